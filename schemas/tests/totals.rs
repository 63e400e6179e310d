//! What a state counts and remembers over an execution's life.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::sync::Arc;

use fiec_schemas::chain::Link;
use fiec_schemas::energy::Energy;
use fiec_schemas::event::{StatePlace, Totals};
use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::{
    BoundaryEvent, Cause, Digest, Event, Evidence, ExecutionId, ExecutionState, Fault, InstanceId,
    NodeId, Phase, Signal, Submission, Tenant, Threshold, Timestamp,
};
use serde_json::json;
use uuid::Uuid;

fn at(second: i64) -> Timestamp {
    Timestamp::from_micros(second * 1_000_000)
}

fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

/// An execution, the time, and how often it was bound.
struct Life {
    state: ExecutionState,
    second: i64,
}

impl Life {
    fn of(submission: &str) -> Self {
        let state = ExecutionState::unborn(
            Tenant::new("lab").unwrap(),
            ExecutionId(Uuid::from_u128(7)),
            Arc::new(Submission::parse(submission.as_bytes()).unwrap()),
            None,
            at(0),
        );
        let mut life = Self { state, second: 0 };
        life.then(Event::Submitted);
        life
    }

    fn then(&mut self, event: Event) -> &mut Self {
        self.second += 1;
        let next = self.state.after(&[event], "test", at(self.second), None);
        self.state = next.unwrap();
        self
    }

    fn bound(&mut self, to: &str, cause: Cause) -> &mut Self {
        let epoch = self.state.epoch + 1;
        self.then(Event::Bound {
            epoch,
            node: node(to),
            instance: InstanceId(Uuid::from_u128(1)),
            substrate: "host".to_owned(),
            cause,
            decision: None,
        })
    }

    fn started(&mut self) -> &mut Self {
        let epoch = self.state.epoch;
        let computing_since = at(self.second);
        self.then(Event::Started {
            epoch,
            computing_since,
        })
    }

    fn runs(&mut self, on: &str, cause: Cause) -> &mut Self {
        self.bound(on, cause).started()
    }

    fn yielded(&mut self, cause: Cause) -> &mut Self {
        let computed_until = at(self.second);
        self.then(Event::Yielded {
            cause,
            computed_until,
        })
    }

    fn boundary(&mut self, index: u64, host_uj: Option<u64>) -> &mut Self {
        self.then(Event::Boundary(BoundaryEvent {
            index,
            digest: Digest::of(&index.to_le_bytes()),
            bytes: 1_000 + index,
            computed_at: at(self.second),
            compute_us: 500 + index,
            of: None,
            note: None,
            outputs: vec![],
            energy: Energy::of(host_uj, None),
        }))
    }

    fn crashed(&mut self, fault: Fault) -> &mut Self {
        self.then(Event::Crashed {
            attempt: 1,
            exit: "signal 9".to_owned(),
            stderr: String::new(),
            backoff_ms: 0,
            fault: Some(Box::new(fault)),
        })
    }

    fn refused(&mut self, fault: Fault) -> &mut Self {
        self.then(Event::Refused {
            reason: "no".to_owned(),
            offer: 0,
            fault: Some(Box::new(fault)),
        })
    }
}

const PLAIN: &str = r#"{"program":"synthetic@1"}"#;

fn pressure(on: &str) -> Cause {
    Cause::Pressure {
        evidence: Box::new(Evidence {
            node: node(on),
            signal: Signal::Memory,
            device: None,
            value: 0.95,
            threshold: Threshold {
                high: 0.9,
                low: 0.7,
                dwell_ms: 1,
            },
            since: at(0),
            vector: vec![],
        }),
    }
}

fn lost() -> Cause {
    Cause::Lost { silent_ms: 1_000 }
}

fn left(state: &ExecutionState) -> Vec<(&str, Timestamp)> {
    let left = state.left.iter();
    left.map(|left| (left.node.as_str(), left.at)).collect()
}

#[test]
fn bindings_after_the_first_count_as_rebindings_and_those_for_pressure_as_such() {
    let mut life = Life::of(PLAIN);
    life.runs("n1", Cause::Initial);
    assert_eq!(life.state.totals, Totals::default());
    life.yielded(pressure("n1")).runs("n2", pressure("n1"));
    assert_eq!(
        (life.state.totals.rebindings, life.state.totals.pressure),
        (1, 1)
    );
    life.yielded(Cause::Balance).runs("n3", Cause::Balance);
    let totals = Totals {
        rebindings: 2,
        pressure: 1,
        ..Totals::default()
    };
    assert_eq!(life.state.totals, totals);
    assert_eq!(life.state.moved_at, Some(at(life.second - 1)));
}

#[test]
fn commits_add_their_bytes_time_and_energy_and_an_end_its_last_interval() {
    let mut life = Life::of(PLAIN);
    life.runs("n1", Cause::Initial)
        .boundary(3, Some(20))
        .boundary(5, None)
        .boundary(6, Some(1));
    let totals = Totals {
        commits: 3,
        state_bytes: 3_014,
        compute_us: 1_514,
        ..Totals::default()
    };
    let energy = life.state.totals.energy.unwrap().host.unwrap();
    assert_eq!((energy.uj, energy.intervals), (21, 2));
    assert_eq!(
        Totals {
            energy: None,
            ..life.state.totals
        },
        totals
    );
    life.then(Event::Completed {
        result: json!(1),
        object: None,
        computed_until: at(life.second),
        capsules: 6,
        outputs: vec![],
        energy: Energy::of(Some(9), None),
    });
    let energy = life.state.totals.energy.unwrap().host.unwrap();
    assert_eq!((energy.uj, energy.intervals), (30, 3));
}

#[test]
fn a_crash_counts_for_the_program_and_other_faults_for_their_owners() {
    let mut life = Life::of(PLAIN);
    life.runs("n1", Cause::Initial)
        .crashed(Fault::Exited { status: 1 })
        .crashed(Fault::Unexplained)
        .yielded(Cause::Balance)
        .bound("n2", Cause::Balance)
        .refused(Fault::DiskFull)
        .bound("n3", Cause::Balance)
        .refused(Fault::Broker)
        .bound("n1", Cause::Balance)
        .refused(Fault::DiskFull);
    let counted = &life.state.totals;
    assert_eq!(counted.crashes, 2);
    assert_eq!((counted.node_faults, counted.infrastructure_faults), (2, 1));
    assert_eq!(life.state.crashes_since_commit, 2);
    assert!(life.state.deaths.is_empty());
}

#[test]
fn nodes_on_which_it_ended_a_worker_are_remembered_until_it_commits() {
    let mut life = Life::of(PLAIN);
    life.runs("n1", Cause::Initial).bound("n2", lost());
    assert_eq!(life.state.deaths, [node("n1")]);
    assert_eq!(life.state.totals.node_faults, 1);
    life.started().crashed(Fault::WorkerPanicked);
    assert_eq!(life.state.deaths, [node("n1"), node("n2")]);
    // A hold tells what was noted before.
    let mut held = Life { ..life };
    held.then(Event::Held {
        reason: "too many".to_owned(),
        stderr: String::new(),
        fault: Some(Box::new(Fault::WorkerDied)),
    });
    assert_eq!(held.state.deaths.len(), 2);
    held.then(Event::Retried {
        who: "ops".to_owned(),
    });
    assert!(held.state.deaths.is_empty());
}

#[test]
fn a_commit_forgets_the_deaths_and_only_the_last_deaths_are_kept() {
    let mut life = Life::of(PLAIN);
    life.runs("n0", Cause::Initial);
    for n in 1..=20 {
        life.bound(&format!("n{n}"), lost()).started();
    }
    let deaths = &life.state.deaths;
    assert!(deaths.len() < 20, "{deaths:?}");
    assert_eq!(deaths.last(), Some(&node("n19")));
    assert_eq!(
        *deaths,
        (20 - deaths.len()..20)
            .map(|n| node(&format!("n{n}")))
            .collect::<Vec<_>>()
    );
    life.boundary(1, None);
    assert!(life.state.deaths.is_empty());
}

#[test]
fn a_loss_before_the_start_is_remembered_until_it_starts_somewhere() {
    let mut life = Life::of(PLAIN);
    life.bound("n1", Cause::Initial);
    assert!(!life.state.lost_unstarted);
    life.bound("n2", Cause::Balance);
    assert!(!life.state.lost_unstarted);
    life.bound("n3", lost());
    assert!(life.state.lost_unstarted);
    life.bound("n4", Cause::Balance);
    assert!(life.state.lost_unstarted, "nothing has started yet");
    life.started();
    assert!(!life.state.lost_unstarted);
    life.bound("n5", lost());
    assert!(!life.state.lost_unstarted, "it had started");
}

#[test]
fn a_node_that_it_left_for_pressure_is_remembered_once_with_the_last_time() {
    let mut life = Life::of(PLAIN);
    life.runs("n1", Cause::Initial).yielded(Cause::Balance);
    assert!(life.state.left.is_empty());
    life.runs("n1", Cause::Balance).yielded(pressure("n1"));
    let first = at(life.second);
    assert_eq!(left(&life.state), [("n1", first)]);
    life.runs("n2", Cause::Balance).yielded(pressure("n2"));
    assert_eq!(left(&life.state), [("n1", first), ("n2", at(life.second))]);
    let second = at(life.second);
    // A binding that names the pressure of a node is as good as a yield.
    life.bound("n3", pressure("n1"));
    assert_eq!(left(&life.state), [("n2", second), ("n1", at(life.second))]);
    for n in 0..20 {
        life.bound("x", pressure(&format!("m{n}")));
    }
    let kept = left(&life.state);
    assert!(kept.len() < 20);
    assert_eq!(kept.last().unwrap().0, "m19");
    life.then(Event::Cancelled {
        who: "ops".to_owned(),
    });
    assert!(life.state.left.is_empty() && matches!(life.state.phase, Phase::Cancelled));
}

/// An execution whose binding is in message 3 and whose σ is in message 7.
fn stored() -> Life {
    let mut life = Life::of(PLAIN);
    life.bound("n1", Cause::Initial);
    life.state.resolve(3);
    life.started().boundary(1, None);
    life.state.resolve(7);
    life
}

fn seqs(state: &ExecutionState) -> (Option<u64>, Option<u64>) {
    let binding = state.phase.binding().map(|binding| binding.seq);
    (binding, state.boundary.as_ref().and_then(|place| place.seq))
}

#[test]
fn a_message_that_carries_the_state_again_is_its_new_place() {
    let mut life = stored();
    let made = life.state.boundary.as_ref().unwrap().ordinal;
    life.then(Event::Adjusted {
        who: "ops".to_owned(),
        change: Adjustment::default(),
    });
    assert_eq!(life.state.boundary.as_ref().unwrap().ordinal, made);
    life.state.carry_state_again();
    assert_eq!(seqs(&life.state), (Some(3), Some(0)));
    assert_eq!(life.state.boundary.unwrap().ordinal, life.state.ordinal);
    assert!(life.state.ordinal > made);
}

#[test]
fn a_healed_message_replaces_what_was_lost_with_the_messages_after_the_last() {
    let life = stored();
    let after = |seq| {
        let digest = Digest::of(b"last");
        let last = Link {
            seq,
            digest,
            prev: None,
            ordinal: 2,
        };
        let healed = life.state.healed(Some(&last), digest, "test", at(99));
        seqs(&healed.unwrap().1)
    };
    assert_eq!(after(7), (Some(3), Some(7)));
    assert_eq!(after(6), (Some(3), Some(0)));
    assert_eq!(after(3), (Some(3), Some(0)));
    assert_eq!(after(2), (Some(0), Some(0)));
}

#[test]
fn a_step_back_goes_to_a_state_that_is_stored_or_comes_with_the_message() {
    let life = stored();
    let place = life.state.boundary.unwrap();
    for (seq, is_own) in [(Some(7), false), (Some(0), true), (None, false)] {
        let mut life = stored();
        let to = StatePlace {
            seq,
            ..place.clone()
        };
        life.then(Event::SteppedBack {
            to: Some(to),
            cause: Cause::Balance,
        });
        let now = life.state.boundary.unwrap().ordinal;
        assert_eq!(now == life.state.ordinal, is_own, "{seq:?}");
        assert_eq!(now == place.ordinal, !is_own, "{seq:?}");
    }
}
