//! What one execution waits for.

use fiec_schemas::ExecutionId;
use fiec_schemas::scheduling::AfterOutcome;

use crate::fate::{Fate, Seen};

/// An execution that must end first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Awaited {
    /// Its id.
    pub id: ExecutionId,
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
    pub after: Vec<Awaited>,
    /// The dependency because of which it can no longer run.
    pub fails: Option<InVain>,
}

impl Held {
    /// Handles what was seen of a dependency. `old`: its ledger would exist by now. Returns true if
    /// something changed.
    pub fn learn(&mut self, id: ExecutionId, seen: Seen, old: bool) -> bool {
        let Some(at) = self.after.iter().position(|a| a.id == id) else {
            return false;
        };
        let (name, on) = (&self.after[at].name, self.after[at].on);
        let awaited = self.after[at].clone();
        let in_vain = |words| InVain { awaited, words };
        match (seen, on) {
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
        self.after.retain(|a| a.id != id);
        true
    }
}
