//! What operators and clients ask of the policy service, and its answers.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::envelope::NodeEnvelopes;
use crate::event::{Cause, Decision, ExecutionState, PhaseKind};
use crate::hardware::{NodeDescriptor, NodeFlags, RunningProgress};
use crate::ids::{BatchId, ClientId, Epoch, ExecutionId, NodeId, Sequence, Tenant};
use crate::package::Grant;
use crate::scheduling::Adjustment;
use crate::submission::LineError;

use super::RefusalCode;

/// A request about one execution on `fiec.api.<verb>.<tenant>`: `status`, `cancel`, `pause`,
/// `resume`, `yield`, `reconfigure`, `adjust`, `why`.
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

/// A request about one node on `fiec.api.node.<verb>`: `cordon`, `uncordon`, `drain`, `undrain`,
/// `revoke`, `release`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NodeRequest {
    /// The node.
    pub node: NodeId,
    /// Who asks.
    #[serde(default)]
    pub who: String,
    /// For `drain`: what has not left after so many seconds is given up there. For `revoke`: the
    /// node will be gone in so many seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<u32>,
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

/// A request about what a tenant may use at once, on `fiec.api.quota.<tenant>`; without a change it
/// only shows what is in force.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct QuotaRequest {
    /// Who asks; kept with the quota.
    #[serde(default)]
    pub who: String,
    /// What to change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change: Option<QuotaChange>,
}

/// A change of what a tenant may use at once.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct QuotaChange {
    /// Takes all limits and the weight away before the others of this change are set.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub clear: bool,
    /// Most executions at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running: Option<u32>,
    /// Most of them on devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<u32>,
    /// Most bytes of memory that they ask for together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Share relative to other tenants, from 1 to 1000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
}

/// The answer about tenants' quotas.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct QuotaReply {
    /// Why it was not done, and what to do; absent where it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Why, for programs; present where `error` is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<RefusalCode>,
    /// What is to be known although it was done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
    /// The tenant that was asked about, or all that have a quota.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tenants: Vec<TenantQuota>,
}

/// What a tenant may use at once, and what it has reserved of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TenantQuota {
    /// Which tenant.
    pub tenant: Tenant,
    /// What is in force; absent: no limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota: Option<crate::quota::Quota>,
    /// Executions with a reservation now. Without limits only batches with `at_once` and gangs
    /// have any.
    pub running: u32,
    /// Devices that these hold.
    pub devices: u32,
    /// Bytes of memory that these ask for.
    pub memory_bytes: u64,
}

/// A request about a whole batch on `fiec.api.batch.<verb>.<tenant>`: `status`, `cancel`, `pause`,
/// `resume`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BatchRequest {
    /// The batch's UUID, or the name that its client gave it.
    pub batch: String,
    /// Who asks; kept in the history.
    #[serde(default)]
    pub who: String,
    /// Ends the answer after so many milliseconds of doing (5000 where nothing is said, 8000 at most);
    /// [`BatchReply::left`] says how many remain, and the same request with
    /// [`BatchReply::cursor`] goes on with them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within_ms: Option<u64>,
    /// [`Untaken::upto`] of the answer before: nothing is done before these have been taken in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub untaken: Option<Sequence>,
    /// [`BatchReply::cursor`] of the answer before: this one goes on where that one ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
}

/// Submission messages of a tenant that no service has taken in yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Untaken {
    /// How many there are.
    pub messages: u64,
    /// Sequence of the oldest.
    pub oldest: Sequence,
    /// Sequence of the last one that is waited for: those behind it came after the request.
    pub upto: Sequence,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The answer about a whole batch.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BatchReply {
    /// Why it was not done, and what to do; absent where it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Why, for programs; present where `error` is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<RefusalCode>,
    /// The batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch: Option<BatchId>,
    /// How many of its executions are in each phase, after what was done; one whose worker has
    /// taken the request counts under the phase in which it still is. Empty while ledgers are
    /// unread.
    #[serde(default, skip_serializing_if = "std::collections::BTreeMap::is_empty")]
    pub phases: std::collections::BTreeMap<PhaseKind, u32>,
    /// Executions for which this request was carried out, or taken by their workers: those of this
    /// answer.
    #[serde(default)]
    pub done: u32,
    /// Executions that it does not concern: they have ended, or are so already.
    #[serde(default)]
    pub unconcerned: u32,
    /// Executions for which it failed.
    #[serde(default)]
    pub failed: u32,
    /// Executions that this request did not come to: send it again.
    #[serde(default)]
    pub left: u32,
    /// Ledgers of the tenant that were not read yet: send the request again with the cursor.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub unread: u64,
    /// Absent once the request has come to its end; otherwise what the next request names, within a
    /// minute, to go on where this answer ended. Without it, or where it is not known any more, the
    /// next request looks at all ledgers again, and does what is left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
    /// What no service has taken in after a second of waiting; it may hold executions of the batch:
    /// send the request again, with [`Untaken::upto`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub untaken: Option<Untaken>,
    /// Why it failed for the first few.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reasons: Vec<String>,
}

/// The answer to every request that is not a submission.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ApiReply {
    /// Why it was not done, and what to do; absent where it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Why, for programs; present where `error` is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<RefusalCode>,
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
    /// Its phase.
    pub phase: PhaseKind,
    /// Where it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<Place>,
    /// Why it is there; of one that waits to be bound anew, why it must be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<Cause>,
    /// Whom that place was chosen from, and who was rejected then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decision: Option<Decision>,
    /// What judges it where it is: each signal with its threshold in force and what is read.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub thresholds: Vec<InForce>,
    /// Of one that is placed: what would move it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub would_move: Vec<String>,
    /// Of one that is placed and has no order to move: the first few nodes that could take it now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub would_go_to: Option<Vec<NodeId>>,
    /// What it waits for beside a node, each a sentence.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waits_for: Vec<String>,
    /// Who must act next, and by when, as its ledger says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<crate::duty::Duty>,
}

/// Where an execution is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Place {
    /// The node.
    pub node: NodeId,
    /// Which place on it.
    pub substrate: String,
    /// Under which epoch.
    pub epoch: Epoch,
    /// The node that it came from, where the ledger still shows that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<NodeId>,
}

/// A threshold that judges an execution, and how the signal stands against it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct InForce {
    /// Which signal.
    pub signal: crate::hardware::Signal,
    /// Which device; none: the node itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// The threshold.
    pub threshold: crate::hardware::Threshold,
    /// True where the execution brings it, false where it is the node's own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub own: bool,
    /// What was read last, in [0, 1]; none: nothing fresh.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
    /// `viable`, `suspect`, `unviable`, `recovering`, `unknown`.
    pub state: String,
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
    /// Why, for programs; present where `error` is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<RefusalCode>,
    /// The batch that the lines became, where there were several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch: Option<BatchId>,
    /// The lines that were taken.
    pub accepted: Vec<Accepted>,
    /// The lines that were not.
    pub errors: Vec<LineError>,
    /// What the tenant should know of it, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
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
    /// True where the same submission was there before; of an array, all of its elements.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub existing: bool,
    /// Of an array: all its executions in order of their indices, of which `id` is the first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub elements: Vec<ExecutionId>,
}
