//! The reasons that hold an execution back although there may be room: dependencies, its gang, and
//! the limits of its batch and its tenant. Only executions with such a field, and tenants with
//! limits, have entries here.

use std::collections::{BTreeMap, BTreeSet};

use fiec_schemas::scheduling::{AfterOutcome, Dependency, Gang};
use fiec_schemas::{BatchName, ExecutionId, Submission};
use serde::Deserialize;

use crate::fate::{Fate, Seen};
use crate::time::Millis;

/// The fields of a submission that may hold it back.
#[derive(Debug, Default, Deserialize)]
pub struct HoldSpec {
    /// Its batch, if named.
    #[serde(default)]
    pub batch: Option<BatchName>,
    /// The executions that must end first.
    #[serde(default)]
    pub after: Vec<Dependency>,
    /// Most executions of its batch that run at once.
    #[serde(default)]
    pub at_once: Option<u32>,
    /// The gang with which it starts.
    #[serde(default)]
    pub gang: Option<Gang>,
}

impl HoldSpec {
    /// Reads a submission. None if it holds nothing back.
    pub fn of(spec: &Submission) -> Option<Self> {
        let any = spec.batch.is_some() || !spec.after.is_empty() || spec.gang.is_some();
        any.then(|| Self {
            batch: spec.batch.clone(),
            after: spec.after.clone(),
            at_once: spec.at_once,
            gang: spec.gang.clone(),
        })
    }

    /// Reads a submission in JSON. None if it holds nothing back.
    pub fn read(json: &str) -> Option<Self> {
        let spec: Self = serde_json::from_str(json).ok()?;
        let any = spec.batch.is_some() || !spec.after.is_empty() || spec.gang.is_some();
        any.then_some(spec)
    }
}

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

/// The state of all holds.
#[derive(Debug, Default)]
pub struct Holds {
    /// Executions with holds.
    pub held: BTreeMap<ExecutionId, Box<Held>>,
    /// For each awaited execution, those that wait for it.
    pub waiters: BTreeMap<ExecutionId, BTreeSet<ExecutionId>>,
    /// Awaited executions that are not known here, with the time of the next look at their ledgers.
    pub look_at: BTreeMap<ExecutionId, Millis>,
    /// Executions that can no longer run.
    pub failing: BTreeSet<ExecutionId>,
}

impl Holds {
    /// True for an execution that waits for no other to end.
    pub fn is_free(&self, id: ExecutionId) -> bool {
        let held = self.held.get(&id);
        held.is_none_or(|held| held.after.is_empty() && held.fails.is_none())
    }
}
