//! The actions: what each means, and which executions, batches and nodes it concerns.

use fiec_schemas::messages::{BatchVerb, ExecutionVerb, NodeVerb};
use serde::{Deserialize, Serialize};

use crate::pages::executions::Choice;

/// An action.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// End it.
    Cancel,
    /// Pause it at its next boundary.
    Pause,
    /// Go on with it.
    Resume,
    /// Start it again from its last commit.
    Retry,
    /// Move it at its next boundary.
    Move,
    /// Change its priority.
    Adjust,
    /// Lift an operator's restrictions of its nodes.
    Unpin,
    /// Place nothing new on a node.
    Cordon,
    /// Place work on it again.
    Uncordon,
    /// Move everything away from it.
    Drain,
    /// End a drain.
    Undrain,
}

impl What {
    /// The verb on buttons and command lines.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Cancel => "cancel",
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::Retry => "retry",
            Self::Move => "move",
            Self::Adjust => "adjust",
            Self::Unpin => "unpin",
            Self::Cordon => "cordon",
            Self::Uncordon => "uncordon",
            Self::Drain => "drain",
            Self::Undrain => "undrain",
        }
    }

    /// Explains it on the page that asks.
    pub(super) fn meaning(self) -> &'static str {
        match self {
            Self::Cancel => {
                "It ends at once, without another commit. A retry starts it again from its last one."
            }
            Self::Pause => {
                "It commits its next boundary, gives its place back and waits until it is resumed."
            }
            Self::Resume => "It goes on as soon as there is a place.",
            Self::Retry => {
                "It starts again from its last commit, under its id and with one history."
            }
            Self::Move => "It commits its next boundary and goes on elsewhere, with the same bits.",
            Self::Adjust => "Its new priority holds at once, also for what waits.",
            Self::Unpin => {
                "It may run on every node again. Restrictions of its submission stay in force."
            }
            Self::Cordon => "Nothing new is placed there. What computes there goes on.",
            Self::Uncordon => "Work is placed there again.",
            Self::Drain => {
                "Nothing new is placed there. What computes there moves away at its next boundary."
            }
            Self::Undrain => "Work is placed there again, and nothing more moves away.",
        }
    }

    /// The request about one execution.
    pub(super) fn of_execution(self) -> Option<ExecutionVerb> {
        match self {
            Self::Cancel => Some(ExecutionVerb::Cancel),
            Self::Pause => Some(ExecutionVerb::Pause),
            Self::Resume => Some(ExecutionVerb::Resume),
            Self::Retry => Some(ExecutionVerb::Retry),
            Self::Move => Some(ExecutionVerb::Yield),
            Self::Adjust | Self::Unpin => Some(ExecutionVerb::Adjust),
            Self::Cordon | Self::Uncordon | Self::Drain | Self::Undrain => None,
        }
    }

    /// The request about a whole batch.
    pub(super) fn of_batch(self) -> Option<BatchVerb> {
        match self {
            Self::Cancel => Some(BatchVerb::Cancel),
            Self::Pause => Some(BatchVerb::Pause),
            Self::Resume => Some(BatchVerb::Resume),
            Self::Retry => Some(BatchVerb::Retry),
            _ => None,
        }
    }

    /// Phases of executions that it concerns.
    pub(super) fn phases(self) -> &'static [&'static str] {
        match self {
            Self::Cancel | Self::Adjust | Self::Unpin => {
                &["pending", "bound", "started", "paused", "held", "verifying"]
            }
            Self::Pause | Self::Move => &["pending", "bound", "started"],
            Self::Resume => &["paused"],
            Self::Retry => &["failed", "held", "cancelled"],
            Self::Cordon | Self::Uncordon | Self::Drain | Self::Undrain => &[],
        }
    }

    /// What of a choice it concerns.
    pub(super) fn of_chosen(self, choice: &Choice) -> Choice {
        let named: Vec<&str> = choice.phase.split(',').filter(|p| !p.is_empty()).collect();
        let own = self.phases().iter().copied();
        let both: Vec<&str> = own
            .filter(|p| named.is_empty() || named.contains(p))
            .collect();
        Choice {
            // No phase has this name.
            phase: if both.is_empty() {
                "none".to_owned()
            } else {
                both.join(",")
            },
            skip: 0,
            ..choice.clone()
        }
    }

    /// The request about a node.
    pub(super) fn of_node(self) -> Option<NodeVerb> {
        match self {
            Self::Cordon => Some(NodeVerb::Cordon),
            Self::Uncordon => Some(NodeVerb::Uncordon),
            Self::Drain => Some(NodeVerb::Drain),
            Self::Undrain => Some(NodeVerb::Undrain),
            _ => None,
        }
    }
}
