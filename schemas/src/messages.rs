//! Messages outside the ledger: capsules, handover, control, the operator's requests, records.

mod api;
mod record;
mod refusal;
mod verbs;

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::event::{Cause, Decision, ExecutionState};
use crate::hardware::RunningProgress;
use crate::ids::{Digest, Epoch, ExecutionId, InstanceId, NodeId, Sequence, Tenant};
use crate::package::Grant;
use crate::scheduling::{Adjustment, Keep};
use crate::trust::Segment;

pub use api::*;
pub use record::*;
pub use refusal::*;
pub use verbs::*;

/// Header of a handover message that holds a [`Handover`] as JSON.
pub const HANDOVER_HEADER: &str = "Fiec-Handover";

/// Bindings for a node: one message on `fiec.capsule.<shard>.<node>`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CapsuleMessage {
    /// Version of this message: 1.
    pub v: u8,
    /// The bindings.
    pub bindings: Vec<CapsuleBinding>,
    /// The life of the broker's server that gave the sequences of the bindings. In another life,
    /// another message can have the same sequence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
}

/// One binding of an execution to the node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CapsuleBinding {
    /// Sequence of the last message of the execution's ledger, which `started` must follow.
    pub seq: Sequence,
    /// Digest of that message's `Fiec-Event` header.
    pub digest: Digest,
    /// The state after that message (sequences resolved, or 0 for `seq`).
    pub state: Arc<ExecutionState>,
}

/// Kind of a handover message on `fiec.handover.<node>`. The body of a part is a piece of σ.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Handover {
    /// A piece of σ, sent at the moment of the append that binds the destination.
    Part {
        /// The execution.
        execution: ExecutionId,
        /// The epoch that the append makes.
        epoch: Epoch,
        /// Number of this part, from 0.
        part: u32,
        /// Number of all parts.
        parts: u32,
        /// Digest of the whole σ.
        digest: Digest,
        /// Bytes of the whole σ.
        bytes: u64,
        /// The ledger message that is being appended. It comes with part 0.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        ledger: Option<String>,
        /// For a large σ: bytes of all parts. The parts hold the list of its chunks, and the
        /// chunks that the commit before does not have.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        delta: Option<u64>,
    },
    /// First bindings that the node is entrusted with. Each line of the body is the header of a
    /// ledger message that was not appended. The node computes at once, and appends the
    /// binding's events together with its own as the first message of that ledger. If it does
    /// not do so in time, the policy service appends the line unchanged and sends a capsule
    /// message.
    Entrusted {
        /// Number of lines of the body.
        bindings: u32,
    },
    /// The append was acknowledged: `started` must follow this sequence.
    Confirmed {
        /// The execution.
        execution: ExecutionId,
        /// The epoch.
        epoch: Epoch,
        /// The sequence.
        seq: Sequence,
        /// Digest of the ledger message that was appended. A node that holds another message
        /// drops it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bound: Option<Digest>,
        /// The life of the broker's server that gave the sequence.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        server: Option<String>,
    },
    /// The append failed: discard the speculation.
    Abandoned {
        /// The execution.
        execution: ExecutionId,
        /// The epoch.
        epoch: Epoch,
    },
}

/// Destination of a move.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Destination {
    /// The node.
    pub node: NodeId,
    /// The life of its agent.
    pub instance: InstanceId,
    /// The substrate on it.
    pub substrate: String,
}

/// A request to a node on `fiec.control.<node>`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum ControlRequest {
    /// Asks whether the node is alive, and which life of its agent answers.
    Ping,
    /// Asks which executions the node holds. The answer has a page of them, ordered by id.
    Holdings {
        /// The page begins after this execution. Absent for the first page.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        after: Option<ExecutionId>,
    },
    /// Announces a rebinding: prepare a child with this program, and fetch its inputs.
    Prepare {
        /// The execution.
        execution: ExecutionId,
        /// Its tenant.
        tenant: Tenant,
        /// Its program.
        program: String,
        /// Bytes of σ to expect.
        state_bytes: u64,
        /// The substrate that it will be bound to. Absent: the host. For a device, the node makes
        /// its context ahead.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        substrate: Option<String>,
    },
    /// Yield at the next boundary: commit there and end the run. The execution continues elsewhere.
    Yield {
        /// The execution.
        execution: ExecutionId,
        /// Its epoch. The node refuses another one.
        epoch: Epoch,
        /// The reason.
        cause: Cause,
        /// The destination. Without it, the policy service binds the execution again.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        to: Option<Destination>,
        /// How the destination was chosen.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        decision: Option<Decision>,
    },
    /// Stop the execution now, at a boundary or not. It continues from its last commit elsewhere.
    GiveUp {
        /// The execution.
        execution: ExecutionId,
        /// Its epoch. The node refuses another one.
        epoch: Epoch,
        /// The reason.
        cause: Cause,
    },
    /// Run the canaries again and publish the proof.
    Prove,
    /// Compute a part of an execution again, beside other work and never before it. The node
    /// publishes its finding on `fiec.verdict`.
    Verify {
        /// Number of the question.
        question: u64,
        /// The execution.
        execution: ExecutionId,
        /// Its tenant.
        tenant: Tenant,
        /// The part.
        segment: Segment,
    },
    /// Yield at the next boundary, and stay paused.
    Pause {
        /// The execution.
        execution: ExecutionId,
        /// The person or program that asks.
        who: String,
    },
    /// Park at the next boundary: commit there, keep `keep`, and wait.
    Park {
        /// The execution.
        execution: ExecutionId,
        /// Its epoch. The node refuses another one.
        epoch: Epoch,
        /// The reason.
        cause: Cause,
        /// What the execution keeps.
        keep: Keep,
    },
    /// Continue the parked execution on this node.
    Unpark {
        /// The execution.
        execution: ExecutionId,
        /// Its epoch. The node refuses another one.
        epoch: Epoch,
        /// The reason, or who asked.
        reason: String,
    },
    /// Split at the next boundary: the last half of the remaining range becomes a part.
    Split {
        /// The execution.
        execution: ExecutionId,
        /// Its epoch. The node refuses another one.
        epoch: Epoch,
    },
    /// Append an adjustment of the execution, in force from now on.
    Adjust {
        /// The execution.
        execution: ExecutionId,
        /// The person or program that asks.
        who: String,
        /// The change.
        change: Adjustment,
    },
    /// Change its grant from its next boundary on.
    Reconfigure {
        /// The execution.
        execution: ExecutionId,
        /// Its epoch. The node refuses another one.
        epoch: Epoch,
        /// The new grant. An absent resource keeps its value.
        grant: Grant,
        /// The person or program that asks.
        #[serde(default)]
        who: String,
    },
    /// End the execution now.
    Cancel {
        /// The execution.
        execution: ExecutionId,
        /// The person or program that asks.
        who: String,
    },
}

impl ControlRequest {
    /// The execution whose runner handles the request, and the epoch that it must have. `None` if
    /// the node itself handles it.
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
    /// The life of its agent.
    pub instance: InstanceId,
    /// Why the request was refused. Absent if it was accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Reason for programs, if the refusal has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<Refusal>,
    /// For `ping`: the running executions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub running: Vec<RunningProgress>,
    /// For `holdings`: a page of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holdings: Option<HoldingsPage>,
}

/// Reasons of a refusal that the asker can act on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Refusal {
    /// The node does not hold the execution.
    NotHeld,
    /// The execution is about to start at the node, or to leave it. Ask again at its next node.
    Moving,
}

/// Most executions on a page of [`ControlRequest::Holdings`]: about 300 KB of JSON.
pub const HOLDINGS_PAGE: usize = 4_000;

/// A page of the executions that a node holds. They wait there, compute, or have a last message
/// that is not stored yet.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HoldingsPage {
    /// The executions, ordered by id; [`HOLDINGS_PAGE`] at most.
    pub held: Vec<Holding>,
    /// True if another page follows.
    #[serde(default)]
    pub more: bool,
}

/// An execution that a node holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Holding {
    /// The execution.
    pub execution: ExecutionId,
    /// Its epoch.
    pub epoch: Epoch,
}
