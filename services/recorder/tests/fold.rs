//! The pure fold: messages in, rows out.
use std::sync::Arc;

use fiec_recorder::fold::{Known, Message, fold};
use fiec_recorder::lab_support::{LedgerWriter, short_ledgers};
use fiec_schemas::duty::{REQUEST_MS, START_MS};
use fiec_schemas::{
    Cause, CauseKind, Decision, Entrusted, Event, EventKind, ExecutionId, Fault, InstanceId,
    LedgerMessage, PhaseKind, RequestKind, Submission, Tenant, Timestamp,
};

fn at(ms: i64) -> Timestamp {
    Timestamp::from_micros(1_750_000_000_000_000 + ms * 1_000)
}

fn message(item: &fiec_broker::feed::FeedItem) -> Message {
    let message = LedgerMessage::decode(&item.header, item.seq).unwrap();
    Message {
        seq: item.seq,
        stored_at: item.stored_at,
        digest: Some(item.digest()),
        message,
    }
}

fn bound(epoch: u64, node: &str, cause: Cause) -> Event {
    let instance = InstanceId::random();
    let node = node.parse().unwrap();
    Event::Bound {
        epoch,
        node,
        instance,
        substrate: "host".into(),
        cause,
        decision: None,
    }
}

/// Bound to a, started, lost; bound to b, started, cancelled.
fn lost_ledger() -> Vec<Message> {
    let submission = Submission::parse(br#"{"program":"synthetic@1"}"#).unwrap();
    let id = ExecutionId(uuid::Uuid::now_v7());
    let tenant = Tenant::new("lab").unwrap();
    let mut w = LedgerWriter::new(tenant, id, Arc::new(submission), at(0));
    let steps = vec![
        vec![Event::Submitted, bound(1, "a", Cause::Initial)],
        vec![Event::Started {
            epoch: 1,
            computing_since: at(1),
        }],
        vec![bound(2, "b", Cause::Lost { silent_ms: 5_000 })],
        vec![Event::Started {
            epoch: 2,
            computing_since: at(40),
        }],
        vec![Event::Cancelled { who: "ada".into() }],
    ];
    steps
        .into_iter()
        .zip(1u64..)
        .map(|(events, seq)| {
            let ms = i64::try_from(seq).unwrap() * 10;
            message(&w.append(events, "policy/p", at(ms), seq).unwrap())
        })
        .collect()
}

#[test]
fn both_messages_of_a_short_execution_become_one_row_each() {
    let messages: Vec<_> = short_ledgers(3, 1).unwrap().iter().map(message).collect();
    let mut known = Known::default();
    let rows = fold(messages, &mut known);
    assert_eq!(
        (
            rows.executions.len(),
            rows.placements.len(),
            rows.decisions.len()
        ),
        (3, 3, 3)
    );
    assert!(
        rows.executions
            .iter()
            .all(|e| e.is_new && e.phase == PhaseKind::Completed && e.spec.is_some())
    );
    assert!(
        rows.placements
            .values()
            .all(|p| p.is_new && p.end_reason == Some("completed"))
    );
    assert_eq!((rows.messages, rows.last_seq), (6, 6));
    assert!(known.is_empty(), "finished executions are forgotten");
}

#[test]
fn an_execution_is_due_while_the_ledger_sets_its_worker_a_time() {
    let ask = Event::Requested {
        what: RequestKind::Cancel,
        who: "ada".into(),
    };
    let submission = Submission::parse(br#"{"program":"synthetic@1"}"#).unwrap();
    let (id, tenant) = (
        ExecutionId(uuid::Uuid::now_v7()),
        Tenant::new("lab").unwrap(),
    );
    let mut w = LedgerWriter::new(tenant, id, Arc::new(submission), at(0));
    let started = Event::Started {
        epoch: 1,
        computing_since: at(15),
    };
    let cancelled = Event::Cancelled { who: "ada".into() };
    let steps = [
        (
            vec![Event::Submitted, bound(1, "a", Cause::Initial)],
            Some(at(10).plus_ms(START_MS)),
        ),
        (vec![started], None),
        (vec![ask], Some(at(30).plus_ms(REQUEST_MS))),
        (vec![cancelled], None),
    ];
    let mut known = Known::default();
    for ((events, due), seq) in steps.into_iter().zip(1u64..) {
        let now = at(i64::try_from(seq).unwrap() * 10);
        let item = w.append(events, "policy/p", now, seq).unwrap();
        let rows = fold(vec![message(&item)], &mut known);
        assert_eq!(rows.executions[0].due_at, due, "message {seq}");
    }
}

#[test]
fn a_life_in_one_message_becomes_the_same_rows_as_in_two() {
    let submission = Submission::parse(br#"{"program":"synthetic@1"}"#).unwrap();
    let (id, tenant) = (
        ExecutionId(uuid::Uuid::now_v7()),
        Tenant::new("lab").unwrap(),
    );
    let decision = |entrusted| Decision {
        candidates: Vec::new(),
        omitted: 0,
        entrusted,
    };
    let bound = |entrusted| match bound(1, "a", Cause::Initial) {
        Event::Bound {
            epoch,
            node,
            substrate,
            cause,
            ..
        } => Event::Bound {
            epoch,
            node,
            instance: InstanceId(uuid::Uuid::nil()),
            substrate,
            cause,
            decision: Some(decision(entrusted)),
        },
        event => event,
    };
    let end = || {
        vec![
            Event::Started {
                epoch: 1,
                computing_since: at(20),
            },
            Event::Completed {
                result: serde_json::Value::Null,
                object: None,
                computed_until: at(25),
                capsules: 1,
                outputs: vec![],
                energy: None,
            },
        ]
    };
    let writer = || LedgerWriter::new(tenant.clone(), id, Arc::new(submission.clone()), at(0));
    let mut w = writer();
    let first = vec![Event::Submitted, bound(None)];
    let apart = vec![
        message(&w.append(first, "policy/p", at(10), 1).unwrap()),
        message(&w.append(end(), "worker/a/i", at(30), 2).unwrap()),
    ];
    let entrusted = Entrusted {
        by: "policy/p".into(),
        at: at(10),
    };
    let mut all = vec![Event::Submitted, bound(Some(entrusted))];
    all.extend(end());
    let whole = vec![message(
        &writer().append(all, "worker/a/i", at(30), 2).unwrap(),
    )];
    let apart = fold(apart, &mut Known::default());
    let mut known = Known::default();
    let whole = fold(whole, &mut known);
    assert!(known.is_empty());
    let mut placement = whole.placements[0].clone();
    assert_eq!(placement.bound_at, Some(at(10)));
    assert_eq!(placement.end_reason, Some("completed"));
    assert_eq!(placement.started_in, Some(1));
    assert_eq!(placement.ended_in, Some(1));
    (placement.started_in, placement.ended_in) = (Some(2), Some(2));
    // Nothing but the count of messages differs.
    let mut row = whole.executions.into_iter().next().unwrap();
    assert_eq!(row.ordinal, 1);
    row.ordinal = 2;
    row.digest = apart.executions[0].digest;
    assert_eq!(format!("{row:?}"), format!("{:?}", apart.executions[0]));
    assert_eq!(
        format!("{placement:?}"),
        format!("{:?}", apart.placements[0])
    );
    assert_eq!((whole.decisions.len(), apart.decisions.len()), (1, 1));
}

#[test]
fn a_first_message_that_yields_says_so_and_is_no_handover() {
    let submission = Submission::parse(br#"{"program":"synthetic@1"}"#).unwrap();
    let (id, tenant) = (
        ExecutionId(uuid::Uuid::now_v7()),
        Tenant::new("lab").unwrap(),
    );
    let mut w = LedgerWriter::new(tenant, id, Arc::new(submission), at(0));
    let events = vec![
        Event::Submitted,
        bound(1, "a", Cause::Initial),
        Event::Started {
            epoch: 1,
            computing_since: at(1),
        },
        Event::Yielded {
            cause: Cause::Drain { who: "ada".into() },
            computed_until: at(2),
        },
    ];
    let item = w.append(events, "worker/a/i", at(3), 1).unwrap();
    let rows = fold(vec![message(&item)], &mut Known::default());
    let kinds: Vec<_> = rows.events.iter().map(|e| e.kind).collect();
    assert_eq!(kinds, [EventKind::Yielded]);
    assert_eq!(rows.placements[0].end_reason, Some("drain"));
}

#[test]
fn a_split_between_batches_changes_the_row_instead_of_making_another() {
    let messages: Vec<_> = short_ledgers(1, 1).unwrap().iter().map(message).collect();
    let (first, second) = messages.split_at(1);
    let mut known = Known::default();
    assert!(fold(first.to_vec(), &mut known).executions[0].is_new);
    let rows = fold(second.to_vec(), &mut known);
    assert!(!rows.executions[0].is_new && !rows.placements[0].is_new);
    assert!(rows.executions[0].spec.is_none(), "the table has it");
}

#[test]
fn a_lost_node_ends_its_placement_and_begins_a_rebinding() {
    let rows = fold(lost_ledger(), &mut Known::default());
    let ends: Vec<_> = rows
        .placements
        .values()
        .map(|p| (p.epoch, p.end_reason))
        .collect();
    assert_eq!(ends, [(1, Some("lost")), (2, Some("cancelled"))]);
    assert_eq!(rows.rebindings.len(), 1, "{:?}", rows.rebindings);
    let rebinding = &rows.rebindings[0];
    assert_eq!(rebinding.from_node.as_ref().unwrap().as_str(), "a");
    assert_eq!(
        (rebinding.cause, rebinding.yielded_at),
        (CauseKind::Lost, None)
    );
    assert_eq!(
        rebinding.gap_us, None,
        "nothing was committed, so no capsule is known to have ended"
    );
    assert_eq!(rows.events.last().unwrap().who.as_deref(), Some("ada"));
}

#[test]
fn messages_seen_before_change_nothing() {
    let messages = lost_ledger();
    let mut known = Known::default();
    fold(messages[..3].to_vec(), &mut known);
    let rows = fold(messages[..3].to_vec(), &mut known);
    assert!(rows.executions.is_empty() && rows.placements.is_empty() && rows.missing.is_empty());
}

#[test]
fn a_last_message_that_was_lost_and_appended_again_as_it_was_has_its_new_place() {
    let mut ledger = lost_ledger();
    ledger.pop();
    let mut known = Known::default();
    fold(ledger.clone(), &mut known);
    let mut again = ledger.pop().unwrap();
    let before = (again.seq, again.stored_at);
    again.seq += 10;
    again.stored_at = at(1_000);
    let rows = fold(vec![again.clone()], &mut known);
    let row = &rows.executions[0];
    assert_ne!((row.seq, row.recorded_at), before);
    assert_eq!((row.seq, row.recorded_at), (again.seq, again.stored_at));
    assert_eq!(
        (row.ordinal, row.is_new),
        (again.message.state.ordinal, false)
    );
    assert!(rows.placements.is_empty() && rows.events.is_empty() && rows.missing.is_empty());
    // The same again is nothing new, nor is one that is not the last.
    assert!(fold(vec![again], &mut known).executions.is_empty());
    let mut early = ledger.pop().unwrap();
    early.seq += 20;
    assert!(fold(vec![early], &mut known).executions.is_empty());
}

#[test]
fn a_gap_is_stated_once_and_the_placement_is_taken_from_the_state() {
    let messages = lost_ledger();
    let mut known = Known::default();
    fold(messages[..1].to_vec(), &mut known);
    // Ordinals 2 and 3, with the binding to b, were never seen.
    let rows = fold(messages[3..].to_vec(), &mut known);
    let [gap] = rows.missing.as_slice() else {
        panic!("{:?}", rows.missing)
    };
    assert_eq!((gap.first_missing, gap.last_missing), (2, 3));
    let ends: Vec<_> = rows
        .placements
        .values()
        .map(|p| (p.epoch, p.end_reason))
        .collect();
    assert_eq!(ends, [(1, Some("unseen")), (2, Some("cancelled"))]);
    assert_eq!(rows.placements[1].node.as_ref().unwrap().as_str(), "b");
}

#[test]
fn an_execution_seen_from_its_middle_must_be_looked_up_first() {
    let messages = lost_ledger();
    let known = Known::default();
    assert_eq!(known.unknown(&messages[1..], false).len(), 1);
    assert!(known.unknown(&messages, false).is_empty());
    assert_eq!(known.unknown(&messages, true).len(), 1);
}

#[test]
fn a_retry_follows_an_end_that_the_tables_do_not_have_yet() {
    let submission = Submission::parse(br#"{"program":"synthetic@1"}"#).unwrap();
    let id = ExecutionId(uuid::Uuid::now_v7());
    let tenant = Tenant::new("lab").unwrap();
    let mut w = LedgerWriter::new(tenant, id, Arc::new(submission), at(0));
    let mut next = |seq: u64, events| {
        let ms = i64::try_from(seq).unwrap() * 10;
        message(&w.append(events, "policy/p", at(ms), seq).unwrap())
    };
    let first = vec![
        next(1, vec![Event::Submitted, bound(1, "a", Cause::Initial)]),
        next(
            2,
            vec![Event::Started {
                epoch: 1,
                computing_since: at(1),
            }],
        ),
        next(
            3,
            vec![Event::Failed {
                reason: "no".into(),
                stderr: "words".into(),
                fault: Some(Box::new(Fault::Reported)),
            }],
        ),
    ];
    let again = vec![
        next(4, vec![Event::Retried { who: "ann".into() }]),
        next(5, vec![bound(2, "b", Cause::Resumed)]),
    ];
    let mut known = Known::default();
    let rows = fold(first, &mut known);
    assert_eq!(rows.executions[0].failure.as_deref(), Some("no"));
    assert!(rows.executions[0].finished_at.is_some());
    assert!(known.unknown(&again, false).is_empty(), "it is known still");
    let rows = fold(again, &mut known);
    assert!(rows.missing.is_empty(), "{:?}", rows.missing);
    assert_eq!(rows.retried, [id]);
    let row = &rows.executions[0];
    assert_eq!(
        (row.phase, &row.failure, row.fault),
        (PhaseKind::Bound, &None, None)
    );
    assert!(row.finished_at.is_none());
    let moved = rows.rebindings.values().next().unwrap();
    assert_eq!(
        moved.from_node.as_ref().map(|node| node.as_str()),
        Some("a")
    );
}
