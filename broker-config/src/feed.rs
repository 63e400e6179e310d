//! The feed of all ledgers: headers only, from the reader's own checkpoint, for readers that fold.

use std::time::Duration;

use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, pull};
use async_nats::jetstream::stream::LastRawMessageErrorKind;
use fiec_schemas::{Digest, ExecutionId, LedgerMessage, Sequence, Tenant, Timestamp, subjects};
use futures_util::stream::BoxStream;
use futures_util::{Stream, StreamExt};

use crate::reader::{Delivered, Reader, next_fetched};
use crate::{Broker, BrokerError};

/// The start of a feed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// At this sequence (1 is the beginning).
    At(Sequence),
    /// With the last message of each execution, then with all later messages.
    LastOfEach,
}

/// One message of the feed, not yet read.
#[derive(Debug, Clone)]
pub struct FeedItem {
    /// Its sequence.
    pub seq: Sequence,
    /// The tenant.
    pub tenant: Tenant,
    /// The execution.
    pub execution: ExecutionId,
    /// The `Fiec-Event` header.
    pub header: String,
    /// Time of storage in the broker.
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
    bounds_of(broker, subjects::LEDGER_STREAM).await
}

/// As [`bounds`], for any stream. In an empty stream the first sequence is greater than the last.
///
/// # Errors
/// When the broker does not answer.
pub async fn bounds_of(broker: &Broker, stream: &str) -> Result<(Sequence, Sequence), BrokerError> {
    let stream = broker
        .js
        .get_stream(stream)
        .await
        .map_err(BrokerError::operation(format!("look at stream {stream}")))?;
    let state = &stream.cached_info().state;
    Ok((state.first_sequence, state.last_sequence))
}

/// Sequence of a stream's first message that was stored at this moment or later.
///
/// # Errors
/// When the broker does not answer.
pub async fn first_since(
    broker: &Broker,
    stream: &str,
    at: Timestamp,
) -> Result<Option<Sequence>, BrokerError> {
    const WHAT: &str = "look for what a stream has stored since";
    let nanos = i128::from(at.micros()) * 1_000;
    let start_time = time::OffsetDateTime::from_unix_timestamp_nanos(nanos)
        .map_err(BrokerError::operation(WHAT))?;
    let config = pull::Config {
        ack_policy: AckPolicy::None,
        headers_only: true,
        deliver_policy: DeliverPolicy::ByStartTime { start_time },
        inactive_threshold: Duration::from_secs(10),
        ..Default::default()
    };
    let consumer = broker.js.create_consumer_on_stream(config, stream).await;
    let consumer = consumer.map_err(BrokerError::operation(WHAT))?;
    let found = consumer.fetch().max_messages(1).messages().await;
    let mut found = found.map_err(BrokerError::operation(WHAT))?;
    let Some(message) = found.next().await else {
        return Ok(None);
    };
    let message = message.map_err(BrokerError::operation(WHAT))?;
    let info = message.info().map_err(BrokerError::operation(WHAT))?;
    Ok(Some(info.stream_sequence))
}

/// Whether a stream holds a message with this sequence or a later one. A deletion of the last
/// message does not change the stream's last sequence.
///
/// # Errors
/// When the broker does not answer.
pub async fn has_from(broker: &Broker, stream: &str, seq: Sequence) -> Result<bool, BrokerError> {
    let what = || format!("look for message {seq} of stream {stream}");
    let opened = broker.js.get_stream_no_info(stream).await;
    let opened = opened.map_err(BrokerError::operation(what()))?;
    match opened.get_first_raw_message_by_subject(">", seq).await {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == LastRawMessageErrorKind::NoMessageFound => Ok(false),
        Err(error) => Err(BrokerError::operation(what())(error)),
    }
}

/// Messages that the server sends ahead.
const BATCH: usize = 1_000;
/// Pause before [`live`] opens the feed again.
const REOPEN: Duration = Duration::from_millis(200);

/// Opens the feed. [`BrokerError::Foreign`] stands for a message that is no ledger message. Any
/// other error ends the feed. Its reader then opens it again, after the last message that it has
/// processed.
///
/// # Errors
/// When the broker refuses the consumer.
pub async fn ledger(
    broker: &Broker,
    start: Start,
) -> Result<impl Stream<Item = Result<FeedItem, BrokerError>> + Unpin + use<>, BrokerError> {
    let filter = match start {
        Start::LastOfEach => vec!["fiec.ledger.*.*".to_owned()],
        Start::At(_) => Vec::new(),
    };
    open(broker, start, filter).await
}

/// Opens the feed of the ledgers on these subjects only. An empty list means all.
async fn open(
    broker: &Broker,
    start: Start,
    mut filter_subjects: Vec<String>,
) -> Result<impl Stream<Item = Result<FeedItem, BrokerError>> + Unpin + use<>, BrokerError> {
    // A single subject goes into the field that permissions can name.
    let filter_subject = match filter_subjects.len() {
        1 => filter_subjects.remove(0),
        _ => String::new(),
    };
    let config = pull::Config {
        headers_only: true,
        deliver_policy: match start {
            Start::At(seq) => DeliverPolicy::ByStartSequence {
                start_sequence: seq.max(1),
            },
            Start::LastOfEach => DeliverPolicy::LastPerSubject,
        },
        filter_subject,
        filter_subjects,
        max_waiting: 16,
        ..Default::default()
    };
    let what = "follow the ledger stream";
    let reader = Reader::open(broker, subjects::LEDGER_STREAM, config, BATCH, what).await?;
    Ok(reader.map(|message| item(&message?)))
}

/// The feed from now on, for watchers without a checkpoint. After an error it opens itself again,
/// after the last message that it returned. It never ends.
///
/// # Errors
/// When the broker refuses the first consumer.
pub async fn live(
    broker: &Broker,
) -> Result<BoxStream<'static, Result<FeedItem, BrokerError>>, BrokerError> {
    let (_, last) = bounds(broker).await?;
    live_of(broker, last + 1, Vec::new()).await
}

/// As [`live`], from this sequence on, for the ledgers on these subjects only. An empty list means
/// all.
///
/// # Errors
/// When the broker refuses the first consumer.
pub async fn live_of(
    broker: &Broker,
    from: Sequence,
    subjects: Vec<String>,
) -> Result<BoxStream<'static, Result<FeedItem, BrokerError>>, BrokerError> {
    let feed = open(broker, Start::At(from), subjects.clone())
        .await?
        .boxed();
    let last = from.saturating_sub(1);
    let step = async move |(broker, mut feed, mut last, subjects): (
        Broker,
        BoxStream<'static, _>,
        Sequence,
        Vec<String>,
    )| {
        loop {
            if let Some(item) = feed.next().await {
                if let Ok(FeedItem { seq, .. }) = &item {
                    last = *seq;
                }
                return Some((item, (broker, feed, last, subjects)));
            }
            tokio::time::sleep(REOPEN).await;
            feed = match open(&broker, Start::At(last + 1), subjects.clone()).await {
                Ok(feed) => feed.boxed(),
                Err(error) => futures_util::stream::iter([Err(error)]).boxed(),
            };
        }
    };
    Ok(futures_util::stream::unfold((broker.clone(), feed, last, subjects), step).boxed())
}

fn item(delivered: &Delivered) -> Result<FeedItem, BrokerError> {
    let Delivered { message, seq, .. } = delivered;
    let foreign = |reason| BrokerError::Foreign { seq: *seq, reason };
    let (tenant, execution) = subjects::parse_ledger(&message.subject)
        .ok_or_else(|| foreign("its subject names no execution"))?;
    let header = message
        .headers
        .as_ref()
        .and_then(|headers| headers.get(subjects::EVENT_HEADER))
        .ok_or_else(|| foreign("it has no Fiec-Event header"))?;
    Ok(FeedItem {
        seq: *seq,
        tenant,
        execution,
        header: header.as_str().to_owned(),
        stored_at: delivered.stored_at,
        pending: delivered.pending,
    })
}

/// Returns the messages of one execution's ledger that the stream still holds, in order.
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
    // More than the stream keeps of one subject: one fetch returns all.
    let most = usize::try_from(2 * subjects::LEDGER_DEPTH).unwrap_or(usize::MAX);
    let mut messages = consumer
        .fetch()
        .max_messages(most)
        .messages()
        .await
        .map_err(BrokerError::operation(&what))?;
    let mut items = Vec::new();
    while let Some(message) = next_fetched(&mut messages, &what).await? {
        items.push(item(&Delivered::new(message, &what)?)?);
    }
    Ok(items)
}
