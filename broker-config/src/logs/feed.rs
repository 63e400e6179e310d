//! The messages of a subject, in order, whatever becomes of connection, broker and consumer.

use std::time::Duration;

use async_nats::jetstream::Message;
use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, pull};
use fiec_schemas::subjects;
use futures_util::StreamExt as _;

use crate::{Broker, BrokerError, leader};

/// Time without a message after which the caller looks at what else there is.
const QUIET: Duration = Duration::from_millis(500);
/// What is done, for errors.
const READ: &str = "read the log stream";
/// Pause before a new consumer, if the last one failed.
const AGAIN: Duration = Duration::from_millis(250);

/// A reader of the log stream. It remembers its place, so that a consumer that is gone is replaced:
/// the broker forgets it if this process is stopped for a minute, or the broker starts anew.
#[derive(Debug)]
pub struct Feed<'a> {
    broker: &'a Broker,
    subject: String,
    /// Tries again for ever.
    patient: bool,
    /// The next sequence to read.
    pub next: u64,
    consumer: Option<Consumer>,
    /// The user was told that the stream does not answer.
    complained: bool,
}

struct Consumer {
    messages: pull::Stream,
    /// Messages that it has delivered.
    delivered: u64,
}

impl std::fmt::Debug for Consumer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Consumer")
            .field("delivered", &self.delivered)
            .finish_non_exhaustive()
    }
}

impl<'a> Feed<'a> {
    /// Messages of this subject, from the first that is stored.
    pub fn new(broker: &'a Broker, subject: String, patient: bool) -> Self {
        Self {
            broker,
            subject,
            patient,
            next: 1,
            consumer: None,
            complained: false,
        }
    }

    /// The sequence of the last message, 0 if there is none.
    ///
    /// # Errors
    /// If the stream does not answer.
    pub async fn last(&self) -> Result<u64, BrokerError> {
        let stream = self.broker.js.get_stream_no_info(subjects::LOG_STREAM);
        let stream = stream.await.map_err(BrokerError::operation(READ))?;
        let last = leader::last(&stream, &self.subject).await?;
        Ok(last.map_or(0, |message| message.sequence))
    }

    /// The next message, or none if none comes for a moment.
    ///
    /// # Errors
    /// If the stream does not answer, unless this reader is patient.
    pub async fn message(&mut self) -> Result<Option<Message>, BrokerError> {
        let consumer = match self.consumer.take() {
            Some(consumer) => Ok(consumer),
            None => self.consumer().await,
        };
        let mut consumer = match consumer {
            Ok(consumer) => consumer,
            Err(error) => return self.failed(error).await,
        };
        match tokio::time::timeout(QUIET, consumer.messages.next()).await {
            Err(_) => {
                self.consumer = Some(consumer);
                Ok(None)
            }
            Ok(None) => Ok(None),
            Ok(Some(Err(error))) => self.failed(BrokerError::operation(READ)(error)).await,
            Ok(Some(Ok(message))) => {
                let info = message.info().map_err(BrokerError::operation(READ))?;
                let (sequence, number) = (info.stream_sequence, info.consumer_sequence);
                if number != consumer.delivered + 1 {
                    // Messages were lost on their way. A new consumer sends them again.
                    return Ok(None);
                }
                consumer.delivered = number;
                self.consumer = Some(consumer);
                self.complained = false;
                self.next = sequence + 1;
                Ok(Some(message))
            }
        }
    }

    async fn failed(&mut self, error: BrokerError) -> Result<Option<Message>, BrokerError> {
        if !self.patient {
            return Err(error);
        }
        if !std::mem::replace(&mut self.complained, true) {
            tracing::warn!("the log stream does not answer ({error}); trying again");
        }
        tokio::time::sleep(AGAIN).await;
        Ok(None)
    }

    async fn consumer(&mut self) -> Result<Consumer, BrokerError> {
        let stream = self.broker.js.get_stream(subjects::LOG_STREAM).await;
        let stream = stream.map_err(BrokerError::operation(READ))?;
        // A broker that was killed may have lost the last messages. It uses their sequences again.
        self.next = self.next.min(stream.cached_info().state.last_sequence + 1);
        let config = pull::Config {
            ack_policy: AckPolicy::None,
            deliver_policy: DeliverPolicy::ByStartSequence {
                start_sequence: self.next,
            },
            filter_subject: self.subject.clone(),
            inactive_threshold: Duration::from_secs(60),
            ..Default::default()
        };
        let created = stream.create_consumer(config).await;
        let created = created.map_err(BrokerError::operation(READ))?;
        let messages = created
            .stream()
            .max_messages_per_batch(500)
            .heartbeat(Duration::from_secs(10))
            .expires(Duration::from_secs(30))
            .messages();
        Ok(Consumer {
            messages: messages.await.map_err(BrokerError::operation(READ))?,
            delivered: 0,
        })
    }
}
