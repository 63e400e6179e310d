//! Ranges that several computed, as the history tells of them.
use std::sync::Arc;

use crate::support::{database, words};
use fiec_broker::feed::FeedItem;
use fiec_recorder::lab_support::{LedgerWriter, project};
use fiec_schemas::event::Output;
use fiec_schemas::programs::TileRange;
use fiec_schemas::spread::part_id;
use fiec_schemas::{
    BoundaryEvent, Cause, Digest, Event, ExecutionId, InstanceId, Submission, Tenant, Timestamp,
};

fn submission(from: u64, to: u64) -> Arc<Submission> {
    let line = format!(
        r#"{{"program":"sweep@1","params":{{"tiles":{{"from":{from},"to":{to}}}}},"spread":{{"up_to":2}}}}"#
    );
    Arc::new(Submission::parse(line.as_bytes()).unwrap())
}

fn begun(epoch: u64, node: &str) -> Vec<Event> {
    let bound = Event::Bound {
        epoch,
        node: node.parse().unwrap(),
        instance: InstanceId::random(),
        substrate: "host".into(),
        cause: Cause::Initial,
        decision: None,
    };
    let computing_since = Timestamp::now();
    let started = Event::Started {
        epoch,
        computing_since,
    };
    vec![bound, started]
}

fn boundary(index: u64, tiles: &[u64]) -> Event {
    let output = |tile: &u64| Output {
        name: format!("tile-{tile}"),
        digest: Digest::of(&tile.to_le_bytes()),
        bytes: 8,
    };
    Event::Boundary(BoundaryEvent {
        index,
        digest: Digest::of(&index.to_le_bytes()),
        bytes: 8,
        computed_at: Timestamp::now(),
        compute_us: 1_000,
        of: None,
        note: None,
        outputs: tiles.iter().map(output).collect(),
        energy: None,
    })
}

fn completed(capsules: u64) -> Event {
    Event::Completed {
        result: serde_json::Value::Null,
        object: None,
        computed_until: Timestamp::now(),
        capsules,
        outputs: vec![],
        energy: None,
    }
}

fn yielded() -> Event {
    Event::Yielded {
        cause: Cause::Parts,
        computed_until: Timestamp::now(),
    }
}

/// Six tiles: two by the holder, three by its part, which gives the last one back.
fn story() -> (ExecutionId, ExecutionId, Vec<FeedItem>) {
    let tenant = Tenant::new("lab").unwrap();
    let holder = ExecutionId(uuid::Uuid::now_v7());
    let range = TileRange { from: 2, to: 6 };
    let part = part_id(holder, 0, range);
    let now = Timestamp::now();
    let mut of_holder = LedgerWriter::new(tenant.clone(), holder, submission(0, 6), now);
    let mut of_part = LedgerWriter::new(tenant, part, submission(2, 6), now);
    let split = Event::Split {
        part,
        nth: 0,
        from: 2,
        to: 6,
    };
    let first = [vec![Event::Submitted], begun(1, "n1")].concat();
    let (mut seq, mut items) = (0, Vec::new());
    let mut add = |writer: &mut LedgerWriter, events: Vec<Event>| {
        seq += 1;
        let at = Timestamp::from_micros(now.micros() + i64::try_from(seq).unwrap() * 1_000);
        items.push(writer.append(events, "policy/p", at, seq).unwrap());
    };
    add(&mut of_holder, first.clone());
    add(&mut of_holder, vec![boundary(1, &[0]), split]);
    add(&mut of_part, first);
    add(&mut of_part, vec![boundary(3, &[2, 3, 4])]);
    add(&mut of_holder, vec![boundary(2, &[1]), yielded()]);
    add(&mut of_holder, begun(2, "n2"));
    let merged = Event::Merged { part };
    add(&mut of_holder, vec![boundary(3, &[]), merged]);
    add(&mut of_holder, vec![boundary(4, &[5]), completed(4)]);
    (holder, part, items)
}

#[tokio::test]
async fn parts_and_what_the_whole_has_made_are_told_also_message_by_message() {
    let db = database().await;
    let pool = db.pool.clone();
    let (holder, part, items) = story();
    for item in items {
        project(&pool, vec![item]).await.unwrap();
    }
    let parts = "SELECT string_agg(concat_ws(' ', whole, holder, part, from_tile, to_tile, tiles, \
                 phase, node, tiles_done, nth, merged_at IS NOT NULL, split_at IS NOT NULL), '|') \
                 FROM spread_parts";
    let expected = format!("{holder} {holder} {part} 2 6 4 started n1 3 0 t t");
    assert_eq!(words(&pool, parts).await, expected);
    let made = format!(
        "SELECT string_agg(name || CASE made_by WHEN '{part}' THEN '*' ELSE '' END, ' ' \
         ORDER BY name) FROM whole_outputs WHERE whole = '{holder}'"
    );
    assert_eq!(
        words(&pool, &made).await,
        "tile-0 tile-1 tile-2* tile-3* tile-4* tile-5"
    );
    let kinds = format!(
        "SELECT string_agg(kind, ' ' ORDER BY ordinal) FROM execution_events WHERE execution = '{holder}'"
    );
    assert_eq!(words(&pool, &kinds).await, "split yielded merged");
}

#[tokio::test]
async fn a_split_that_was_not_seen_is_taken_from_a_later_state() {
    let db = database().await;
    let pool = db.pool.clone();
    let (holder, part, mut items) = story();
    // The message with the split has dropped out of the stream.
    items.remove(1);
    project(&pool, items).await.unwrap();
    let row = "SELECT concat_ws(' ', holder, part, from_tile, to_tile, split_at IS NULL, \
               merged_at IS NOT NULL) FROM spread_splits";
    assert_eq!(words(&pool, row).await, format!("{holder} {part} 2 6 t t"));
}
