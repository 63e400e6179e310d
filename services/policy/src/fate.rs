//! How executions end, and what a look at a ledger shows.

use fiec_schemas::PhaseKind;
use serde::{Deserialize, Serialize};

/// The end of an execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fate {
    /// It completed.
    Completed,
    /// It failed.
    Failed,
    /// It was cancelled.
    Cancelled,
    /// A part that ended early: its holder computes the rest.
    Returned,
}

impl Fate {
    /// The end that a phase stands for. None if the execution still lives.
    pub fn of(phase: PhaseKind) -> Option<Self> {
        match phase {
            PhaseKind::Completed => Some(Fate::Completed),
            PhaseKind::Failed => Some(Fate::Failed),
            PhaseKind::Cancelled => Some(Fate::Cancelled),
            PhaseKind::Returned => Some(Fate::Returned),
            PhaseKind::Pending
            | PhaseKind::Bound
            | PhaseKind::Started
            | PhaseKind::Paused
            | PhaseKind::Held
            | PhaseKind::Verifying => None,
        }
    }

    /// The words for people.
    pub fn in_words(self) -> &'static str {
        match self {
            Fate::Completed => "completed",
            Fate::Failed => "failed",
            Fate::Cancelled => "was cancelled",
            Fate::Returned => "was given back",
        }
    }
}

/// Result of a look at the last message of a ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Seen {
    /// The execution lives.
    Lives,
    /// The ledger has no message.
    Vanished,
    /// The execution has ended.
    #[serde(untagged)]
    Ended(Fate),
}
