//! Pulls submission messages. Memory is reserved before messages are requested. A message keeps its
//! reservation until it is acknowledged. So the messages here are bounded in number and bytes.
//!
//! A message that crashes a policy service is delivered again to the next one, together with all
//! messages that were pulled with it. A service that starts while messages of others are open
//! therefore pulls one message at a time for [`CAREFUL`]. Then only the harmful message collects
//! deliveries, until it is refused (`Options::deliveries`). A message that cannot be taken in now
//! collects none (`waiting`).

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use async_nats::jetstream;
use async_nats::jetstream::consumer::{Consumer, pull};
use fiec_broker::{Broker, BrokerError, Upkeep, topology};
use fiec_schemas::Timestamp;
use futures_util::StreamExt as _;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::mpsc::Sender;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::ServiceError;
use crate::metrics::Metrics;
use crate::sources::{SourceHealth, again};
use crate::waiting::Waiting;

/// Most messages held here, and most per request.
pub const MESSAGES: u32 = 2_048;
const BATCH: u32 = 256;
/// Most KiB of messages held here, and most per request. Both are larger if the broker's largest
/// message is.
const KIB: u32 = 16 * 1024;
const BATCH_KIB: u32 = 4 * 1024;
/// A message's subject and headers take fewer bytes than this.
const OVERHEAD: usize = 4 * 1024;
/// Time for which the broker keeps a request open. A message may be younger than its request by
/// this.
const OPEN: Duration = Duration::from_secs(2);
/// Additional time after which the rest of an answer is not waited for.
const LATE: Duration = Duration::from_secs(3);
/// Half of the time after which the broker delivers a message again. A younger message is nowhere
/// else.
const RECENT: Duration = Duration::from_secs(4);
/// How long messages are pulled one at a time. Longer than the time after which one comes again.
const CAREFUL: Duration = Duration::from_secs(10);
/// Time without a successful request after which health is red.
const PATIENCE: Duration = Duration::from_secs(3);

/// Time of the request for a message. The message was not delivered before it.
#[derive(Debug, Clone, Copy)]
pub struct Asked {
    monotonic: Instant,
    wall: Timestamp,
}

impl Asked {
    /// The present time.
    pub fn now() -> Self {
        Self {
            monotonic: Instant::now(),
            wall: Timestamp::now(),
        }
    }

    /// True while a message of this request cannot have been delivered again. Both clocks are
    /// compared, because only one of them shows that the machine has slept.
    pub fn is_recent(self) -> bool {
        let wall = Timestamp::now().millis().saturating_sub(self.wall.millis());
        let recent = i64::try_from(RECENT.as_millis()).unwrap_or(i64::MAX);
        self.monotonic.elapsed() < RECENT && (0..recent).contains(&wall)
    }
}

/// A submission message as it arrived.
#[derive(Debug)]
pub struct Pulled {
    /// The message.
    pub message: jetstream::Message,
    /// When it was requested.
    pub asked: Asked,
    /// It waited here and is tried again.
    pub again: bool,
    /// Its share of the memory, held until it is acknowledged.
    pub room: Room,
}

/// Reserved memory for messages.
#[derive(Debug)]
pub struct Room {
    messages: OwnedSemaphorePermit,
    kib: OwnedSemaphorePermit,
}

impl Room {
    /// Splits off the share of one message, or all that is left if that is too little.
    fn split(&mut self, bytes: usize) -> Option<Self> {
        let kib = (bytes / 1024 + 1).min(self.kib.num_permits());
        Some(Self {
            messages: self.messages.split(1)?,
            kib: self.kib.split(kib)?,
        })
    }
}

/// Limits on messages and KiB, in total and per request.
pub struct Bounds {
    messages: Arc<Semaphore>,
    kib: Arc<Semaphore>,
    all_kib: u32,
    batch_kib: u32,
}

impl Bounds {
    fn new(broker: &Broker) -> Self {
        let largest = broker.client.server_info().max_payload + OVERHEAD;
        let largest = u32::try_from(largest.div_ceil(1024)).unwrap_or(KIB);
        let (all_kib, batch_kib) = (KIB.max(largest), BATCH_KIB.max(largest));
        Self {
            messages: Arc::new(Semaphore::new(MESSAGES as usize)),
            kib: Arc::new(Semaphore::new(all_kib as usize)),
            all_kib,
            batch_kib,
        }
    }

    /// Reserves memory for one message with a text of this length.
    pub async fn room_of(&self, bytes: usize) -> Option<Room> {
        let kib = u32::try_from((bytes + OVERHEAD).div_ceil(1024)).unwrap_or(u32::MAX);
        let of_kib = Arc::clone(&self.kib).acquire_many_owned(kib.min(self.all_kib));
        Some(Room {
            messages: Arc::clone(&self.messages).acquire_owned().await.ok()?,
            kib: of_kib.await.ok()?,
        })
    }

    /// Reserves memory for a batch. With `alone`, reserves all, so that no other message is held.
    /// Waits until earlier messages are acknowledged, which deadlines bound.
    async fn room(&self, alone: bool) -> Option<Room> {
        let (messages, kib) = match alone {
            true => (MESSAGES, self.all_kib),
            false => (BATCH, self.batch_kib),
        };
        let of_messages = Arc::clone(&self.messages).acquire_many_owned(messages);
        let of_kib = Arc::clone(&self.kib).acquire_many_owned(kib);
        Some(Room {
            messages: of_messages.await.ok()?,
            kib: of_kib.await.ok()?,
        })
    }
}

/// Whether submissions can be pulled. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Intake {
    health: SourceHealth,
    closed: Gauge,
    /// Begin of the trouble.
    since: Arc<Mutex<Option<Instant>>>,
}

impl Intake {
    /// The intake that `metrics` shows.
    pub fn new(metrics: &Metrics) -> Self {
        Self {
            health: SourceHealth::default(),
            closed: metrics.intake_closed.clone(),
            since: Arc::default(),
        }
    }

    /// Checks that submissions can be pulled.
    ///
    /// # Errors
    /// After [`PATIENCE`] without them, with the reason.
    pub fn check(&self) -> Result<(), String> {
        self.health.check()
    }

    fn since(&self) -> MutexGuard<'_, Option<Instant>> {
        self.since.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pulled(&self) {
        *self.since() = None;
        self.closed.set(0);
        self.health.opened();
    }

    fn failed(&self, error: &BrokerError) {
        self.closed.set(1);
        if self.since().get_or_insert_with(Instant::now).elapsed() >= PATIENCE {
            let reason = format!("submissions are not pulled: {error}");
            self.health.closed(reason);
        }
    }
}

/// Pulls submissions until the receiver is closed. Passes those that wait on again.
pub async fn submissions(
    broker: Broker,
    to: Sender<Pulled>,
    intake: Intake,
    waiting: Waiting,
    upkeep: Upkeep,
) -> Result<(), ServiceError> {
    let bounds = Bounds::new(&broker);
    let careful_until = OnceLock::new();
    let pulls = again("submissions", || async {
        let ended = pull_all(&broker, &to, &bounds, &careful_until, &intake, &upkeep).await;
        ended.inspect_err(|error| intake.failed(error))
    });
    let (ended, ()) = tokio::join!(pulls, waiting.try_again(&broker, &bounds, &to));
    ended
}

/// Pulls submissions until the receiver is closed, or the broker refuses.
async fn pull_all(
    broker: &Broker,
    to: &Sender<Pulled>,
    bounds: &Bounds,
    careful_until: &OnceLock<Option<Instant>>,
    intake: &Intake,
    upkeep: &Upkeep,
) -> Result<(), BrokerError> {
    let consumer = topology::submit_consumer(broker).await?;
    let open = consumer.cached_info().num_ack_pending;
    let careful_until = *careful_until.get_or_init(|| careful_until_of(open));
    while !to.is_closed() {
        if upkeep.is_ledger_full() {
            // They wait in their stream. Health is red with the reason.
            tokio::time::sleep(OPEN).await;
            continue;
        }
        let alone = careful_until.is_some_and(|until| Instant::now() < until);
        let Some(room) = bounds.room(alone).await else {
            return Ok(());
        };
        pull(&consumer, to, room, alone, bounds.batch_kib).await?;
        intake.pulled();
    }
    Ok(())
}

/// End of the time in which messages are pulled one at a time. `open` messages were open at the
/// start.
fn careful_until_of(open: usize) -> Option<Instant> {
    if open > 0 {
        tracing::info!(
            open,
            "submissions of others are open: taking in one at a time at first"
        );
    }
    (open > 0).then(|| Instant::now() + CAREFUL)
}

/// Sends one request and passes its messages on.
async fn pull(
    consumer: &Consumer<pull::Config>,
    to: &Sender<Pulled>,
    mut room: Room,
    alone: bool,
    kib: u32,
) -> Result<(), BrokerError> {
    const WHAT: &str = "pull submissions";
    let asked = Asked::now();
    let most = if alone { 1 } else { BATCH };
    let mut messages = consumer
        .batch()
        .max_messages(most as usize)
        .max_bytes(kib as usize * 1024)
        .expires(OPEN)
        .messages()
        .await
        .map_err(BrokerError::operation(WHAT))?;
    let deadline = tokio::time::Instant::now() + OPEN + LATE;
    let mut has_come = false;
    while let Ok(Some(message)) = tokio::time::timeout_at(deadline, messages.next()).await {
        let message = match message {
            Ok(message) => message,
            // The broker ends an answer so if the next message is larger than the rest of the
            // requested bytes. Other trouble ends the next answer too, before its first message.
            Err(error) if has_come => {
                tracing::debug!(%error, "requesting the rest of the submissions again");
                return Ok(());
            }
            Err(error) => return Err(BrokerError::operation(WHAT)(error)),
        };
        has_come = true;
        let bytes = match alone {
            true => usize::MAX,
            false => message.payload.len() + OVERHEAD / 4,
        };
        let Some(share) = room.split(bytes) else {
            return Ok(());
        };
        let pulled = Pulled {
            message,
            asked,
            again: false,
            room: share,
        };
        // The channel has room for each message that has reserved memory.
        if to.send(pulled).await.is_err() {
            return Ok(());
        }
        if alone {
            break;
        }
    }
    Ok(())
}
