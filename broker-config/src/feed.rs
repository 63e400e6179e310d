//! The feed of all ledgers: headers only, from one's own checkpoint, for readers that fold.

use std::time::Duration;

use async_nats::jetstream;
use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, pull};
use fiec_schemas::{Digest, ExecutionId, LedgerMessage, Sequence, Tenant, Timestamp, subjects};
use futures_util::{Stream, StreamExt};

use crate::{Broker, BrokerError};

/// Where a feed begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// At this sequence (1 is the beginning).
    At(Sequence),
    /// With the last message of each execution, then whatever comes.
    LastOfEach,
    /// With whatever comes.
    New,
}

/// One message of the feed, not yet read.
#[derive(Debug, Clone)]
pub struct FeedItem {
    /// Its sequence.
    pub seq: Sequence,
    /// Whose.
    pub tenant: Tenant,
    /// Which execution.
    pub execution: ExecutionId,
    /// The `Fiec-Event` header.
    pub header: String,
    /// When the broker stored it.
    pub stored_at: Timestamp,
    /// Messages behind it in the stream when it was delivered.
    pub pending: u64,
}

impl FeedItem {
    /// Reads the header.
    ///
    /// # Errors
    /// When it is no ledger message.
    pub fn message(&self) -> Result<LedgerMessage, BrokerError> {
        LedgerMessage::decode(&self.header, self.seq).map_err(|error| BrokerError::Malformed {
            what: format!("ledger message {} of {}", self.seq, self.execution),
            reason: error.to_string(),
        })
    }

    /// Digest of the header.
    pub fn digest(&self) -> Digest {
        Digest::of(self.header.as_bytes())
    }
}

/// The stream's first and last sequence now.
///
/// # Errors
/// When the broker does not answer.
pub async fn bounds(broker: &Broker) -> Result<(Sequence, Sequence), BrokerError> {
    let stream = broker
        .js
        .get_stream(subjects::LEDGER_STREAM)
        .await
        .map_err(BrokerError::operation("look at the ledger stream"))?;
    let state = &stream.cached_info().state;
    Ok((state.first_sequence, state.last_sequence))
}

/// Opens the feed. It reconnects by itself; an error item says that something was passed over or
/// that the feed must be opened anew.
///
/// # Errors
/// When the broker refuses the consumer.
pub async fn ledger(
    broker: &Broker,
    start: Start,
) -> Result<impl Stream<Item = Result<FeedItem, BrokerError>> + Unpin + use<>, BrokerError> {
    // Ephemeral and without acks: the reader's own checkpoint counts, not what was delivered.
    let consumer = broker
        .js
        .create_consumer_on_stream(
            pull::Config {
                ack_policy: AckPolicy::None,
                headers_only: true,
                deliver_policy: match start {
                    Start::At(seq) => DeliverPolicy::ByStartSequence {
                        start_sequence: seq.max(1),
                    },
                    Start::LastOfEach => DeliverPolicy::LastPerSubject,
                    Start::New => DeliverPolicy::New,
                },
                filter_subject: if start == Start::LastOfEach {
                    "fiec.ledger.*.*".to_owned()
                } else {
                    String::new()
                },
                inactive_threshold: Duration::from_secs(60),
                max_waiting: 16,
                ..Default::default()
            },
            subjects::LEDGER_STREAM,
        )
        .await
        .map_err(BrokerError::operation("follow the ledger stream"))?;
    let messages = consumer
        .stream()
        .max_messages_per_batch(1_000)
        .expires(Duration::from_secs(30))
        .heartbeat(Duration::from_secs(10))
        .messages()
        .await
        .map_err(BrokerError::operation("follow the ledger stream"))?;
    Ok(messages
        .map(|message| item(&message.map_err(BrokerError::operation("follow the ledger stream"))?)))
}

fn item(message: &jetstream::Message) -> Result<FeedItem, BrokerError> {
    let malformed = |reason: &str| BrokerError::Malformed {
        what: format!("message on {}", message.subject),
        reason: reason.to_owned(),
    };
    let info = message
        .info()
        .map_err(BrokerError::operation("read a message's place"))?;
    let (tenant, execution) = subjects::parse_ledger(&message.subject)
        .ok_or_else(|| malformed("its subject names no execution"))?;
    let header = message
        .headers
        .as_ref()
        .and_then(|headers| headers.get(subjects::EVENT_HEADER))
        .ok_or_else(|| malformed("it has no Fiec-Event header"))?;
    Ok(FeedItem {
        seq: info.stream_sequence,
        tenant,
        execution,
        header: header.as_str().to_owned(),
        stored_at: Timestamp::from_micros(
            i64::try_from(info.published.unix_timestamp_nanos() / 1_000).unwrap_or(0),
        ),
        pending: info.pending,
    })
}

/// What the stream still holds of one execution's ledger, in order.
///
/// # Errors
/// When the broker does not answer, or a message is no ledger message.
pub async fn of_execution(
    broker: &Broker,
    tenant: &Tenant,
    execution: ExecutionId,
) -> Result<Vec<FeedItem>, BrokerError> {
    let what = format!("read the ledger of {execution}");
    let consumer = broker
        .js
        .create_consumer_on_stream(
            pull::Config {
                ack_policy: AckPolicy::None,
                headers_only: true,
                deliver_policy: DeliverPolicy::All,
                filter_subject: subjects::ledger(tenant, execution),
                inactive_threshold: Duration::from_secs(10),
                ..Default::default()
            },
            subjects::LEDGER_STREAM,
        )
        .await
        .map_err(BrokerError::operation(&what))?;
    // More than the stream keeps of one subject: one round gets all.
    let most = usize::try_from(2 * subjects::LEDGER_DEPTH).unwrap_or(usize::MAX);
    let mut messages = consumer
        .fetch()
        .max_messages(most)
        .messages()
        .await
        .map_err(BrokerError::operation(&what))?;
    let mut items = Vec::new();
    while let Some(message) = messages.next().await {
        items.push(item(&message.map_err(BrokerError::operation(&what))?)?);
    }
    Ok(items)
}
