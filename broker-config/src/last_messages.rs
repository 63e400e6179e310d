//! Reads the last message of each ledger of a tenant.
//!
//! The server places the consumer on any copy of the stream, and one that lags behind its leader has
//! old messages. So the leader says first which message is the last, and the reader goes on, with other
//! consumers, until it has seen that one. The last message of a ledger may therefore come more than
//! once, and an older one before it.

use std::time::Duration;

use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, pull};
use fiec_schemas::{Sequence, Tenant, subjects};
use futures_util::StreamExt as _;
use tokio::time::Instant;

use crate::{Broker, BrokerError, leader};

/// How long the broker keeps the place of a reader that pauses.
pub const KEPT: Duration = Duration::from_secs(60);
/// Longest pause while the broker sends ledgers. After it, the reading fails.
const SILENCE: Duration = Duration::from_secs(5);
/// Longest time in which all copies that are asked lag behind, and the pause before another is.
const LAG: Duration = Duration::from_secs(10);
const ANOTHER: Duration = Duration::from_millis(50);

const READ: &str = "read the ledgers of a tenant";

/// The last messages of a tenant's ledgers.
pub struct LastMessages {
    broker: Broker,
    tenant: Tenant,
    /// The stream of messages.
    messages: pull::Stream,
    /// Number of messages that remain.
    remaining: u64,
    /// When the last message came, or the reader went on.
    heard: Instant,
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
#[derive(Debug)]
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

impl LastMessages {
    /// Requests them. Returns `None` if the tenant has no ledgers.
    ///
    /// # Errors
    /// If the broker does not answer.
    pub async fn of(broker: &Broker, tenant: &Tenant) -> Result<Option<Self>, BrokerError> {
        let Some(up_to) = last_of_all(broker, tenant).await? else {
            return Ok(None);
        };
        Ok(Some(Self {
            messages: consume(broker, tenant).await?,
            broker: broker.clone(),
            tenant: tenant.clone(),
            remaining: 1,
            heard: Instant::now(),
            is_over: false,
            seen: 0,
            up_to,
            since: Instant::now(),
        }))
    }

    /// About how many messages remain.
    pub fn remaining(&self) -> u64 {
        self.remaining
    }

    /// Goes on after a pause of the reader, which is no silence of the broker.
    pub fn go_on(&mut self) {
        self.heard = Instant::now();
    }

    /// Asks another copy: the one that was asked may have lost its leader, or its server.
    ///
    /// # Errors
    /// The error, if the copies have failed or lagged behind for too long.
    fn pardon(&mut self, error: BrokerError) -> Result<(), BrokerError> {
        if self.since.elapsed() >= LAG {
            return Err(error);
        }
        tracing::debug!(%error, "a copy of the ledgers does not answer; asking another copy");
        self.is_over = true;
        Ok(())
    }

    /// Returns the next one.
    ///
    /// # Errors
    /// If no copy of the stream has all of them.
    pub async fn next(&mut self, deadline: Instant) -> Result<Next, BrokerError> {
        loop {
            if self.is_over && self.seen >= self.up_to {
                return Ok(Next::Over);
            }
            if self.is_over {
                if self.since.elapsed() >= LAG {
                    return Err(self.missing("each copy that was asked lags behind"));
                }
                if Instant::now() >= deadline {
                    return Ok(Next::NotYet);
                }
                tokio::time::sleep(ANOTHER).await;
                // A void message is removed by its author.
                let up_to = last_of_all(&self.broker, &self.tenant).await?;
                self.up_to = up_to.unwrap_or(0);
                match consume(&self.broker, &self.tenant).await {
                    Ok(messages) => self.messages = messages,
                    Err(error) => {
                        self.pardon(error)?;
                        continue;
                    }
                }
                (self.is_over, self.heard) = (false, Instant::now());
            }
            let until = deadline.min(self.heard + SILENCE);
            let message = match tokio::time::timeout_at(until, self.messages.next()).await {
                Ok(Some(Ok(message))) => message,
                Ok(Some(Err(error))) => {
                    self.pardon(BrokerError::operation(READ)(error))?;
                    continue;
                }
                Ok(None) => {
                    self.is_over = true;
                    continue;
                }
                Err(_) if self.heard.elapsed() < SILENCE => return Ok(Next::NotYet),
                // A copy may have none, and then nothing comes.
                Err(_) if self.seen == 0 && self.since.elapsed() < LAG => {
                    self.is_over = true;
                    continue;
                }
                Err(_) => {
                    return Err(self.missing(&format!("the broker sent nothing for {SILENCE:?}")));
                }
            };
            self.heard = Instant::now();
            let Ok(info) = message.info() else { continue };
            self.seen = self.seen.max(info.stream_sequence);
            (self.remaining, self.is_over) = (info.pending, info.pending == 0);
            let header = message.headers.as_ref();
            let header = header.and_then(|h| h.get(subjects::EVENT_HEADER));
            return Ok(Next::Message {
                seq: info.stream_sequence,
                header: header.map(|h| h.as_str().to_owned()).unwrap_or_default(),
            });
        }
    }

    fn missing(&self, why: &str) -> BrokerError {
        BrokerError::Missing {
            what: format!("the rest of the ledgers of {}", self.tenant),
            hint: format!(": {why}"),
        }
    }
}

/// The last sequence of a tenant's ledgers, as the leader has it.
async fn last_of_all(broker: &Broker, tenant: &Tenant) -> Result<Option<Sequence>, BrokerError> {
    let stream = broker.js.get_stream_no_info(subjects::LEDGER_STREAM).await;
    let stream = stream.map_err(BrokerError::operation(READ))?;
    let last = leader::last(&stream, &subjects::ledgers(tenant)).await?;
    Ok(last.map(|last| last.sequence))
}

async fn consume(broker: &Broker, tenant: &Tenant) -> Result<pull::Stream, BrokerError> {
    let config = pull::Config {
        ack_policy: AckPolicy::None,
        headers_only: true,
        deliver_policy: DeliverPolicy::LastPerSubject,
        filter_subject: subjects::ledgers(tenant),
        inactive_threshold: KEPT,
        ..Default::default()
    };
    let consumer = broker
        .js
        .create_consumer_on_stream(config, subjects::LEDGER_STREAM)
        .await
        .map_err(BrokerError::operation(READ))?;
    let messages = consumer.stream().max_messages_per_batch(1_000).messages();
    messages.await.map_err(BrokerError::operation(READ))
}
