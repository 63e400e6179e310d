//! An ephemeral reader of a stream. It ends after its first error, and its owner opens it again
//! from its own checkpoint. An ephemeral consumer does not come back, and a feed that continues
//! after an error skips messages silently.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use async_nats::jetstream;
use async_nats::jetstream::consumer::{AckPolicy, pull};
use fiec_schemas::{Sequence, Timestamp};
use futures_util::{Stream, StreamExt};

use crate::{Broker, BrokerError};

/// The server deletes the consumer of a reader that requested nothing for this long.
const INACTIVE: Duration = Duration::from_secs(60);

/// A fetch that is silent for this long has lost its end: the server normally sends a final answer.
const SILENCE: Duration = Duration::from_secs(10);

/// Returns the next message of a fetch, or none at its end.
///
/// # Errors
/// When neither comes in time: messages may be missing then.
pub async fn next_fetched<S, T, E>(messages: &mut S, what: &str) -> Result<Option<T>, BrokerError>
where
    S: Stream<Item = Result<T, E>> + Unpin,
    E: Into<async_nats::Error>,
{
    next_within(messages, what, SILENCE).await
}

async fn next_within<S, T, E>(
    messages: &mut S,
    what: &str,
    time: Duration,
) -> Result<Option<T>, BrokerError>
where
    S: Stream<Item = Result<T, E>> + Unpin,
    E: Into<async_nats::Error>,
{
    match tokio::time::timeout(time, messages.next()).await {
        Ok(next) => next.transpose().map_err(BrokerError::operation(what)),
        Err(silence) => Err(BrokerError::operation(what)(silence)),
    }
}

/// A message with its position in the stream.
#[derive(Debug)]
pub struct Delivered {
    /// The message.
    pub message: jetstream::Message,
    /// Its sequence.
    pub seq: Sequence,
    /// Time of storage in the broker.
    pub stored_at: Timestamp,
    /// Messages behind it in the stream when it was delivered.
    pub pending: u64,
    /// The consumer's number for it.
    number: u64,
}

impl Delivered {
    /// Reads the position of a message. `what` names the purpose in errors.
    ///
    /// # Errors
    /// When it came from no stream.
    pub(crate) fn new(message: jetstream::Message, what: &str) -> Result<Self, BrokerError> {
        let info = message.info().map_err(BrokerError::operation(what))?;
        let stored = info.published.unix_timestamp_nanos() / 1_000;
        Ok(Self {
            seq: info.stream_sequence,
            stored_at: Timestamp::from_micros(i64::try_from(stored).unwrap_or(0)),
            pending: info.pending,
            number: info.consumer_sequence,
            message,
        })
    }
}

/// Messages of one stream, in order and without a gap, until the first error.
pub struct Reader {
    what: &'static str,
    messages: pull::Stream,
    /// The consumer's number of the next message. Every number is delivered once.
    next: u64,
    has_failed: bool,
}

impl std::fmt::Debug for Reader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reader").finish_non_exhaustive()
    }
}

impl Reader {
    /// Opens a reader of `stream` without acknowledgements, which the owner's checkpoint replaces.
    /// `batch` is the most messages that the server sends ahead. `what` names the purpose in
    /// errors.
    ///
    /// # Errors
    /// When the broker refuses the consumer or does not answer.
    pub async fn open(
        broker: &Broker,
        stream: &str,
        config: pull::Config,
        batch: usize,
        what: &'static str,
    ) -> Result<Self, BrokerError> {
        let config = pull::Config {
            ack_policy: AckPolicy::None,
            inactive_threshold: INACTIVE,
            ..config
        };
        let consumer = broker
            .js
            .create_consumer_on_stream(config, stream)
            .await
            .map_err(BrokerError::operation(what))?;
        let messages = consumer
            .stream()
            .max_messages_per_batch(batch)
            .expires(Duration::from_secs(30))
            .heartbeat(Duration::from_secs(10))
            .messages()
            .await
            .map_err(BrokerError::operation(what))?;
        Ok(Self {
            what,
            messages,
            next: 1,
            has_failed: false,
        })
    }

    fn check(&mut self, message: jetstream::Message) -> Result<Delivered, BrokerError> {
        let message = Delivered::new(message, self.what)?;
        let (delivered, what, next) = (message.number, self.what, self.next);
        if delivered != next {
            let lost = format!("delivery {delivered} came where {next} was due");
            return Err(BrokerError::operation(what)(lost));
        }
        self.next += 1;
        Ok(message)
    }
}

impl Stream for Reader {
    type Item = Result<Delivered, BrokerError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.has_failed {
            return Poll::Ready(None);
        }
        let polled = self.messages.poll_next_unpin(cx);
        let item = std::task::ready!(polled).map(|message| match message {
            Ok(message) => self.check(message),
            Err(error) => Err(BrokerError::operation(self.what)(error)),
        });
        self.has_failed = !matches!(item, Some(Ok(_)));
        Poll::Ready(item)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use futures_util::stream;

    #[tokio::test]
    async fn a_fetch_whose_end_is_lost_fails() {
        let one = || stream::iter([Ok::<_, std::io::Error>(1)]);
        let mut whole = one();
        assert_eq!(next_fetched(&mut whole, "read").await.unwrap(), Some(1));
        assert_eq!(next_fetched(&mut whole, "read").await.unwrap(), None);
        let mut broken = one().chain(stream::pending());
        let soon = Duration::from_millis(10);
        assert_eq!(next_fetched(&mut broken, "read").await.unwrap(), Some(1));
        let failed = next_within(&mut broken, "read", soon).await.unwrap_err();
        assert!(failed.to_string().contains("cannot read"), "{failed}");
    }
}
