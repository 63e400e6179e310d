//! The states that this node fetches for executions that are bound to it. The hardware vector lists
//! them, so that the policy service waits for a fetch that moves on.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use fiec_schemas::hardware::{ArrivingState, LISTED_LIMIT};
use fiec_schemas::{Epoch, ExecutionId};

/// Bytes that arrived, and bytes of the whole.
type Counted = (u64, u64);

/// The states that are being fetched.
#[derive(Debug, Default)]
pub struct Arrivals(Mutex<BTreeMap<(ExecutionId, Epoch), Counted>>);

/// The fetch of one state. It is listed until this is dropped.
#[derive(Debug)]
pub(crate) struct Arrival<'a> {
    all: &'a Arrivals,
    key: (ExecutionId, Epoch),
}

impl Arrivals {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<(ExecutionId, Epoch), Counted>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lists a fetch of `of` bytes for an execution that is bound here under this epoch.
    pub(crate) fn begin(&self, execution: ExecutionId, epoch: Epoch, of: u64) -> Arrival<'_> {
        let key = (execution, epoch);
        self.lock().insert(key, (0, of));
        Arrival { all: self, key }
    }

    /// Returns those that lack the most bytes, up to [`LISTED_LIMIT`]: only they take long.
    pub fn list(&self) -> Vec<ArrivingState> {
        let all = self.lock();
        let listed = all
            .iter()
            .map(|((execution, epoch), (bytes, of))| ArrivingState {
                execution: *execution,
                epoch: *epoch,
                bytes: *bytes,
                of: *of,
            });
        let mut listed: Vec<_> = listed.collect();
        drop(all);
        listed.sort_by_key(|a| Reverse(a.of.saturating_sub(a.bytes)));
        listed.truncate(LISTED_LIMIT);
        listed
    }
}

impl Arrival<'_> {
    /// Notes that `bytes` of `of` bytes are here.
    pub(crate) fn reached(&self, bytes: u64, of: u64) {
        self.all.lock().insert(self.key, (bytes, of));
    }
}

impl Drop for Arrival<'_> {
    fn drop(&mut self) {
        self.all.lock().remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id() -> ExecutionId {
        ExecutionId(uuid::Uuid::now_v7())
    }

    #[test]
    fn a_fetch_is_listed_with_its_bytes_until_it_ends() {
        let (arrivals, execution) = (Arrivals::default(), id());
        let arrival = arrivals.begin(execution, 3, 100);
        arrival.reached(40, 90);
        let listed = ArrivingState {
            execution,
            epoch: 3,
            bytes: 40,
            of: 90,
        };
        assert_eq!(arrivals.list(), [listed]);
        drop(arrival);
        assert_eq!(arrivals.list(), []);
    }

    #[test]
    fn those_that_lack_the_most_are_listed_and_no_more_than_the_limit() {
        let arrivals = Arrivals::default();
        let all: Vec<_> = (0..=LISTED_LIMIT as u64)
            .map(|n| arrivals.begin(id(), 1, 1_000 - n))
            .collect();
        let listed = arrivals.list();
        assert_eq!(listed.len(), LISTED_LIMIT);
        assert_eq!(listed[0].of, 1_000);
        assert!(listed.iter().all(|a| a.of > 1_000 - LISTED_LIMIT as u64));
        drop(all);
    }
}
