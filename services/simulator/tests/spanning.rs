//! Dependencies, gangs, quotas, parks, preemptions and deadlines: the production policy keeps each
//! promise, and each check can fail.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::borrow::Cow;
use std::path::Path;

use fiec_policy::{Action, Config, Input, LedgerView, Now, Policy};
use fiec_schemas::messages::ControlRequest;
use fiec_schemas::quota::Reservation;
use fiec_schemas::scheduling::{self, Keep};
use fiec_schemas::{Cause, Event, ExecutionId, NodeId, PhaseKind, Submission};
use fiec_simulator::shrink::shrink;
use fiec_simulator::{Decide, Outcome, Rule, Scenario, Summary, World, play, random};

/// A defect of a policy or a worker.
#[derive(Clone, Copy, PartialEq)]
enum Defect {
    ForgetsDependencies,
    NeverFails,
    FailsEverything,
    BindsGangsInPart,
    IgnoresQuotas,
    TakesQuotasForTwice,
    GivesBackWhatRuns,
    NeverGivesBack,
    NeverGivesUp,
    OnlyGivesUp,
    ParksTooMany,
    NeverUnparks,
    NeverMoreThanPreempts,
}

struct Broken {
    inner: Policy,
    defect: Defect,
    /// The first execution seen as started, with its epoch and node.
    started: Option<(ExecutionId, u64, NodeId)>,
    reserved: Vec<Reservation>,
    left_out: bool,
}

impl Broken {
    fn spoil(&mut self, out: &mut Vec<Action>) {
        let defect = self.defect;
        for action in out.iter_mut() {
            match action {
                Action::Append { events, .. } if defect == Defect::FailsEverything => {
                    if matches!(events[..], [Event::Bound { .. }]) {
                        *events = vec![Event::Failed {
                            reason: "out of spite".into(),
                            stderr: String::new(),
                            fault: None,
                        }];
                    }
                }
                Action::Reserve { change, .. } => match defect {
                    Defect::NeverGivesBack => change.free.clear(),
                    Defect::GivesBackWhatRuns => {
                        let runs = self.started.as_ref().map(|(id, ..)| *id);
                        let known = self.reserved.iter();
                        let known = known.filter(|r| Some(r.execution) == runs);
                        change.free.extend(known.map(|r| (r.execution, r.by)));
                    }
                    _ => {}
                },
                Action::Control { request, .. } if defect == Defect::ParksTooMany => {
                    if let ControlRequest::Yield {
                        execution,
                        epoch,
                        cause,
                        ..
                    } = request.clone()
                    {
                        *request = ControlRequest::Park {
                            execution,
                            epoch,
                            cause,
                            keep: Keep::Host,
                        };
                    }
                }
                _ => {}
            }
        }
        let mut left_out = self.left_out;
        out.retain(|action| match (defect, action) {
            (Defect::NeverFails, Action::Append { events, .. }) => {
                !events.iter().any(|e| matches!(e, Event::Failed { .. }))
            }
            (Defect::BindsGangsInPart, Action::Append { events, .. }) => {
                let bound = events.iter().any(|e| matches!(e, Event::Bound { .. }));
                let leave_out = bound && !left_out;
                left_out |= bound;
                !leave_out
            }
            (Defect::NeverGivesUp, Action::Control { request, .. }) => {
                !matches!(request, ControlRequest::GiveUp { .. })
            }
            (Defect::OnlyGivesUp, Action::Control { request, .. }) => {
                !matches!(request, ControlRequest::Yield { .. })
            }
            (Defect::NeverUnparks, Action::Control { request, .. }) => {
                !matches!(request, ControlRequest::Unpark { .. })
            }
            _ => true,
        });
        self.left_out = left_out;
        if defect == Defect::NeverMoreThanPreempts
            && let Some((execution, epoch, node)) = self.started.take()
        {
            let cause = Cause::Preempted {
                rule: scheduling::Rule::TimeSlice,
                by: Some(ExecutionId(uuid::Uuid::from_u128(1))),
                reason: "again".into(),
            };
            out.push(Action::Control {
                node,
                request: ControlRequest::Yield {
                    execution,
                    epoch,
                    cause,
                    to: None,
                    decision: None,
                },
                ticket: None,
            });
        }
    }
}

impl Decide for Broken {
    fn policy(&self) -> &Policy {
        &self.inner
    }
    fn policy_mut(&mut self) -> &mut Policy {
        &mut self.inner
    }
    fn alter_submission<'a>(&self, spec: &'a Submission) -> Cow<'a, Submission> {
        let mut spec = Cow::Borrowed(spec);
        if self.defect == Defect::ForgetsDependencies {
            spec.to_mut().after.clear();
        }
        spec
    }
    fn hear(&mut self, _now: Now, view: &LedgerView<'_>) {
        if view.state.phase.is == PhaseKind::Started {
            let node = NodeId::new(view.state.phase.node.unwrap()).unwrap();
            self.started = Some((view.state.execution, view.state.epoch, node));
        }
    }
    fn alter_input(&mut self, mut input: Input) -> Option<Input> {
        match &mut input {
            Input::Quota { .. } if self.defect == Defect::IgnoresQuotas => return None,
            Input::Quota {
                quota: Some(quota), ..
            } if self.defect == Defect::TakesQuotasForTwice => {
                quota.running = quota.running.map(|n| 2 * n);
            }
            Input::Reserved { table, .. } => {
                let entries = table.as_ref().map(|(_, table)| table.entries.clone());
                self.reserved = entries.unwrap_or_default();
            }
            _ => {}
        }
        Some(input)
    }
    fn alter(&mut self, out: &mut Vec<Action>) {
        self.spoil(out);
    }
    fn withholds(&self, id: ExecutionId) -> bool {
        self.defect != Defect::BindsGangsInPart && self.inner.withholds(id)
    }
    fn overfills(&self) -> bool {
        self.defect == Defect::ParksTooMany
    }
}

fn broken(scenario: &Scenario, defect: Defect) -> Outcome {
    let mut make = |config: &Config, id| Broken {
        inner: Policy::new(config.clone(), id),
        defect,
        started: None,
        reserved: Vec::new(),
        left_out: false,
    };
    World::new(scenario, &mut make).unwrap().run(&mut |_| {})
}

/// The production policy keeps the promise, the broken one does not, and the check reports it.
fn trips(text: &str, defect: Defect, rule: Rule, word: &str) -> Summary {
    let scenario = Scenario::parse(text.as_bytes()).unwrap();
    let honest = play(&scenario, &mut |_| {}).unwrap();
    assert!(honest.violation.is_none(), "{}", honest.violation.unwrap());
    let violation = broken(&scenario, defect)
        .violation
        .expect("it must be seen");
    assert_eq!(violation.rule, rule, "{violation}");
    assert!(violation.to_string().contains(word), "{violation}");
    honest.summary
}

/// Two nodes of two slots, and these fields.
fn world(fields: &str) -> String {
    format!(
        r#"{{"seed": 5, "duration_ms": 300000, "drain_ms": 600000,
            "nodes": [{{"name": "n", "count": 2, "slots": 2}}], {fields}}}"#
    )
}

const CHAIN: &str = r#""workloads": [
    {"name": "first", "arrivals": {"at_once": {"count": 4}}, "work_ms": {"fixed": 4000}, "fails": 0.5},
    {"name": "then", "arrivals": {"at_once": {"count": 4}}, "work_ms": {"fixed": 4000},
     "after": [{"workload": "first"}]}]"#;

#[test]
fn what_is_bound_before_what_it_waits_for_has_ended_is_seen() {
    let defect = Defect::ForgetsDependencies;
    let honest = trips(&world(CHAIN), defect, Rule::Order, "before execution");
    assert_eq!(honest.completed + honest.failed, 8);
    assert!(
        honest.failed >= 2 && honest.failed.is_multiple_of(2),
        "{honest:?}"
    );
}

#[test]
fn what_is_not_failed_although_it_cannot_run_any_more_is_seen() {
    let word = "it is not failed";
    trips(&world(CHAIN), Defect::NeverFails, Rule::Order, word);
}

#[test]
fn what_is_failed_although_it_could_run_is_seen() {
    let word = "may yet complete";
    trips(&world(CHAIN), Defect::FailsEverything, Rule::Order, word);
}

#[test]
fn a_gang_that_starts_in_part_is_seen() {
    let text = world(
        r#""workloads": [{"name": "gang", "arrivals": {"at_once": {"count": 6}},
            "work_ms": {"fixed": 5000}, "gang": 3}]"#,
    );
    let honest = trips(
        &text,
        Defect::BindsGangsInPart,
        Rule::Gangs,
        "have been bound",
    );
    assert_eq!(honest.completed, 6);
}

const LIMITED: &str = r#""quotas": [{"tenant": "sim", "running": 2}],
    "workloads": [{"name": "jobs", "arrivals": {"poisson": {"per_s": 1, "count": 60}},
        "work_ms": {"exponential": {"mean": 3000}}}]"#;

#[test]
fn what_is_bound_without_a_reservation_is_seen() {
    let word = "has not reserved";
    let honest = trips(&world(LIMITED), Defect::IgnoresQuotas, Rule::Quotas, word);
    assert!(
        honest.completed == 60 && honest.reservations > 60,
        "{honest:?}"
    );
}

#[test]
fn a_tenant_above_its_quota_is_seen() {
    let word = "2 may at once";
    trips(
        &world(LIMITED),
        Defect::TakesQuotasForTwice,
        Rule::Quotas,
        word,
    );
}

#[test]
fn a_batch_above_its_number_is_seen_where_what_runs_is_not_reserved_any_more() {
    let text = world(
        r#""workloads": [{"name": "jobs", "arrivals": {"at_once": {"count": 12}},
            "work_ms": {"fixed": 4000},
            "submission": {"program": "synthetic@1", "batch": "b", "at_once": 3}}]"#,
    );
    let word = "given back while it has a place";
    let honest = trips(&text, Defect::GivesBackWhatRuns, Rule::Quotas, word);
    // Never more than three at once: four rounds of four seconds.
    assert!(honest.makespan_ms >= 16_000.0, "{honest:?}");
}

#[test]
fn what_has_ended_and_stays_reserved_is_seen() {
    let word = "still has it reserved";
    trips(&world(LIMITED), Defect::NeverGivesBack, Rule::Quotas, word);
}

fn revoked(capsule_ms: u64) -> String {
    world(&format!(
        r#""workloads": [{{"name": "jobs", "arrivals": {{"at_once": {{"count": 4}}}},
              "work_ms": {{"fixed": 200000}}, "capsule_ms": {{"fixed": {capsule_ms}}}}}],
           "faults": [{{"revoke": {{"node": "n-0", "at_ms": 50000, "notice_ms": 40000, "for_ms": 10000}}}}]"#
    ))
}

#[test]
fn what_is_still_on_a_node_that_is_gone_as_it_had_said_is_seen() {
    let defect = Defect::NeverGivesUp;
    let honest = trips(&revoked(100_000), defect, Rule::AwayInTime, "still there");
    assert!(honest.given_up > 0 && honest.completed == 4, "{honest:?}");
}

#[test]
fn what_is_given_up_although_it_had_boundaries_to_leave_at_is_seen() {
    let word = "with a boundary every";
    let honest = trips(&revoked(500), Defect::OnlyGivesUp, Rule::AwayInTime, word);
    assert_eq!((honest.given_up, honest.lost_ms), (0, 0.0));
}

#[test]
fn a_drain_with_a_deadline_is_held_to_it() {
    let text = revoked(100_000).replace(
        r#""revoke": {"node": "n-0", "at_ms": 50000, "notice_ms": 40000, "for_ms": 10000}"#,
        r#""drain": {"node": "n-0", "at_ms": 50000, "within_ms": 40000}"#,
    );
    let word = "still there";
    let honest = trips(&text, Defect::NeverGivesUp, Rule::AwayInTime, word);
    assert!(honest.given_up > 0 && honest.completed == 4, "{honest:?}");
}

/// Both executions on one node lose their viable place for a while.
fn pressed() -> String {
    world(
        r#""workloads": [{"name": "jobs", "arrivals": {"at_once": {"count": 2}},
            "work_ms": {"fixed": 60000},
            "submission": {"program": "synthetic@1", "when_unviable": "wait"}}]"#,
    )
    .replace(
        r#""count": 2, "slots": 2"#,
        r#""count": 1, "slots": 2, "parks": 2,
           "thresholds": {"memory_stall": {"high": 0.9, "low": 0.5, "dwell_ms": 1000}},
           "load": {"memory_stall": {"steps": [[0, 0.2], [10000, 0.95], [40000, 0.2]]}}"#,
    )
}

#[test]
fn what_is_parked_and_never_let_go_on_is_seen() {
    let defect = Defect::NeverUnparks;
    let honest = trips(&pressed(), defect, Rule::NoStarvation, "has had room");
    assert!(honest.parks > 0 && honest.completed == 2, "{honest:?}");
}

#[test]
fn a_node_that_parks_more_than_it_can_is_seen() {
    // Later priorities are higher, so that running executions are preempted.
    let text = world(
        r#""workloads": [
            {"name": "low", "arrivals": {"at_once": {"count": 4}}, "work_ms": {"fixed": 100000}},
            {"name": "high", "arrivals": {"at_once": {"count": 4, "at_ms": 20000}},
             "work_ms": {"fixed": 10000}, "submission": {"program": "synthetic@1", "priority": 50}}]"#,
    )
    .replace(r#""slots": 2"#, r#""slots": 2, "parks": 1"#);
    let honest = trips(&text, Defect::ParksTooMany, Rule::Capacity, "1 may be");
    assert!(
        honest.preemptions > 0 && honest.completed == 8,
        "{honest:?}"
    );
}

#[test]
fn what_gives_way_again_and_again_is_seen() {
    let text = world(
        r#""workloads": [{"name": "jobs", "arrivals": {"at_once": {"count": 2}},
            "work_ms": {"fixed": 60000}}]"#,
    );
    let defect = Defect::NeverMoreThanPreempts;
    trips(&text, defect, Rule::BoundedRebindings, "it gave way");
}

#[test]
fn a_failing_seed_with_everything_that_spans_executions_is_shrunk_to_what_it_takes() {
    let seed = (1..).find(|seed| {
        let scenario = random::scenario(*seed);
        let spans = scenario.workloads.iter().any(|w| !w.after.is_empty());
        let alone = scenario.workloads.len() == 1 && scenario.policies == 1;
        spans && alone && !scenario.quotas.is_empty() && scenario.faults.len() > 2
    });
    let scenario = random::scenario(seed.unwrap());
    let mut player = |s: &Scenario| Ok(broken(s, Defect::ForgetsDependencies).violation);
    let small = shrink(&scenario, 150, &mut player).unwrap().unwrap();
    let text = small.scenario.to_json();
    assert_eq!(small.violation.rule, Rule::Order, "{text}");
    assert!(small.scenario.faults.is_empty(), "{text}");
    assert!(small.scenario.quotas.is_empty(), "{text}");
    assert!(small.scenario.node_count() <= 2, "{text}");
    let again = Scenario::parse(text.as_bytes()).unwrap();
    assert_eq!(player(&again).unwrap(), Some(small.violation));
}

fn committed(name: &str) -> Summary {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios");
    let text = std::fs::read(folder.join(name)).unwrap();
    let outcome = play(&Scenario::parse(&text).unwrap(), &mut |_| {}).unwrap();
    assert!(
        outcome.violation.is_none(),
        "{}",
        outcome.violation.unwrap()
    );
    outcome.summary
}

#[test]
fn a_study_of_dependencies_runs_to_its_end_and_only_what_waits_for_failures_fails() {
    let s = committed("dag.json");
    assert_eq!(s.completed + s.failed, s.submitted, "{:?}", s.unfinished);
    assert!(s.failed > 0 && s.lookups > 0, "{s:?}");
}

#[test]
fn gangs_among_short_work_all_get_their_turn() {
    let s = committed("gangs.json");
    assert_eq!(s.completed, s.submitted, "{:?}", s.unfinished);
}

#[test]
fn tenants_with_changing_quotas_complete_everything() {
    let s = committed("quotas.json");
    assert_eq!(s.completed, s.submitted, "{:?}", s.unfinished);
    assert!(s.reservations > 100, "{s:?}");
}

#[test]
fn revoked_nodes_lose_only_what_has_no_boundary_in_time() {
    let s = committed("revocation.json");
    assert_eq!(s.completed, s.submitted, "{:?}", s.unfinished);
    assert!(
        s.rebindings["revoked"] > 0 && s.faults["revoke"] > 3,
        "{s:?}"
    );
    assert!(s.given_up > 0 && s.lost_ms > 0.0, "{s:?}");
}

#[test]
fn what_gives_way_is_parked_or_moved_and_everything_ends() {
    let s = committed("preemption.json");
    assert_eq!(s.completed, s.submitted, "{:?}", s.unfinished);
    assert!(s.preemptions > 0 && s.parks > 0, "{s:?}");
}
