//! A recorded history is played again with its gangs, quotas, batches with limits, dependencies and
//! spread ranges.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeMap;

use fiec_schemas::messages::NodeEventKind;
use fiec_schemas::{
    ExecutionId, NodeId, Reading, Signal, Submission, Tenant, Threshold, Timestamp,
};
use fiec_simulator::history::{EventRow, ExecutionRow, History, NodeRow, QuotaRow, VectorRow};
use fiec_simulator::scenario::{Fault, NodeFault, Revocation, Scenario};
use fiec_simulator::{Summary, play, settings};

const START: i64 = 1_767_225_600_000_000;

fn at(ms: i64) -> Timestamp {
    Timestamp::from_micros(START + ms * 1_000)
}

fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

fn lab() -> Tenant {
    Tenant::new("lab").unwrap()
}

fn row(name: &str) -> NodeRow {
    NodeRow {
        node: node(name),
        slots: 1,
        parks: 0,
        memory_bytes: 1 << 30,
        cpus: 2,
        labels: BTreeMap::new(),
        thresholds: BTreeMap::from([(
            Signal::Memory,
            Threshold {
                high: 0.9,
                low: 0.7,
                dwell_ms: 10_000,
            },
        )]),
    }
}

fn vector(name: &str, ms: i64, value: f64) -> VectorRow {
    VectorRow {
        node: node(name),
        at: at(ms),
        readings: vec![Reading {
            signal: Signal::Memory,
            device: None,
            value: Some(value),
            raw: None,
            limit: None,
            unit: "ratio".to_owned(),
            source: "test".to_owned(),
            at: at(ms),
            missing: None,
            envelope: None,
        }],
    }
}

fn event(name: &str, ms: i64, what: NodeEventKind) -> EventRow {
    EventRow {
        node: node(name),
        at: at(ms),
        what,
    }
}

fn id(n: u128) -> ExecutionId {
    ExecutionId(uuid::Uuid::from_u128(n))
}

/// An execution of `seconds`, in capsules of 100 ms, with these fields beside its program.
fn execution(n: u128, ms: i64, seconds: u64, fields: &str) -> ExecutionRow {
    let fields = match fields.contains("program") {
        true => fields.to_owned(),
        false => format!(r#""program":"synthetic@1"{fields}"#),
    };
    ExecutionRow {
        execution: id(n),
        tenant: lab(),
        submitted_at: at(ms),
        spec: Some(Submission::parse(format!("{{{fields}}}").as_bytes()).unwrap()),
        computed_us: seconds * 1_000_000,
        capsules: seconds * 10,
        state_bytes: 1_000,
        failed: false,
        part_of: None,
    }
}

/// Two calm nodes of one slot for a minute.
fn history(executions: Vec<ExecutionRow>) -> History {
    History {
        since: at(0),
        until: at(60_000),
        nodes: vec![row("a"), row("b")],
        vectors: vec![vector("a", 100, 0.2), vector("b", 100, 0.3)],
        events: Vec::new(),
        quotas: Vec::new(),
        executions,
    }
}

fn played(scenario: &Scenario) -> Summary {
    let outcome = play(scenario, &mut |_| {}).unwrap();
    if let Some(violation) = outcome.violation {
        panic!("{violation}\n{}", scenario.to_json());
    }
    outcome.summary
}

fn replayed(history: &History) -> Summary {
    let scenario = history.scenario();
    // The form in which it is saved for `fiec simulate`.
    let again = Scenario::parse(scenario.to_json().as_bytes()).unwrap();
    assert_eq!(again, scenario);
    played(&scenario)
}

/// Checks the makespan to half a second.
fn lasts(s: &Summary, seconds: f64) {
    let found = s.makespan_ms / 1e3;
    assert!((found - seconds).abs() < 0.5, "{found} s: {s:?}");
}

#[test]
fn what_was_recorded_is_played_again_and_otherwise() {
    let mut history = history(vec![execution(
        1,
        1_500,
        40,
        r#","id":"x","commit":{"every":5}"#,
    )]);
    // One node presses for twelve seconds; the other joined two seconds late.
    history.vectors.insert(1, vector("a", 10_000, 0.95));
    history.vectors.insert(2, vector("a", 22_000, 0.2));
    history
        .events
        .push(event("b", 2_000, NodeEventKind::Joined));
    let scenario = history.scenario();
    let absent = Fault::Loss(NodeFault {
        node: node("b"),
        at_ms: 0,
        for_ms: Some(2_000),
    });
    assert_eq!(scenario.faults, [absent]);
    let s = played(&scenario);
    assert_eq!((s.completed, s.rebindings.get("pressure")), (1, Some(&1)));
    assert!(
        (41_000.0..43_000.0).contains(&(s.makespan_ms + 1_500.0)),
        "{s:?}"
    );
    let mut patient = scenario.clone();
    settings::set(&mut patient, "dwell_ms=20000").unwrap();
    let s = played(&patient);
    assert_eq!((s.completed, s.rebindings.get("pressure")), (1, None));
    for (change, word) in [
        ("dwell=1", "is no setting"),
        ("high.gold=1", "is no signal"),
        ("high.memory=much", "a number in [0, 1]"),
        ("dwell_ms", "NAME=VALUE"),
        ("balance_ms=-1", "whole number"),
        ("quota.lab=1", "quota.TENANT.running"),
        ("quota.lab.gold=1", "is no limit"),
        ("quota.mine.running=1", "no workload is of the tenant mine"),
        ("quota.lab.running=many", "whole number or `none`"),
    ] {
        let error = settings::set(&mut patient, change).unwrap_err();
        assert!(error.to_string().contains(word), "{change}: {error}");
    }
}

#[test]
fn what_waited_for_another_waits_whatever_the_order_of_the_rows() {
    let after = r#","after":[{"id":"00000000-0000-0000-0000-000000000001"}]"#;
    // It was recorded first, and submitted at the same moment.
    let rows = vec![execution(2, 0, 10, after), execution(1, 0, 10, "")];
    let s = replayed(&history(rows));
    assert_eq!(s.completed, 2);
    lasts(&s, 20.0);
}

#[test]
fn what_failed_by_its_program_fails_and_what_waits_for_any_end_goes_on() {
    let id = "00000000-0000-0000-0000-000000000001";
    let any = format!(r#","after":[{{"id":"{id}","on":"any"}}]"#);
    let mut first = execution(1, 0, 10, "");
    first.failed = true;
    let s = replayed(&history(vec![first, execution(2, 0, 5, &any)]));
    assert_eq!((s.completed, s.failed), (1, 1));
    lasts(&s, 15.0);
}

#[test]
fn members_of_a_gang_start_together_and_those_that_never_began_are_not_waited_for() {
    let gang = r#","gang":{"name":"g","size":2}"#;
    let rows = |fields: &str| {
        let mut rows = vec![execution(1, 0, 20, "")];
        rows.extend([2, 3].map(|n| execution(n, 1_000 * n as i64, 10, fields)));
        // A member of another gang of the same name, whose other member never started.
        rows.push(execution(4, 4_000, 5, fields));
        rows
    };
    let scenario = history(rows(gang)).scenario();
    let gangs: Vec<_> = scenario.workloads.iter().map(|w| w.gang_size()).collect();
    assert_eq!(gangs, [None, Some(2), Some(2), None]);
    // Two places are free at once only after twenty seconds.
    let s = replayed(&history(rows(gang)));
    assert_eq!(s.completed, 4);
    assert!((30_000.0..32_000.0).contains(&s.makespan_ms), "{s:?}");
    lasts(&replayed(&history(rows(""))), 25.0);
}

#[test]
fn a_batch_runs_as_many_at_once_as_the_smallest_number_that_one_of_it_gives() {
    let batch =
        |n: u128, at_once: &str| execution(n, 0, 5, &format!(r#","batch":"study"{at_once}"#));
    let one = r#","at_once":1"#;
    let all: Vec<_> = (1..5).map(|n| batch(n, one)).collect();
    let s = replayed(&history(all));
    assert!((20_000.0..22_000.0).contains(&s.makespan_ms), "{s:?}");
    // Members without a limit have no promise.
    let some = vec![batch(1, one), batch(2, ""), batch(3, r#","at_once":2"#)];
    let s = replayed(&history(some));
    assert_eq!(s.completed, 3);
    assert!(s.makespan_ms >= 9_900.0, "{s:?}");
    let none: Vec<_> = (1..5).map(|n| batch(n, "")).collect();
    lasts(&replayed(&history(none)), 10.0);
}

#[test]
fn tenants_have_the_quotas_that_they_had_when_they_had_them() {
    let jobs = || (1..7).map(|n| execution(n, 0, 5, "")).collect::<Vec<_>>();
    let quota = |ms: i64, running: Option<u32>| QuotaRow {
        tenant: lab(),
        at: at(ms),
        running,
        memory_bytes: None,
        weight: None,
    };
    lasts(&replayed(&history(jobs())), 15.0);
    // One at a time, as set before the span.
    let mut limited = history(jobs());
    limited.quotas = vec![quota(-50_000, Some(1))];
    let scenario = limited.scenario();
    assert_eq!(scenario.quotas[0].at_ms, 0);
    let s = replayed(&limited);
    assert!(s.reservations >= 6, "{s:?}");
    assert!((30_000.0..33_000.0).contains(&s.makespan_ms), "{s:?}");
    // Lifted after ten seconds: two executions are done by then, the other four run two at a time.
    limited.quotas.push(quota(10_000, None));
    let s = replayed(&limited);
    assert!((19_500.0..23_000.0).contains(&s.makespan_ms), "{s:?}");
    // The same history with another quota.
    let mut other = scenario;
    settings::set(&mut other, "quota.lab.running=2").unwrap();
    let s = played(&other);
    assert!((15_000.0..18_000.0).contains(&s.makespan_ms), "{s:?}");
    settings::set(&mut other, "quota.lab.running=none").unwrap();
    lasts(&played(&other), 15.0);
}

#[test]
fn a_range_that_was_spread_is_one_again_and_who_splits_is_played_anew() {
    let sweep =
        r#""program":"sweep@1","params":{"tiles":{"from":0,"to":600}},"spread":{"up_to":2}"#;
    let mut part = execution(2, 3_000, 25, sweep);
    part.part_of = Some(id(1));
    let rows = vec![execution(1, 0, 35, sweep), part];
    let scenario = history(rows.clone()).scenario();
    assert_eq!(scenario.workloads.len(), 1);
    assert_eq!(scenario.workloads[0].spread, Some(2));
    let s = replayed(&history(rows.clone()));
    assert_eq!((s.submitted, s.completed), (1, 1));
    assert!(s.parts > 0, "{s:?}");
    // A minute of work on two nodes.
    assert!((30_000.0..36_000.0).contains(&s.makespan_ms), "{s:?}");
    assert!((s.work_ms - 60_000.0).abs() < 1.0, "{s:?}");
    let mut never = scenario;
    settings::set(&mut never, "spread_least_ms=3600000").unwrap();
    let s = played(&never);
    assert_eq!(s.parts, 0);
    lasts(&s, 60.0);
}

#[test]
fn what_lived_when_the_span_began_comes_at_its_beginning() {
    let mut rows = vec![execution(1, 500, 5, "")];
    rows.push(execution(2, -90_000, 8, ""));
    rows.push(execution(3, -80_000, 8, ""));
    let s = replayed(&history(rows));
    assert_eq!(s.completed, 3);
    lasts(&s, 13.0);
}

#[test]
fn a_deadline_is_as_far_away_as_it_was() {
    let within = |ms: i64, deadline: &str| {
        let fields = format!(r#","deadline":{{{deadline},"on_miss":"fail"}}"#);
        let scenario = history(vec![execution(1, ms, 20, &fields)]).scenario();
        let deadline = scenario.workloads[0].submission.deadline.unwrap();
        assert_eq!(deadline.at, None);
        (deadline.within_s, played(&scenario).failed)
    };
    let moment = format!(r#""at":"{}""#, at(31_000));
    assert_eq!(within(1_000, &moment), (Some(30), 0));
    assert_eq!(within(21_000, &moment), (Some(10), 1));
    // It was submitted before the span and has twelve seconds of the span left.
    assert_eq!(within(-18_000, r#""within_s":30"#), (Some(12), 1));
}

#[test]
fn a_node_that_said_that_it_would_be_gone_is_left_before_it_is() {
    let mut history = history(vec![execution(1, 0, 30, ""), execution(2, 0, 30, "")]);
    history.events = vec![
        event("b", 5_000, NodeEventKind::Revoked),
        event("b", 25_000, NodeEventKind::Left),
        event("b", 40_000, NodeEventKind::Joined),
    ];
    let scenario = history.scenario();
    let revoked = Fault::Revoke(Revocation {
        node: node("b"),
        at_ms: 5_000,
        notice_ms: 20_000,
        for_ms: Some(15_000),
    });
    assert!(scenario.faults.contains(&revoked), "{:?}", scenario.faults);
    let s = played(&scenario);
    assert_eq!((s.completed, s.lost_ms), (2, 0.0));
    assert_eq!(s.rebindings.get("revoked"), Some(&1), "{s:?}");
}

#[test]
fn what_no_node_here_is_known_to_have_does_not_keep_anything_from_running() {
    let fields = r#","verify":"all","requires":{"device":{"kind":"NVIDIA*"},"bandwidth_bytes_s":1000000000}"#;
    let s = replayed(&history(vec![execution(1, 0, 5, fields)]));
    assert_eq!(s.completed, 1);
}
