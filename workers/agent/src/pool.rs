//! Idle children, kept so that the next execution of the same program and tenant starts at once.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fiec_schemas::ExecutionId;

use crate::child_process::{Child, Key, Spawner};
use crate::logs::Logs;
use crate::packages::Package;

/// Idle children of a node.
pub struct Pool {
    /// The one that was idle longest comes first.
    idle: Mutex<VecDeque<Child>>,
    /// How many are kept.
    limit: usize,
    spawner: Spawner,
    /// Makes a new child's logs.
    logs: Box<dyn Fn() -> Logs + Send + Sync>,
}

impl Pool {
    /// At most `limit` are kept.
    pub fn new(
        limit: usize,
        spawner: Spawner,
        logs: impl Fn() -> Logs + Send + Sync + 'static,
    ) -> Self {
        Self {
            idle: Mutex::default(),
            limit,
            spawner,
            logs: Box::new(logs),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<Child>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, key: &Key, execution: ExecutionId, own: bool) -> Option<Child> {
        let mut idle = self.lock();
        let same = |c: &Child| c.key.as_ref() == Some(key);
        let at = idle
            .iter()
            .rposition(|c| same(c) && c.prepared_for == Some(execution))
            .or_else(|| {
                idle.iter()
                    .rposition(|c| same(c) && c.prepared_for.is_none())
            })
            .or_else(|| idle.iter().rposition(|c| !own && c.key.is_none()))?;
        idle.remove(at)
    }

    /// A child for this key: an idle one, a new one that nobody has used yet, or one started now.
    /// `package` is the program, where it is not built in.
    ///
    /// # Errors
    /// When none can be started.
    pub async fn take(
        &self,
        key: &Key,
        execution: ExecutionId,
        package: Option<&Arc<Package>>,
    ) -> io::Result<Child> {
        let own = package.is_some_and(|p| p.command().is_some());
        let mut child = match self.find(key, execution, own) {
            Some(child) => child,
            None => self.spawner.spawn(package, (self.logs)()).await?,
        };
        child.key = Some(key.clone());
        child.prepared_for = None;
        child.package = package.cloned();
        Ok(child)
    }

    /// A child that has not served the key's executions yet, for one that just died idle.
    ///
    /// # Errors
    /// When none can be started.
    pub async fn fresh(&self, key: &Key, package: Option<&Arc<Package>>) -> io::Result<Child> {
        let mut child = self.spawner.spawn(package, (self.logs)()).await?;
        child.key = Some(key.clone());
        Ok(child)
    }

    /// Has a new child waiting.
    pub async fn warm(&self) {
        match self.spawner.spawn(None, (self.logs)()).await {
            Ok(child) => self.give(child),
            Err(error) => tracing::warn!(%error, "cannot start a child ahead of time"),
        }
    }

    /// Takes a child back; the oldest goes when there are too many.
    pub fn give(&self, mut child: Child) {
        child.idle_since = std::time::Instant::now();
        let mut idle = self.lock();
        idle.push_back(child);
        while idle.len() > self.limit {
            idle.pop_front();
        }
    }

    /// Ends children that were idle for longer than this, except one.
    pub fn sweep(&self, longest: Duration) {
        let mut idle = self.lock();
        while idle.len() > 1
            && idle
                .front()
                .is_some_and(|c| c.idle_since.elapsed() > longest)
        {
            idle.pop_front();
        }
    }

    /// Ends all.
    pub fn clear(&self) {
        self.lock().clear();
    }
}
