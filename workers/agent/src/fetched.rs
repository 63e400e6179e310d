//! Earlier states of executions that were announced. They stay in memory until the execution comes:
//! the agent assembles handovers with them.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use fiec_broker::chunks::Manifest;
use fiec_schemas::{Digest, ExecutionId, StatePlace};
use tokio::sync::watch;

/// Most states, their bytes in all, and how long each is kept.
const WARM: usize = 4;
const WARM_BYTES: usize = 512 << 20;
const WARM_FOR: Duration = Duration::from_secs(60);
/// A handover waits this long for a running fetch of its earlier state, before it fetches the same.
const AHEAD_WITHIN: Duration = Duration::from_secs(5);

/// Chunks by their digests.
pub(crate) type Pieces = HashMap<Digest, Bytes>;

/// An earlier σ: its pieces, and the list of them if it was fetched.
#[derive(Debug)]
pub(crate) struct Before {
    /// Its chunks.
    pub(crate) pieces: Pieces,
    /// The commit's place, and its list.
    pub(crate) list: Option<(StatePlace, Manifest)>,
}

/// Each with its time of arrival and its bytes.
type Held = VecDeque<(Instant, ExecutionId, usize, Arc<Before>)>;

/// Earlier states of executions that were announced.
#[derive(Default)]
pub struct Warm {
    held: Mutex<Held>,
    /// Executions whose state is being fetched.
    coming: watch::Sender<HashSet<ExecutionId>>,
}

/// Marks a running fetch of an earlier state.
pub(crate) struct Coming<'a>(&'a Warm, ExecutionId);

impl Drop for Coming<'_> {
    fn drop(&mut self) {
        self.0.coming.send_modify(|all| _ = all.remove(&self.1));
    }
}

impl Warm {
    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks a fetch as running until the result is dropped. Returns none if one is running
    /// already.
    pub(crate) fn begin(&self, execution: ExecutionId) -> Option<Coming<'_>> {
        let begun = self.coming.send_if_modified(|all| all.insert(execution));
        // Built only then: dropping a second mark would remove the first.
        begun.then(|| Coming(self, execution))
    }

    pub(crate) fn hold(&self, execution: ExecutionId, before: Before) {
        let bytes: usize = before.pieces.values().map(Bytes::len).sum();
        let mut warm = self.lock();
        warm.retain(|(_, id, ..)| *id != execution);
        warm.push_back((Instant::now(), execution, bytes, Arc::new(before)));
        while warm.len() > WARM || warm.iter().map(|w| w.2).sum::<usize>() > WARM_BYTES {
            warm.pop_front();
        }
    }

    /// Returns the state of this execution and keeps it.
    pub(crate) fn held(&self, execution: ExecutionId) -> Option<Arc<Before>> {
        let warm = self.lock();
        let held = warm.iter().find(|(_, id, ..)| *id == execution)?;
        Some(Arc::clone(&held.3))
    }

    /// Takes the state of this execution out. Waits for a running fetch first.
    pub(crate) async fn take(&self, execution: ExecutionId) -> Option<Arc<Before>> {
        let mut coming = self.coming.subscribe();
        let here = coming.wait_for(|all| !all.contains(&execution));
        // The sender lives as long as `self`, so the only error is the timeout.
        let _ = tokio::time::timeout(AHEAD_WITHIN, here).await;
        let mut warm = self.lock();
        let at = warm.iter().position(|(_, id, ..)| *id == execution)?;
        warm.remove(at).map(|(.., before)| before)
    }

    /// Drops the states of executions that did not come.
    pub(crate) fn sweep(&self) {
        self.lock().retain(|(at, ..)| at.elapsed() < WARM_FOR);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(byte: u8) -> Before {
        let bytes = Bytes::from(vec![byte; 10]);
        Before {
            pieces: [(Digest::of(&bytes), bytes)].into(),
            list: None,
        }
    }

    fn id() -> ExecutionId {
        ExecutionId(uuid::Uuid::now_v7())
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_takes_a_state_waits_for_what_is_on_its_way_and_not_for_ever() {
        let (warm, execution) = (Arc::new(Warm::default()), id());
        assert!(warm.take(execution).await.is_none());
        let coming = warm.begin(execution).unwrap();
        assert!(warm.begin(execution).is_none(), "it is on its way already");
        let taker = tokio::spawn({
            let warm = Arc::clone(&warm);
            async move { warm.take(execution).await }
        });
        tokio::task::yield_now().await;
        assert!(!taker.is_finished());
        warm.hold(execution, one(1));
        drop(coming);
        assert_eq!(taker.await.unwrap().unwrap().pieces.len(), 1);
        assert!(warm.held(execution).is_none(), "it was taken");
        let _stuck = warm.begin(execution).unwrap();
        assert!(warm.take(execution).await.is_none());
    }

    #[test]
    fn the_newest_states_are_held_and_one_of_each_execution() {
        let warm = Warm::default();
        let ids: Vec<_> = (0..=WARM).map(|_| id()).collect();
        for execution in &ids {
            warm.hold(*execution, one(1));
            warm.hold(*execution, one(2));
        }
        assert!(warm.held(ids[0]).is_none());
        for execution in &ids[1..] {
            let held = warm.held(*execution).unwrap();
            assert!(held.pieces.values().all(|bytes| bytes[0] == 2));
        }
    }
}
