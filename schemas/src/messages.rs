//! Messages beside the ledger: capsules, handover, control, the operator's requests, records.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::envelope::NodeEnvelopes;
use crate::event::{Cause, Decision, ExecutionState};
use crate::hardware::{NodeDescriptor, NodeFlags, RunningProgress};
use crate::ids::{
    BatchId, BoundaryIndex, ClientId, Digest, Epoch, ExecutionId, InstanceId, NodeId, Sequence,
    Tenant, Timestamp,
};
use crate::package::Grant;
use crate::scheduling::{Adjustment, Keep};
use crate::submission::LineError;
use crate::trust::{Segment, SignedProof};

/// Header of a handover message that holds a [`Handover`] as JSON.
pub const HANDOVER_HEADER: &str = "Fiec-Handover";

/// Bindings for a node to take up: one message on `fiec.capsule.<shard>.<node>`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CapsuleMessage {
    /// Version of this message: 1.
    pub v: u8,
    /// The bindings.
    pub bindings: Vec<CapsuleBinding>,
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

/// What a handover message on `fiec.handover.<node>` is; the body of a part is a piece of σ.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "is", rename_all = "snake_case")]
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
    /// A first binding, told at the moment of its append where nothing else is going on. There is
    /// no σ; the capsule message that follows the acknowledgement confirms it.
    Ahead {
        /// Which execution.
        execution: ExecutionId,
        /// The epoch that the append makes.
        epoch: Epoch,
        /// The ledger message as it is being appended.
        ledger: String,
    },
    /// The append was acknowledged: `started` must follow this sequence.
    Confirmed {
        /// Which execution.
        execution: ExecutionId,
        /// The epoch.
        epoch: Epoch,
        /// The sequence.
        seq: Sequence,
    },
    /// The append failed: discard the speculation.
    Abandoned {
        /// Which execution.
        execution: ExecutionId,
        /// The epoch.
        epoch: Epoch,
    },
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
    },
    /// Give the execution up at its next boundary.
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
    /// Give it up at its next boundary and leave it paused.
    Pause {
        /// Which execution.
        execution: ExecutionId,
        /// Who asked.
        who: String,
    },
    /// Stop at the next boundary, commit, keep this of it, and wait there.
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
    /// For `ping`: what runs here.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub running: Vec<RunningProgress>,
}

/// A request about one execution on `fiec.api.<verb>.<tenant>`: `status`, `cancel`, `pause`,
/// `resume`, `yield`, `why`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExecutionRequest {
    /// The execution's UUID, or the client's id.
    pub id: String,
    /// Who asks; kept in the history.
    #[serde(default)]
    pub who: String,
    /// For `yield`: the node to move to, if the asker has a wish.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<NodeId>,
    /// For `reconfigure`: what is to change of what it may use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grant: Option<Grant>,
    /// For `adjust`: what is to change about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change: Option<Adjustment>,
}

/// A request about one node on `fiec.api.node.<verb>`: `cordon`, `uncordon`, `drain`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NodeRequest {
    /// The node.
    pub node: NodeId,
    /// Who asks.
    #[serde(default)]
    pub who: String,
}

/// A request about what a node may offer, on `fiec.api.node.envelope`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EnvelopeRequest {
    /// The node.
    pub node: NodeId,
    /// Who asks; kept in the history.
    #[serde(default)]
    pub who: String,
    /// What to change; absent: nothing, only show what is in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change: Option<EnvelopeChange>,
}

/// A change of a node's envelopes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum EnvelopeChange {
    /// Puts each in the place of the one for its signal and device; leaves the others.
    Set {
        /// The new ones, as [`crate::envelope::Envelope`] reads them.
        envelopes: serde_json::Value,
    },
    /// Puts these in the place of all.
    Replace {
        /// The new ones.
        envelopes: serde_json::Value,
    },
    /// Takes envelopes away.
    Clear {
        /// Only those of this signal.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        signal: Option<crate::hardware::Signal>,
        /// Only those of this device.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        device: Option<String>,
    },
}

/// The answer to every request that is not a submission.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ApiReply {
    /// Why it was not done, and what to do; absent where it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// What was done, for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// The execution's state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<ExecutionState>,
    /// What it has reached beyond the last commit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<RunningProgress>,
    /// For `why`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<Why>,
    /// For `nodes`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<NodeStatus>,
    /// For `envelope`: what is in force now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub envelopes: Option<NodeEnvelopes>,
}

/// Why an execution is where it is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Why {
    /// In one sentence.
    pub summary: String,
    /// Every node and the verdict on it now.
    pub candidates: Vec<crate::event::Candidate>,
    /// What would have to change.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub would_help: Vec<String>,
}

/// How a policy service sees a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NodeStatus {
    /// What it said when it joined.
    pub descriptor: NodeDescriptor,
    /// What operators said.
    pub flags: NodeFlags,
    /// `viable`, `suspect`, `unviable`, `recovering`, `unknown`, `lost`.
    pub viability: String,
    /// The signals that are not viable, each a sentence.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pressing: Vec<String>,
    /// The last vector.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vector: Option<crate::hardware::HardwareVector>,
    /// Milliseconds since it was last heard.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub silent_ms: Option<u64>,
    /// Executions bound to it.
    pub bound: u32,
    /// The numeric contracts and how it stands with each, on each substrate.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub contracts: Vec<ContractStanding>,
}

/// How a node stands with a numeric contract.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ContractStanding {
    /// The contract.
    pub contract: crate::submission::Contract,
    /// On which substrate.
    pub substrate: String,
    /// `proved`, `unproved`, `expired`, `failed`, `quarantined`.
    pub standing: String,
    /// In words: until when, or why not.
    pub detail: String,
}

/// The answer to `fiec.api.submit.<tenant>`: one result for every line that was not blank.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SubmitReply {
    /// Why nothing at all was taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The batch that the lines became, where there were several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch: Option<BatchId>,
    /// The lines that were taken.
    pub accepted: Vec<Accepted>,
    /// The lines that were not.
    pub errors: Vec<LineError>,
}

/// A line that was taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Accepted {
    /// Line in the batch, from 1.
    pub line: u32,
    /// The execution.
    pub id: ExecutionId,
    /// The client's id, if it gave one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_id: Option<ClientId>,
    /// True where the same submission was there before.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub existing: bool,
}

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
        /// `joined`, `left`, `lost`, `returned`, `cordoned`, `uncordoned`, `draining`, `viability`.
        what: String,
        /// Who or why.
        detail: String,
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
    /// Somebody changed what a node may offer.
    Envelopes {
        /// The node.
        node: NodeId,
        /// All that are in force now, with who set them and when.
        envelopes: NodeEnvelopes,
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
