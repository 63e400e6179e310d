//! Picks moments out of the ledgers of executions that a bench measures.
//!
//! [`Follow`] reads every ledger message as it comes, which takes a core. A bench during which that
//! would change the figures polls one ledger instead, with [`ended`] and [`arrived`].

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use fiec_broker::feed::{self, FeedItem};
use fiec_broker::{Broker, BrokerError, Ledger};
use fiec_schemas::{Event, ExecutionId, LedgerMessage, Phase, Started, Timestamp};
use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;

use super::tenant;

/// The feed of all ledgers from now on.
pub struct Follow {
    feed: BoxStream<'static, Result<FeedItem, BrokerError>>,
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

    /// Returns the next message of any execution.
    ///
    /// # Errors
    /// When none comes within `patience`.
    pub async fn next(
        &mut self,
        patience: Duration,
    ) -> anyhow::Result<(ExecutionId, LedgerMessage)> {
        let item = self.next_item(patience).await?;
        Ok((item.execution, item.message()?))
    }

    /// Returns the next message of one execution, and the time at which the broker stored it.
    ///
    /// # Errors
    /// When it ends, or no execution has a message within `patience`.
    pub async fn next_of(
        &mut self,
        execution: ExecutionId,
        patience: Duration,
    ) -> anyhow::Result<(LedgerMessage, Timestamp)> {
        loop {
            let item = self.next_item(patience).await?;
            if item.execution != execution {
                continue;
            }
            let message = item.message()?;
            ensure!(
                !message.state.phase.is_terminal(),
                "it ended: {:?}",
                message.events
            );
            return Ok((message, item.stored_at));
        }
    }

    /// Waits until one execution computes under this epoch or a later one.
    ///
    /// # Errors
    /// When it ends, or no execution has a message within `patience`.
    pub async fn started(
        &mut self,
        execution: ExecutionId,
        epoch: u64,
        patience: Duration,
    ) -> anyhow::Result<Moved> {
        let mut yielded = None;
        loop {
            let (message, _) = self.next_of(execution, patience).await?;
            for event in &message.events {
                match event {
                    Event::Yielded { computed_until, .. } => yielded = Some(*computed_until),
                    Event::Started {
                        epoch: at,
                        computing_since,
                    } if *at >= epoch => {
                        let binding = message.state.phase.binding();
                        let binding = binding.context("it started without a node")?;
                        return Ok(Moved {
                            epoch: *at,
                            node: binding.node.to_string(),
                            since: *computing_since,
                            yielded,
                        });
                    }
                    _ => {}
                }
            }
        }
    }

    async fn next_item(&mut self, patience: Duration) -> anyhow::Result<FeedItem> {
        loop {
            let item = tokio::time::timeout(patience, self.feed.next())
                .await
                .with_context(|| format!("nothing happened for {patience:?}"))?
                .context("the ledger feed ended")?;
            match item {
                Ok(item) => return Ok(item),
                Err(error) => tracing::debug!(%error, "ledger feed"),
            }
        }
    }
}

/// A start on a node, with the end of computing on the node before.
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

impl Moved {
    /// Returns the end of the last capsule on the node `left`.
    ///
    /// # Errors
    /// When it is on that node again, or its ledger does not say when it stopped there.
    pub fn yielded_from(&self, left: &str) -> anyhow::Result<Timestamp> {
        ensure!(self.node != left, "it was bound to {left} again");
        self.yielded
            .context("a move without the end of computing before it")
    }
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
    /// Number of rebindings.
    pub rebindings: u64,
}

/// Polls a ledger until its execution has completed. The first poll is one interval from now.
///
/// # Errors
/// When it ends otherwise, or does not complete within `patience`.
pub async fn ended(
    broker: &Broker,
    execution: ExecutionId,
    interval: Duration,
    patience: Duration,
) -> anyhow::Result<Ended> {
    let (ledger, tenant) = (Ledger::new(broker), tenant()?);
    let deadline = Instant::now() + patience;
    loop {
        tokio::time::sleep(interval).await;
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
                Event::Failed { reason, stderr, .. } => bail!("it failed: {reason}\n{stderr}"),
                _ => {}
            }
        }
        if Instant::now() > deadline {
            bail!("it did not complete within {patience:?}");
        }
    }
}

/// Polls a ledger until its execution computes under this epoch or a later one. The first poll is
/// one interval from now. The message that tells the start must still be the last one of the ledger
/// then, so the execution must do nothing else within an interval.
///
/// # Errors
/// When its ledger has a later message, or it does not arrive within `patience`.
pub async fn arrived(
    broker: &Broker,
    execution: ExecutionId,
    epoch: u64,
    interval: Duration,
    patience: Duration,
) -> anyhow::Result<Moved> {
    let (ledger, tenant) = (Ledger::new(broker), tenant()?);
    let deadline = Instant::now() + patience;
    loop {
        tokio::time::sleep(interval).await;
        let last = ledger.last(&tenant, execution).await?.map(|e| e.message);
        if let Some(message) = last.filter(|m| m.state.epoch >= epoch)
            && let Phase::Started(Started { binding, .. }) = &message.state.phase
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

/// Milliseconds between two times of the ledger.
pub fn millis(from: Timestamp, to: Timestamp) -> f64 {
    (to.micros() - from.micros()) as f64 / 1e3
}
