//! A running recorder between a real nats-server and a real PostgreSQL.
use std::sync::Arc;
use std::time::Duration;

use crate::support::as_role;
use async_nats::jetstream::message::PublishMessage;
use bytes::Bytes;
use fiec_broker::feed::FeedItem;
use fiec_broker::topology::{Profile, apply};
use fiec_broker::{Broker, ConnectOptions};
use fiec_dev_servers::{DevServers, NoProgress, Options};
use fiec_recorder::lab_support::{LedgerWriter, short_ledgers};
use fiec_recorder::{Recorder, RecorderOptions};
use fiec_schemas::messages::{NodeEventKind, Record, RecordedReply, RecordedRequest};
use fiec_schemas::{
    BoundaryEvent, Cause, Digest, Event, ExecutionId, FieldError, HardwareVector, InstanceId,
    LineError, PhaseKind, Reading, Signal, Submission, Tenant, Timestamp, subjects,
};
use futures_util::StreamExt as _;
use sqlx::{AssertSqlSafe, PgPool, Postgres, Transaction};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub async fn servers() -> (DevServers, Broker, PgPool) {
    let servers = DevServers::start(Options::default(), &NoProgress)
        .await
        .unwrap();
    let broker = Broker::connect(ConnectOptions::new(servers.nats_url(), "test"))
        .await
        .unwrap();
    apply(&broker, &Profile::default()).await.unwrap();
    let pool = fiec_recorder::connect(&servers.postgres_url().unwrap())
        .await
        .unwrap();
    fiec_recorder::migrate(&pool).await.unwrap();
    (servers, broker, pool)
}

/// A recorder with the rights of its role.
pub fn start(
    broker: &Broker,
    pool: &PgPool,
) -> (CancellationToken, JoinHandle<fiec_recorder::Result<()>>) {
    let stop = CancellationToken::new();
    let options = RecorderOptions {
        state_every: Duration::from_millis(50),
        ..RecorderOptions::default()
    };
    let (broker, pool, token) = (broker.clone(), pool.clone(), stop.clone());
    let recording = async move {
        let pool = as_role(&pool, "fiec_recorder").await;
        Recorder::new(options, broker, pool).run(token).await
    };
    (stop, tokio::spawn(recording))
}

pub async fn publish(broker: &Broker, item: &FeedItem, body: Bytes) {
    let mut headers = async_nats::HeaderMap::new();
    headers.insert(subjects::EVENT_HEADER, item.header.as_str());
    let subject = subjects::ledger(&item.tenant, item.execution);
    broker
        .js
        .publish_with_headers(subject, headers, body)
        .await
        .unwrap()
        .await
        .unwrap();
}

/// Waits until a query gives a value.
pub async fn until(pool: &PgPool, sql: &str, expected: i64) {
    let mut last = None;
    for _ in 0..1_200 {
        let asked = sqlx::query_scalar::<_, i64>(AssertSqlSafe(sql.to_owned()));
        last = asked.fetch_one(pool).await.ok();
        if last == Some(expected) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("{sql}: {last:?}, expected {expected}");
}

#[tokio::test]
async fn two_recorders_and_a_restart_record_everything_exactly_once() {
    let (_servers, broker, pool) = servers().await;
    let items = short_ledgers(300, 1).unwrap();
    let (first, second) = items.split_at(250);
    let (stop_a, a) = start(&broker, &pool);
    let (stop_b, b) = start(&broker, &pool);
    for item in first {
        publish(&broker, item, Bytes::new()).await;
    }
    let seq = "SELECT seq FROM recorder_checkpoint WHERE stream = 'FIEC_LEDGER'";
    until(&pool, seq, 250).await;
    stop_a.cancel();
    a.await.unwrap().unwrap();
    stop_b.cancel();
    b.await.unwrap().unwrap();
    for item in second {
        publish(&broker, item, Bytes::new()).await;
    }
    let (stop, recorder) = start(&broker, &pool);
    until(
        &pool,
        "SELECT count(*) FROM executions WHERE phase = 'completed'",
        300,
    )
    .await;
    until(&pool, "SELECT count(*) FROM placements", 300).await;
    until(&pool, "SELECT count(*) FROM decisions", 300).await;
    until(&pool, "SELECT count(*) FROM ledger_gaps", 0).await;
    stop.cancel();
    recorder.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_lost_checkpoint_is_made_up_for_without_duplicates() {
    let (_servers, broker, pool) = servers().await;
    for item in short_ledgers(60, 1).unwrap() {
        publish(&broker, &item, Bytes::new()).await;
    }
    let seq = "SELECT seq FROM recorder_checkpoint WHERE stream = 'FIEC_LEDGER'";
    for _ in 0..2 {
        let (stop, recorder) = start(&broker, &pool);
        until(&pool, seq, 120).await;
        stop.cancel();
        recorder.await.unwrap().unwrap();
        until(&pool, "SELECT count(*) FROM placements", 60).await;
        until(&pool, "SELECT count(*) FROM decisions", 60).await;
        sqlx::query("UPDATE recorder_checkpoint SET seq = 0")
            .execute(&pool)
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn the_last_state_is_mirrored_while_it_is_needed() {
    let (_servers, broker, pool) = servers().await;
    let (stop, recorder) = start(&broker, &pool);
    let submission = Submission::parse(br#"{"program":"synthetic@1"}"#).unwrap();
    let id = ExecutionId(uuid::Uuid::now_v7());
    let now = Timestamp::now();
    let mut w = LedgerWriter::new(Tenant::new("lab").unwrap(), id, Arc::new(submission), now);
    let state = Bytes::from_static(b"sigma");
    let steps = [
        vec![
            Event::Submitted,
            Event::Bound {
                epoch: 1,
                node: "n1".parse().unwrap(),
                instance: InstanceId::random(),
                substrate: "host".into(),
                cause: Cause::Initial,
                decision: None,
            },
        ],
        vec![
            Event::Started {
                epoch: 1,
                computing_since: now,
            },
            Event::Boundary(BoundaryEvent {
                index: 1,
                digest: Digest::of(&state),
                bytes: state.len() as u64,
                computed_at: now,
                compute_us: 1,
                of: None,
                note: None,
                outputs: Vec::new(),
                energy: None,
            }),
        ],
        vec![Event::Cancelled { who: "ada".into() }],
    ];
    let mirrored = "SELECT count(*) FROM boundary_state WHERE state = 'sigma'::bytea";
    for (events, seq) in steps.into_iter().zip(1u64..) {
        let item = w.append(events, "worker/n1/x", now, seq).unwrap();
        publish(
            &broker,
            &item,
            if seq == 2 {
                state.clone()
            } else {
                Bytes::new()
            },
        )
        .await;
        if seq > 1 {
            until(&pool, mirrored, i64::from(seq == 2)).await;
        }
    }
    stop.cancel();
    recorder.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_placement_that_is_there_already_does_not_stop_the_recording() {
    let (_servers, broker, pool) = servers().await;
    let (stop, recorder) = start(&broker, &pool);
    let submission = Submission::parse(br#"{"program":"synthetic@1"}"#).unwrap();
    let id = ExecutionId(uuid::Uuid::now_v7());
    let now = Timestamp::now();
    let mut w = LedgerWriter::new(Tenant::new("lab").unwrap(), id, Arc::new(submission), now);
    let bound = |epoch, cause| Event::Bound {
        epoch,
        node: "n1".parse().unwrap(),
        instance: InstanceId::random(),
        substrate: "host".into(),
        cause,
        decision: None,
    };
    let first = vec![Event::Submitted, bound(1, Cause::Initial)];
    let item = w.append(first, "policy/p", now, 1).unwrap();
    publish(&broker, &item, Bytes::new()).await;
    until(&pool, "SELECT count(*) FROM placements", 1).await;
    sqlx::query("INSERT INTO placements (execution, epoch) VALUES ($1, 2)")
        .bind(id.0)
        .execute(&pool)
        .await
        .unwrap();
    let again = vec![bound(2, Cause::Lost { silent_ms: 5_000 })];
    let item = w.append(again, "policy/p", now, 2).unwrap();
    publish(&broker, &item, Bytes::new()).await;
    until(&pool, "SELECT ordinal FROM executions", 2).await;
    let filled = "SELECT count(*) FROM placements WHERE epoch = 2 AND node = 'n1'";
    until(&pool, filled, 1).await;
    stop.cancel();
    recorder.await.unwrap().unwrap();
}

#[tokio::test]
async fn rejections_and_node_events_are_recorded() {
    let (_servers, broker, pool) = servers().await;
    let (stop, recorder) = start(&broker, &pool);
    let at = Timestamp::now();
    let error = LineError::of(3, FieldError::because(2, "program", "does not exist\0"));
    let excerpt = "{}".to_owned();
    let rejection = Record::Rejection {
        tenant: "lab".into(),
        seq: Some(1),
        error,
        excerpt,
        at,
    };
    let cordoned = Record::Node {
        node: "n1".parse().unwrap(),
        instance: None,
        what: NodeEventKind::Cordoned,
        contract: None,
        substrate: None,
        detail: "by ada".into(),
        who: Some("ada".into()),
        at,
        descriptor: None,
    };
    for (subject, record) in [
        (subjects::rejection("lab"), rejection),
        (subjects::node_record(&"n1".parse().unwrap()), cordoned),
    ] {
        let payload = serde_json::to_vec(&record).unwrap();
        broker
            .js
            .publish(subject, payload.into())
            .await
            .unwrap()
            .await
            .unwrap();
    }
    until(
        &pool,
        "SELECT count(*) FROM rejections WHERE line = 3 AND because = 2",
        1,
    )
    .await;
    until(&pool, "SELECT count(*) FROM nodes WHERE cordoned", 1).await;
    stop.cancel();
    recorder.await.unwrap().unwrap();
}

#[tokio::test]
async fn postgres_away_is_unhealthy_and_then_caught_up() {
    let (mut servers, broker, pool) = servers().await;
    let stop = CancellationToken::new();
    let recorder = Recorder::new(RecorderOptions::default(), broker.clone(), pool.clone());
    let health = recorder.health();
    let running = tokio::spawn(recorder.run(stop.clone()));
    let items = short_ledgers(2, 1).unwrap();
    publish(&broker, &items[0], Bytes::new()).await;
    until(&pool, "SELECT count(*) FROM executions", 1).await;
    let postgres = servers.postgres.as_mut().unwrap();
    postgres.stop(Duration::from_secs(10)).await;
    for item in &items[1..] {
        publish(&broker, item, Bytes::new()).await;
    }
    let unhealthy = || {
        health
            .check()
            .is_err_and(|reason| reason.contains("ledger"))
    };
    for _ in 0..300 {
        if unhealthy() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(unhealthy(), "unhealthy while PostgreSQL is away");
    assert!(!running.is_finished(), "the recorder stays");
    postgres.restart().await.unwrap();
    until(
        &pool,
        "SELECT count(*) FROM executions WHERE phase = 'completed'",
        2,
    )
    .await;
    // It hears of its commit a moment after others can see it.
    for _ in 0..300 {
        if health.check().is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(health.check(), Ok(()));
    stop.cancel();
    running.await.unwrap().unwrap();
}

#[tokio::test]
async fn tables_that_somebody_locks_are_unhealthy_and_then_caught_up() {
    let (_servers, broker, pool) = servers().await;
    // A last record that is deleted before it is read waits for nobody, whatever the stream's end is.
    record(&broker, &[rejection(), rejection()]).await;
    let stream = broker.js.get_stream(subjects::RECORD_STREAM).await;
    stream.unwrap().delete_message(2).await.unwrap();
    let stop = CancellationToken::new();
    let recorder = Recorder::new(RecorderOptions::default(), broker.clone(), pool.clone());
    let health = recorder.health();
    let running = tokio::spawn(recorder.run(stop.clone()));
    let items = short_ledgers(2, 1).unwrap();
    publish(&broker, &items[0], Bytes::new()).await;
    until(&pool, "SELECT count(*) FROM executions", 1).await;
    let says = async |what: &str, holds: &dyn Fn(Result<(), String>) -> bool| {
        for _ in 0..1_200 {
            if holds(health.check()) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("it never said {what}; it says {:?}", health.check());
    };
    let red = |words: &'static str| {
        move |said: Result<(), String>| said.is_err_and(|t| t.contains(words))
    };

    let lock = locked(&pool, "executions").await;
    for item in &items[1..] {
        publish(&broker, item, Bytes::new()).await;
    }
    let words = "nothing of FIEC_LEDGER was written";
    says(words, &red(words)).await;
    lock.rollback().await.unwrap();
    says("that all is well", &|said| said.is_ok()).await;
    let completed = "SELECT count(*) FROM executions WHERE phase = 'completed'";
    until(&pool, completed, 2).await;

    let lock = locked(&pool, "rejections").await;
    let payload = serde_json::to_vec(&rejection()).unwrap();
    let message = PublishMessage::build().payload(payload.into());
    publish_all(&broker, vec![(subjects::rejection("lab"), message)]).await;
    let words = "nothing of FIEC_RECORD was read and written";
    says(words, &red(words)).await;
    lock.rollback().await.unwrap();
    says("that all is well", &|said| said.is_ok()).await;
    until(&pool, "SELECT count(*) FROM rejections", 2).await;
    stop.cancel();
    running.await.unwrap().unwrap();
}

/// Keeps everybody from a table until the transaction ends.
async fn locked(pool: &PgPool, table: &str) -> Transaction<'static, Postgres> {
    let mut lock = pool.begin().await.unwrap();
    let sql = AssertSqlSafe(format!("LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE"));
    sqlx::query(sql).execute(&mut *lock).await.unwrap();
    lock
}

fn rejection() -> Record {
    Record::Rejection {
        tenant: "lab".into(),
        seq: None,
        error: LineError::of(1, FieldError::new("program", "does not exist")),
        excerpt: String::new(),
        at: Timestamp::now(),
    }
}

#[tokio::test]
async fn values_that_no_column_can_hold_do_not_stop_the_recording_of_vectors() {
    let (_servers, broker, pool) = servers().await;
    let (stop, recorder) = start(&broker, &pool);
    // The recorder does not get what was published before it listened, so this publishes again.
    let speak = async {
        loop {
            for (node, value) in [("large", 1e300), ("small", 1e-300), ("good", 0.25)] {
                let payload = serde_json::to_vec(&vector(node, value)).unwrap();
                let subject = format!("fiec.telemetry.{node}");
                let sent = broker.client.publish(subject, payload.into());
                sent.await.unwrap();
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let recorded = "SELECT count(DISTINCT node) FROM hardware_vectors WHERE (node, memory) IN \
                    (('large', 1.0), ('small', 0.0), ('good', 0.25))";
    tokio::select! {
        () = speak => {}
        () = until(&pool, recorded, 3) => {}
    }
    stop.cancel();
    recorder.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_vector_counts_for_the_node_of_its_subject_alone() {
    let (_servers, broker, pool) = servers().await;
    let (stop, recorder) = start(&broker, &pool);
    // The recorder does not get what was published before it listened, so this publishes again. A
    // value that moves is a row each time.
    let speak = async {
        for round in 0_u32.. {
            let value = f64::from(round % 2);
            for node in ["victim", "speaker"] {
                let payload = serde_json::to_vec(&vector(node, value)).unwrap();
                let sent = broker
                    .client
                    .publish("fiec.telemetry.speaker", payload.into());
                sent.await.unwrap();
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let own = "SELECT least(count(*), 2) FROM hardware_vectors WHERE node = 'speaker'";
    tokio::select! {
        () = speak => {}
        () = until(&pool, own, 2) => {}
    }
    // A vector of the victim came before the second one of the speaker.
    let forged = "SELECT count(*) FROM hardware_vectors WHERE node = 'victim'";
    let forged: i64 = sqlx::query_scalar(forged).fetch_one(&pool).await.unwrap();
    assert_eq!(forged, 0);
    stop.cancel();
    recorder.await.unwrap().unwrap();
}

fn vector(node: &str, value: f64) -> HardwareVector {
    let at = Timestamp::now();
    HardwareVector {
        v: 1,
        node: node.parse().unwrap(),
        instance: InstanceId::random(),
        count: 1,
        at,
        clock: None,
        readings: vec![Reading {
            signal: Signal::Memory,
            device: None,
            value: Some(value),
            raw: None,
            limit: None,
            unit: "bytes".into(),
            source: "test".into(),
            at,
            missing: None,
            envelope: None,
        }],
        draining: false,
        slots: 1,
        running_count: 0,
        queued_count: 0,
        running: Vec::new(),
        arriving: Vec::new(),
        stuck: Vec::new(),
    }
}

#[tokio::test]
async fn a_proof_with_a_long_substrate_is_recorded_with_its_beginning() {
    let (_servers, broker, pool) = servers().await;
    let (stop, recorder) = start(&broker, &pool);
    // Random text: PostgreSQL would compress any other.
    let substrate: String = (0..100)
        .map(|_| uuid::Uuid::new_v4().simple().to_string())
        .collect();
    let at = Timestamp::now();
    let statement = serde_json::json!({
        "v": 1, "node": "n1", "instance": uuid::Uuid::from_u128(1), "suite": 1,
        "environment": "00".repeat(32), "at": at, "expires_at": at,
        "results": [{"substrate": substrate, "contract": "bitwise", "digest": "00".repeat(32),
                     "cases": 1, "passed": true, "ran_on": "", "detail": ""}],
    });
    let proof = Record::Proof {
        proof: serde_json::from_value(serde_json::json!({
            "v": 1, "statement": statement.to_string(), "key": "", "sig": "",
        }))
        .unwrap(),
        refused: None,
        at,
    };
    record(&broker, &[proof]).await;
    let sql = format!(
        "SELECT count(*) FROM node_proofs WHERE substrate = '{}'",
        &substrate[..128]
    );
    until(&pool, &sql, 1).await;
    stop.cancel();
    recorder.await.unwrap().unwrap();
}

/// Publishes records.
async fn record(broker: &Broker, records: &[Record]) {
    let message = |record| {
        let payload = serde_json::to_vec(record).unwrap();
        let message = PublishMessage::build().payload(payload.into());
        (subjects::rejection("lab"), message)
    };
    publish_all(broker, records.iter().map(message).collect()).await;
}

#[tokio::test]
async fn a_record_that_postgresql_cannot_hold_does_not_stop_those_beside_it() {
    let (_servers, broker, pool) = servers().await;
    // Line 13 is a value that this table cannot hold (SQLSTATE 22012).
    let check = "ALTER TABLE rejections ADD CHECK (1 / (line - 13) IS NOT NULL)";
    sqlx::query(check).execute(&pool).await.unwrap();
    let on_line = |n: u32| match rejection() {
        Record::Rejection {
            tenant,
            seq,
            error,
            excerpt,
            at,
        } => Record::Rejection {
            tenant,
            seq,
            error: LineError { line: n, ..error },
            excerpt,
            at,
        },
        record => record,
    };
    let records: Vec<_> = [12, 13, 14, 13, 15].map(on_line).into();
    record(&broker, &records).await;
    let (stop, recorder) = start(&broker, &pool);
    let checkpoint = "SELECT seq FROM recorder_checkpoint WHERE stream = 'FIEC_RECORD'";
    until(&pool, checkpoint, 5).await;
    let lines = "SELECT count(*) FROM rejections WHERE line IN (12, 14, 15)";
    until(&pool, lines, 3).await;
    until(&pool, "SELECT count(*) FROM rejections", 3).await;
    until(&pool, "SELECT count(*) FROM record_gaps", 0).await;
    stop.cancel();
    recorder.await.unwrap().unwrap();
}

/// Publishes without waiting for each message's acknowledgement.
async fn publish_all(broker: &Broker, messages: Vec<(String, PublishMessage)>) {
    let mut acks = Vec::new();
    for (subject, message) in messages {
        acks.push(broker.js.send_publish(subject, message).await.unwrap());
    }
    for ack in acks {
        ack.await.unwrap();
    }
}

/// The consumer of a stream's only reader, if that asks for nothing more although messages wait.
async fn stalled(broker: &Broker, stream: &str) -> Option<String> {
    let stream = broker.js.get_stream(stream).await.unwrap();
    let mut delivered = None;
    for _ in 0..4 {
        let consumer = stream.consumers().next().await?.unwrap();
        if consumer.num_waiting > 0 || consumer.num_pending == 0 {
            return None;
        }
        if *delivered.get_or_insert(consumer.delivered.stream_sequence)
            != consumer.delivered.stream_sequence
        {
            return None;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
        delivered = Some(consumer.delivered.stream_sequence);
    }
    Some(stream.consumers().next().await?.unwrap().name)
}

/// Deletes the consumer of a stalled reader, as the server does after a minute.
async fn delete_stalled(broker: &Broker, stream: &str) {
    for _ in 0..400 {
        if let Some(consumer) = stalled(broker, stream).await {
            let stream = broker.js.get_stream(stream).await.unwrap();
            stream.delete_consumer(&consumer).await.unwrap();
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("the reader of {stream} does not stall");
}

#[tokio::test]
async fn readers_go_on_after_the_server_has_deleted_their_consumers_while_postgres_was_away() {
    let (mut servers, broker, pool) = servers().await;
    let (stop, recorder) = start(&broker, &pool);
    let mut items = short_ledgers(6_000, 1).unwrap().into_iter().map(|item| {
        let message = PublishMessage::build().header(subjects::EVENT_HEADER, item.header.as_str());
        (subjects::ledger(&item.tenant, item.execution), message)
    });
    let mut ledgers = 1;
    publish_all(&broker, items.by_ref().take(1).collect()).await;
    let checkpoint = "SELECT seq FROM recorder_checkpoint WHERE stream = ";
    until(&pool, &format!("{checkpoint}'FIEC_LEDGER'"), ledgers).await;

    let payload = Bytes::from(serde_json::to_vec(&rejection()).unwrap());
    let rejection = || {
        let message = PublishMessage::build().payload(payload.clone());
        (subjects::rejection("lab"), message)
    };
    publish_all(&broker, vec![rejection()]).await;
    until(&pool, &format!("{checkpoint}'FIEC_RECORD'"), 1).await;

    let postgres = servers.postgres.as_mut().unwrap();
    postgres.stop(Duration::from_secs(10)).await;
    let records = 3_000;
    publish_all(&broker, (1..records).map(|_| rejection()).collect()).await;
    delete_stalled(&broker, subjects::RECORD_STREAM).await;
    while stalled(&broker, subjects::LEDGER_STREAM).await.is_none() {
        let burst: Vec<_> = items.by_ref().take(500).collect();
        assert!(!burst.is_empty(), "the reader of the ledger does not stall");
        ledgers += burst.len() as i64;
        publish_all(&broker, burst).await;
    }
    delete_stalled(&broker, subjects::LEDGER_STREAM).await;

    servers.postgres.as_mut().unwrap().restart().await.unwrap();
    until(&pool, &format!("{checkpoint}'FIEC_RECORD'"), records).await;
    until(&pool, "SELECT count(*) FROM rejections", records).await;
    until(&pool, &format!("{checkpoint}'FIEC_LEDGER'"), ledgers).await;
    until(&pool, "SELECT count(*) FROM ledger_gaps", 0).await;
    stop.cancel();
    recorder.await.unwrap().unwrap();
}

#[tokio::test]
async fn records_that_the_stream_dropped_before_they_were_read_are_stated() {
    let (_servers, broker, pool) = servers().await;
    let payload = Bytes::from_static(b"{}");
    let publish = async |count: usize| {
        let message = || {
            let message = PublishMessage::build().payload(payload.clone());
            (subjects::rejection("lab"), message)
        };
        publish_all(&broker, (0..count).map(|_| message()).collect()).await;
    };
    let (stop, recorder) = start(&broker, &pool);
    publish(2).await;
    let checkpoint = "SELECT seq FROM recorder_checkpoint WHERE stream = 'FIEC_RECORD'";
    until(&pool, checkpoint, 2).await;
    stop.cancel();
    recorder.await.unwrap().unwrap();

    publish(8).await;
    let stream = broker.js.get_stream(subjects::RECORD_STREAM).await.unwrap();
    stream.purge().sequence(9).await.unwrap();
    let (stop, recorder) = start(&broker, &pool);
    until(&pool, checkpoint, 10).await;
    let stated = "SELECT count(*) FROM record_gaps WHERE first_missing = 3 AND last_missing = 8 \
                  AND after < before";
    until(&pool, stated, 1).await;
    until(&pool, "SELECT count(*) FROM record_gaps", 1).await;
    stop.cancel();
    recorder.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_record_stream_that_was_made_anew_is_read_from_its_beginning_each_time() {
    let (_servers, broker, pool) = servers().await;
    let publish = async |life: usize, count: u32| {
        let rejection = |line: u32| {
            let record = Record::Rejection {
                tenant: "lab".into(),
                seq: None,
                error: LineError::of(line, FieldError::new("program", format!("life {life}"))),
                excerpt: String::new(),
                at: Timestamp::now(),
            };
            let payload = Bytes::from(serde_json::to_vec(&record).unwrap());
            let message = PublishMessage::build().payload(payload);
            (subjects::rejection("lab"), message)
        };
        publish_all(&broker, (1..=count).map(rejection).collect()).await;
    };
    let rejections = "SELECT count(*) FROM rejections";
    let mut expected = 0;
    // Records after each loss overtake the checkpoint before the recorder looks.
    for (life, count) in [5, 8, 9].into_iter().enumerate() {
        publish(life, count).await;
        let (stop, recorder) = start(&broker, &pool);
        expected += i64::from(count);
        until(&pool, rejections, expected).await;
        stop.cancel();
        recorder.await.unwrap().unwrap();
        let stream = subjects::RECORD_STREAM;
        broker.js.delete_stream(stream).await.unwrap();
        apply(&broker, &Profile::default()).await.unwrap();
    }
    let lives = "SELECT count(DISTINCT reason) FROM rejections WHERE line BETWEEN 1 AND 5";
    until(&pool, lives, 3).await;
    until(&pool, "SELECT count(*) FROM record_gaps", 0).await;
}

#[tokio::test]
async fn a_record_stream_that_begins_behind_what_is_recorded_has_no_gap() {
    let (_servers, broker, pool) = servers().await;
    record(&broker, &[rejection(), rejection(), rejection()]).await;
    let checkpoint = "SELECT seq FROM recorder_checkpoint WHERE stream = 'FIEC_RECORD'";
    let (stop, recorder) = start(&broker, &pool);
    until(&pool, checkpoint, 3).await;
    stop.cancel();
    recorder.await.unwrap().unwrap();
    let stream = subjects::RECORD_STREAM;
    broker.js.delete_stream(stream).await.unwrap();
    // As `fiec setup` does.
    let profile = Profile {
        record_first_sequence: Some(4),
        ..Profile::default()
    };
    apply(&broker, &profile).await.unwrap();
    let (stop, recorder) = start(&broker, &pool);
    let created = "SELECT count(*) FROM recorder_checkpoint WHERE stream = 'FIEC_RECORD' \
                   AND seq = 3 AND digest IS NULL";
    until(&pool, created, 1).await;
    record(&broker, &[rejection()]).await;
    until(&pool, checkpoint, 4).await;
    until(&pool, "SELECT count(*) FROM rejections WHERE seq > 0", 4).await;
    until(&pool, "SELECT count(*) FROM record_gaps", 0).await;
    stop.cancel();
    recorder.await.unwrap().unwrap();
}

#[tokio::test]
async fn another_record_at_the_checkpoint_is_noticed_once() {
    let (_servers, broker, pool) = servers().await;
    record(&broker, &[rejection()]).await;
    let checkpoint = "SELECT seq FROM recorder_checkpoint WHERE stream = 'FIEC_RECORD'";
    let (stop, recorder) = start(&broker, &pool);
    until(&pool, checkpoint, 1).await;
    stop.cancel();
    recorder.await.unwrap().unwrap();
    // The recorded one was another, and the clock of its broker was ahead.
    let other = "UPDATE recorder_checkpoint SET digest = sha256('another'), \
                 stored_at = now() + interval '1 day' WHERE stream = 'FIEC_RECORD'";
    sqlx::query(other).execute(&pool).await.unwrap();
    record(&broker, &[rejection()]).await;
    let (stop, recorder) = start(&broker, &pool);
    until(&pool, checkpoint, 2).await;
    stop.cancel();
    recorder.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_policy_service_learns_which_executions_are_recorded_and_how_they_stand() {
    let (_servers, broker, pool) = servers().await;
    let items = short_ledgers(2, 1).unwrap();
    // Both are bound; the first one completes.
    for item in &items[..3] {
        publish(&broker, item, Bytes::new()).await;
    }
    let (stop, recorder) = start(&broker, &pool);
    let seq = "SELECT seq FROM recorder_checkpoint WHERE stream = 'FIEC_LEDGER'";
    until(&pool, seq, 3).await;
    let unknown = ExecutionId(uuid::Uuid::now_v7());
    let (first, second) = (items[0].execution, items[1].execution);
    let request = RecordedRequest {
        executions: vec![first, second, unknown],
    };
    let body = serde_json::to_vec(&request).unwrap();
    let asked = broker
        .client
        .request(subjects::RECORDER_RECORDED, body.into());
    let reply: RecordedReply = serde_json::from_slice(&asked.await.unwrap().payload).unwrap();
    assert_eq!(reply.error, None);
    let phase = |id| {
        let found = reply.recorded.iter().find(|r| r.execution == id);
        found.map(|r| r.phase)
    };
    assert_eq!(phase(first), Some(PhaseKind::Completed));
    assert_eq!(phase(second), Some(PhaseKind::Bound));
    assert_eq!(phase(unknown), None);
    let digest = items[0].message().unwrap().state.submission;
    assert!(reply.recorded.iter().all(|r| r.submission == digest));
    stop.cancel();
    recorder.await.unwrap().unwrap();
}
