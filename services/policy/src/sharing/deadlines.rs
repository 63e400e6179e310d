//! Schedule of the executions that fail after their deadline. Each has one entry, from its first
//! message to its end.

use std::collections::{BTreeMap, BTreeSet};

use fiec_schemas::{ExecutionId, Timestamp};

/// Deadlines of live executions.
#[derive(Debug, Default)]
pub struct Deadlines {
    /// For each execution its deadline, and the time of the next check.
    known: BTreeMap<ExecutionId, (Timestamp, Timestamp)>,
    looks: BTreeSet<(Timestamp, ExecutionId)>,
}

impl Deadlines {
    /// Sets or removes an execution's deadline. An unchanged deadline keeps its next check.
    pub fn note(&mut self, id: ExecutionId, deadline: Option<Timestamp>) {
        if self.known.get(&id).map(|(known, _)| *known) == deadline {
            return;
        }
        self.forget(id);
        if let Some(at) = deadline {
            self.known.insert(id, (at, at));
            self.looks.insert((at, id));
        }
    }

    /// The first execution that is due for a check.
    pub fn due(&self, now: Timestamp) -> Option<ExecutionId> {
        let (at, id) = self.looks.first()?;
        (*at <= now).then_some(*id)
    }

    /// Schedules the next check.
    pub fn again(&mut self, id: ExecutionId, at: Timestamp) {
        if let Some((_, look)) = self.known.get_mut(&id) {
            self.looks.remove(&(*look, id));
            *look = at;
            self.looks.insert((at, id));
        }
    }

    /// Forgets an execution that no longer lives.
    pub fn forget(&mut self, id: ExecutionId) {
        if let Some((_, look)) = self.known.remove(&id) {
            self.looks.remove(&(look, id));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    #[test]
    fn one_stands_once_however_often_it_is_noted_and_nothing_is_left_of_what_has_ended() {
        let at = Timestamp::from_micros;
        let (one, two) = (1, 2);
        let id = |n| ExecutionId(Uuid::from_u128(n));
        let mut deadlines = Deadlines::default();
        deadlines.note(id(one), Some(at(10)));
        deadlines.note(id(two), Some(at(20)));
        assert_eq!(deadlines.due(at(9)), None);
        assert_eq!(deadlines.due(at(15)), Some(id(one)));
        deadlines.again(id(one), at(30));
        // Messages in the meantime do not bring the check forward.
        deadlines.note(id(one), Some(at(10)));
        assert_eq!(deadlines.due(at(25)), Some(id(two)));
        deadlines.note(id(two), Some(at(40)));
        assert_eq!(deadlines.due(at(30)), Some(id(one)));
        deadlines.note(id(one), None);
        assert_eq!(deadlines.due(at(30)), None);
        deadlines.forget(id(two));
        assert!(deadlines.known.is_empty() && deadlines.looks.is_empty());
    }
}
