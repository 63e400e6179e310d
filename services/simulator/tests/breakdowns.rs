//! Nodes that cannot start a program, and programs that end their workers: the production policy
//! keeps its promises in drawn scenarios.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use fiec_policy::{Action, LedgerView, Now, Policy};
use fiec_schemas::{Cause, Event, EventKind, ExecutionId, Fault, InstanceId};
use fiec_simulator::draw::{Draw, Purpose};
use fiec_simulator::scenario::{Arrivals, CannotStart, Kills};
use fiec_simulator::shrink::shrink;
use fiec_simulator::{Decide, Scenario, Summary, World, play, random, scenario};

/// Start of the policy's clock in a run, in ms.
const ORIGIN_MS: u64 = 86_400_000;

/// The facts that a policy service saw in its ledgers, with their times in ms.
#[derive(Default)]
struct Seen {
    /// Starts that failed, by node and program.
    failed_starts: BTreeMap<(String, String), Vec<u64>>,
    /// Commits and completions by node.
    computed: BTreeMap<String, Vec<u64>>,
    /// Executions that the policy held, with the reason.
    held: Vec<(ExecutionId, String)>,
    /// Executions that the policy failed.
    failed: Vec<String>,
}

struct Observer {
    inner: Policy,
    seen: Rc<RefCell<Seen>>,
}

impl Observer {
    fn note_ledger(&self, now: Now, view: &LedgerView<'_>) {
        let Some(node) = view.worker() else { return };
        let at = now.mono.0 - ORIGIN_MS;
        let mut seen = self.seen.borrow_mut();
        for event in &view.events {
            let fault = match event.cause() {
                Some(Cause::NotTaken { fault, .. }) => fault.map(|fault| *fault),
                _ => event.fault(),
            };
            if let Some(Fault::CannotStart { command, .. }) = fault {
                let tries = seen.failed_starts.entry((node.to_owned(), command));
                tries.or_default().push(at);
            }
            if matches!(event.kind, EventKind::Boundary | EventKind::Completed) {
                seen.computed.entry(node.to_owned()).or_default().push(at);
            }
        }
    }

    fn note_actions(&self, actions: &[Action]) {
        let mut seen = self.seen.borrow_mut();
        for action in actions {
            let Action::Append {
                execution, events, ..
            } = action
            else {
                continue;
            };
            for event in events {
                match event {
                    Event::Held { reason, .. } => seen.held.push((*execution, reason.clone())),
                    Event::Failed { reason, .. } => seen.failed.push(reason.clone()),
                    _ => {}
                }
            }
        }
    }
}

impl Decide for Observer {
    fn policy(&self) -> &Policy {
        &self.inner
    }
    fn policy_mut(&mut self) -> &mut Policy {
        &mut self.inner
    }
    fn hear(&mut self, now: Now, view: &LedgerView<'_>) {
        self.note_ledger(now, view);
    }
    fn alter(&mut self, out: &mut Vec<Action>) {
        self.note_actions(out);
    }
}

fn observe(scenario: &Scenario) -> (Summary, Seen) {
    let seen = Rc::new(RefCell::new(Seen::default()));
    let mut make = |config: &fiec_policy::Config, id: InstanceId| Observer {
        inner: Policy::new(config.clone(), id),
        seen: Rc::clone(&seen),
    };
    let outcome = World::new(scenario, &mut make).unwrap().run(&mut |_| {});
    if let Some(violation) = outcome.violation {
        panic!("{violation}\n{}", scenario.to_json());
    }
    (outcome.summary, seen.take())
}

/// The seeds of a test: `FIEC_SEEDS` of them from `FIEC_SEED` on, or from the clock.
fn seeds(count: u64) -> Range<u64> {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse().unwrap());
    let first = number("FIEC_SEED").unwrap_or_else(|| {
        let since = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
        since.as_secs() * 1_000
    });
    let count = number("FIEC_SEEDS").unwrap_or(count);
    println!("FIEC_SEED={first} FIEC_SEEDS={count}");
    first..first + count
}

fn parse(seed: u64, nodes: u64, slots: u64, workloads: &str, rest: &str) -> Scenario {
    let text = format!(
        r#"{{"seed": {seed}, "duration_ms": 400000, "drain_ms": 1200000,
            "nodes": [{{"name": "n", "count": {nodes}, "slots": {slots}}}, {{"name": "m", "slots": {slots}}}],
            "workloads": [{workloads}], {rest}}}"#
    );
    Scenario::parse(text.as_bytes()).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn poisson(program: &str, per_s: f64) -> String {
    format!(
        r#"{{"name": "{program}", "arrivals": {{"poisson": {{"per_s": {per_s}}}}},
            "work_ms": {{"uniform": {{"low": 2000, "high": 6000}}}},
            "submission": {{"program": "{program}"}}}}"#
    )
}

/// Checks that one execution at a time tries the node, after pauses that double.
fn check_pauses(tries: &[u64], slots: u64, context: &str) {
    // Executions that were bound before the first failure fail along with it.
    let first = tries[0];
    let along = tries.iter().take_while(|at| **at < first + 1_000).count();
    assert!(along as u64 <= 2 * slots, "{along} at first, {context}");
    let mut pause = 5_000;
    let mut before = first;
    for at in &tries[along..] {
        assert!(
            *at >= before + pause,
            "{at} after {before}, {context}: {tries:?}"
        );
        (before, pause) = (*at, (2 * pause).min(600_000));
    }
}

#[test]
fn a_node_that_cannot_start_a_program_gets_a_try_after_growing_pauses_and_computes_when_it_can() {
    let (mut retried, mut played) = (0, 0);
    for seed in seeds(12) {
        played += 1;
        let mut draw = Draw::new(seed, Purpose::Scenario);
        let (nodes, slots) = (1 + draw.below(3), 1 + draw.below(3));
        let end_ms = 30_000 + draw.below(150_000);
        let program = ["", r#""program": "a@1","#][draw.below(2) as usize];
        let after_start = draw.chance(0.5);
        let faults = format!(
            r#""faults": [{{"cannot_start": {{"node": "m", {program} "at_ms": 0, "for_ms": {end_ms},
                "after_start": {after_start}}}}}]"#
        );
        #[expect(clippy::cast_precision_loss, reason = "a few slots")]
        let rate = (nodes * slots) as f64 / 10.0;
        let workloads = [poisson("a@1", rate), poisson("b@1", rate)].join(",");
        let scenario = parse(seed, nodes, slots, &workloads, &faults);
        let context = format!("FIEC_SEED={seed} FIEC_SEEDS=1: {}", scenario.to_json());
        let (s, seen) = observe(&scenario);
        assert_eq!(s.completed, s.submitted, "{context}");
        assert!(seen.failed.is_empty(), "{:?}, {context}", seen.failed);
        assert_eq!(s.faults["cannot_start"], 1, "{context}");
        // After two failures in a row the node is set aside for all: one program may not try.
        let fails = |(_, of): &(String, String)| program.is_empty() || of == "a@1";
        assert!(seen.failed_starts.keys().all(fails), "{context}");
        for ((node, _), tries) in &seen.failed_starts {
            assert_eq!(node, "m", "{context}");
            check_pauses(tries, slots, &context);
            retried += tries.len();
        }
        // The last pause is at most as long as the fault, and a try.
        let computed = &seen.computed["m"];
        let by = 2 * end_ms + 60_000;
        let again = computed.iter().any(|at| (end_ms..by).contains(at));
        assert!(again, "{computed:?}, {context}");
    }
    // In a single drawn scenario perhaps nothing came to the node in time.
    assert!(played == 1 || retried > played, "{retried} tries");
}

#[test]
fn executions_wait_for_the_only_nodes_and_complete_when_these_can_start_them() {
    for seed in seeds(8) {
        let mut draw = Draw::new(seed, Purpose::Scenario);
        let (nodes, slots) = (1, 1 + draw.below(3));
        let mut ends = Vec::new();
        let mut faults = Vec::new();
        for node in ["n", "m"] {
            let (end_ms, after_start) = (20_000 + draw.below(200_000), draw.chance(0.5));
            ends.push(end_ms);
            faults.push(format!(
                r#"{{"cannot_start": {{"node": "{node}", "at_ms": 0, "for_ms": {end_ms},
                    "after_start": {after_start}}}}}"#
            ));
        }
        let workload = r#"{"name": "jobs", "arrivals": {"at_once": {"count": 6}},
            "work_ms": {"fixed": 3000}}"#;
        let faults = format!(r#""faults": [{}]"#, faults.join(","));
        let scenario = parse(seed, nodes, slots, workload, &faults);
        let context = format!("FIEC_SEED={seed} FIEC_SEEDS=1: {}", scenario.to_json());
        let (s, seen) = observe(&scenario);
        assert_eq!(s.completed, s.submitted, "{context}");
        assert!(seen.failed.is_empty(), "{:?}, {context}", seen.failed);
        // The first node that recovers is tried after a pause that is as long as its fault at most.
        #[expect(clippy::cast_precision_loss, reason = "a time")]
        let by = (2 * ends.iter().min().unwrap() + 60_000) as f64;
        assert!(s.makespan_ms < by, "{} ms, {context}", s.makespan_ms);
    }
}

#[test]
fn an_execution_that_kills_its_workers_is_held_after_the_configured_deaths_and_others_complete() {
    for seed in seeds(12) {
        let mut draw = Draw::new(seed, Purpose::Scenario);
        let (nodes, slots) = (2 + draw.below(4), 1 + draw.below(3));
        let limit = 2 + draw.below(3);
        // The first commit is at boundary 10.
        let boundary = 1 + draw.below(25);
        let back_ms = 500 + draw.below(20_000);
        let at_ms = draw.below(30_000);
        let workloads = [
            poisson("a@1", 0.2),
            format!(
                r#"{{"name": "deadly", "arrivals": {{"at_once": {{"count": 1, "at_ms": {at_ms}}}}},
                    "work_ms": {{"fixed": 5000}}, "submission": {{"program": "deadly@1"}}}}"#
            ),
        ];
        let rest = format!(
            r#""policy": {{"deadly_workers": {limit}}}, "faults": [
                {{"kills": {{"program": "deadly@1", "boundary": {boundary}, "for_ms": {back_ms}}}}}]"#
        );
        let scenario = parse(seed, nodes, slots, &workloads.join(","), &rest);
        let context = format!("FIEC_SEED={seed} FIEC_SEEDS=1: {}", scenario.to_json());
        let (s, seen) = observe(&scenario);
        assert_eq!(
            s.completed + 1,
            s.submitted,
            "{:?}, {context}",
            s.unfinished
        );
        assert_eq!(
            s.unfinished[0].why, "held after deaths of workers",
            "{context}"
        );
        // A death after a commit is the first of a new row.
        let kills = s.faults["kills"];
        let is_exact = kills == limit || boundary > 10 && kills > limit;
        assert!(is_exact, "{kills} deaths, {context}");
        let [(_, reason)] = &seen.held[..] else {
            panic!("{:?}, {context}", seen.held);
        };
        assert!(
            reason.starts_with(&format!("{limit} workers")),
            "{reason}, {context}"
        );
    }
}

#[test]
fn drawn_scenarios_with_breakdowns_keep_every_promise() {
    let (mut refused, mut killed) = (0, 0);
    // In these, members of gangs end after the others had started: before and while one is bound.
    let known = [1_795_816_774_005, 5_186, 1_795_834_740_012];
    for seed in known.into_iter().chain(seeds(30)) {
        let mut s = random::scenario(seed);
        let mut draw = Draw::new(seed ^ 1, Purpose::Scenario);
        let mut deadly = s.workloads[0].clone();
        deadly.name = "deadly".to_owned();
        deadly.submission = fiec_schemas::Submission::of("deadly@1");
        (deadly.gang, deadly.spread) = (None, None);
        deadly.after.clear();
        deadly.arrivals = Arrivals::AtOnce {
            count: 1,
            at_ms: 5_000,
        };
        deadly.work_ms = scenario::Quantity::Fixed(5_000.0);
        s.workloads.push(deadly);
        s.faults.push(scenario::Fault::Kills(Kills {
            program: "deadly@1".to_owned(),
            boundary: 1 + draw.below(20),
            for_ms: draw.below(20_000),
        }));
        let names = s.nodes.iter().flat_map(scenario::node_names);
        for name in names.take(2) {
            s.faults.push(scenario::Fault::CannotStart(CannotStart {
                node: fiec_schemas::NodeId::new(name).unwrap(),
                program: None,
                at_ms: draw.below(20_000),
                for_ms: Some(draw.below(120_000)),
                after_start: draw.chance(0.5),
            }));
        }
        let outcome = play(&s, &mut |_| {}).unwrap();
        if let Some(violation) = outcome.violation {
            let mut player = |s: &Scenario| Ok(play(s, &mut |_| {})?.violation);
            let small = shrink(&s, 200, &mut player).unwrap().unwrap();
            panic!(
                "FIEC_SEED={seed} FIEC_SEEDS=1: {violation}\nshrunk:\n{}{}",
                small.scenario.to_json(),
                small.violation
            );
        }
        refused += outcome.summary.refusals;
        killed += outcome.summary.faults.get("kills").copied().unwrap_or(0);
    }
    assert!(
        refused > 0 && killed > 0,
        "{refused} refused, {killed} killed"
    );
}
