//! The live timeline: the ledger's events as they are appended, with few of the boundaries.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use fiec::commands::watch;
use fiec_broker::Broker;
use fiec_broker::BrokerError;
use fiec_broker::feed::{self, FeedItem};
use fiec_schemas::{Event, ExecutionId, LedgerMessage};
use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;

/// Shortest time between two printed commits.
const COMMIT_LINES: Duration = Duration::from_millis(900);

/// Follows all ledgers and prints one execution's events.
pub struct Timeline {
    feed: BoxStream<'static, Result<FeedItem, BrokerError>>,
    began: Instant,
    quiet: bool,
    commit_shown: Option<Instant>,
}

impl Timeline {
    /// Opens the feed. No later event is missed.
    ///
    /// # Errors
    /// If the broker refuses.
    pub async fn open(broker: &Broker, quiet: bool) -> anyhow::Result<Self> {
        let feed = feed::live(broker).await?;
        Ok(Self {
            feed,
            began: Instant::now(),
            quiet,
            commit_shown: None,
        })
    }

    /// Prints a line of the demo itself.
    pub fn say(&self, text: &str) {
        if !self.quiet {
            println!("{:7.3} s  ▶ {text}", self.began.elapsed().as_secs_f64());
        }
    }

    /// Follows the feed until `found` returns a value for a message of the execution.
    ///
    /// # Errors
    /// At the deadline, or if the execution ends before.
    pub async fn until<T>(
        &mut self,
        execution: ExecutionId,
        patience: Duration,
        found: impl Fn(&LedgerMessage) -> Option<T>,
    ) -> anyhow::Result<T> {
        let deadline = tokio::time::Instant::now() + patience;
        loop {
            let item = tokio::time::timeout_at(deadline, self.feed.next())
                .await
                .with_context(|| format!("nothing of the kind within {patience:?}"))?
                .context("the ledger feed ended")?;
            let item = match item {
                Ok(item) => item,
                Err(error) => {
                    tracing::debug!(%error, "ledger feed");
                    continue;
                }
            };
            if item.execution != execution {
                continue;
            }
            let message = item.message()?;
            self.show(&message);
            if let Some(answer) = found(&message) {
                return Ok(answer);
            }
            if message.state.phase.is_terminal() {
                bail!("the execution is {} already", message.state.phase.as_str());
            }
        }
    }

    fn show(&mut self, message: &LedgerMessage) {
        if self.quiet {
            return;
        }
        let only_commit = message
            .events
            .iter()
            .all(|e| matches!(e, Event::Boundary(_)));
        if only_commit {
            if self
                .commit_shown
                .is_some_and(|at| at.elapsed() < COMMIT_LINES)
            {
                return;
            }
            self.commit_shown = Some(Instant::now());
        }
        for line in watch::in_words(message) {
            println!("{:7.3} s    {line}", self.began.elapsed().as_secs_f64());
        }
    }
}
