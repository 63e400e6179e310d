//! Each oracle finds its forgery, and is content with what keeps the promise.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::stream::Config;
use fiec_schemas::hardware::RunningProgress;
use fiec_schemas::messages::{Believed, Why};
use fiec_schemas::quota::Quota;
use fiec_schemas::{
    Binding, Digest, ExecutionId, ExecutionState, NodeId, Phase, PhaseKind, RequestKind, Requested,
    Started, Submission, Tenant, Timestamp,
};
use serde_json::json;
use uuid::Uuid;

use fiec_lab::judge::checker::{Rule, Violation};
use fiec_lab::judge::oracles::answers::{self, Answer, Said};
use fiec_lab::judge::oracles::health::{self, Health};
use fiec_lab::judge::oracles::leaks::{self, Kept};
use fiec_lab::judge::oracles::ledgers::Last;
use fiec_lab::judge::oracles::liveness::{self, Waiting};
use fiec_lab::judge::oracles::objects::{self, Objects};
use fiec_lab::judge::oracles::outbox::{self, Emitted};
use fiec_lab::judge::oracles::{agreement, configuration, recovery};

fn id(number: u128) -> ExecutionId {
    ExecutionId(Uuid::from_u128(number))
}

fn tenant() -> Tenant {
    "lab".parse().unwrap()
}

fn at(second: u64) -> Timestamp {
    Timestamp::from_micros(1_790_000_000_000_000).plus_ms(1_000 * second)
}

fn submission(more: serde_json::Value) -> Arc<Submission> {
    let mut all = json!({"program": "synthetic@1"});
    let fields = more.as_object().unwrap().clone();
    all.as_object_mut().unwrap().extend(fields);
    Arc::new(serde_json::from_value(all).unwrap())
}

/// A ledger whose last message is in this phase.
fn last(number: u128, seq: u64, phase: Phase, spec: &Arc<Submission>) -> (ExecutionId, Last) {
    let spec = Arc::clone(spec);
    let mut state = ExecutionState::unborn(tenant(), id(number), spec, None, at(0));
    state.phase = phase;
    state.at = at(10);
    let state = Arc::new(state);
    (id(number), Last { seq, state })
}

fn binding(node: &str) -> Binding {
    serde_json::from_value(
        json!({"node": node, "instance": Uuid::nil(), "substrate": "host",
        "seq": 3, "at": at(1)}),
    )
    .unwrap()
}

fn started(node: &str) -> Phase {
    Phase::Started(binding(node).into())
}

fn plain() -> Arc<Submission> {
    submission(json!({}))
}

fn rules(found: &[Violation]) -> Vec<Rule> {
    found.iter().map(|violation| violation.rule).collect()
}

fn believed(number: u128, phase: PhaseKind, seq: u64, node: Option<&str>) -> Believed {
    Believed {
        execution: id(number),
        phase,
        seq,
        epoch: 0,
        node: node.map(|node| node.parse::<NodeId>().unwrap()),
        appending: false,
    }
}

#[test]
fn a_view_that_stays_behind_or_differs_from_the_ledger_is_found() {
    let ledgers = BTreeMap::from([last(1, 7, started("n1"), &plain())]);
    let judged = |view: Option<Believed>| {
        let view = view.into_iter().map(|e| (e.execution, e)).collect();
        rules(&agreement::judge(&ledgers, &[view], &ledgers))
    };
    let right = believed(1, PhaseKind::Started, 7, Some("n1"));
    assert_eq!(judged(Some(right)), []);
    for wrong in [
        believed(1, PhaseKind::Started, 6, Some("n1")),
        believed(1, PhaseKind::Bound, 7, Some("n1")),
        believed(1, PhaseKind::Started, 7, Some("n2")),
    ] {
        assert_eq!(judged(Some(wrong)), [Rule::Agreement]);
    }
    // It is not known at all, or the service knows one without a ledger.
    assert_eq!(judged(None), [Rule::Agreement]);
    let invented = believed(2, PhaseKind::Pending, 9, None);
    let found = judged(Some(invented));
    assert_eq!(found, [Rule::Agreement, Rule::Agreement]);
}

#[test]
fn a_view_may_show_any_message_that_was_stored_while_it_was_read() {
    let before = BTreeMap::from([last(1, 7, Phase::PENDING, &plain())]);
    let after = BTreeMap::from([last(1, 9, started("n1"), &plain())]);
    let between = believed(1, PhaseKind::Bound, 8, Some("n1"));
    let view = BTreeMap::from([(id(1), between)]);
    assert_eq!(rules(&agreement::judge(&before, &[view], &after)), []);
    // A first message that is in flight has no ledger yet.
    let unborn = BTreeMap::from([(id(3), believed(3, PhaseKind::Pending, 0, None))]);
    let none = BTreeMap::new();
    assert_eq!(rules(&agreement::judge(&none, &[unborn], &none)), []);
}

fn why(rejected: &[&str], waits_for: &[&str]) -> Why {
    serde_json::from_value(
        json!({"summary": "", "phase": "pending", "waits_for": waits_for,
        "candidates": [{"node": "n1", "rejected": rejected}]}),
    )
    .unwrap()
}

fn waiting(number: u128, why: Why, running: Option<u32>) -> Waiting {
    let quota = running.map(|running| Quota {
        v: 1,
        running: Some(running),
        devices: None,
        memory_bytes: None,
        waiting: None,
        weight: None,
        who: "me".into(),
        at: at(0),
    });
    Waiting {
        why: BTreeMap::from([(id(number), why)]),
        quotas: quota.map(|quota| (tenant(), quota)).into_iter().collect(),
    }
}

#[test]
fn a_pending_execution_that_a_free_node_could_take_is_found() {
    let ledgers = BTreeMap::from([last(1, 7, Phase::PENDING, &plain())]);
    let judged = |waiting: &Waiting| rules(&liveness::judge(&ledgers, waiting));
    assert_eq!(judged(&waiting(1, why(&[], &[]), None)), [Rule::Liveness]);
    assert_eq!(judged(&waiting(1, why(&["it is full"], &[]), None)), []);
    // The policy service speaks of a quota of which nothing is used.
    let quota = why(&[], &["its tenant's quota (1 running)"]);
    assert_eq!(judged(&waiting(1, quota, Some(1))), [Rule::Liveness]);
}

#[test]
fn a_limit_that_is_in_use_and_a_dependency_hold_an_execution_back() {
    let mut ledgers = BTreeMap::from([
        last(1, 7, Phase::PENDING, &plain()),
        last(2, 8, started("n1"), &plain()),
    ]);
    let full = waiting(1, why(&[], &["its tenant's quota"]), Some(1));
    assert_eq!(rules(&liveness::judge(&ledgers, &full)), []);
    let spec = submission(json!({"after": [{"id": "other"}]}));
    ledgers.extend([last(3, 9, Phase::PENDING, &spec)]);
    let waits = waiting(3, why(&[], &["other"]), None);
    assert_eq!(rules(&liveness::judge(&ledgers, &waits)), []);
}

#[test]
fn answers_that_were_not_kept_are_found() {
    let answer = |said| Answer {
        execution: id(1),
        said,
        at: at(1),
    };
    let judged = |said: &[Said], phase: Phase| {
        let answers: Vec<Answer> = said.iter().map(|said| answer(*said)).collect();
        let ledgers = BTreeMap::from([last(1, 7, phase, &plain())]);
        rules(&answers::judge(&answers, &ledgers))
    };
    let paused = || Phase::Paused { who: "me".into() };
    for (said, phase) in [
        (Said::Paused, started("n1")),
        (Said::Resumed, paused()),
        (Said::Cancelled, started("n1")),
        (Said::Completed, Phase::Failed),
    ] {
        assert_eq!(judged(&[said], phase), [Rule::Answers], "{said:?}");
    }
    for (said, phase) in [
        (Said::Paused, paused()),
        (Said::Paused, Phase::Completed),
        (Said::Resumed, started("n1")),
        (Said::Cancelled, Phase::Cancelled),
        (Said::Completed, Phase::Completed),
        (Said::Accepted, Phase::PENDING),
    ] {
        assert_eq!(judged(&[said], phase), [], "{said:?}");
    }
    // A later answer replaces an earlier one, but the end stays the end.
    assert_eq!(judged(&[Said::Paused, Said::Resumed], started("n1")), []);
    let again = [Said::Completed, Said::Resumed];
    assert_eq!(judged(&again, started("n1")), [Rule::Answers]);
    let lost = answers::judge(&[answer(Said::Accepted)], &BTreeMap::new());
    assert_eq!(rules(&lost), [Rule::Answers]);
}

#[test]
fn a_pause_that_stands_in_the_ledger_may_wait_for_its_boundary() {
    let started = Phase::Started(Started {
        binding: binding("n1"),
        requested: Some(Requested {
            what: RequestKind::Pause,
            who: "me".to_owned(),
            at: Some(at(1)),
        }),
        parked: None,
    });
    let (number, ledger) = last(1, 7, started, &plain());
    let said = [Answer {
        execution: number,
        said: Said::Paused,
        at: at(1),
    }];
    let ledgers = BTreeMap::from([(number, ledger)]);
    assert_eq!(rules(&answers::judge(&said, &ledgers)), []);
}

#[test]
fn progress_that_no_commit_holds_for_too_long_is_found() {
    let progress = |boundary| RunningProgress {
        execution: id(1),
        epoch: 0,
        boundary,
        of: None,
        note: None,
    };
    let bound = recovery::bound(Duration::from_secs(60), Duration::from_secs(10));
    let judged = |boundary, now, spec: &Arc<Submission>| {
        let ledgers = BTreeMap::from([last(1, 7, started("n1"), spec)]);
        rules(&recovery::judge(
            &ledgers,
            &[progress(boundary)],
            now,
            bound,
        ))
    };
    let soon = at(20);
    let late = at(10).plus_ms(bound.as_millis() as u64 + 1);
    assert_eq!(judged(5, late, &plain()), [Rule::RecoveryPoint]);
    assert_eq!(judged(5, soon, &plain()), []);
    // It computes its first capsule.
    assert_eq!(judged(0, late, &plain()), []);
    let rarely = submission(json!({"commit": {"every": 1000}}));
    assert_eq!(judged(5, late, &rarely), []);
}

#[test]
fn each_kind_of_leak_is_found() {
    let ledgers = BTreeMap::from([
        last(1, 7, Phase::PENDING, &plain()),
        last(2, 8, started("n1"), &plain()),
    ]);
    let judged = |kept: Kept| rules(&leaks::judge(&ledgers, &kept));
    let kept = || Kept {
        reserved: BTreeSet::from([id(2)]),
        chunks: BTreeMap::from([(id(2), 5)]),
        named: BTreeMap::from([(id(2), 5)]),
        consumers: BTreeSet::from(["node-n1".to_owned()]),
        nodes: BTreeSet::from(["node-n1".to_owned()]),
        orphans: Vec::new(),
        waits_since: None,
        superseded_ms: 40_000,
        now: at(300),
    };
    assert_eq!(judged(kept()), []);
    let leaks = [
        Kept {
            reserved: BTreeSet::from([id(1)]),
            ..kept()
        },
        Kept {
            chunks: BTreeMap::from([(id(2), 6)]),
            ..kept()
        },
        Kept {
            nodes: BTreeSet::new(),
            ..kept()
        },
        Kept {
            orphans: vec!["$O.FIEC_DATA.C.x".to_owned()],
            ..kept()
        },
        Kept {
            waits_since: Some(at(50)),
            ..kept()
        },
    ];
    for leak in leaks {
        assert_eq!(judged(leak.clone()), [Rule::Leaks], "{leak:?}");
    }
    // Chunks that a commit has just superseded are still there.
    let fresh = Kept {
        chunks: BTreeMap::from([(id(2), 6)]),
        now: at(20),
        ..kept()
    };
    assert_eq!(judged(fresh), []);
}

#[test]
fn an_object_to_which_nothing_refers_is_found_once_it_is_due() {
    let object = Digest::of(b"an output");
    let ledger = |is_over, made: &[Digest], named: &[Digest]| objects::Ledger {
        is_over,
        made: made.iter().copied().collect(),
        named: named.iter().copied().collect(),
    };
    let with = |ledger| Objects {
        stored: BTreeMap::from([(object, at(50))]),
        ledgers: BTreeMap::from([("x".to_owned(), ledger)]),
        due_before: at(100),
        ..Objects::default()
    };
    let judged = |objects: Objects| rules(&objects::judge(&objects));
    let others = [Digest::of(b"another output")];
    let left = || with(ledger(false, &others, &others));
    assert_eq!(judged(left()), [Rule::Leaks]);
    // What an ended execution has read is no longer needed.
    let read = ledger(true, &[], &[object]);
    assert_eq!(judged(with(read)), [Rule::Leaks]);

    let kept = [
        with(ledger(false, &[object], &[])),
        with(ledger(false, &[], &[object])),
        with(ledger(true, &[object], &[object])),
        Objects {
            packages: BTreeSet::from([object]),
            ..left()
        },
        Objects {
            history: BTreeSet::from([object]),
            ..left()
        },
        Objects {
            missing_history: vec![(at(40), at(60))],
            ..left()
        },
        // It was put within the grace.
        Objects {
            due_before: at(50),
            ..left()
        },
    ];
    for kept in kept {
        assert_eq!(judged(kept.clone()), [], "{kept:?}");
    }
    let missed_later = Objects {
        missing_history: vec![(at(51), at(60))],
        ..left()
    };
    assert_eq!(judged(missed_later), [Rule::Leaks]);
}

#[test]
fn an_outbox_with_a_gap_a_double_or_a_message_too_many_is_found() {
    let judged = |emitted: Emitted| rules(&outbox::judge(&BTreeMap::from([(id(1), emitted)])));
    let emitted = |published: &[(u64, u32)], is_over| Emitted {
        counts: vec![2, 1],
        published: published.to_vec(),
        is_over,
    };
    assert_eq!(judged(emitted(&[(1, 0), (1, 1), (2, 0)], true)), []);
    // The last set is published after its commit.
    assert_eq!(judged(emitted(&[(1, 0), (1, 1)], false)), []);
    assert_eq!(judged(emitted(&[(1, 0), (1, 1)], true)), [Rule::Outbox]);
    assert_eq!(judged(emitted(&[(1, 0)], false)), [Rule::Outbox]);
    let double = [(1, 0), (1, 0), (1, 1)];
    assert_eq!(judged(emitted(&double, true)), [Rule::Outbox]);
    let more = [(1, 0), (1, 1), (2, 0), (3, 0)];
    assert_eq!(judged(emitted(&more, true)), [Rule::Outbox]);
}

#[test]
fn a_stream_that_is_not_as_it_was_set_up_is_found() {
    let wanted = Config {
        name: "FIEC_LEDGER".to_owned(),
        num_replicas: 3,
        max_messages_per_subject: 64,
        ..Config::default()
    };
    let judged = |has: Option<Config>| rules(&configuration::judge(&vec![(wanted.clone(), has)]));
    assert_eq!(judged(Some(wanted.clone())), []);
    assert_eq!(judged(None), [Rule::Configuration]);
    let fewer = Config {
        num_replicas: 1,
        ..wanted.clone()
    };
    assert_eq!(judged(Some(fewer)), [Rule::Configuration]);
    let deeper = Config {
        max_messages_per_subject: -1,
        ..wanted.clone()
    };
    assert_eq!(judged(Some(deeper)), [Rule::Configuration]);
}

#[test]
fn what_is_broken_while_every_health_is_green_is_hidden() {
    let broken = [Violation::new(Rule::Leaks, "", "something")];
    let health = |is_green| Health {
        service: "recorder".to_owned(),
        is_green,
    };
    let judged = |broken: &[Violation], is_green, overdue| {
        health::judge(broken, &[health(true), health(is_green)], overdue).map(|v| v.rule)
    };
    assert_eq!(judged(&broken, true, false), Some(Rule::Health));
    assert_eq!(judged(&broken, false, false), None);
    assert_eq!(judged(&broken, true, true), None);
    assert_eq!(judged(&[], true, false), None);
}
