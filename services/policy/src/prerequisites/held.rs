//! What one execution waits for.

use std::collections::BTreeMap;

use fiec_schemas::dependency::AfterOutcome;
use fiec_schemas::{ExecutionId, Timestamp};

use super::groups::GroupKey;
use crate::fate::{Fate, Seen};

/// What must end first.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Goal {
    /// An execution.
    One(ExecutionId),
    /// A group.
    All(Box<GroupKey>),
}

/// How a dependency is named, and what it requires.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Awaited {
    /// Its place in the submission.
    pub nth: usize,
    /// Its name in the submission.
    pub name: String,
    /// The required outcome.
    pub on: AfterOutcome,
}

/// Outlook of a dependency.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outlook {
    /// It may end as required.
    Open,
    /// It has ended as required.
    Met,
    /// It cannot end as required.
    InVain {
        /// What became of it.
        words: String,
        /// The execution that is the cause, if one is.
        by: Option<ExecutionId>,
    },
}

impl Awaited {
    /// The outlook after a look at the ledger of an execution. `old`: its ledger would exist by now.
    pub fn outlook(&self, id: ExecutionId, seen: Seen, old: bool) -> Outlook {
        let in_vain = |words: String| Outlook::InVain {
            words: format!("it waits for {}, {words}", self.name),
            by: Some(id),
        };
        match (seen, self.on) {
            (Seen::Ended(Fate::Completed), _) | (Seen::Ended(_), AfterOutcome::Any) => Outlook::Met,
            (Seen::Ended(fate), _) => in_vain(format!("which {}", fate.in_words())),
            (Seen::Vanished, AfterOutcome::Any) if old => Outlook::Met,
            (Seen::Vanished, _) if old => in_vain(
                "of which nothing is known: it was refused, or it ended more than 30 days ago"
                    .to_owned(),
            ),
            (Seen::Lives | Seen::Vanished, _) => Outlook::Open,
        }
    }
}

/// A dependency that cannot end as required.
#[derive(Debug, Clone)]
pub struct InVain {
    /// The dependency.
    pub goal: Goal,
    /// How it is named.
    pub awaited: Awaited,
    /// What became of it, in words.
    pub words: String,
    /// The execution that is the cause, if one is.
    pub by: Option<ExecutionId>,
}

/// The holds of one execution.
#[derive(Debug, Clone, Default)]
pub struct Held {
    /// Dependencies that have not ended yet.
    pub after: BTreeMap<Goal, Awaited>,
    /// The moment before which it is not placed. None once that has come.
    pub not_before: Option<Timestamp>,
    /// The dependency because of which it can no longer run.
    pub fails: Option<InVain>,
}

impl Held {
    /// Takes what is known of a dependency. Returns true if something changed.
    pub fn learn(&mut self, goal: &Goal, outlook: Outlook) -> bool {
        let Some(awaited) = self.after.get(goal) else {
            return false;
        };
        match outlook {
            Outlook::Open => return false,
            Outlook::Met => {}
            Outlook::InVain { words, by } => {
                self.fails = Some(InVain {
                    goal: goal.clone(),
                    awaited: awaited.clone(),
                    words,
                    by,
                });
            }
        }
        self.after.remove(goal);
        true
    }

    /// Waits again for the dependency because of which it fails, if it is this one.
    pub fn wait_again(&mut self, goal: &Goal) -> bool {
        let Some(in_vain) = self.fails.take_if(|in_vain| in_vain.goal == *goal) else {
            return false;
        };
        self.after.insert(in_vain.goal, in_vain.awaited);
        true
    }

    /// True if it waits for nothing.
    pub fn is_free(&self) -> bool {
        self.after.is_empty() && self.not_before.is_none() && self.fails.is_none()
    }

    /// The first `most` dependencies of the submission that have not ended yet.
    pub fn first(&self, most: usize) -> Vec<(&Goal, &Awaited)> {
        let mut all: Vec<_> = self.after.iter().collect();
        all.sort_unstable_by_key(|(_, awaited)| awaited.nth);
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
                nth,
                name: name.to_owned(),
                on,
            };
            (Goal::One(id(n)), awaited)
        };
        Held {
            after: BTreeMap::from([
                awaited(1, 1, "one", AfterOutcome::Ok),
                awaited(2, 0, "two", AfterOutcome::Any),
            ]),
            ..Held::default()
        }
    }

    fn learn(held: &mut Held, n: u128, seen: Seen, old: bool) -> bool {
        let goal = Goal::One(id(n));
        let outlook = held.after.get(&goal).map(|a| a.outlook(id(n), seen, old));
        outlook.is_some_and(|outlook| held.learn(&goal, outlook))
    }

    #[test]
    fn an_end_of_the_required_kind_is_one_less_to_wait_for() {
        let mut held = held();
        assert!(learn(&mut held, 1, Seen::Ended(Fate::Completed), true));
        assert!(learn(&mut held, 2, Seen::Ended(Fate::Failed), true));
        assert!(held.is_free());
        assert!(!learn(&mut held, 2, Seen::Ended(Fate::Failed), true));
    }

    #[test]
    fn an_end_of_another_kind_is_one_with_which_it_fails_until_that_starts_again() {
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
            assert!(learn(&mut held, 1, seen, true));
            let fails = held.fails.clone().unwrap();
            assert!(fails.words.starts_with(words), "{}", fails.words);
            assert_eq!((fails.by, held.after.len()), (Some(id(1)), 1));
            assert!(!held.wait_again(&Goal::One(id(2))));
            assert!(held.wait_again(&Goal::One(id(1))));
            assert_eq!((held.fails.is_none(), held.after.len()), (true, 2));
        }
    }

    #[test]
    fn words_name_them_in_the_order_of_the_submission() {
        let held = held();
        let first = |most| {
            let first = held.first(most).into_iter();
            first.map(|(_, a)| &*a.name).collect::<Vec<_>>()
        };
        assert_eq!((first(1), first(5)), (vec!["two"], vec!["two", "one"]));
    }

    #[test]
    fn a_ledger_that_lives_or_may_not_exist_yet_changes_nothing() {
        let mut held = held();
        for seen in [Seen::Lives, Seen::Vanished] {
            assert!(!learn(&mut held, 1, seen, false) && !learn(&mut held, 2, seen, false));
        }
        assert_eq!(held.after.len(), 2);
        // In the end, one of which nothing is known has ended somehow.
        assert!(learn(&mut held, 2, Seen::Vanished, true));
        assert!(held.fails.is_none());
    }
}
