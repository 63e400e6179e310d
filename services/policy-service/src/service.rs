//! Connects the parts of the service and watches its tasks. A task that ends early ends the
//! service.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fiec_broker::aging::LedgerAge;
use fiec_broker::{Broker, Ledger, UNACKNOWLEDGED, Upkeep, sight};
use fiec_schemas::{InstanceId, author};
use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use prometheus_client::metrics::counter::Counter;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::core::Core;
use crate::effects::Effects;
use crate::events::News;
use crate::history::History;
use crate::metrics::Metrics;
use crate::programs::Programs;
use crate::pulling::Intake;
use crate::reading::Reader;
use crate::running::Running;
use crate::sources::SourceHealth;
use crate::waiting::Waiting;
use crate::{Options, ServiceError, acks, api, pulling, reservation, sources};

/// Capacity of the channel for news.
const NEWS: usize = 4_096;
/// Capacity of the channel for outcomes and questions.
const OUTCOMES: usize = 4_096;

/// Most readers of the queue of submissions at the same time.
const LOOKING: usize = 4;
/// Most readers of all ledgers of a tenant for the members of groups at the same time.
const SCANNING: usize = 2;

/// Pause before the ledgers are read again after the broker lost messages. It doubles with each
/// failure.
const AGAIN: Duration = Duration::from_secs(1);
const AGAIN_LIMIT: Duration = Duration::from_secs(30);

/// A policy service, ready to run.
pub struct PolicyService {
    options: Options,
    broker: Broker,
}

impl PolicyService {
    /// Takes a connection. The streams and buckets must exist (`fiec_broker::topology::apply`).
    pub fn new(options: Options, broker: Broker) -> Self {
        Self { options, broker }
    }

    /// Runs until `stop` is cancelled. A current-thread runtime is the best choice.
    ///
    /// # Errors
    /// If the start fails, or a task ends early.
    pub fn run(self, stop: CancellationToken) -> LocalBoxFuture<'static, Result<(), ServiceError>> {
        // Boxed, so that the future is compiled in this crate only.
        self.serve_until(stop).boxed_local()
    }

    async fn serve_until(self, stop: CancellationToken) -> Result<(), ServiceError> {
        let Self {
            mut options,
            broker,
        } = self;
        let metrics = Metrics::default();
        let loaded = Arc::new(AtomicBool::new(false));
        let end = stop.child_token();
        let _end = end.clone().drop_guard();
        let (upkeep, feed) = (Upkeep::default(), SourceHealth::default());
        let (intake, waiting) = (Intake::new(&metrics), Waiting::new(options.retry));
        if let Some(addr) = options.http {
            let health = health(&broker, &loaded, &upkeep, &feed, (&intake, &waiting));
            let bound = sight::serve(addr, metrics.registry(), health, end.clone())
                .await
                .map_err(|source| ServiceError::Http { addr, source })?;
            tracing::info!(addr = %bound, "serving /metrics and /healthz");
        }
        // If the server does not send its time, this machine's clock stays in use.
        if let Err(error) = broker.measure_clock().await {
            tracing::warn!(%error, "the broker's clock is not measured yet");
        }
        tokio::spawn(
            end.clone()
                .run_until_cancelled_owned(broker.clone().keep_clock()),
        );
        let (mut after_loss, mut wait) = (false, AGAIN);
        loop {
            let life = Life {
                options: options.clone(),
                broker: broker.clone(),
                metrics: metrics.clone(),
                loaded: Arc::clone(&loaded),
                upkeep: upkeep.clone(),
                feed: feed.clone(),
                intake: intake.clone(),
                waiting: waiting.clone(),
                after_loss,
            };
            match life.live(&stop).await {
                Err(ServiceError::Lost(lost)) => {
                    tracing::error!(%lost, "taking over the remaining ledgers");
                    loaded.store(false, Ordering::Relaxed);
                    options.id = InstanceId::random();
                    after_loss = true;
                    wait = AGAIN;
                }
                // A broker that lost messages may still be recovering.
                Err(ServiceError::Broker(error))
                    if after_loss && !loaded.load(Ordering::Relaxed) =>
                {
                    tracing::warn!(%error, ?wait, "taking over the ledgers again after a pause");
                    let _ = tokio::time::timeout(wait, stop.cancelled()).await;
                    if stop.is_cancelled() {
                        return Ok(());
                    }
                    options.id = InstanceId::random();
                    wait = (2 * wait).min(AGAIN_LIMIT);
                }
                ended => return ended,
            }
        }
    }
}

/// One life of the service, with one id. Its knowledge of the ledgers is valid until the broker
/// loses messages.
struct Life {
    options: Options,
    broker: Broker,
    metrics: Metrics,
    loaded: Arc<AtomicBool>,
    upkeep: Upkeep,
    feed: SourceHealth,
    intake: Intake,
    waiting: Waiting,
    /// The life before this one ended because the broker lost messages.
    after_loss: bool,
}

impl Life {
    async fn live(self, stop: &CancellationToken) -> Result<(), ServiceError> {
        let Self {
            options,
            broker,
            metrics,
            loaded,
            upkeep,
            feed,
            intake,
            waiting,
            after_loss,
        } = self;
        // Those of an earlier life are delivered again.
        waiting.clear();
        let (news_tx, news) = mpsc::channel(NEWS);
        // A task that brings an outcome waits while the core's channel is full. If the core waited
        // for such a task, both would wait for ever. The core sends into two channels. `firsts` has
        // room for each append that the core admits, so it is never full. `published` is drained by
        // a task that waits for acknowledgements only. Publishing also waits for a permit. First
        // appends, whose task may wait for the core, take at most half of the permits.
        let in_flight = options.in_flight.clamp(1, UNACKNOWLEDGED / 2);
        let options = Options {
            in_flight,
            ..options
        };
        let (outcomes_tx, outcomes) = mpsc::channel(OUTCOMES);
        let (submissions_tx, submissions) = mpsc::channel(pulling::MESSAGES as usize);
        let (firsts, firsts_rx) = mpsc::channel(in_flight);
        let (published, published_rx) = mpsc::channel(UNACKNOWLEDGED);
        let ledger = Ledger::new(&broker);
        let (history, asking) = History::new(broker.clone(), upkeep.clone());
        let effects = Effects {
            broker: broker.clone(),
            ledger: ledger.clone(),
            outcomes: outcomes_tx.clone(),
            author: author::of_policy(options.id),
            programs: Programs::new(&broker),
            upkeep: upkeep.clone(),
            history,
            looking: Arc::new(Semaphore::new(LOOKING)),
            scanning: Arc::new(Semaphore::new(SCANNING)),
            reader: Reader::default(),
            running: Running::new(outcomes_tx.clone()),
        };
        // One token ends every part, whatever the reason.
        let end = stop.child_token();
        let guard = end.clone().drop_guard();
        let mut core = Core::new(
            options.clone(),
            effects.clone(),
            metrics.clone(),
            firsts,
            published,
            waiting.clone(),
            (Arc::clone(&loaded), feed.clone(), after_loss),
        );
        let mut tasks: JoinSet<(&'static str, Result<(), ServiceError>)> = JoinSet::new();
        let (b, u) = (broker.clone(), upkeep.clone());
        tasks.spawn(async move {
            ("upkeep", {
                u.keep(b, "policy").await;
                Ok(())
            })
        });
        tasks.spawn(async move {
            ("history", {
                asking.await;
                Ok(())
            })
        });
        // Subscribe to live telemetry first, so that no vector is missed after the last ones.
        let (b, n) = (broker.clone(), news_tx.clone());
        let unreadable = metrics.unreadable_vectors.clone();
        tasks.spawn(async move { ("telemetry", sources::telemetry(b, unreadable, n).await) });
        let mut known = sources::known_nodes(&broker).await?;
        known.extend(sources::contained_programs(&broker).await);
        known.extend(reservation::quotas(&broker).await?);
        let vectors = vectors(&broker, &metrics.unreadable_vectors).await;
        core.preload(known, vectors).await;
        let (b, n) = (broker.clone(), news_tx.clone());
        tasks.spawn(async move { ("nodes", sources::nodes(b, n).await) });
        let (b, n) = (broker.clone(), news_tx.clone());
        tasks.spawn(async move { ("quotas", sources::quotas(b, n).await) });
        let (b, n) = (broker.clone(), news_tx.clone());
        tasks.spawn(async move { ("reservations", sources::reservations(b, n).await) });
        let (b, n) = (broker.clone(), news_tx.clone());
        tasks.spawn(async move { ("verdicts", sources::verdicts(b, n).await) });
        let (b, n, id) = (broker.clone(), news_tx.clone(), options.id);
        tasks.spawn(async move { ("presence", sources::presence(b, id, n).await) });
        let (p, n) = (effects.programs.clone(), news_tx.clone());
        tasks.spawn(async move { ("programs", sources::programs(p, n).await) });
        let (b, n) = (broker.clone(), news_tx.clone());
        tasks.spawn(async move {
            ("aging", {
                let mut age = LedgerAge::new(&b);
                while n.send(News::Aged(age.aged().await)).await.is_ok() {}
                Ok(())
            })
        });
        let (b, n) = (broker.clone(), news_tx);
        tasks.spawn(async move { ("ledgers", sources::ledgers(b, n, feed).await) });
        let b = broker.clone();
        tasks.spawn(async move {
            (
                "submissions",
                pulling::submissions(b, submissions_tx, intake, waiting, upkeep).await,
            )
        });
        tasks.spawn(async move {
            ("appends", {
                acks::appends(ledger, firsts_rx, outcomes_tx).await;
                Ok(())
            })
        });
        let m = metrics.clone();
        tasks.spawn(async move {
            ("publishes", {
                acks::publishes(published_rx, m).await;
                Ok(())
            })
        });
        let (e, o, l) = (effects, options.clone(), Arc::clone(&loaded));
        tasks.spawn(async move { ("api", api::serve(e, o, l).await) });
        let ending = end.clone();
        let run = async move {
            ("core", {
                core.run(news, outcomes, submissions, ending).await;
                Ok(())
            })
        };
        tasks.spawn(run);
        let ended = tokio::select! {
            () = stop.cancelled() => None,
            ended = tasks.join_next() => ended,
        };
        let result = match ended {
            _ if stop.is_cancelled() => Ok(()),
            None => Ok(()),
            Some(Ok((_, Err(error)))) => Err(error),
            Some(Ok((task, Ok(())))) => Err(ServiceError::Task {
                task,
                reason: "the task ended without a stop request".to_owned(),
            }),
            Some(Err(error)) => Err(ServiceError::Task {
                task: "unknown",
                reason: error.to_string(),
            }),
        };
        drop(guard);
        // The core announces to the other replicas that it leaves. The other tasks may stop
        // anywhere.
        let farewell = async {
            while let Some(ended) = tasks.join_next().await {
                if matches!(ended, Ok(("core", _))) {
                    break;
                }
            }
        };
        let _ = tokio::time::timeout(Duration::from_secs(2), farewell).await;
        tasks.shutdown().await;
        result
    }
}

async fn vectors(broker: &Broker, unreadable: &Counter) -> Vec<fiec_schemas::HardwareVector> {
    match sources::last_vectors(broker, unreadable).await {
        Ok(vectors) => vectors,
        Err(error) => {
            tracing::warn!(%error, "starting without the last vectors; nodes are unknown until they send one");
            Vec::new()
        }
    }
}

/// The check behind `/healthz`.
fn health(
    broker: &Broker,
    loaded: &Arc<AtomicBool>,
    upkeep: &Upkeep,
    feed: &SourceHealth,
    (intake, waiting): (&Intake, &Waiting),
) -> impl Fn() -> Result<(), String> + Send + Sync + Clone + 'static {
    let (client, loaded) = (broker.client.clone(), Arc::clone(loaded));
    let (upkeep, feed) = (upkeep.clone(), feed.clone());
    let (intake, waiting) = (intake.clone(), waiting.clone());
    move || {
        if client.connection_state() != async_nats::connection::State::Connected {
            return Err("not connected to NATS: see that nats-server runs".to_owned());
        }
        upkeep.check()?;
        feed.check()?;
        intake.check()?;
        waiting.check()?;
        if !loaded.load(Ordering::Relaxed) {
            return Err("still taking over the ledgers".to_owned());
        }
        Ok(())
    }
}
