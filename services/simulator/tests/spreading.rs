//! Ranges that are spread over nodes: holder and parts cover each tile once, none is computed twice
//! or skipped, and every part ends; and each check can fail.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};

use fiec_policy::{Action, Config, Policy};
use fiec_schemas::{Event, ExecutionState};
use fiec_simulator::shrink::shrink;
use fiec_simulator::{Decide, Outcome, Rule, Scenario, Summary, World, play};

/// A defect of a policy, a broker or a worker.
#[derive(Clone, Copy, PartialEq)]
enum Defect {
    KeepsWhatItGives,
    ForgetsParts,
    NeverMakesParts,
    NeverGivesBack,
}

struct Broken {
    inner: Policy,
    defect: Defect,
}

impl Broken {
    fn spoil(&self, out: &mut Vec<Action>) {
        let returns = |events: &[Event]| events.iter().any(|e| matches!(e, Event::Returned { .. }));
        out.retain(|action| match (self.defect, action) {
            (Defect::NeverMakesParts, Action::MakePart { .. }) => false,
            (Defect::NeverGivesBack, Action::Append { events, .. }) => !returns(events),
            _ => true,
        });
    }
}

impl Decide for Broken {
    fn policy(&self) -> &Policy {
        &self.inner
    }
    fn policy_mut(&mut self) -> &mut Policy {
        &mut self.inner
    }
    fn alter(&mut self, out: &mut Vec<Action>) {
        self.spoil(out);
    }
    fn store(&self, state: &mut ExecutionState) {
        if let (Defect::ForgetsParts, Some(spread)) = (self.defect, &mut state.spread) {
            spread.parts.clear();
        }
    }
    fn keeps_what_it_gives(&self) -> bool {
        self.defect == Defect::KeepsWhatItGives
    }
}

fn broken(scenario: &Scenario, defect: Defect) -> Outcome {
    let mut make = |config: &Config, id| Broken {
        inner: Policy::new(config.clone(), id),
        defect,
    };
    World::new(scenario, &mut make).unwrap().run(&mut |_| {})
}

/// A minute of work on nodes of one slot, of which four may compute it, with these faults.
fn sweep(nodes: u32, faults: &str) -> Scenario {
    let text = format!(
        r#"{{"seed": 3, "duration_ms": 600000, "drain_ms": 900000,
            "nodes": [{{"name": "n", "count": {nodes}, "slots": 1}}],
            "workloads": [{{"name": "sweep", "arrivals": {{"at_once": {{"count": 1}}}}, "spread": 4,
                "work_ms": {{"fixed": 60000}}, "capsule_ms": {{"fixed": 50}},
                "submission": {{"program": "sweep@1"}}}}],
            "faults": [{faults}]}}"#
    );
    Scenario::parse(text.as_bytes()).unwrap()
}

/// One of two nodes disappears after 25 seconds, and the other is cordoned for six and a half
/// minutes: the part that leaves the first has no place.
const CLOSED: &str = r#"
    {"cordon": {"node": "n-0", "at_ms": 10000, "for_ms": 390000}},
    {"revoke": {"node": "n-1", "at_ms": 10500, "notice_ms": 15000}}"#;

fn honest(scenario: &Scenario) -> Summary {
    let outcome = play(scenario, &mut |_| {}).unwrap();
    if let Some(violation) = outcome.violation {
        panic!("{violation}");
    }
    outcome.summary
}

/// The production policy keeps the promise, the broken one does not, and the check reports it.
fn trips(scenario: &Scenario, defect: Defect, word: &str) -> Summary {
    let summary = honest(scenario);
    let violation = broken(scenario, defect).violation.expect("it must be seen");
    assert_eq!(violation.rule, Rule::Ranges, "{violation}");
    assert!(violation.to_string().contains(word), "{violation}");
    summary
}

#[test]
fn a_range_grows_over_the_nodes_that_are_free_and_is_whole_at_its_end() {
    let s = honest(&sweep(4, ""));
    assert_eq!((s.submitted, s.completed), (1, 1));
    assert!(s.parts >= 3, "{s:?}");
    // A minute of work on four nodes.
    assert!((15_000.0..25_000.0).contains(&s.makespan_ms), "{s:?}");
    assert!(s.utilization > 0.6, "{s:?}");
}

#[test]
fn tiles_that_two_have_are_seen() {
    trips(&sweep(4, ""), Defect::KeepsWhatItGives, "are of two");
}

#[test]
fn tiles_that_nobody_has_are_seen() {
    trips(&sweep(4, ""), Defect::ForgetsParts, "are nobody's");
}

#[test]
fn a_part_that_is_never_made_is_seen() {
    trips(&sweep(4, ""), Defect::NeverMakesParts, "is not made");
}

#[test]
fn a_part_without_a_place_that_is_not_given_back_is_seen() {
    let word = "is not given back";
    let s = trips(&sweep(2, CLOSED), Defect::NeverGivesBack, word);
    assert_eq!((s.completed, s.returned), (1, 1), "{s:?}");
}

#[test]
fn where_a_part_fails_the_whole_fails_and_its_other_parts_end() {
    let mut scenario = sweep(4, "");
    scenario.workloads[0].fails = 1.0;
    let s = honest(&scenario);
    assert_eq!((s.failed, s.completed), (1, 0));
    assert!(s.parts > 0 && s.unfinished.is_empty(), "{s:?}");
}

#[test]
fn a_failing_whole_is_shrunk_to_what_it_takes() {
    let mut scenario = spread();
    scenario.duration_ms = 60_000;
    let mut player = |s: &Scenario| Ok(broken(s, Defect::KeepsWhatItGives).violation);
    let small = shrink(&scenario, 100, &mut player).unwrap().unwrap();
    let text = small.scenario.to_json();
    assert_eq!(small.violation.rule, Rule::Ranges, "{text}");
    assert!(small.scenario.faults.is_empty(), "{text}");
    assert_eq!(small.scenario.workloads.len(), 1, "{text}");
    assert!(small.scenario.workloads[0].spread.is_some(), "{text}");
}

#[test]
fn each_mistake_about_a_range_is_named_with_its_field_and_rule() {
    let good = sweep(4, "").to_json();
    for (from, to, field, word) in [
        (
            r#""spread": 4"#,
            r#""spread": 1"#,
            "workloads[0].spread",
            "from 2 to 64",
        ),
        (
            r#""spread": 4"#,
            r#""spread": 4, "gang": 2"#,
            "workloads[0].spread",
            "gang",
        ),
        ("sweep@1", "synthetic@1", "workloads[0].spread", "no range"),
        (
            r#""program": "sweep@1""#,
            r#""program": "sweep@1", "spread": {"up_to": 4}, "params": {"tiles": {"from": 0, "to": 9}}"#,
            "workloads[0].submission.spread",
            "the workload's `spread`",
        ),
    ] {
        let text = good.replacen(from, to, 1);
        assert_ne!(text, good, "{from}");
        let error = Scenario::parse(text.as_bytes()).unwrap_err();
        assert_eq!(error.field, field, "{error}");
        assert!(error.reason.contains(word), "{error}");
    }
}

fn spread() -> Scenario {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios");
    Scenario::parse(&std::fs::read(folder.join("spread.json")).unwrap()).unwrap()
}

/// The figures of the committed scenario: a policy change that alters them needs a look.
#[test]
fn ranges_among_short_work_and_faults_come_to_what_was_committed() {
    let scenario = spread();
    let s = honest(&scenario);
    assert_eq!(s.completed, s.submitted, "{:?}", s.unfinished);
    assert!(s.parts > 20 && s.returned > 0, "{s:?}");
    assert!(s.faults["revoke"] > 0 && s.faults["loss"] > 0, "{s:?}");
    let found = serde_json::json!({
        "submitted": s.submitted, "completed": s.completed, "parts": s.parts,
        "returned": s.returned, "bindings": s.bindings, "rebindings": s.rebindings,
        "makespan_s": (s.makespan_ms / 1e3).round(), "lost_s": (s.lost_ms / 1e3).round(),
    });
    let text = format!("{}\n", serde_json::to_string_pretty(&found).unwrap());
    let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/spread.json");
    if std::env::var_os("FIEC_UPDATE").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == text,
        "it comes to {text}not to what {} says: if that is meant, run FIEC_UPDATE=1 cargo test -p \
         fiec-simulator and read the difference",
        path.display()
    );
}
