//! Submission messages that wait, because a line of theirs could not be taken in: the ledger stream
//! refuses, or a look-up fails. Such trouble is not the line's fault, so its message waits as long as
//! the trouble lasts, and health is red with the reason.
//!
//! The service keeps such a message open with progress reports, and reads its text from the stream
//! again for each further try. So the broker delivers a message again only after a service ended, or
//! was without its connection. The number of deliveries therefore counts the services that the
//! message may have ended, and only that number refuses it (`Options::deliveries`).
//!
//! Given up: the broker cannot tell a crash from a stop, or from a long interruption. A message that
//! waits through more of them than the limit is refused by the next service.
//!
//! A waiting message takes less than 1 KiB here. The consumer bounds their number: it has at most
//! 20,000 open messages. Beyond that it delivers nothing, so all submissions wait in the stream.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_nats::Message;
use async_nats::jetstream::stream::RawMessageErrorKind;
use async_nats::jetstream::{self, AckKind};
use bytes::Bytes;
use fiec_broker::Broker;
use fiec_schemas::{Sequence, subjects};
use tokio::sync::mpsc::Sender;

use crate::pulling::{Asked, Bounds, Pulled};

/// The delay before a further try doubles with each try, at most this many times.
const DOUBLINGS: u32 = 8;
/// Failed tries after which health is red. Most trouble passes before the second one.
const PATIENCE: u32 = 2;
/// Interval at which due messages are looked for.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Interval of the progress reports to the broker. It is well below the time after which the broker
/// delivers a message again.
pub const KEEP_ALIVE: Duration = Duration::from_secs(2);

/// The waiting messages of a service. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Waiting {
    /// Delay before the second try.
    retry: Duration,
    all: Arc<Mutex<BTreeMap<Sequence, Wait>>>,
}

#[derive(Debug)]
struct Wait {
    /// The message without headers and text, for reports and the acknowledgement.
    message: jetstream::Message,
    /// Length of its text.
    bytes: usize,
    /// Failed tries.
    tries: u32,
    /// Why the last try failed.
    reason: String,
    /// Time of the last progress report.
    told: Instant,
    step: Step,
}

#[derive(Debug, Clone, Copy)]
enum Step {
    /// The next try is due at this time.
    Until(Instant),
    /// It is being tried.
    Trying,
}

impl Waiting {
    /// No message waits yet. `retry` is the delay before the second try.
    pub fn new(retry: Duration) -> Self {
        Self {
            retry,
            all: Arc::default(),
        }
    }

    /// Checks that submissions are taken in.
    ///
    /// # Errors
    /// While a message waits that failed repeatedly, with the reason.
    pub fn check(&self) -> Result<(), String> {
        let all = self.all();
        let stuck = all.values().find(|wait| wait.tries >= PATIENCE);
        stuck.map_or(Ok(()), |wait| {
            let (number, reason) = (all.len(), &wait.reason);
            Err(format!(
                "submissions are not taken in: {number} messages wait, because {reason}"
            ))
        })
    }

    /// True if this message waits or is tried again.
    pub fn contains(&self, seq: Sequence) -> bool {
        self.all().contains_key(&seq)
    }

    /// Adds a message after a failed try, or puts it off further.
    pub fn put_off(&self, seq: Sequence, message: &jetstream::Message, reason: String) {
        let mut all = self.all();
        let tries = all.get(&seq).map_or(0, |wait| wait.tries);
        let mut wait = Wait {
            message: without_content(message),
            bytes: message.payload.len(),
            tries,
            reason: String::new(),
            told: Instant::now(),
            step: Step::Trying,
        };
        wait.fail(reason, self.retry);
        all.insert(seq, wait);
    }

    /// Forgets a message that was taken in.
    pub fn remove(&self, seq: Sequence) {
        self.all().remove(&seq);
    }

    /// Forgets all messages. The broker delivers them again.
    pub fn clear(&self) {
        self.all().clear();
    }

    /// Reports progress for all messages, so that the broker does not deliver them again.
    pub async fn keep_alive(&self) {
        for message in self.to_report() {
            if let Err(error) = message.ack_with(AckKind::Progress).await {
                tracing::debug!(%error, "cannot report that a submission waits");
            }
        }
    }

    fn to_report(&self) -> Vec<jetstream::Message> {
        let mut all = self.all();
        let late = all.values_mut().filter(|w| w.told.elapsed() >= KEEP_ALIVE);
        late.map(|wait| {
            wait.told = Instant::now();
            wait.message.clone()
        })
        .collect()
    }

    fn due(&self) -> Vec<Sequence> {
        let now = Instant::now();
        let all = self.all();
        let due = all
            .iter()
            .filter(|(_, wait)| matches!(wait.step, Step::Until(at) if at <= now));
        due.map(|(seq, _)| *seq).collect()
    }

    /// Begins a further try. Returns the message without its content, and the length of its text.
    fn begin(&self, seq: Sequence) -> Option<(jetstream::Message, usize)> {
        let mut all = self.all();
        let wait = all.get_mut(&seq)?;
        wait.step = Step::Trying;
        Some((wait.message.clone(), wait.bytes))
    }

    /// Notes that a message could not be read for its next try.
    fn fail(&self, seq: Sequence, reason: String) {
        if let Some(wait) = self.all().get_mut(&seq) {
            wait.fail(reason, self.retry);
        }
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<Sequence, Wait>> {
        // Each change is complete even if a holder of the lock panicked.
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads due messages from the stream and passes them on, until the receiver is closed.
    pub async fn try_again(&self, broker: &Broker, bounds: &Bounds, to: &Sender<Pulled>) {
        while !to.is_closed() {
            for seq in self.due() {
                let Some((message, bytes)) = self.begin(seq) else {
                    continue;
                };
                let Some(room) = bounds.room_of(bytes).await else {
                    return;
                };
                let asked = Asked::now();
                let Some(message) = self.read(broker, seq, message).await else {
                    continue;
                };
                let pulled = Pulled {
                    message,
                    asked,
                    again: true,
                    room,
                };
                if to.send(pulled).await.is_err() {
                    return;
                }
            }
            tokio::time::sleep(LOOK_EVERY.min(self.retry)).await;
        }
    }

    /// Reads the content of a message. Returns `None` if it is gone, or must wait further.
    async fn read(
        &self,
        broker: &Broker,
        seq: Sequence,
        mut message: jetstream::Message,
    ) -> Option<jetstream::Message> {
        let stream = match broker.js.get_stream_no_info(subjects::SUBMIT_STREAM).await {
            Ok(stream) => stream,
            Err(error) => {
                self.fail(seq, error.to_string());
                return None;
            }
        };
        match stream.get_raw_message(seq).await {
            Ok(stored) => {
                message.message.headers = Some(stored.headers).filter(|h| !h.is_empty());
                message.message.payload = stored.payload;
                Some(message)
            }
            // Another service took it in, after the connection of this one was interrupted.
            Err(error) if error.kind() == RawMessageErrorKind::NoMessageFound => {
                self.remove(seq);
                None
            }
            Err(error) => {
                self.fail(seq, format!("a submission cannot be read: {error}"));
                None
            }
        }
    }
}

impl Wait {
    fn fail(&mut self, reason: String, retry: Duration) {
        let delay = retry.saturating_mul(2_u32.pow(self.tries.min(DOUBLINGS)));
        self.tries = self.tries.saturating_add(1);
        self.reason = reason;
        self.step = Step::Until(Instant::now() + delay);
    }
}

/// Copies what is needed to acknowledge a message. The memory of its content can be freed then.
fn without_content(message: &jetstream::Message) -> jetstream::Message {
    jetstream::Message {
        message: Message {
            subject: message.subject.clone(),
            reply: message.reply.clone(),
            payload: Bytes::new(),
            headers: None,
            status: None,
            description: None,
            length: 0,
        },
        context: message.context.clone(),
    }
}
