//! A ledger that has lost its end, and goes on with other messages: the rows of what is left stay as
//! they are, and those of what was lost go.

use std::sync::Arc;

use fiec_broker::feed::FeedItem;
use fiec_recorder::lab_support::{LedgerWriter, clear, project, project_carefully};
use fiec_schemas::{Cause, Event, ExecutionId, Submission, Tenant, Timestamp};
use sqlx::PgPool;

use crate::support::{bound, database, words};

fn at(ms: i64) -> Timestamp {
    Timestamp::from_micros(1_800_000_000_000_000 + ms * 1_000)
}

fn ledger(id: ExecutionId, capsules: u64, submitted: i64) -> LedgerWriter {
    let line = format!(r#"{{"program":"synthetic@1","params":{{"capsules":{capsules}}}}}"#);
    let spec = Arc::new(Submission::parse(line.as_bytes()).unwrap());
    LedgerWriter::new(Tenant::new("lab").unwrap(), id, spec, at(submitted))
}

fn started(epoch: u64) -> Event {
    Event::Started {
        epoch,
        computing_since: at(1),
    }
}

/// A worker gives the execution up when it is paused.
fn paused() -> Vec<Event> {
    let yielded = Event::Yielded {
        cause: Cause::Operator { who: by("ann") },
        computed_until: at(2),
    };
    vec![yielded, Event::Paused { who: by("ann") }]
}

fn by(who: &str) -> String {
    who.to_owned()
}

/// The messages in one batch, or each in its own.
async fn record(pool: &PgPool, items: Vec<FeedItem>, at_once: bool) {
    if at_once {
        project(pool, items).await.unwrap();
    } else {
        for item in items {
            project_carefully(pool, vec![item]).await.unwrap();
        }
    }
}

const PLACEMENTS: &str = "SELECT string_agg(concat_ws(' ', epoch, node, started_at IS NOT NULL, \
    end_reason), ', ' ORDER BY epoch) FROM placements";

#[tokio::test]
async fn a_placement_that_had_ended_before_what_was_lost_keeps_its_end() {
    let db = database().await;
    for at_once in [true, false] {
        let id = ExecutionId(uuid::Uuid::now_v7());
        let mut kept = ledger(id, 7, 0);
        let begin = vec![Event::Submitted, bound(1, "a", Cause::Initial)];
        let mut items = vec![
            kept.append(begin, "policy/p", at(0), 1).unwrap(),
            kept.append(vec![started(1)], "worker/a/x", at(1), 2)
                .unwrap(),
            kept.append(paused(), "worker/a/x", at(2), 3).unwrap(),
        ];
        let mut lost = kept.clone();
        let on = |node: &str| {
            let resumed = Event::Resumed { who: by("ann") };
            vec![resumed, bound(2, node, Cause::Resumed)]
        };
        items.push(lost.append(on("b"), "policy/p", at(3), 4).unwrap());
        items.push(kept.append(on("c"), "policy/p", at(4), 4).unwrap());
        record(&db.pool, items, at_once).await;
        let found = words(&db.pool, PLACEMENTS).await;
        assert_eq!(found, "1 a t operator, 2 c f", "{at_once}");
        clear(&db.pool).await.unwrap();
    }
}

#[tokio::test]
async fn a_start_that_was_lost_is_withdrawn() {
    let db = database().await;
    for at_once in [true, false] {
        let id = ExecutionId(uuid::Uuid::now_v7());
        let mut kept = ledger(id, 7, 0);
        let begin = vec![Event::Submitted, bound(1, "a", Cause::Initial)];
        let mut items = vec![kept.append(begin, "policy/p", at(0), 1).unwrap()];
        let mut lost = kept.clone();
        items.push(
            lost.append(vec![started(1)], "worker/a/x", at(1), 2)
                .unwrap(),
        );
        let reason = by("not started");
        let cause = Cause::NotTaken {
            reason,
            fault: None,
        };
        let anew = vec![bound(2, "b", cause)];
        items.push(kept.append(anew, "policy/p", at(2), 2).unwrap());
        record(&db.pool, items, at_once).await;
        let found = words(&db.pool, PLACEMENTS).await;
        assert_eq!(found, "1 a f not_taken, 2 b f", "{at_once}");
        clear(&db.pool).await.unwrap();
    }
}

#[tokio::test]
async fn an_execution_that_was_lost_whole_is_recorded_as_it_was_submitted_again() {
    let db = database().await;
    for at_once in [true, false] {
        let id = ExecutionId(uuid::Uuid::now_v7());
        let begin = |capsules: u64, submitted: i64, seq: u64| {
            let events = vec![Event::Submitted, bound(1, "a", Cause::Initial)];
            let mut ledger = ledger(id, capsules, submitted);
            ledger
                .append(events, "policy/p", at(submitted), seq)
                .unwrap()
        };
        let items = vec![begin(7, 0, 1), begin(8, 60_000, 2)];
        record(&db.pool, items, at_once).await;
        let row = "SELECT concat_ws(' ', spec -> 'params' ->> 'capsules', \
                   extract(epoch FROM submitted_at)::bigint) FROM executions";
        assert_eq!(words(&db.pool, row).await, "8 1800000060", "{at_once}");
        clear(&db.pool).await.unwrap();
    }
}

#[tokio::test]
async fn an_end_that_is_appended_again_as_it_was_gets_its_new_place_and_another_end_replaces_it() {
    let db = database().await;
    for at_once in [true, false] {
        let id = ExecutionId(uuid::Uuid::now_v7());
        let mut begun = ledger(id, 7, 0);
        let begin = vec![Event::Submitted, bound(1, "a", Cause::Initial)];
        let begin = begun.append(begin, "policy/p", at(0), 1).unwrap();
        let end = |ms: i64, seq: u64| {
            let events = vec![started(1), Event::Cancelled { who: by("ann") }];
            let mut ledger = begun.clone();
            ledger.append(events, "worker/a/x", at(ms), seq).unwrap()
        };
        let lost = end(1, 2);
        let again = FeedItem {
            seq: 9,
            stored_at: at(60_000),
            ..lost.clone()
        };
        let stands = "SELECT concat_ws(' ', seq, phase, extract(epoch FROM finished_at)::bigint \
                      % 1000, (SELECT count(*) FROM lost_rows l WHERE l.execution = id)) FROM executions";
        record(&db.pool, vec![begin, lost, again], at_once).await;
        assert_eq!(
            words(&db.pool, stands).await,
            "9 cancelled 0 0",
            "{at_once}"
        );
        record(&db.pool, vec![end(90_000, 10)], at_once).await;
        assert_eq!(
            words(&db.pool, stands).await,
            "10 cancelled 90 1",
            "{at_once}"
        );
        clear(&db.pool).await.unwrap();
    }
}
