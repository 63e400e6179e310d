//! Messages of a newer version: kept as they were sent, and recorded by a recorder that can read them.
use std::sync::Arc;

use bytes::Bytes;
use fiec_broker::feed::FeedItem;
use fiec_broker::topology::{Profile, apply};
use fiec_recorder::lab_support::{LedgerWriter, project, read_again};
use fiec_schemas::{
    BoundaryEvent, Cause, Digest, Event, ExecutionId, InstanceId, Output, Submission, Tenant,
    Timestamp,
};
use sqlx::PgPool;

use crate::live::{publish, servers, start, until};
use crate::support::{database, number, words};

/// An execution that makes an output, moves, makes another, and completes; one message each.
fn ledger() -> Vec<FeedItem> {
    let tenant = Tenant::new("lab").unwrap();
    let submission = Arc::new(Submission::parse(br#"{"program":"synthetic@1"}"#).unwrap());
    let id = ExecutionId(uuid::Uuid::now_v7());
    let base = Timestamp::now().micros();
    let at = |n: u64| Timestamp::from_micros(base + i64::try_from(n).unwrap() * 1_000);
    let mut writer = LedgerWriter::new(tenant, id, submission, at(0));
    let bound = |epoch, node: &str, cause| Event::Bound {
        epoch,
        node: node.parse().unwrap(),
        instance: InstanceId::random(),
        substrate: "host".into(),
        cause,
        decision: None,
    };
    let started = |epoch, n| Event::Started {
        epoch,
        computing_since: at(n),
    };
    let boundary = |index: u64, n| {
        Event::Boundary(BoundaryEvent {
            index,
            digest: Digest::of(&index.to_le_bytes()),
            bytes: 8,
            computed_at: at(n),
            compute_us: 1,
            of: None,
            note: None,
            outputs: vec![Output {
                name: format!("o{index}"),
                digest: Digest::of(b"output"),
                bytes: 1,
            }],
            energy: None,
        })
    };
    let operator = || Cause::Operator { who: "ann".into() };
    let yielded = Event::Yielded {
        cause: operator(),
        computed_until: at(4),
    };
    let completed = Event::Completed {
        result: serde_json::json!({"sum": 7}),
        object: None,
        computed_until: at(7),
        capsules: 3,
        outputs: Vec::new(),
        energy: None,
    };
    let messages = [
        vec![Event::Submitted, bound(1, "a", Cause::Initial)],
        vec![started(1, 2)],
        vec![boundary(1, 3)],
        vec![yielded, bound(2, "b", operator())],
        vec![started(2, 5)],
        vec![boundary(2, 6)],
        vec![completed],
    ];
    let messages = messages.into_iter().zip(1..);
    let append = |(events, seq)| writer.append(events, "worker/a/x", at(seq), seq).unwrap();
    messages.map(append).collect()
}

/// As a newer version may write it: with a kind of event that this version does not know.
fn of_a_newer_version(item: &FeedItem) -> FeedItem {
    let header = item.header.replacen(r#""type":""#, r#""type":"new_"#, 1);
    assert_ne!(header, item.header);
    FeedItem {
        header,
        ..item.clone()
    }
}

/// As if the recorder had learned to read what it has kept.
async fn learn(pool: &PgPool, item: &FeedItem) {
    let learned = "UPDATE unread_messages SET header = $1, digest = $2 WHERE seq = $3";
    let learned = sqlx::query(learned)
        .bind(&item.header)
        .bind(item.digest().0.to_vec())
        .bind(i64::try_from(item.seq).unwrap());
    let done = learned.execute(pool).await.unwrap();
    assert_eq!(done.rows_affected(), 1);
}

/// The rows of the events. A gap leaves the time between two placements unknown.
async fn history(pool: &PgPool) -> String {
    let mut all = String::new();
    for (table, unknown) in [
        ("boundaries", "''"),
        ("decisions", "''"),
        ("execution_events", "''"),
        ("rebindings", "'gap_us', 'yielded_at'"),
        ("placements", "'gap_us', 'computed_until'"),
    ] {
        let rows = format!(
            "SELECT coalesce(string_agg((to_jsonb(t) - ARRAY[{unknown}])::text, E'\\n' \
             ORDER BY to_jsonb(t)::text), '') FROM {table} t"
        );
        all.push_str(&words(pool, &rows).await);
        all.push('\n');
    }
    all + &words(pool, "SELECT first_started_at::text FROM executions").await
}

const KEPT: &str = "SELECT count(*) FROM unread_messages";
const GAPS: &str = "SELECT count(*) FROM ledger_gaps";
const ORDINAL: &str = "SELECT ordinal FROM executions";
const RECORDED: &str = "SELECT seq FROM recorder_checkpoint WHERE stream = 'FIEC_LEDGER'";

#[tokio::test]
async fn a_message_of_a_newer_version_is_kept_and_recorded_at_the_next_start_that_can_read_it() {
    let (_servers, broker, pool) = servers().await;
    let items = ledger();
    let (stop, recorder) = start(&broker, &pool);
    for item in &items {
        let newer = [3, 7].contains(&item.seq);
        let sent = if newer {
            of_a_newer_version(item)
        } else {
            item.clone()
        };
        publish(&broker, &sent, Bytes::new()).await;
    }
    // The last message has no rows, and the checkpoint is behind it all the same.
    until(&pool, RECORDED, 7).await;
    stop.cancel();
    recorder.await.unwrap().unwrap();
    assert_eq!(number(&pool, KEPT).await, 2, "a message is lost");
    let header = "SELECT header FROM unread_messages ORDER BY seq LIMIT 1";
    assert_eq!(
        words(&pool, header).await,
        of_a_newer_version(&items[2]).header
    );
    assert_eq!(number(&pool, ORDINAL).await, 6);
    assert_eq!(number(&pool, GAPS).await, 1);
    learn(&pool, &items[2]).await;
    learn(&pool, &items[6]).await;
    for _ in 0..2 {
        let (stop, recorder) = start(&broker, &pool);
        until(&pool, KEPT, 0).await;
        stop.cancel();
        recorder.await.unwrap().unwrap();
        let boundaries = "SELECT string_agg(index::text, ' ' ORDER BY index) FROM boundaries";
        assert_eq!(words(&pool, boundaries).await, "1 2");
        let end = "SELECT phase || ' ' || (result ->> 'sum') FROM executions";
        assert_eq!(words(&pool, end).await, "completed 7");
        assert_eq!(number(&pool, GAPS).await, 0);
    }
}

#[tokio::test]
async fn a_message_that_is_read_late_has_the_rows_that_it_would_have_had() {
    let items = ledger();
    let control = database().await;
    project(&control.pool, items.clone()).await.unwrap();
    let expected = history(&control.pool).await;
    let ordinal = number(&control.pool, ORDINAL).await;
    // Each alone, and neighbours.
    for unread in [
        vec![1],
        vec![2],
        vec![3],
        vec![4],
        vec![5],
        vec![7],
        vec![3, 4],
        vec![6, 7],
    ] {
        let db = database().await;
        let sent = items.iter().map(|item| match unread.contains(&item.seq) {
            true => of_a_newer_version(item),
            false => item.clone(),
        });
        project(&db.pool, sent.collect()).await.unwrap();
        for seq in &unread {
            let item = items.iter().find(|item| item.seq == *seq).unwrap();
            learn(&db.pool, item).await;
            // The others are still unread: they stay.
            read_again(&db.pool).await.unwrap();
        }
        assert_eq!(number(&db.pool, KEPT).await, 0, "{unread:?}");
        assert_eq!(number(&db.pool, GAPS).await, 0, "{unread:?}");
        assert_eq!(number(&db.pool, ORDINAL).await, ordinal, "{unread:?}");
        let found = history(&db.pool).await;
        assert_eq!(found, expected, "{unread:?}");
    }
}

#[tokio::test]
async fn a_kept_message_that_the_broker_has_lost_is_a_lost_row_and_is_not_recorded() {
    let (_servers, broker, pool) = servers().await;
    let items = ledger();
    let (stop, recorder) = start(&broker, &pool);
    publish(&broker, &items[0], Bytes::new()).await;
    publish(&broker, &of_a_newer_version(&items[1]), Bytes::new()).await;
    until(&pool, RECORDED, 2).await;
    stop.cancel();
    recorder.await.unwrap().unwrap();
    let stream = fiec_schemas::subjects::LEDGER_STREAM;
    broker.js.delete_stream(stream).await.unwrap();
    apply(&broker, &Profile::default()).await.unwrap();
    let (stop, recorder) = start(&broker, &pool);
    until(&pool, KEPT, 0).await;
    let lost = "SELECT count(*) FROM lost_rows WHERE table_name = 'unread_messages' \
                AND row ->> 'header' LIKE '%new_%'";
    assert_eq!(number(&pool, lost).await, 1);
    stop.cancel();
    recorder.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_kept_message_whose_rows_are_there_changes_nothing() {
    let db = database().await;
    let items = ledger();
    project(&db.pool, items.clone()).await.unwrap();
    let before = history(&db.pool).await;
    for item in &items {
        let row = "INSERT INTO unread_messages VALUES ($1, $2, 'lab', $3, now(), $4, 'older')";
        let row = sqlx::query(row)
            .bind(i64::try_from(item.seq).unwrap())
            .bind(item.digest().0.to_vec())
            .bind(item.execution.0)
            .bind(&item.header);
        row.execute(&db.pool).await.unwrap();
    }
    read_again(&db.pool).await.unwrap();
    assert_eq!(number(&db.pool, KEPT).await, 0);
    assert_eq!(history(&db.pool).await, before);
}
