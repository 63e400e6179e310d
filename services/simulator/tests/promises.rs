//! Whatever happens to a cluster, the policy keeps its promises; and each check can fail.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use fiec_policy::{Action, Config, LedgerView, Now, Policy};
use fiec_schemas::{Cause, Event, ExecutionId, ExecutionState, InstanceId, NodeId, PhaseKind};
use fiec_simulator::shrink::shrink;
use fiec_simulator::{Decide, Outcome, Rule, Scenario, World, play, random};
use uuid::Uuid;

fn files() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios");
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
        .unwrap()
        .map(|f| f.unwrap().path())
        .filter(|f| f.extension().is_some_and(|e| e == "json"))
        .collect();
    files.sort();
    files
}

#[test]
fn every_committed_scenario_keeps_every_promise() {
    let mut played = 0;
    for file in files() {
        let text = std::fs::read(&file).unwrap();
        let scenario = Scenario::parse(&text).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        // The scenario of an hour and 10,000 nodes is for `fiec simulate`.
        if scenario.node_count() > 1_000 {
            continue;
        }
        let outcome = play(&scenario, &mut |_| {}).unwrap();
        if let Some(violation) = outcome.violation {
            panic!("{}: {violation}", file.display());
        }
        let s = outcome.summary;
        assert!(s.submitted > 0, "{}", file.display());
        let left: u64 = s.unfinished.iter().map(|u| u.count).sum();
        let ended = s.completed + s.failed;
        assert_eq!(ended + left, s.submitted, "{}", file.display());
        played += 1;
    }
    assert!(played >= 3, "{played} scenarios");
}

#[test]
fn many_small_random_scenarios_keep_every_promise() {
    let first: u64 = match std::env::var("FIEC_SEED") {
        Ok(text) => text.parse().unwrap(),
        Err(_) => std::time::SystemTime::UNIX_EPOCH
            .elapsed()
            .unwrap()
            .as_secs()
            .wrapping_mul(1_000),
    };
    let count: u64 = std::env::var("FIEC_SEEDS").map_or(40, |text| text.parse().unwrap());
    println!("seeds {first} to {}", first + count - 1);
    let (mut ended, mut moved) = (0, 0);
    for seed in first..first + count {
        let scenario = random::scenario(seed);
        let outcome = play(&scenario, &mut |_| {}).unwrap();
        if let Some(violation) = outcome.violation {
            let mut player = |s: &Scenario| Ok(play(s, &mut |_| {})?.violation);
            let small = shrink(&scenario, 200, &mut player).unwrap().unwrap();
            panic!(
                "FIEC_SEED={seed} FIEC_SEEDS=1: {violation}\nshrunk:\n{}{}",
                small.scenario.to_json(),
                small.violation
            );
        }
        ended += outcome.summary.completed;
        moved += outcome.summary.rebindings.values().sum::<u64>();
    }
    assert!(
        ended > 10 * count && moved > 0,
        "{ended} ended, {moved} moved"
    );
}

#[test]
fn a_seed_gives_the_same_run() {
    for seed in [11, 12, 13] {
        let scenario = random::scenario(seed);
        let run = || {
            let mut summary = play(&scenario, &mut |_| {}).unwrap().summary;
            // These depend on real time.
            (summary.wall_s, summary.decisions_per_s) = (0.0, 0.0);
            (summary.policy_share, summary.tick_share) = (0.0, 0.0);
            summary
        };
        assert_eq!(run(), run(), "seed {seed}");
    }
}

/// A defect of a policy, a broker or a worker.
#[derive(Clone, Copy, PartialEq)]
enum Defect {
    BindsElsewhereThough(&'static str),
    BindsTwice,
    SkipsAnEpoch,
    ForgetsACommit,
    MovesForPressureAllTheTime,
    Overfills,
    IgnoresLabels,
    NeverBinds,
}

struct Broken {
    inner: Policy,
    defect: Defect,
    done: Rc<Cell<u32>>,
    started: Option<(ExecutionId, u64, u64, NodeId)>,
}

impl Broken {
    fn spoil(&self, actions: &mut Vec<Action>) {
        let me = fiec_schemas::Tenant::new("sim").unwrap();
        match self.defect {
            Defect::BindsTwice | Defect::BindsElsewhereThough(_) | Defect::SkipsAnEpoch => {
                let Some((execution, seq, epoch, node)) = self.started.clone() else {
                    return;
                };
                if self.done.get() > 0 {
                    return;
                }
                self.done.set(1);
                let cause = match self.defect {
                    Defect::BindsElsewhereThough(_) => Cause::Lost { silent_ms: 9_000 },
                    _ => Cause::Initial,
                };
                let number = u32::from(node.as_str() == "n-0");
                let skip = u64::from(self.defect == Defect::SkipsAnEpoch);
                actions.push(Action::Append {
                    execution,
                    tenant: me,
                    expected: seq,
                    events: vec![Event::Bound {
                        epoch: epoch + 1 + skip,
                        node: NodeId::new(format!("n-{number}")).unwrap(),
                        instance: fiec_simulator::node::instance(number, 0),
                        substrate: "host".into(),
                        cause,
                        decision: None,
                    }],
                    ticket: None,
                });
            }
            _ => {
                for action in actions {
                    if let Action::Append { events, .. } = action {
                        self.spoil_events(events);
                    }
                }
            }
        }
    }

    fn spoil_events(&self, events: &mut Vec<Event>) {
        match self.defect {
            Defect::NeverBinds => events.retain(|e| !matches!(e, Event::Bound { .. })),
            Defect::IgnoresLabels => {
                for event in events {
                    if let Event::Bound { node, instance, .. } = event {
                        *node = NodeId::new("n-0").unwrap();
                        *instance = fiec_simulator::node::instance(0, 0);
                    }
                }
            }
            _ => {}
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
    fn alter_first(&mut self, events: &mut Vec<Event>) {
        self.spoil_events(events);
    }
    fn hear(&mut self, _now: Now, view: &LedgerView<'_>) {
        if view.state.phase.is == PhaseKind::Started {
            let node = NodeId::new(view.state.phase.node.unwrap()).unwrap();
            self.started = Some((view.state.execution, view.seq, view.state.epoch, node));
        }
    }
    fn act(&mut self, now: Now, out: &mut Vec<Action>) {
        let mut mine = Vec::new();
        self.inner.act(now, &mut mine);
        self.alter(&mut mine);
        if self.defect != Defect::NeverBinds {
            out.extend(mine);
        }
    }
    fn alter(&mut self, out: &mut Vec<Action>) {
        self.spoil(out);
    }
    fn store(&self, state: &mut ExecutionState) {
        match self.defect {
            Defect::ForgetsACommit if state.totals.commits >= 2 => {
                if let Some(place) = &mut state.boundary {
                    place.index = 0;
                }
            }
            Defect::SkipsAnEpoch if state.boundary_index() > 3 => state.epoch += 1,
            Defect::MovesForPressureAllTheTime => state.totals.pressure += 3,
            _ => {}
        }
    }
    fn overfills(&self) -> bool {
        self.defect == Defect::Overfills
    }
}

fn two_nodes(extra: &str) -> Scenario {
    let text = format!(
        r#"{{"seed": 5, "duration_ms": 300000, "drain_ms": 900000,
            "nodes": [{{"name": "n", "count": 2, "slots": 2}}],
            "workloads": [{{"name": "jobs", "arrivals": {{"at_once": {{"count": 4, "at_ms": 3000}}}},
                "work_ms": {{"fixed": 30000}}, "capsule_ms": {{"fixed": 100}}{extra}}}]}}"#
    );
    Scenario::parse(text.as_bytes()).unwrap()
}

fn broken(scenario: &Scenario, defect: Defect) -> Outcome {
    let done = Rc::new(Cell::new(0));
    let mut make = |config: &Config, id: InstanceId| {
        assert_ne!(id.0, Uuid::nil());
        Broken {
            inner: Policy::new(config.clone(), id),
            defect,
            done: Rc::clone(&done),
            started: None,
        }
    };
    World::new(scenario, &mut make).unwrap().run(&mut |_| {})
}

fn trips(scenario: &Scenario, defect: Defect, rule: Rule, word: &str) {
    let honest = play(scenario, &mut |_| {}).unwrap();
    assert!(honest.violation.is_none(), "{:?}", honest.violation);
    let violation = broken(scenario, defect).violation.expect("it must be seen");
    assert_eq!(violation.rule, rule, "{violation}");
    assert!(violation.to_string().contains(word), "{violation}");
    assert_eq!(violation.seed, scenario.seed);
}

#[test]
fn a_binding_away_from_a_node_that_is_heard_is_seen() {
    let defect = Defect::BindsElsewhereThough("it is heard");
    trips(&two_nodes(""), defect, Rule::OneBinding, "which was heard");
}

#[test]
fn a_second_binding_of_what_runs_is_an_impossible_event() {
    let scenario = two_nodes("");
    trips(
        &scenario,
        Defect::BindsTwice,
        Rule::PossibleEvents,
        "cannot become bound",
    );
}

#[test]
fn an_epoch_that_is_skipped_is_seen() {
    // The fold refuses the event. If a broker corrupts a state later, the world's own check finds
    // it.
    let violation = broken(&two_nodes(""), Defect::SkipsAnEpoch)
        .violation
        .unwrap();
    assert!(
        matches!(violation.rule, Rule::PossibleEvents | Rule::Epochs),
        "{violation}"
    );
}

#[test]
fn a_commit_that_is_forgotten_is_seen() {
    let scenario = two_nodes("");
    trips(&scenario, Defect::ForgetsACommit, Rule::Progress, "after");
    let violation = broken(&scenario, Defect::ForgetsACommit).violation.unwrap();
    let last = violation.events.last().unwrap();
    assert!(last.contains("boundary"), "{last}");
}

#[test]
fn rebindings_beyond_the_bound_are_seen() {
    let mut scenario = two_nodes("");
    let text = scenario.to_json().replace(
        r#""count": 2,"#,
        r#""count": 2, "load": {"memory": {"bursts": {"calm": 0.3, "burst": 0.95, "every_ms": 20000, "for_ms": 15000}}},
           "thresholds": {"memory": {"high": 0.9, "low": 0.75, "dwell_ms": 5000}},"#,
    );
    scenario = Scenario::parse(text.as_bytes()).unwrap();
    scenario.workloads[0].arrivals = fiec_simulator::scenario::Arrivals::AtOnce {
        count: 2,
        at_ms: 3_000,
    };
    scenario.workloads[0].work_ms = fiec_simulator::scenario::Quantity::Fixed(200_000.0);
    let honest = play(&scenario, &mut |_| {}).unwrap().summary;
    assert!(honest.rebindings["pressure"] > 0, "{:?}", honest.rebindings);
    let defect = Defect::MovesForPressureAllTheTime;
    trips(&scenario, defect, Rule::BoundedRebindings, "for pressure");
}

#[test]
fn a_node_that_runs_more_than_it_can_is_seen() {
    let mut scenario = two_nodes("");
    // Short executions are queued on a node, and a correct worker queues them.
    scenario.workloads[0].work_ms = fiec_simulator::scenario::Quantity::Fixed(20.0);
    scenario.workloads[0].arrivals = fiec_simulator::scenario::Arrivals::Poisson {
        per_s: 300.0,
        from_ms: 0,
        count: Some(2_000),
    };
    trips(&scenario, Defect::Overfills, Rule::Capacity, "on 2 slots");
}

#[test]
fn a_destination_without_what_is_required_is_seen() {
    let scenario =
        two_nodes(r#", "submission": {"program": "synthetic@1", "requires": {"nodes": ["n-1"]}}"#);
    trips(
        &scenario,
        Defect::IgnoresLabels,
        Rule::Requirements,
        "requires.nodes",
    );
}

#[test]
fn what_waits_while_a_node_has_room_is_seen() {
    let scenario = two_nodes("");
    trips(
        &scenario,
        Defect::NeverBinds,
        Rule::NoStarvation,
        "has had room",
    );
}

#[test]
fn a_failing_scenario_is_shrunk_to_what_it_takes() {
    let scenario = random::scenario(7);
    let mut player = |s: &Scenario| Ok(broken(s, Defect::ForgetsACommit).violation);
    let small = shrink(&scenario, 300, &mut player)
        .unwrap()
        .expect("it fails");
    assert_eq!(small.violation.rule, Rule::Progress);
    assert!(
        small.scenario.faults.is_empty(),
        "{}",
        small.scenario.to_json()
    );
    assert!(
        small.scenario.node_count() <= 2,
        "{}",
        small.scenario.to_json()
    );
    let again = Scenario::parse(small.scenario.to_json().as_bytes()).unwrap();
    assert_eq!(player(&again).unwrap(), Some(small.violation));
}
