//! Follows many executions through the live ledger feed.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fiec_broker::Broker;
use fiec_schemas::{Event, ExecutionId, LedgerMessage, Timestamp};
use serde_json::Value;
use tokio::task::JoinHandle;

use crate::bench::follow::Follow;

/// The end of an execution.
#[derive(Debug, Clone)]
pub(super) struct Ended {
    /// End of its last capsule.
    pub at: Timestamp,
    /// The program's result.
    pub result: Value,
}

#[derive(Debug, Default)]
struct Seen {
    ended: BTreeMap<ExecutionId, Ended>,
    failed: Option<String>,
    moved: u64,
    parked: u64,
    suspended: u64,
}

impl Seen {
    fn add(&mut self, id: ExecutionId, message: &LedgerMessage) {
        let is_bound = |e: &Event| matches!(e, Event::Bound { .. });
        let bound = message.events.iter().any(is_bound);
        for event in &message.events {
            match event {
                Event::Yielded { .. } if bound => self.moved += 1,
                Event::Yielded { .. } => self.suspended += 1,
                Event::Parked { .. } => self.parked += 1,
                Event::Completed {
                    result,
                    computed_until,
                    ..
                } => {
                    let end = Ended {
                        at: *computed_until,
                        result: result.clone(),
                    };
                    self.ended.insert(id, end);
                }
                Event::Failed { reason, stderr, .. } => {
                    self.failed = Some(format!("{id}: {reason}\n{stderr}"));
                }
                _ => {}
            }
        }
    }
}

/// Collects observations until it is dropped.
pub(super) struct Watch {
    seen: Arc<Mutex<Seen>>,
    task: JoinHandle<()>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Watch {
    /// Starts observing; no later event is missed.
    ///
    /// # Errors
    /// If the broker refuses.
    pub async fn open(broker: &Broker) -> anyhow::Result<Self> {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let mut follow = Follow::open(broker).await?;
        let ledger = Arc::clone(&seen);
        let task = tokio::spawn(async move {
            // It ends with the feed; each waiting caller has its own deadline.
            while let Ok((id, message)) = follow.next(Duration::from_secs(3_600)).await {
                lock(&ledger).add(id, &message);
            }
        });
        Ok(Self { seen, task })
    }

    /// The completed executions.
    pub fn ended(&self) -> BTreeMap<ExecutionId, Ended> {
        lock(&self.seen).ended.clone()
    }

    /// Number of completed executions.
    pub fn count(&self) -> usize {
        lock(&self.seen).ended.len()
    }

    /// The reason of a failure, if an execution has failed.
    pub fn failed(&self) -> Option<String> {
        lock(&self.seen).failed.clone()
    }

    /// Numbers of moves, parks and suspensions.
    pub fn counts(&self) -> (u64, u64, u64) {
        let seen = lock(&self.seen);
        (seen.moved, seen.parked, seen.suspended)
    }
}

fn lock(seen: &Mutex<Seen>) -> MutexGuard<'_, Seen> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}
