//! Follows the ledgers during a bench and picks out moments.
//!
//! [`Follow`] reads every message as it comes, which takes a core at the very moment that is
//! measured. Where that matters, [`ended`] and [`arrived`] look at one ledger now and then instead.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use fiec_broker::feed::{self, FeedItem};
use fiec_broker::{Broker, BrokerError, Ledger};
use fiec_schemas::{Event, ExecutionId, LedgerMessage, Phase, Timestamp};
use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;

use super::tenant;

/// The feed of all ledgers from now on.
pub struct Follow {
    feed: BoxStream<'static, Result<FeedItem, BrokerError>>,
}

/// When and how long an execution computed, as its program's own clock says.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    /// Begin of its first capsule.
    pub since: Timestamp,
    /// End of its last capsule.
    pub until: Timestamp,
    /// Capsules in all.
    pub capsules: u64,
    /// Boundaries committed.
    pub commits: u64,
}

impl Span {
    /// Seconds between the first capsule's begin and the last one's end.
    pub fn seconds(&self) -> f64 {
        (self.until.micros() - self.since.micros()) as f64 / 1e6
    }
}

impl Follow {
    /// Opens the feed.
    ///
    /// # Errors
    /// When the broker refuses.
    pub async fn open(broker: &Broker) -> anyhow::Result<Self> {
        Ok(Self {
            feed: feed::live(broker).await?,
        })
    }

    /// The next message of any execution.
    ///
    /// # Errors
    /// At the deadline.
    pub async fn next(
        &mut self,
        patience: Duration,
    ) -> anyhow::Result<(ExecutionId, LedgerMessage)> {
        loop {
            let item = tokio::time::timeout(patience, self.feed.next())
                .await
                .with_context(|| format!("nothing happened for {patience:?}"))?
                .context("the ledger feed ended")?;
            match item {
                Ok(item) => return Ok((item.execution, item.message()?)),
                Err(error) => tracing::debug!(%error, "ledger feed"),
            }
        }
    }

    /// Follows one execution to its end.
    ///
    /// # Errors
    /// When it does not complete.
    pub async fn to_completion(
        &mut self,
        execution: ExecutionId,
        patience: Duration,
    ) -> anyhow::Result<Span> {
        let mut since = None;
        loop {
            let (id, message) = self.next(patience).await?;
            if id != execution {
                continue;
            }
            for event in &message.events {
                match event {
                    Event::Started {
                        computing_since, ..
                    } if since.is_none() => {
                        since = Some(*computing_since);
                    }
                    Event::Completed {
                        computed_until,
                        capsules,
                        ..
                    } => {
                        return Ok(Span {
                            since: since.context("it completed without having started")?,
                            until: *computed_until,
                            capsules: *capsules,
                            commits: message.state.totals.commits,
                        });
                    }
                    Event::Failed { reason, stderr } => bail!("it failed: {reason}\n{stderr}"),
                    _ => {}
                }
            }
        }
    }

    /// Follows one execution until it is started under this epoch or a later one; the begin of
    /// its first capsule there, and the end of the last capsule before where it has moved.
    ///
    /// # Errors
    /// When it ends, or at the deadline.
    pub async fn started(
        &mut self,
        execution: ExecutionId,
        epoch: u64,
        patience: Duration,
    ) -> anyhow::Result<Moved> {
        let mut yielded = None;
        loop {
            let (id, message) = self.next(patience).await?;
            if id != execution {
                continue;
            }
            for event in &message.events {
                match event {
                    Event::Yielded { computed_until, .. } => yielded = Some(*computed_until),
                    Event::Started {
                        epoch: at,
                        computing_since,
                    } if *at >= epoch => {
                        let Phase::Started(binding) = &message.state.phase else {
                            bail!("it ended in the message that started it");
                        };
                        return Ok(Moved {
                            epoch: *at,
                            node: binding.node.to_string(),
                            since: *computing_since,
                            yielded,
                        });
                    }
                    Event::Completed { .. } | Event::Failed { .. } => {
                        bail!("it ended: {:?}", message.events);
                    }
                    _ => {}
                }
            }
        }
    }
}

/// A start, with the end of computing before it.
#[derive(Debug, Clone)]
pub struct Moved {
    /// The epoch.
    pub epoch: u64,
    /// The node.
    pub node: String,
    /// Begin of the first capsule there.
    pub since: Timestamp,
    /// End of the last capsule on the node before.
    pub yielded: Option<Timestamp>,
}

/// An execution that has completed.
#[derive(Debug, Clone, Copy)]
pub struct Ended {
    /// End of its last capsule.
    pub until: Timestamp,
    /// Capsules in all.
    pub capsules: u64,
    /// Boundaries committed.
    pub commits: u64,
    /// How often it was bound anew.
    pub rebindings: u64,
}

/// Looks `every` so often until an execution has completed, first after such a pause.
///
/// # Errors
/// When it ends otherwise, or at the deadline.
pub async fn ended(
    broker: &Broker,
    execution: ExecutionId,
    every: Duration,
    patience: Duration,
) -> anyhow::Result<Ended> {
    let (ledger, tenant) = (Ledger::new(broker), tenant()?);
    let deadline = Instant::now() + patience;
    loop {
        tokio::time::sleep(every).await;
        let message = ledger.last(&tenant, execution).await?.map(|e| e.message);
        for event in message.iter().flat_map(|m| &m.events) {
            match event {
                Event::Completed {
                    computed_until,
                    capsules,
                    ..
                } => {
                    return Ok(Ended {
                        until: *computed_until,
                        capsules: *capsules,
                        commits: message.as_ref().map_or(0, |m| m.state.totals.commits),
                        rebindings: message.as_ref().map_or(0, |m| m.state.totals.rebindings),
                    });
                }
                Event::Failed { reason, stderr } => bail!("it failed: {reason}\n{stderr}"),
                _ => {}
            }
        }
        if Instant::now() > deadline {
            bail!("it did not complete within {patience:?}");
        }
    }
}

/// Looks `every` so often until an execution computes under this epoch, first after such a pause.
/// The message that says when it began must still be its last one then: nothing else may happen
/// to it within such a pause.
///
/// # Errors
/// When it ends or something else happened to it, or at the deadline.
pub async fn arrived(
    broker: &Broker,
    execution: ExecutionId,
    epoch: u64,
    every: Duration,
    patience: Duration,
) -> anyhow::Result<Moved> {
    let (ledger, tenant) = (Ledger::new(broker), tenant()?);
    let deadline = Instant::now() + patience;
    loop {
        tokio::time::sleep(every).await;
        let last = ledger.last(&tenant, execution).await?.map(|e| e.message);
        if let Some(message) = last.filter(|m| m.state.epoch >= epoch)
            && let Phase::Started(binding) = &message.state.phase
        {
            let since = message.events.iter().find_map(|event| match event {
                Event::Started {
                    computing_since, ..
                } => Some(*computing_since),
                _ => None,
            });
            let bound = ledger.by_sequence(binding.seq).await?.message;
            let yielded = bound.events.iter().find_map(|event| match event {
                Event::Yielded { computed_until, .. } => Some(*computed_until),
                _ => None,
            });
            return Ok(Moved {
                epoch: message.state.epoch,
                node: binding.node.to_string(),
                since: since.context("something happened right after it had started")?,
                yielded,
            });
        }
        if Instant::now() > deadline {
            bail!("it did not arrive within {patience:?}");
        }
    }
}
