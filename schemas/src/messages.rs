//! Messages beside the ledger: capsules, handover, control, the operator's requests, records.

mod api;
mod record;
mod refusal;
mod verbs;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::event::{Cause, Decision, ExecutionState};
use crate::hardware::RunningProgress;
use crate::ids::{Digest, Epoch, ExecutionId, InstanceId, NodeId, Sequence, Tenant};
use crate::package::Grant;
use crate::scheduling::{Adjustment, Keep};
use crate::tagged::tagged;
use crate::trust::Segment;

pub use api::*;
pub use record::*;
pub use refusal::*;
pub use verbs::*;

/// Header of a handover message that holds a [`Handover`] as JSON.
pub const HANDOVER_HEADER: &str = "Fiec-Handover";

/// Bindings for a node to take up: one message on `fiec.capsule.<shard>.<node>`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CapsuleMessage {
    /// Version of this message: 1.
    pub v: u8,
    /// The bindings.
    pub bindings: Vec<CapsuleBinding>,
    /// The life of the broker's server that gave their sequences; after another begin of the server
    /// a sequence may be another message's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
}

/// One binding to take up.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CapsuleBinding {
    /// Sequence of the last message of the execution's ledger, which `started` must follow.
    pub seq: Sequence,
    /// Digest of that message's `Fiec-Event` header.
    pub digest: Digest,
    /// The state that it gives (sequences resolved or 0 for `seq`).
    pub state: ExecutionState,
}

tagged! { "is", "Handover",
    /// What a handover message on `fiec.handover.<node>` is; the body of a part is a piece of σ.
    #[derive(Debug, Clone, PartialEq, JsonSchema)]
    pub enum Handover {
        /// A piece of σ, sent at the moment of the append that binds the destination.
        Part {
            /// Which execution.
            execution: ExecutionId,
            /// The epoch that the append makes.
            epoch: Epoch,
            /// From 0.
            part: u32,
            /// How many there are.
            parts: u32,
            /// Digest of the whole σ.
            digest: Digest,
            /// Bytes of the whole σ.
            bytes: u64,
            /// The ledger message as it is being appended (with part 0).
            #[serde(default, skip_serializing_if = "Option::is_none")]
            ledger: Option<String>,
            /// Where σ is large: the bytes of all parts, which are the list of its chunks and those of
            /// them that the commit before does not have.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            delta: Option<u64>,
        },
        /// First bindings that the node is entrusted with. Each line of the body is the header of a
        /// ledger message that was not appended. The node computes at once, and appends the
        /// binding's events together with its own as the first message of that ledger. If it does
        /// not do so in time, the policy service appends the line as it stands, and sends a capsule
        /// message.
        Entrusted {
            /// Number of lines of the body.
            bindings: u32,
        },
        /// The append was acknowledged: `started` must follow this sequence.
        Confirmed {
            /// Which execution.
            execution: ExecutionId,
            /// The epoch.
            epoch: Epoch,
            /// The sequence.
            seq: Sequence,
            /// Digest of the ledger message that was appended; a node that has heard of another one
            /// drops that.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            bound: Option<Digest>,
            /// The life of the broker's server that gave the sequence.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            server: Option<String>,
        },
        /// The append failed: discard the speculation.
        Abandoned {
            /// Which execution.
            execution: ExecutionId,
            /// The epoch.
            epoch: Epoch,
        },
    }
}

/// A place to move to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Destination {
    /// The node.
    pub node: NodeId,
    /// Which life of its agent.
    pub instance: InstanceId,
    /// Which place on it.
    pub substrate: String,
}

/// A request to a node on `fiec.control.<node>`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum ControlRequest {
    /// Are you there, and who are you?
    Ping,
    /// Which executions do you hold? The answer has a page of them, in order of their ids.
    Holdings {
        /// The page begins behind this one; absent for the first page.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        after: Option<ExecutionId>,
    },
    /// A rebinding is coming: have a child of this program ready and inputs fetched.
    Prepare {
        /// Which execution.
        execution: ExecutionId,
        /// Its tenant.
        tenant: Tenant,
        /// Its program.
        program: String,
        /// Bytes of σ to expect.
        state_bytes: u64,
        /// Where on the node it will be bound; none: on its host. The context of a device is made
        /// ahead.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        substrate: Option<String>,
    },
    /// Yield at the next boundary: commit there and end the run. The execution goes on elsewhere.
    Yield {
        /// Which execution.
        execution: ExecutionId,
        /// Under which epoch; another one is refused.
        epoch: Epoch,
        /// Why.
        cause: Cause,
        /// Where to; without it the policy service binds anew.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        to: Option<Destination>,
        /// How that was chosen.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        decision: Option<Decision>,
    },
    /// Give the execution up now, at a boundary or not: it goes on from its last commit elsewhere.
    GiveUp {
        /// Which execution.
        execution: ExecutionId,
        /// Under which epoch; another one is refused.
        epoch: Epoch,
        /// Why.
        cause: Cause,
    },
    /// Run the canaries anew and publish what they show.
    Prove,
    /// Compute a part of an execution once more, beside real work and never before it; what is
    /// found is published on `fiec.verdict`.
    Verify {
        /// Names the question.
        question: u64,
        /// Of which execution.
        execution: ExecutionId,
        /// Its tenant.
        tenant: Tenant,
        /// Which part.
        segment: Segment,
    },
    /// Yield at the next boundary, and stay paused.
    Pause {
        /// Which execution.
        execution: ExecutionId,
        /// Who asked.
        who: String,
    },
    /// Park at the next boundary: commit there, keep this of the execution, and wait.
    Park {
        /// Which execution.
        execution: ExecutionId,
        /// Under which epoch; another one is refused.
        epoch: Epoch,
        /// Why.
        cause: Cause,
        /// What it keeps.
        keep: Keep,
    },
    /// Go on where it is parked.
    Unpark {
        /// Which execution.
        execution: ExecutionId,
        /// Under which epoch; another one is refused.
        epoch: Epoch,
        /// Why, or who asked.
        reason: String,
    },
    /// Give the last half of what is left away at the next boundary, as a part of its own.
    Split {
        /// Which execution.
        execution: ExecutionId,
        /// Under which epoch; another one is refused.
        epoch: Epoch,
    },
    /// Append that something about it is changed from now on.
    Adjust {
        /// Which execution.
        execution: ExecutionId,
        /// Who asked.
        who: String,
        /// What is changed.
        change: Adjustment,
    },
    /// Give it more or less from its next boundary on.
    Reconfigure {
        /// Which execution.
        execution: ExecutionId,
        /// Under which epoch; another one is refused.
        epoch: Epoch,
        /// What it may use then; what is left out stays as it is.
        grant: Grant,
        /// Who asked.
        #[serde(default)]
        who: String,
    },
    /// End it now.
    Cancel {
        /// Which execution.
        execution: ExecutionId,
        /// Who asked.
        who: String,
    },
}

impl ControlRequest {
    /// The execution whose runner takes the request, and the epoch that it must have there. None
    /// for a request that the node itself takes.
    pub fn runner(&self) -> Option<(ExecutionId, Option<Epoch>)> {
        match *self {
            Self::Yield {
                execution, epoch, ..
            }
            | Self::GiveUp {
                execution, epoch, ..
            }
            | Self::Park {
                execution, epoch, ..
            }
            | Self::Unpark {
                execution, epoch, ..
            }
            | Self::Split { execution, epoch }
            | Self::Reconfigure {
                execution, epoch, ..
            } => Some((execution, Some(epoch))),
            Self::Pause { execution, .. }
            | Self::Adjust { execution, .. }
            | Self::Cancel { execution, .. } => Some((execution, None)),
            Self::Ping
            | Self::Holdings { .. }
            | Self::Prepare { .. }
            | Self::Prove
            | Self::Verify { .. } => None,
        }
    }
}

/// A node's answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ControlReply {
    /// The node.
    pub node: NodeId,
    /// Which life of its agent answers.
    pub instance: InstanceId,
    /// Why the request was not taken; absent where it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Why it was not taken, for programs, where that has a name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<Refusal>,
    /// For `ping`: what runs here.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub running: Vec<RunningProgress>,
    /// For `holdings`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holdings: Option<HoldingsPage>,
}

/// Why a node does not take a request, where the asker can do something about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Refusal {
    /// The node does not hold the execution.
    NotHeld,
    /// The execution is about to start at the node, or to leave it. Ask again, where it is then.
    Moving,
}

/// Most executions on a page of [`ControlRequest::Holdings`]: some 300 KB of JSON.
pub const HOLDINGS_PAGE: usize = 4_000;

/// A page of the executions that a node holds: those that wait there, compute, or whose last
/// message is not yet stored.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HoldingsPage {
    /// They, in order of their ids; [`HOLDINGS_PAGE`] at most.
    pub held: Vec<Holding>,
    /// True where another page follows.
    #[serde(default)]
    pub more: bool,
}

/// An execution that a node holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Holding {
    /// Which.
    pub execution: ExecutionId,
    /// Under which epoch.
    pub epoch: Epoch,
}
