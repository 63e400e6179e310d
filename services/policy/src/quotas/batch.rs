//! Batches with a limit on concurrent executions.

use std::collections::BTreeMap;

use fiec_schemas::ExecutionId;

/// A batch with a limit on concurrent executions.
#[derive(Debug, Default)]
pub struct Limited {
    /// Its live executions, each with the limit that it states.
    members: BTreeMap<ExecutionId, Option<u32>>,
    /// Number of executions that state each limit. It makes `at_once` cheap for batches of a
    /// hundred thousand.
    limits: BTreeMap<u32, u32>,
}

impl Limited {
    /// Adds a live execution with the limit that it states.
    pub fn insert(&mut self, id: ExecutionId, limit: Option<u32>) {
        self.remove(id);
        self.members.insert(id, limit);
        if let Some(limit) = limit {
            *self.limits.entry(limit).or_default() += 1;
        }
    }

    /// Removes an execution that no longer lives.
    pub fn remove(&mut self, id: ExecutionId) {
        let Some(Some(limit)) = self.members.remove(&id) else {
            return;
        };
        if let Some(count) = self.limits.get_mut(&limit) {
            *count -= 1;
            if *count == 0 {
                self.limits.remove(&limit);
            }
        }
    }

    /// True if no execution of the batch lives.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// The smallest limit that one of them states.
    pub fn at_once(&self) -> Option<u32> {
        self.limits.first_key_value().map(|(limit, _)| *limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_runs_as_few_at_once_as_one_of_its_live_members_says() {
        let id = |number| ExecutionId(uuid::Uuid::from_u128(number));
        let mut batch = Limited::default();
        batch.insert(id(1), None);
        assert_eq!(batch.at_once(), None);
        batch.insert(id(2), Some(5));
        batch.insert(id(3), Some(3));
        batch.insert(id(4), Some(3));
        // The same execution with another limit.
        batch.insert(id(4), Some(4));
        assert_eq!(batch.at_once(), Some(3));
        batch.remove(id(3));
        assert_eq!(batch.at_once(), Some(4));
        batch.remove(id(4));
        batch.remove(id(4));
        assert_eq!(batch.at_once(), Some(5));
        batch.remove(id(2));
        batch.remove(id(1));
        assert!(batch.is_empty() && batch.at_once().is_none());
    }
}
