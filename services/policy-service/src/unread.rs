//! Reads the last message of each ledger of a tenant.
//!
//! The server places the consumer on any copy of the stream, and one that lags behind its leader has
//! old messages. So the leader says first which message is the last, and the reader goes on, with other
//! consumers, until it has seen that one.

use std::time::Duration;

use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, pull};
use fiec_broker::{BrokerError, leader};
use fiec_schemas::{Sequence, Tenant, subjects};
use futures_util::StreamExt as _;
use tokio::time::Instant;

use crate::effects::Effects;

/// How long a reader that pauses is kept.
pub const KEPT: Duration = Duration::from_secs(60);
/// Longest pause while the broker sends ledgers. After it, the request fails.
const SILENCE: Duration = Duration::from_secs(5);
/// Longest time in which all copies that are asked lag behind, and the pause before another is.
const LAG: Duration = Duration::from_secs(10);
const ANOTHER: Duration = Duration::from_millis(50);

const READ: &str = "read the ledgers of a tenant";

/// The last messages of a tenant's ledgers.
pub struct Unread {
    /// The stream of messages.
    messages: pull::Stream,
    /// Number of messages that remain.
    pub count: u64,
    /// When the last message came.
    pub heard: Instant,
    /// True if the stream has no more.
    is_over: bool,
    /// The last sequence that has come.
    seen: Sequence,
    /// The last one that the leader had when the reading began.
    up_to: Sequence,
    /// When that was.
    since: Instant,
}

/// The next of them.
pub enum Next {
    /// A message.
    Message {
        /// Its sequence.
        seq: Sequence,
        /// Its `Fiec-Event` header; empty if it has none.
        header: String,
    },
    /// None has come before the deadline.
    NotYet,
    /// All have been read.
    Over,
}

impl Unread {
    /// Asks another copy: the one that was asked may have lost its leader, or its server.
    ///
    /// # Errors
    /// The error, if the copies have failed or lagged behind for too long.
    fn pardon(&mut self, error: BrokerError) -> Result<(), BrokerError> {
        if self.since.elapsed() >= LAG {
            return Err(error);
        }
        tracing::debug!(%error, "a copy of the ledgers does not answer; another is asked");
        self.is_over = true;
        Ok(())
    }
}

impl Effects {
    /// Requests them. Returns `None` if there are no ledgers.
    pub async fn unread(&self, tenant: &Tenant) -> Result<Option<Unread>, BrokerError> {
        let Some(up_to) = self.last_of_all(tenant).await? else {
            return Ok(None);
        };
        let messages = self.consume(tenant).await?;
        Ok(Some(Unread {
            count: 1,
            messages,
            heard: Instant::now(),
            is_over: false,
            seen: 0,
            up_to,
            since: Instant::now(),
        }))
    }

    /// The last sequence of a tenant's ledgers, as the leader has it.
    async fn last_of_all(&self, tenant: &Tenant) -> Result<Option<Sequence>, BrokerError> {
        let js = &self.broker.js;
        let stream = js.get_stream_no_info(subjects::LEDGER_STREAM).await;
        let stream = stream.map_err(BrokerError::operation(READ))?;
        let last = leader::last(&stream, &subjects::ledgers(tenant)).await?;
        Ok(last.map(|last| last.sequence))
    }

    async fn consume(&self, tenant: &Tenant) -> Result<pull::Stream, BrokerError> {
        let config = pull::Config {
            ack_policy: AckPolicy::None,
            headers_only: true,
            deliver_policy: DeliverPolicy::LastPerSubject,
            filter_subject: subjects::ledgers(tenant),
            inactive_threshold: KEPT,
            ..Default::default()
        };
        let js = &self.broker.js;
        let consumer = js
            .create_consumer_on_stream(config, subjects::LEDGER_STREAM)
            .await
            .map_err(BrokerError::operation(READ))?;
        let messages = consumer.stream().max_messages_per_batch(1_000).messages();
        messages.await.map_err(BrokerError::operation(READ))
    }

    /// Returns the next one.
    pub async fn next_unread(
        &self,
        tenant: &Tenant,
        unread: &mut Unread,
        deadline: Instant,
    ) -> Result<Next, BrokerError> {
        loop {
            if unread.is_over && unread.seen >= unread.up_to {
                return Ok(Next::Over);
            }
            if unread.is_over {
                if unread.since.elapsed() >= LAG {
                    return Err(missing(tenant, "each copy that was asked lags behind"));
                }
                if Instant::now() >= deadline {
                    return Ok(Next::NotYet);
                }
                tokio::time::sleep(ANOTHER).await;
                // A void message is removed by its author.
                unread.up_to = self.last_of_all(tenant).await?.unwrap_or(0);
                match self.consume(tenant).await {
                    Ok(messages) => unread.messages = messages,
                    Err(error) => {
                        unread.pardon(error)?;
                        continue;
                    }
                }
                (unread.is_over, unread.heard) = (false, Instant::now());
            }
            let until = deadline.min(unread.heard + SILENCE);
            let message = match tokio::time::timeout_at(until, unread.messages.next()).await {
                Ok(Some(Ok(message))) => message,
                Ok(Some(Err(error))) => {
                    unread.pardon(BrokerError::operation(READ)(error))?;
                    continue;
                }
                Ok(None) => {
                    unread.is_over = true;
                    continue;
                }
                Err(_) if unread.heard.elapsed() < SILENCE => return Ok(Next::NotYet),
                // A copy may have none, and then nothing comes.
                Err(_) if unread.seen == 0 && unread.since.elapsed() < LAG => {
                    unread.is_over = true;
                    continue;
                }
                Err(_) => return Err(missing(tenant, &format!("nothing came for {SILENCE:?}"))),
            };
            unread.heard = Instant::now();
            let Ok(info) = message.info() else { continue };
            unread.seen = unread.seen.max(info.stream_sequence);
            (unread.count, unread.is_over) = (info.pending, info.pending == 0);
            let header = message.headers.as_ref();
            let header = header.and_then(|h| h.get(subjects::EVENT_HEADER));
            return Ok(Next::Message {
                seq: info.stream_sequence,
                header: header.map(|h| h.as_str().to_owned()).unwrap_or_default(),
            });
        }
    }
}

fn missing(tenant: &Tenant, why: &str) -> BrokerError {
    BrokerError::Missing {
        what: format!("the rest of the ledgers of {tenant}"),
        hint: format!(": {why}"),
    }
}
