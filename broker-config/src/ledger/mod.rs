//! The ledger of one execution. Messages are appended by compare-and-set on the subject's last
//! sequence. An author that loses the race reads and decides again.

mod appends;
mod draft;
mod many;
mod reads;

use async_nats::jetstream::message::StreamMessage;
use async_nats::jetstream::stream::Stream;
use bytes::Bytes;
use fiec_schemas::chain::Link;
use fiec_schemas::event::MessageError;
use fiec_schemas::{
    Digest, ExecutionState, LedgerMessage, Sequence, Timestamp, TransitionError, subjects,
};
use std::sync::Arc;
use tokio::sync::OnceCell;

pub use self::appends::InFlight;
pub use self::draft::{CARRY_AGAIN_AFTER, Draft};
use crate::{Broker, BrokerError};

/// A message in the stream.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Its sequence.
    pub seq: Sequence,
    /// When the broker stored it.
    pub stored_at: Timestamp,
    /// Digest of its header.
    pub digest: Digest,
    /// Its contents, with its own sequence filled in.
    pub message: LedgerMessage,
    /// σ, if it carries one.
    pub body: Bytes,
    /// The connection in which it was read ([`Broker::connection`]), or 0 if that is not known.
    pub seen_in: u64,
}

impl Entry {
    /// Its link in the chain.
    pub fn link(&self) -> Link {
        let state = &self.message.state;
        Link {
            seq: self.seq,
            digest: self.digest,
            prev: state.prev,
            ordinal: state.ordinal,
        }
    }
}

/// The end of a ledger, as its next author must know it.
#[derive(Debug, Clone)]
pub struct Tip {
    /// Sequence of the last message, or 0 if there is none.
    pub seq: Sequence,
    /// Digest of its header.
    pub digest: Option<Digest>,
    /// The state after it.
    pub state: Arc<ExecutionState>,
    /// The connection in which it was seen to be stored, or 0 if that is not known.
    pub seen_in: u64,
}

impl Tip {
    /// Its link in the chain. None before the first message.
    pub fn link(&self) -> Option<Link> {
        Some(Link {
            seq: self.seq,
            digest: self.digest?,
            prev: self.state.prev,
            ordinal: self.state.ordinal,
        })
    }
}

impl From<Entry> for Tip {
    fn from(entry: Entry) -> Self {
        Self {
            seq: entry.seq,
            digest: Some(entry.digest),
            state: entry.message.state,
            seen_in: entry.seen_in,
        }
    }
}

/// The reason why an append did not happen.
#[derive(Debug, thiserror::Error)]
pub enum AppendError {
    /// Another author appended first: read the last message and decide again.
    #[error("the ledger has moved on")]
    Conflict,
    /// The state does not allow the events.
    #[error(transparent)]
    Transition(#[from] TransitionError),
    /// The message is too large or cannot be written.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// The broker did not answer or refused. It is not known whether the message is stored.
    #[error(transparent)]
    Broker(#[from] BrokerError),
}

/// All ledgers, over one connection.
#[derive(Clone)]
pub struct Ledger {
    broker: Broker,
    stream: Arc<OnceCell<Stream<()>>>,
}

impl Ledger {
    /// The ledgers over this connection.
    pub fn new(broker: &Broker) -> Self {
        Self {
            broker: broker.clone(),
            stream: Arc::default(),
        }
    }

    async fn stream(&self) -> Result<&Stream<()>, BrokerError> {
        self.stream
            .get_or_try_init(|| self.broker.js.get_stream_no_info(subjects::LEDGER_STREAM))
            .await
            .map_err(BrokerError::operation("open the ledger stream"))
    }
}

fn malformed(message: &StreamMessage, reason: String) -> BrokerError {
    BrokerError::Malformed {
        what: format!("ledger message {} on {}", message.sequence, message.subject),
        reason,
    }
}

/// The text of the `Fiec-Event` header.
fn header(message: &StreamMessage) -> Result<&str, BrokerError> {
    let header = message.headers.get(subjects::EVENT_HEADER);
    let missing = || {
        malformed(
            message,
            format!("it has no {} header", subjects::EVENT_HEADER),
        )
    };
    header.map(|header| header.as_str()).ok_or_else(missing)
}

fn entry(message: StreamMessage, seen_in: u64) -> Result<Entry, BrokerError> {
    let header = header(&message)?;
    let stored = message.time.unix_timestamp_nanos() / 1_000;
    Ok(Entry {
        seq: message.sequence,
        stored_at: Timestamp::from_micros(i64::try_from(stored).unwrap_or(0)),
        digest: Digest::of(header.as_bytes()),
        message: LedgerMessage::decode(header, message.sequence)
            .map_err(|error| malformed(&message, error.to_string()))?,
        body: message.payload.clone(),
        seen_in,
    })
}
