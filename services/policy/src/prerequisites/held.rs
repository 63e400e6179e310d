//! What one execution waits for.

use std::collections::BTreeMap;

use fiec_schemas::ExecutionId;
use fiec_schemas::scheduling::AfterOutcome;

use crate::fate::{Fate, Seen};

/// An execution that must end first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Awaited {
    /// Its id.
    pub id: ExecutionId,
    /// Its place in the submission.
    pub nth: usize,
    /// Its name in the submission.
    pub name: String,
    /// The required outcome.
    pub on: AfterOutcome,
}

/// A dependency whose outcome is not the required one.
#[derive(Debug, Clone)]
pub struct InVain {
    /// The dependency.
    pub awaited: Awaited,
    /// What became of it, in words.
    pub words: String,
}

/// The holds of one execution.
#[derive(Debug, Clone, Default)]
pub struct Held {
    /// Dependencies that have not ended yet.
    pub after: BTreeMap<ExecutionId, Awaited>,
    /// The dependency because of which it can no longer run.
    pub fails: Option<InVain>,
}

impl Held {
    /// Handles what was seen of a dependency. `old`: its ledger would exist by now. Returns true if
    /// something changed.
    pub fn learn(&mut self, id: ExecutionId, seen: Seen, old: bool) -> bool {
        let Some(awaited) = self.after.get(&id) else {
            return false;
        };
        let name = &awaited.name;
        let in_vain = |words| InVain {
            awaited: awaited.clone(),
            words,
        };
        match (seen, awaited.on) {
            (Seen::Ended(Fate::Completed), _) | (Seen::Ended(_), AfterOutcome::Any) => {}
            (Seen::Ended(fate), AfterOutcome::Ok) => {
                let words = format!("it waits for {name}, which {}", fate.in_words());
                self.fails = Some(in_vain(words));
            }
            (Seen::Vanished, AfterOutcome::Any) if old => {}
            (Seen::Vanished, AfterOutcome::Ok) if old => {
                let words = format!(
                    "it waits for {name}, of which nothing is known any more: it was refused, or it \
                     ended more than 30 days ago"
                );
                self.fails = Some(in_vain(words));
            }
            (Seen::Lives | Seen::Vanished, _) => return false,
        }
        self.after.remove(&id);
        true
    }

    /// The first `most` dependencies of the submission that have not ended yet.
    pub fn first(&self, most: usize) -> Vec<&Awaited> {
        let mut all: Vec<&Awaited> = self.after.values().collect();
        all.sort_unstable_by_key(|awaited| awaited.nth);
        all.truncate(most);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    fn id(n: u128) -> ExecutionId {
        ExecutionId(Uuid::from_u128(n))
    }

    /// It waits for 1 to complete, and for 2 to end.
    fn held() -> Held {
        let awaited = |n, nth, name: &str, on| {
            let awaited = Awaited {
                id: id(n),
                nth,
                name: name.to_owned(),
                on,
            };
            (id(n), awaited)
        };
        Held {
            after: BTreeMap::from([
                awaited(1, 1, "one", AfterOutcome::Ok),
                awaited(2, 0, "two", AfterOutcome::Any),
            ]),
            fails: None,
        }
    }

    #[test]
    fn an_end_of_the_required_kind_is_one_less_to_wait_for() {
        let mut held = held();
        assert!(held.learn(id(1), Seen::Ended(Fate::Completed), true));
        assert!(held.learn(id(2), Seen::Ended(Fate::Failed), true));
        assert!(held.after.is_empty() && held.fails.is_none());
        assert!(!held.learn(id(2), Seen::Ended(Fate::Failed), true), "known");
    }

    #[test]
    fn an_end_of_another_kind_is_one_with_which_it_fails() {
        for (seen, words) in [
            (Seen::Ended(Fate::Failed), "it waits for one, which failed"),
            (
                Seen::Ended(Fate::Cancelled),
                "it waits for one, which was cancelled",
            ),
            (
                Seen::Vanished,
                "it waits for one, of which nothing is known",
            ),
        ] {
            let mut held = held();
            assert!(held.learn(id(1), seen, true));
            let fails = held.fails.unwrap();
            assert!(fails.words.starts_with(words), "{}", fails.words);
            assert_eq!((fails.awaited.id, held.after.len()), (id(1), 1));
        }
    }

    #[test]
    fn words_name_them_in_the_order_of_the_submission() {
        let held = held();
        let first = |most| {
            held.first(most)
                .iter()
                .map(|a| &*a.name)
                .collect::<Vec<_>>()
        };
        assert_eq!((first(1), first(5)), (vec!["two"], vec!["two", "one"]));
    }

    #[test]
    fn a_ledger_that_lives_or_may_not_exist_yet_changes_nothing() {
        let mut held = held();
        for seen in [Seen::Lives, Seen::Vanished] {
            assert!(!held.learn(id(1), seen, false) && !held.learn(id(2), seen, false));
        }
        assert_eq!(held.after.len(), 2);
        // In the end, one of which nothing is known has ended somehow.
        assert!(held.learn(id(2), Seen::Vanished, true));
        assert!(held.fails.is_none());
    }
}
