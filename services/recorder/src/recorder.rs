//! The recorder as a process part: its options, its tasks, its end.
//!
//! Tasks: the ledger, the records, telemetry, the mirror of states, large results and submissions,
//! housekeeping (checkpoint message, partitions). A task that fails permanently ends all the others.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fiec_broker::{Broker, feed, sight};
use fiec_schemas::messages::RecorderCheckpoint;
use fiec_schemas::{Sequence, Timestamp, subjects};
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use prometheus_client::registry::Registry;
use sqlx::PgPool;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::collect::{self, Collection};
use crate::error::{RecorderError, Result};
use crate::ledger;
use crate::metrics::{Health, Metrics, Part};
use crate::mirror::{self, Mirror};
use crate::rows::day_of;
use crate::standstill::Standstill;
use crate::tasks::{Shared, pause, trouble};
use crate::{recorded, records, restore, series, telemetry, unnamed_chunks, unread};

/// How a recorder works.
#[derive(Debug, Clone)]
pub struct RecorderOptions {
    /// Where to serve `/metrics` and `/healthz`; nowhere if absent. Port 0 takes a free one.
    pub http: Option<SocketAddr>,
    /// Largest state in bytes that is copied to PostgreSQL; of a larger one only the digest is kept.
    pub state_limit_bytes: u64,
    /// At most one copy of an execution's state in this time.
    pub state_every: Duration,
    /// A row for each node's hardware vector in this time, if nothing moves.
    pub vector_every: Duration,
    /// A row at once if a signal moved by more than this.
    pub vector_step: f64,
    /// Days for which boundaries, decisions, events and hardware vectors are kept.
    pub retention_days: u32,
    /// Removal of objects that nothing refers to.
    pub collection: Collection,
}

impl Default for RecorderOptions {
    fn default() -> Self {
        Self {
            http: None,
            state_limit_bytes: 64 << 20,
            state_every: Duration::from_secs(2),
            vector_every: Duration::from_secs(5),
            vector_step: 0.05,
            retention_days: 90,
            collection: Collection::default(),
        }
    }
}

/// Folds the ledger stream into PostgreSQL. Several may run: one writes, the others find the
/// checkpoint moved and follow.
#[derive(Debug)]
pub struct Recorder {
    options: RecorderOptions,
    broker: Broker,
    pool: PgPool,
    registry: Arc<Registry>,
    metrics: Metrics,
    health: Health,
}

impl Recorder {
    /// Nothing happens before [`Recorder::run`].
    pub fn new(options: RecorderOptions, broker: Broker, pool: PgPool) -> Self {
        let mut registry = Registry::default();
        let metrics = Metrics::default();
        metrics.register(&mut registry);
        let registry = Arc::new(registry);
        Self {
            options,
            broker,
            pool,
            registry,
            metrics,
            health: Health::default(),
        }
    }

    /// The recorder's health and its checkpoint; stays usable while it runs.
    pub fn health(&self) -> Health {
        self.health.clone()
    }

    /// Records until `stop`. While PostgreSQL or the broker is away, the recorder tries again.
    ///
    /// # Errors
    /// When going on would lose or falsify history: see [`RecorderError`].
    pub fn run(self, stop: CancellationToken) -> BoxFuture<'static, Result<()>> {
        // Boxed, so that the recorder is compiled here and not again in each program that runs it.
        self.record_until(stop).boxed()
    }

    async fn record_until(self, stop: CancellationToken) -> Result<()> {
        let stop = stop.child_token();
        let _stops_all = stop.clone().drop_guard();
        let shared = Shared {
            pool: self.pool,
            metrics: self.metrics,
            health: self.health,
            mirror: Mirror::default(),
            stop: stop.clone(),
        };
        if let Some(addr) = self.options.http {
            let health = shared.health.clone();
            let check = move || health.check();
            let bound = sight::serve(addr, self.registry, check, stop.clone())
                .await
                .map_err(|source| RecorderError::Listen { addr, source })?;
            tracing::info!(%bound, "serving /metrics and /healthz");
        }
        let options = self.options;
        let mut tasks = JoinSet::new();
        tasks.spawn(ledger::follow(self.broker.clone(), shared.clone()));
        tasks.spawn(records::follow(self.broker.clone(), shared.clone()));
        tasks.spawn(telemetry::follow(
            self.broker.clone(),
            shared.clone(),
            options.vector_every,
            options.vector_step,
        ));
        let (broker, mirrored) = (self.broker.clone(), shared.clone());
        tasks.spawn(async move {
            mirror::run(
                broker,
                mirrored,
                options.state_every,
                options.state_limit_bytes,
            )
            .await;
            Ok(())
        });
        let (broker, results) = (self.broker.clone(), shared.clone());
        tasks.spawn(async move {
            crate::results::run(broker, results).await;
            Ok(())
        });
        let (broker, large) = (self.broker.clone(), shared.clone());
        tasks.spawn(async move {
            crate::submissions::run(broker, large).await;
            Ok(())
        });
        let (broker, ended) = (self.broker.clone(), stop.clone());
        tasks.spawn(async move {
            ended.run_until_cancelled(broker.keep_clock()).await;
            Ok(())
        });
        let (upkeep, probed) = (shared.health.broker().clone(), self.broker.clone());
        let ended = stop.clone();
        tasks.spawn(async move {
            ended
                .run_until_cancelled(upkeep.keep(probed, "recorder"))
                .await;
            Ok(())
        });
        let (broker, restoring) = (self.broker.clone(), shared.clone());
        tasks.spawn(async move {
            restore::run(broker, restoring).await;
            Ok(())
        });
        let (broker, sweeping) = (self.broker.clone(), shared.clone());
        let collection = options.collection.clone();
        tasks.spawn(async move {
            unnamed_chunks::run(broker, sweeping, collection).await;
            Ok(())
        });
        let (broker, looking_up) = (self.broker.clone(), shared.clone());
        tasks.spawn(async move {
            recorded::run(broker, looking_up).await;
            Ok(())
        });
        let (broker, collecting) = (self.broker.clone(), shared.clone());
        tasks.spawn(async move {
            collect::run(broker, collecting.clone(), options.collection).await;
            // Without collection the recorder still runs.
            collecting.stop.cancelled().await;
            Ok(())
        });
        tasks.spawn(announce(self.broker, shared.clone()));
        tasks.spawn(housekeeping(shared, options.retention_days));
        let mut outcome = Ok(());
        while let Some(ended) = tasks.join_next().await {
            // A task that ends, ends all; the first error is the one that matters.
            stop.cancel();
            let ended = ended.map_err(RecorderError::from).and_then(|result| result);
            outcome = outcome.and(ended);
        }
        outcome
    }
}

/// Longest time between two looks at the streams, and two reports of the checkpoint.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Time after which a moved checkpoint is reported: workers hold commits back by it.
const ANNOUNCE_EVERY: Duration = Duration::from_millis(200);

/// Publishes the checkpoint, and watches that messages are read and written.
async fn announce(broker: Broker, shared: Shared) -> Result<()> {
    let still = |what| Standstill::new(what, Instant::now());
    let mut ledger_read = still("FIEC_LEDGER was read");
    let mut ledger_written = still("FIEC_LEDGER was written to PostgreSQL");
    let mut records_written = still("FIEC_RECORD was read and written to PostgreSQL");
    let (mut looked, mut last, mut announced) = (None::<Instant>, 0, None);
    while !shared.stop.is_cancelled() {
        pause(&shared.stop, ANNOUNCE_EVERY).await;
        let seq = shared.health.checkpoint();
        if looked.is_some_and(|at| at.elapsed() < LOOK_EVERY) {
            if announced != Some(seq) {
                announced = Some(seq);
                announce_one(&broker, &shared, seq, last).await;
            }
            continue;
        }
        looked = Some(Instant::now());
        let (Ok(ledger), Ok(records)) = (
            feed::bounds(&broker).await,
            feed::bounds_of(&broker, subjects::RECORD_STREAM).await,
        ) else {
            continue;
        };
        let (health, now) = (&shared.health, Instant::now());
        let read = health.read_up_to(Part::Ledger);
        let recorded = health.read_up_to(Part::Records);
        let troubles = [
            match ledger_read.check(read, ledger, now) {
                Some(_) if !waits(&broker, subjects::LEDGER_STREAM, read).await => None,
                trouble => trouble,
            },
            ledger_written.check(health.checkpoint(), (1, health.to_write()), now),
            match records_written.check(recorded, records, now) {
                Some(_) if !waits(&broker, subjects::RECORD_STREAM, recorded).await => None,
                trouble => trouble,
            },
        ];
        match troubles.into_iter().flatten().next() {
            Some(trouble) => health.unwell(Part::Reading, trouble),
            None => health.well(Part::Reading),
        }
        last = ledger.1;
        announced = Some(seq);
        announce_one(&broker, &shared, seq, last).await;
    }
    Ok(())
}

/// False if a stream has no message behind a sequence: its last messages were deleted.
async fn waits(broker: &Broker, stream: &str, done: Sequence) -> bool {
    let found = feed::has_from(broker, stream, done.saturating_add(1)).await;
    found.unwrap_or(true)
}

/// Reports the checkpoint to workers. `last`: the last known sequence of the stream.
async fn announce_one(broker: &Broker, shared: &Shared, seq: Sequence, last: Sequence) {
    let lag = last.saturating_sub(seq);
    shared
        .metrics
        .lag
        .set(i64::try_from(lag).unwrap_or(i64::MAX));
    let word = RecorderCheckpoint {
        seq,
        lag,
        at: broker.now(),
    };
    let Ok(payload) = serde_json::to_vec(&word) else {
        return;
    };
    let sent = broker
        .client
        .publish(subjects::RECORDER_CHECKPOINT, payload.into())
        .await;
    if let Err(error) = sent {
        tracing::debug!(%error, "checkpoint was not announced");
    }
}

/// Makes partitions ahead of time and drops those beyond the retention, every hour.
async fn housekeeping(shared: Shared, retention_days: u32) -> Result<()> {
    while !shared.stop.is_cancelled() {
        let today = day_of(Timestamp::now());
        let first_kept = today.saturating_sub_unsigned(retention_days);
        let done = sqlx::query_as::<_, (i32, i32)>(
            "SELECT fiec_ensure_partitions(date '1970-01-01' + $1, date '1970-01-01' + $1 + 3), \
             fiec_drop_partitions(date '1970-01-01' + $2)",
        )
        .bind(today)
        .bind(first_kept)
        .fetch_one(&shared.pool)
        .await;
        let wait = match done {
            Ok((made, dropped)) => {
                shared.health.well(Part::Housekeeping);
                let days = i64::from(retention_days) * 86_400_000_000;
                let long_ago = Timestamp::from_micros(Timestamp::now().micros() - days);
                let thinned = series::thin_old(&shared.pool, long_ago, &shared.stop).await;
                unread::count(&shared).await;
                if made + dropped > 0 {
                    tracing::info!(made, dropped, "partitions");
                }
                match thinned {
                    Ok(()) => Duration::from_secs(3_600),
                    Err(error) => {
                        trouble(&shared, Part::Housekeeping, &error);
                        Duration::from_secs(30)
                    }
                }
            }
            Err(error) => {
                trouble(&shared, Part::Housekeeping, &error);
                Duration::from_secs(30)
            }
        };
        pause(&shared.stop, wait).await;
    }
    Ok(())
}
