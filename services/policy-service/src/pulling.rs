//! Pulls submission messages. Room is taken before messages are asked for, so what lies here is
//! bounded in messages and bytes, and each message keeps its room until it is acknowledged.
//!
//! What kills a policy service is delivered again to the next one, together with everything that
//! was pulled with it. A service that starts while messages of others are open therefore pulls one
//! at a time for a while: then only the message that does the damage is counted again and again,
//! and is refused in the end (`intake::DELIVERIES`).

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use async_nats::jetstream;
use async_nats::jetstream::consumer::{Consumer, pull};
use fiec_broker::{Broker, BrokerError, topology};
use fiec_schemas::Timestamp;
use futures_util::StreamExt as _;
use tokio::sync::mpsc::Sender;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::ServiceError;
use crate::sources::again;

/// Messages that may lie here, and that are asked for at once.
pub const MESSAGES: u32 = 2_048;
const BATCH: u32 = 256;
/// Kibibytes of messages that may lie here, and that are asked for at once, unless the broker's
/// largest message is larger.
const KIB: u32 = 16 * 1024;
const BATCH_KIB: u32 = 4 * 1024;
/// A message's subject and headers take less.
const OVERHEAD: usize = 4 * 1024;
/// How long the broker keeps a question open: so much older than it looks may a message be.
const OPEN: Duration = Duration::from_secs(2);
/// Beyond it, the answer to a question is not waited for.
const LATE: Duration = Duration::from_secs(3);
/// Half of the time after which a message comes again: one that is younger is nowhere else.
const RECENT: Duration = Duration::from_secs(4);
/// Longer than the time after which a message comes again.
const CAREFUL: Duration = Duration::from_secs(10);

/// When a message was asked for; it was not delivered before that.
#[derive(Debug, Clone, Copy)]
pub struct Asked {
    monotonic: Instant,
    wall: Timestamp,
}

impl Asked {
    /// Now.
    pub fn now() -> Self {
        Self {
            monotonic: Instant::now(),
            wall: Timestamp::now(),
        }
    }

    /// True while a message that was asked for then cannot have been delivered again. The machine
    /// may have slept, which only one of the two clocks shows.
    pub fn is_recent(self) -> bool {
        let wall = Timestamp::now().millis().saturating_sub(self.wall.millis());
        let recent = i64::try_from(RECENT.as_millis()).unwrap_or(i64::MAX);
        self.monotonic.elapsed() < RECENT && (0..recent).contains(&wall)
    }
}

/// A submission message as it arrived.
#[derive(Debug)]
pub struct Pulled {
    /// It.
    pub message: jetstream::Message,
    /// When it was asked for.
    pub asked: Asked,
    /// Its share of the room, until it is acknowledged.
    pub room: Room,
}

/// Room for messages.
#[derive(Debug)]
pub struct Room {
    messages: OwnedSemaphorePermit,
    kib: OwnedSemaphorePermit,
}

impl Room {
    /// The part of it that one message takes; all that is left where that is too little.
    fn split(&mut self, bytes: usize) -> Option<Self> {
        let kib = (bytes / 1024 + 1).min(self.kib.num_permits());
        Some(Self {
            messages: self.messages.split(1)?,
            kib: self.kib.split(kib)?,
        })
    }
}

/// Most messages and kibibytes that lie here, and of one question.
struct Bounds {
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

    /// Room for a batch; `alone`: all there is, so that nothing else lies here. Waits for what was
    /// pulled before, which is bounded by the deadlines of taking it in.
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

/// Submissions, until nobody takes them any more.
pub async fn submissions(broker: Broker, to: Sender<Pulled>) -> Result<(), ServiceError> {
    let bounds = Bounds::new(&broker);
    let careful_until = OnceLock::new();
    again("submissions", || async {
        let consumer = topology::submit_consumer(&broker).await?;
        let open = consumer.cached_info().num_ack_pending;
        let careful_until = *careful_until.get_or_init(|| careful_until_of(open));
        while !to.is_closed() {
            let alone = careful_until.is_some_and(|until| Instant::now() < until);
            let Some(room) = bounds.room(alone).await else {
                return Ok(());
            };
            pull(&consumer, &to, room, alone, bounds.batch_kib).await?;
        }
        Ok(())
    })
    .await
}

/// Until when messages are pulled one at a time, where so many were open at the start.
fn careful_until_of(open: usize) -> Option<Instant> {
    if open > 0 {
        tracing::info!(
            open,
            "submissions of others are open: taking in one at a time at first"
        );
    }
    (open > 0).then(|| Instant::now() + CAREFUL)
}

/// One question, and what comes of it.
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
    while let Ok(Some(message)) = tokio::time::timeout_at(deadline, messages.next()).await {
        let message = match message {
            Ok(message) => message,
            // The next message is larger than what is left of the room.
            Err(error) if error.to_string().contains("MaxBytes") => return Ok(()),
            Err(error) => return Err(BrokerError::operation(WHAT)(error)),
        };
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
            room: share,
        };
        // There is a place for each message that there is room for.
        if to.send(pulled).await.is_err() {
            return Ok(());
        }
        if alone {
            break;
        }
    }
    Ok(())
}
