//! What is told for the history, and between services.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::envelope::NodeEnvelopes;
use crate::hardware::NodeDescriptor;
use crate::ids::{
    BoundaryIndex, Digest, Epoch, ExecutionId, InstanceId, NodeId, Sequence, Tenant, Timestamp,
};
use crate::quota::Quota;
use crate::submission::LineError;
use crate::trust::SignedProof;

/// A fact on `fiec.record.*` for the recorder.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Record {
    /// A submission line was refused.
    Rejection {
        /// The subject's tenant, as it was given.
        tenant: String,
        /// Sequence of the submission message, where it was stored.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        seq: Option<Sequence>,
        /// Line, field, reason.
        error: LineError,
        /// The line's beginning (512 bytes at most).
        excerpt: String,
        /// When.
        at: Timestamp,
    },
    /// Something happened to a node.
    Node {
        /// The node.
        node: NodeId,
        /// Which life, where known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        instance: Option<InstanceId>,
        /// `joined`, `left`, `lost`, `returned`, `cordoned`, `uncordoned`, `draining`, `revoked`,
        /// `quarantined`, `released`, `viability`.
        what: String,
        /// Who or why.
        detail: String,
        /// Who asked for it, if somebody did.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        who: Option<String>,
        /// When.
        at: Timestamp,
        /// For `joined`: what it said of itself.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        descriptor: Option<Box<NodeDescriptor>>,
    },
    /// A node has proved what it can keep, or has tried to.
    Proof {
        /// What it stated and signed.
        proof: Box<SignedProof>,
        /// Why it does not count; absent where it was verified.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        refused: Option<String>,
        /// When the policy service judged it.
        at: Timestamp,
    },
    /// A part of an execution was computed once more.
    Verification {
        /// Which execution.
        execution: ExecutionId,
        /// From which boundary; 0: from the beginning.
        from: BoundaryIndex,
        /// To which.
        to: BoundaryIndex,
        /// Who had computed it, where that was one node.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        node: Option<NodeId>,
        /// Who computed it once more.
        by: Vec<NodeId>,
        /// `agreed`, `node_corrupt`, `verifier_corrupt`, `undecided`.
        outcome: String,
        /// In words.
        detail: String,
        /// When.
        at: Timestamp,
    },
    /// An execution waits, and why: once when it has waited for a moment, and when that changes.
    Waiting {
        /// Which execution.
        execution: ExecutionId,
        /// In one sentence.
        summary: String,
        /// Who was considered ([`crate::limits::CANDIDATES_LIMIT`] at most).
        candidates: Vec<crate::event::Candidate>,
        /// Candidates beyond those listed.
        #[serde(default)]
        omitted: u32,
        /// What would have to change.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        would_help: Vec<String>,
        /// When.
        at: Timestamp,
    },
    /// Somebody changed what a node may offer.
    Envelopes {
        /// The node.
        node: NodeId,
        /// All that are in force now, with who set them and when.
        envelopes: NodeEnvelopes,
    },
    /// Somebody changed what a tenant may use at once.
    Quota {
        /// Whose.
        tenant: Tenant,
        /// What holds now, with who set it and when.
        quota: Quota,
    },
}

/// The recorder's word on how far it has come, on `fiec.recorder.checkpoint`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RecorderCheckpoint {
    /// Last ledger sequence in PostgreSQL.
    pub seq: Sequence,
    /// Messages behind it in the stream.
    pub lag: u64,
    /// When.
    pub at: Timestamp,
}

/// A worker asks a recorder for its copy of a state, on `fiec.recorder.restore`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RestoreRequest {
    /// Whose state.
    pub execution: ExecutionId,
    /// Of which boundary.
    pub index: BoundaryIndex,
    /// Its digest.
    pub digest: Digest,
}

/// The answer: the state lies in `FIEC_STATE` now, or there is a reason why not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RestoreReply {
    /// Why there is no copy; none: it was restored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A policy service's presence, on `fiec.policy.presence`, once a second.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PolicyPresence {
    /// The replica.
    pub id: InstanceId,
    /// When.
    pub at: Timestamp,
    /// True with its last message.
    #[serde(default)]
    pub leaving: bool,
}

/// A line that a program printed, on `fiec.log.<tenant>.<execution>`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LogLine {
    /// When the agent read it.
    pub at: Timestamp,
    /// Where it ran.
    pub node: NodeId,
    /// Under which epoch.
    pub epoch: Epoch,
    /// `stdout` or `stderr`.
    pub stream: String,
    /// Last boundary that the program had reached.
    pub boundary: BoundaryIndex,
    /// The line, cut at 8 KiB.
    pub line: String,
}
