//! Facts for the history, and messages between services.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::envelope::NodeEnvelopes;
use crate::event::{PhaseKind, StatePlace};
use crate::hardware::NodeDescriptor;
use crate::ids::{
    BoundaryIndex, Digest, Epoch, ExecutionId, InstanceId, NodeId, Sequence, Tenant, Timestamp,
};
use crate::named::named;
use crate::quota::Quota;
use crate::submission::{Contract, LineError};
use crate::trust::SignedProof;

/// A fact on `fiec.record.*` for the recorder.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Record {
    /// A submission line was refused.
    Rejection {
        /// The subject's tenant, as it was given.
        tenant: String,
        /// Sequence of the submission message, if it was stored.
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
        /// The life of its agent, if known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        instance: Option<InstanceId>,
        /// What happened.
        what: NodeEventKind,
        /// The contract that was lost, of `quarantined`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        contract: Option<Contract>,
        /// The device that lost it, of `quarantined`; none: all of the node.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        substrate: Option<String>,
        /// Who or why, in words.
        detail: String,
        /// Who asked for it, if somebody did.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        who: Option<String>,
        /// When.
        at: Timestamp,
        /// For `joined`: its descriptor.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        descriptor: Option<Box<NodeDescriptor>>,
    },
    /// A node published a proof, or tried to.
    Proof {
        /// The signed statement.
        proof: Box<SignedProof>,
        /// Why it does not count. Absent if it was verified.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        refused: Option<String>,
        /// When the policy service verified it.
        at: Timestamp,
    },
    /// A part of an execution was computed again.
    Verification {
        /// The execution.
        execution: ExecutionId,
        /// First boundary of the part. 0: the beginning.
        from: BoundaryIndex,
        /// Last boundary of the part.
        to: BoundaryIndex,
        /// The node that had computed it, if it was one node.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        node: Option<NodeId>,
        /// The nodes that computed it again.
        by: Vec<NodeId>,
        /// What came of it.
        outcome: VerificationOutcome,
        /// In words.
        detail: String,
        /// When.
        at: Timestamp,
    },
    /// An execution waits. Recorded when it has waited for a moment, and when the reason changes.
    Waiting {
        /// The execution.
        execution: ExecutionId,
        /// The reason in one sentence.
        summary: String,
        /// The candidates ([`crate::limits::CANDIDATES_LIMIT`] at most).
        candidates: Vec<crate::event::Candidate>,
        /// Candidates beyond those listed.
        #[serde(default)]
        omitted: u32,
        /// Changes that would help.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        would_help: Vec<String>,
        /// When.
        at: Timestamp,
    },
    /// The envelopes of a node were changed.
    Envelopes {
        /// The node.
        node: NodeId,
        /// All envelopes in force now, with who set them and when.
        envelopes: NodeEnvelopes,
    },
    /// The quota of a tenant was changed.
    Quota {
        /// The tenant.
        tenant: Tenant,
        /// The quota in force now, with who set it and when.
        quota: Quota,
    },
}

named! {
    /// What happened to a node. The same names stand in the column `what` of `node_events`.
    pub enum NodeEventKind {
        /// An agent began on it.
        Joined,
        /// Its agent ended.
        Left,
        /// It is silent and does not answer a probe.
        Lost,
        /// It is heard again after it was lost.
        Returned,
        /// An operator lets nothing new begin there.
        Cordoned,
        /// An operator opens it again.
        Uncordoned,
        /// An operator moves everything away from it.
        Draining,
        /// It will be gone at a known time.
        Revoked,
        /// It, or one of its devices, has lost a contract.
        Quarantined,
        /// An operator gave its contracts back.
        Released,
        /// It became viable, unviable or unknown.
        Viability,
        /// It could not start a program, and is set aside for it.
        CannotStart,
        /// That program computes there again.
        StartsAgain,
        /// Its envelopes were changed. The record itself is [`Record::Envelopes`].
        Envelopes,
    }
}

named! {
    /// What came of computing a part of an execution once more. The same names stand in the column
    /// `outcome` of `verifications`.
    pub enum VerificationOutcome {
        /// The bits are the same.
        Agreed,
        /// Two verifiers agree, and the node that had computed it does not.
        NodeCorrupt,
        /// The first verifier alone has other bits.
        VerifierCorrupt,
        /// All have other bits, or the claim cannot be compared.
        Undecided,
    }
}

/// The recorder's progress, on `fiec.recorder.checkpoint`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RecorderCheckpoint {
    /// Last ledger sequence in PostgreSQL.
    pub seq: Sequence,
    /// Messages behind it in the stream.
    pub lag: u64,
    /// When.
    pub at: Timestamp,
}

/// A worker's request for a recorder's copy of a state, on `fiec.recorder.restore`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RestoreRequest {
    /// The execution.
    pub execution: ExecutionId,
    /// The boundary of the state.
    pub index: BoundaryIndex,
    /// Digest of the state.
    pub digest: Digest,
}

/// The answer: the state is in `FIEC_STATE` now, or the reason why not.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RestoreReply {
    /// Why there is no copy. Absent if the state was restored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// With an error: an earlier boundary of the execution, whose state is in `FIEC_STATE` now. The
    /// history up to the requested boundary has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub earlier: Option<StatePlace>,
}

/// A policy service's question whether PostgreSQL has executions, on `fiec.recorder.recorded`. Their
/// ledgers may have dropped out of the stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RecordedRequest {
    /// The executions; at most [`RecordedRequest::MOST`].
    pub executions: Vec<ExecutionId>,
}

impl RecordedRequest {
    /// Most executions of one request.
    pub const MOST: usize = 500;
}

/// The answer to a [`RecordedRequest`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RecordedReply {
    /// Those of the executions that PostgreSQL has.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub recorded: Vec<Recorded>,
    /// Why PostgreSQL could not be asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// An execution in PostgreSQL.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Recorded {
    /// Its id.
    pub execution: ExecutionId,
    /// Its last recorded phase.
    pub phase: PhaseKind,
    /// Digest of its canonical submission.
    pub submission: Digest,
}

/// A policy service's presence, on `fiec.policy.presence`, once a second.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PolicyPresence {
    /// The replica.
    pub id: InstanceId,
    /// When.
    pub at: Timestamp,
    /// True in its last message.
    #[serde(default)]
    pub leaving: bool,
}

named! {
    /// An output stream of a program.
    pub enum LogStream {
        /// Its standard output.
        Stdout,
        /// Its standard error.
        Stderr,
    }
}

/// A piece of a program's output, on `fiec.log.<tenant>.<execution>`: a line, or a part of one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LogLine {
    /// When the agent read it.
    pub at: Timestamp,
    /// The node where the program ran.
    pub node: NodeId,
    /// The epoch of its binding.
    pub epoch: Epoch,
    /// Where the program wrote it.
    pub stream: LogStream,
    /// Last boundary that the program had reached.
    pub boundary: BoundaryIndex,
    /// The text, at most 8 KiB, without the line feed at its end.
    pub line: String,
    /// The text in base64, if it is not UTF-8. `line` then has U+FFFD for what is no text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<String>,
    /// No line feed follows the text: the line goes on in the next piece of this stream.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub part: bool,
    /// Bytes that the program had written to this stream in this epoch before the text. With
    /// `dropped`: before the bytes that were dropped. None: a worker of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
    /// The piece holds no text of the program: this output was dropped, and `line` says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropped: Option<Dropped>,
}

/// Output that a worker dropped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Dropped {
    /// Line feeds in it.
    pub lines: u64,
    /// Its bytes.
    pub bytes: u64,
}
