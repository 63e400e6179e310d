//! What nothing refers to is removed from the broker after the grace, and nothing else.
use std::sync::Arc;
use std::time::Duration;

use crate::support::as_role;
use bytes::Bytes;
use fiec_broker::chunks::{Chunk, Manifest};
use fiec_broker::topology::{Profile, apply};
use fiec_broker::{Broker, ConnectOptions, chunks, registry, store};
use fiec_dev_servers::{DevServers, NoProgress, Options};
use fiec_recorder::lab_support::LedgerWriter;
use fiec_recorder::{Collection, Recorder, RecorderOptions};
use fiec_schemas::{
    BoundaryEvent, Cause, Digest, Event, ExecutionId, InstanceId, Output, Submission, Tenant,
    Timestamp, subjects,
};
use serde_json::json;
use sqlx::PgPool;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub struct World {
    _servers: DevServers,
    pub broker: Broker,
    pub pool: PgPool,
}

pub async fn world() -> World {
    let servers = DevServers::start(Options::default(), &NoProgress).await;
    let servers = servers.unwrap();
    let broker = Broker::connect(ConnectOptions::new(servers.nats_url(), "test"));
    let broker = broker.await.unwrap();
    apply(&broker, &Profile::default()).await.unwrap();
    let url = servers.postgres_url().unwrap();
    let pool = fiec_recorder::connect(&url);
    let pool = pool.await.unwrap();
    fiec_recorder::migrate(&pool).await.unwrap();
    World {
        _servers: servers,
        broker,
        pool,
    }
}

/// An execution whose ledger a test writes.
pub struct Written {
    id: ExecutionId,
    tenant: Tenant,
    writer: LedgerWriter,
}

impl World {
    pub fn recorder(
        &self,
        dry_run: bool,
    ) -> (CancellationToken, JoinHandle<fiec_recorder::Result<()>>) {
        let stop = CancellationToken::new();
        let options = RecorderOptions {
            collection: Collection {
                after: Some(Duration::from_secs(1)),
                every: Duration::from_millis(100),
                chunk_grace: Duration::from_millis(300),
                dry_run,
                ..Collection::default()
            },
            ..RecorderOptions::default()
        };
        (stop.clone(), self.record(options, stop))
    }

    /// With the rights of the recorder's role.
    fn record(
        &self,
        options: RecorderOptions,
        stop: CancellationToken,
    ) -> JoinHandle<fiec_recorder::Result<()>> {
        let (broker, pool) = (self.broker.clone(), self.pool.clone());
        tokio::spawn(async move {
            let pool = as_role(&pool, "fiec_recorder").await;
            Recorder::new(options, broker, pool).run(stop).await
        })
    }

    /// A recorder that removes no objects, and keeps the states of what failed for this time.
    fn recorder_that_keeps(
        &self,
        keep_failed: Duration,
    ) -> (CancellationToken, JoinHandle<fiec_recorder::Result<()>>) {
        let stop = CancellationToken::new();
        let options = RecorderOptions {
            collection: Collection {
                chunk_grace: Duration::from_millis(300),
                keep_failed,
                ..Collection::default()
            },
            ..RecorderOptions::default()
        };
        (stop.clone(), self.record(options, stop))
    }

    pub async fn put(&self, text: &str) -> Digest {
        let digest = Digest::of(text.as_bytes());
        let put = store::put_data(&self.broker, digest, text.as_bytes());
        put.await.unwrap();
        digest
    }

    pub async fn has(&self, digest: Digest) -> bool {
        let size = store::data_size(&self.broker, digest).await.unwrap();
        size.is_some()
    }

    pub async fn submit(&self, line: &str) -> Written {
        let id = ExecutionId(uuid::Uuid::now_v7());
        let tenant = Tenant::new("lab").unwrap();
        let submission = Arc::new(Submission::parse(line.as_bytes()).unwrap());
        let writer = LedgerWriter::new(tenant.clone(), id, submission, Timestamp::now());
        let mut written = Written { id, tenant, writer };
        let bound = Event::Bound {
            epoch: 1,
            node: "n1".parse().unwrap(),
            instance: InstanceId::random(),
            substrate: "host".into(),
            cause: Cause::Initial,
            decision: None,
        };
        self.append(&mut written, vec![Event::Submitted, bound])
            .await;
        written
    }

    pub async fn append(&self, of: &mut Written, events: Vec<Event>) {
        self.append_with(of, events, Bytes::new()).await;
    }

    async fn append_with(&self, of: &mut Written, events: Vec<Event>, body: Bytes) {
        let js = &self.broker.js;
        let stream = js.get_stream(subjects::LEDGER_STREAM).await.unwrap();
        let seq = stream.cached_info().state.last_sequence + 1;
        let item = of
            .writer
            .append(events, "worker/n1/x", Timestamp::now(), seq);
        let item = item.unwrap();
        let mut headers = async_nats::HeaderMap::new();
        headers.insert(subjects::EVENT_HEADER, item.header.as_str());
        let subject = subjects::ledger(&item.tenant, item.execution);
        let ack = js.publish_with_headers(subject, headers, body).await;
        ack.unwrap().await.unwrap();
    }

    /// A boundary with an output.
    pub async fn commit(&self, of: &mut Written, output: Digest) {
        let now = Timestamp::now();
        let started = Event::Started {
            epoch: 1,
            computing_since: now,
        };
        let boundary = Event::Boundary(BoundaryEvent {
            index: 1,
            digest: Digest::of(b"sigma"),
            bytes: 5,
            computed_at: now,
            compute_us: 1,
            of: None,
            note: None,
            outputs: vec![Output {
                name: "x".into(),
                digest: output,
                bytes: 1,
            }],
            energy: None,
        });
        self.append(of, vec![started, boundary]).await;
    }

    async fn start(&self, of: &mut Written) {
        let computing_since = Timestamp::now();
        let epoch = 1;
        let started = Event::Started {
            epoch,
            computing_since,
        };
        self.append(of, vec![started]).await;
    }

    /// Stores a piece of a large σ.
    async fn piece(&self, of: &Written, text: &'static str) -> Chunk {
        let digest = Digest::of(text.as_bytes());
        let (broker, bytes) = (&self.broker, Bytes::from_static(text.as_bytes()));
        let sent = chunks::send_piece(broker, &of.tenant, of.id, digest, bytes).await;
        Chunk {
            digest,
            seq: sent.unwrap().await.unwrap().sequence,
            // The list says so: it is a large σ.
            bytes: 1_000_000,
            hour: chunks::hour_now(),
        }
    }

    /// A boundary whose σ consists of these pieces.
    async fn commit_pieces(&self, of: &mut Written, index: u64, pieces: &[Chunk]) {
        let now = Timestamp::now();
        let manifest = Manifest {
            chunks: pieces.to_vec(),
            stored: 0,
        };
        let boundary = Event::Boundary(BoundaryEvent {
            index,
            digest: Digest::of(&index.to_le_bytes()),
            bytes: manifest.bytes(),
            computed_at: now,
            compute_us: 1,
            of: None,
            note: None,
            outputs: Vec::new(),
            energy: None,
        });
        self.append_with(of, vec![boundary], manifest.encode())
            .await;
    }

    async fn has_piece(&self, chunk: Chunk) -> bool {
        chunks::get(&self.broker, chunk).await.is_ok()
    }

    async fn chunk(&self, of: &Written) {
        let bytes = Bytes::from_static(b"chunk");
        let sent = chunks::send(&self.broker, &of.tenant, of.id, bytes).await;
        sent.unwrap().await.unwrap();
    }

    async fn has_chunks(&self, of: &Written) -> bool {
        let stream = self.broker.js.get_stream(subjects::CHUNK_STREAM).await;
        let subject = subjects::chunk(&of.tenant, of.id);
        let last = stream
            .unwrap()
            .get_last_raw_message_by_subject(&subject)
            .await;
        last.is_ok()
    }

    /// Waits until a sweep began and ended after this moment, and gives what it found.
    pub async fn swept(&self) -> i64 {
        let mut ends = Vec::new();
        for _ in 0..1_200 {
            let row: (Option<f64>, i64) = sqlx::query_as(
                "SELECT extract(epoch FROM swept_at)::float8, objects FROM collection",
            )
            .fetch_one(&self.pool)
            .await
            .unwrap();
            if row.0.is_some() && ends.last() != Some(&row.0) {
                ends.push(row.0);
            }
            // The first one may be old, and the second may have begun before.
            if ends.len() > 3 {
                return row.1;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("no sweep came");
    }

    /// Messages of the chunks of objects that nothing describes.
    async fn orphan_chunks(&self) -> bool {
        let name = format!("OBJ_{}", subjects::DATA_BUCKET);
        let stream = self.broker.js.get_stream(name).await.unwrap();
        let subject = format!("$O.{}.C.cut-off", subjects::DATA_BUCKET);
        stream
            .get_last_raw_message_by_subject(&subject)
            .await
            .is_ok()
    }
}

#[tokio::test]
async fn what_nothing_refers_to_goes_after_the_grace_and_nothing_else() {
    let world = world().await;
    let broker = &world.broker;
    // Of one that lives, and of one that has ended.
    let named = world.put("an object that parameters name").await;
    let line = json!({"program":"own@1","params":{"x":{"object":named}}}).to_string();
    let mut live = world.submit(&line).await;
    let live_output = world.put("an output of one that lives").await;
    world.commit(&mut live, live_output).await;
    let mut ended = world.submit(r#"{"program":"synthetic@1"}"#).await;
    let ended_output = world.put("an output of one that has ended").await;
    world.commit(&mut ended, ended_output).await;
    // A large submission, whose parameters are in it alone.
    let deep = world.put("an object that a large submission names").await;
    let labels: std::collections::BTreeMap<String, String> = (0..30)
        .map(|i| (format!("l{i}"), "x".repeat(100)))
        .collect();
    let large = json!({"program":"own@1","params":{"x":{"object":deep}},"labels":labels});
    let large = Submission::parse(large.to_string().as_bytes()).unwrap();
    let submission = world
        .put(&String::from_utf8(large.to_json()).unwrap())
        .await;
    let _large = world
        .submit(&String::from_utf8(large.to_json()).unwrap())
        .await;
    // What a run that lost has made, and what a put that was cut off has left.
    let lost = world.put("an output of a run that lost").await;
    let subject = format!("$O.{}.C.cut-off", subjects::DATA_BUCKET);
    let cut_off = broker.js.publish(subject, "half".into()).await;
    cut_off.unwrap().await.unwrap();
    for of in [&live, &ended] {
        world.chunk(of).await;
        let kept = store::keep_state(broker, of.id, Digest::of(b"s"), b"s").await;
        kept.unwrap();
    }
    let cancelled = vec![Event::Cancelled { who: "ann".into() }];
    world.append(&mut ended, cancelled).await;
    // A dry run only says so.
    let (stop, recorder) = world.recorder(true);
    let mut found = 0;
    while found < 4 {
        found = world.swept().await;
    }
    assert_eq!(
        found, 4,
        "the lost output, the cut-off put, a state, chunks"
    );
    assert!(world.has(lost).await && world.has_chunks(&ended).await);
    stop.cancel();
    recorder.await.unwrap().unwrap();
    let (stop, recorder) = world.recorder(false);
    while world.has(lost).await || world.orphan_chunks().await || world.has_chunks(&ended).await {
        world.swept().await;
    }
    // What is put now is younger than the grace in each of these sweeps, or referred to.
    world.swept().await;
    for (digest, what) in [
        (named, "what parameters name"),
        (live_output, "the output of one that lives"),
        (ended_output, "the output of one that has ended"),
        (submission, "a large submission"),
        (deep, "what a large submission names"),
    ] {
        assert!(world.has(digest).await, "{what} was removed");
    }
    assert!(world.has_chunks(&live).await, "chunks of one that lives");
    let name = |of: &Written| format!("{}.{}", of.id, Digest::of(b"s"));
    let states = broker.js.get_object_store(subjects::STATE_BUCKET).await;
    let states = states.unwrap();
    assert!(states.info(name(&live)).await.is_ok(), "a kept state");
    assert!(states.info(name(&ended)).await.is_err());
    stop.cancel();
    recorder.await.unwrap().unwrap();
    assert!(registry::list(broker).await.unwrap().is_empty());
}

#[tokio::test]
async fn chunks_that_no_commit_of_a_live_execution_names_go_and_those_of_a_commit_in_flight_stay() {
    let world = world().await;
    let mut live = world.submit(r#"{"program":"synthetic@1"}"#).await;
    let mut other = world.submit(r#"{"program":"synthetic@1"}"#).await;
    world.start(&mut live).await;
    world.start(&mut other).await;
    // A worker was killed before it dropped this one.
    let left = world.piece(&live, "of a superseded commit").await;
    let named = world.piece(&live, "of the last commit").await;
    world.chunk(&live).await;
    let kept = world.piece(&other, "of the other's last commit").await;
    world.commit_pieces(&mut other, 1, &[kept]).await;
    let in_flight = world.piece(&other, "of a commit in flight").await;
    let (stop, recorder) = world.recorder(false);
    let mut index = 0;
    while world.has_piece(left).await {
        index += 1;
        assert!(index < 20, "a chunk that no commit names stays");
        world.commit_pieces(&mut live, index, &[named]).await;
        world.swept().await;
    }
    world.swept().await;
    for (chunk, what) in [
        (named, "a chunk of the last commit"),
        (kept, "a chunk of the other's last commit"),
        (in_flight, "a chunk of a commit in flight"),
    ] {
        assert!(world.has_piece(chunk).await, "{what} was removed");
    }
    let stream = world.broker.js.get_stream(subjects::CHUNK_STREAM).await;
    let messages = stream.unwrap().cached_info().state.messages;
    assert_eq!(messages, 4, "what was emitted is no piece of a state");
    stop.cancel();
    recorder.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_chunk_of_a_commit_that_a_killed_worker_did_not_append_goes_while_its_execution_is_paused()
 {
    let world = world().await;
    let mut paused = world.submit(r#"{"program":"synthetic@1"}"#).await;
    world.start(&mut paused).await;
    let named = world.piece(&paused, "of its last commit").await;
    world.commit_pieces(&mut paused, 1, &[named]).await;
    let left = world
        .piece(&paused, "of a commit that was never appended")
        .await;
    let yielded = Event::Yielded {
        cause: Cause::Lost { silent_ms: 1 },
        computed_until: Timestamp::now(),
    };
    let who = "ann".to_owned();
    world
        .append(&mut paused, vec![yielded, Event::Paused { who }])
        .await;
    let (stop, recorder) = world.recorder(false);
    let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
    while world.has_piece(left).await {
        assert!(tokio::time::Instant::now() < deadline, "the chunk stays");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(
        world.has_piece(named).await,
        "σ of its last commit was removed"
    );
    stop.cancel();
    recorder.await.unwrap().unwrap();
}

#[tokio::test]
async fn chunks_of_an_execution_that_ended_on_a_killed_worker_go_before_the_tables_are_old() {
    let world = world().await;
    let mut ended = world.submit(r#"{"program":"synthetic@1"}"#).await;
    world.start(&mut ended).await;
    let piece = world.piece(&ended, "of its last commit").await;
    world.commit_pieces(&mut ended, 1, &[piece]).await;
    let superseded = world.piece(&ended, "of a commit that failed").await;
    let completed = Event::Completed {
        result: serde_json::Value::Null,
        object: None,
        computed_until: Timestamp::now(),
        capsules: 2,
        outputs: Vec::new(),
        energy: None,
    };
    world.append(&mut ended, vec![completed]).await;
    let (stop, recorder) = world.recorder_that_keeps(Collection::default().keep_failed);
    let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
    while world.has_piece(piece).await || world.has_piece(superseded).await {
        assert!(
            tokio::time::Instant::now() < deadline,
            "a chunk of an ended execution stays"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    stop.cancel();
    recorder.await.unwrap().unwrap();
}

#[tokio::test]
async fn outputs_of_a_live_execution_stay_when_its_boundaries_are_forgotten() {
    let world = world().await;
    let mut live = world.submit(r#"{"program":"synthetic@1"}"#).await;
    let output = world.put("an output that is named early").await;
    world.commit(&mut live, output).await;
    let (stop, recorder) = world.recorder(false);
    world.swept().await;
    sqlx::query("DELETE FROM boundaries")
        .execute(&world.pool)
        .await
        .unwrap();
    world.swept().await;
    assert!(world.has(output).await);
    // Once it has ended nobody can name it any more.
    let cancelled = vec![Event::Cancelled { who: "ann".into() }];
    world.append(&mut live, cancelled).await;
    while world.has(output).await {
        world.swept().await;
    }
    stop.cancel();
    recorder.await.unwrap().unwrap();
}

#[tokio::test]
async fn large_submissions_are_copied_and_a_lost_one_holds_none_back() {
    let world = world().await;
    let large = |n: usize| {
        let labels: std::collections::BTreeMap<String, String> = (0..30)
            .map(|i| (format!("l{i}"), "x".repeat(100)))
            .collect();
        let line = json!({"id":format!("e{n}"),"program":"own@1","labels":labels});
        let canonical = Submission::parse(line.to_string().as_bytes())
            .unwrap()
            .to_json();
        String::from_utf8(canonical).unwrap()
    };
    // More than one look finds have lost theirs.
    for n in 0..70 {
        world.submit(&large(n)).await;
    }
    let (stop, recorder) = world.recorder(true);
    let mut ended = world.submit(&large(70)).await;
    let cancelled = vec![Event::Cancelled { who: "ann".into() }];
    world.append(&mut ended, cancelled).await;
    world.put(&large(70)).await;
    world.put(&large(71)).await;
    let live = world.submit(&large(71)).await;
    let query = "SELECT program, client_id, spec = $2::jsonb AS same FROM executions WHERE id = $1";
    for (id, n) in [(live.id, 71), (ended.id, 70)] {
        let mut row = (None, None, None);
        while row.2.is_none() {
            tokio::time::sleep(Duration::from_millis(20)).await;
            let found = sqlx::query_as::<_, (Option<String>, Option<String>, Option<bool>)>(query)
                .bind(id.0)
                .bind(large(n))
                .fetch_optional(&world.pool);
            row = found.await.unwrap().unwrap_or_default();
        }
        let client_id = Some(format!("e{n}"));
        assert_eq!(row, (Some("own@1".into()), client_id, Some(true)));
    }
    let copied: Vec<uuid::Uuid> = sqlx::query_scalar(
        "SELECT id FROM executions WHERE spec IS NOT NULL ORDER BY submitted_at",
    )
    .fetch_all(&world.pool)
    .await
    .unwrap();
    assert_eq!(copied, [ended.id.0, live.id.0]);
    stop.cancel();
    recorder.await.unwrap().unwrap();
}

#[tokio::test]
async fn the_state_of_a_failed_execution_stays_for_its_days_and_nothing_beside_it() {
    let world = world().await;
    let mut failed = world.submit(r#"{"program":"synthetic@1"}"#).await;
    world.start(&mut failed).await;
    let piece = world.piece(&failed, "of its last commit").await;
    world.commit_pieces(&mut failed, 1, &[piece]).await;
    let left = world.piece(&failed, "of a commit that failed").await;
    let reported = Event::Failed {
        reason: "no".to_owned(),
        stderr: String::new(),
        fault: None,
    };
    world.append(&mut failed, vec![reported]).await;
    let goes = async |chunk, what: &str| {
        let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
        while world.has_piece(chunk).await {
            assert!(tokio::time::Instant::now() < deadline, "{what} stays");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let (stop, recorder) = world.recorder_that_keeps(Duration::from_secs(86_400));
    goes(left, "a chunk that no commit names").await;
    assert!(world.has_piece(piece).await, "it could not be retried");
    stop.cancel();
    recorder.await.unwrap().unwrap();
    // Its days are over.
    let (stop, recorder) = world.recorder_that_keeps(Duration::ZERO);
    goes(piece, "a chunk of its last commit").await;
    stop.cancel();
    recorder.await.unwrap().unwrap();
}
