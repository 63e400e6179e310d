//! Requests of operators and clients to the policy service, and its answers.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::dependency::Dependency;
use crate::envelope::NodeEnvelopes;
use crate::event::{Cause, Decision, ExecutionState, PhaseKind};
use crate::hardware::{ArrivingState, NodeDescriptor, NodeFlags, RunningProgress};
use crate::ids::{BatchId, BoundaryIndex, ClientId, Epoch, ExecutionId, NodeId, Sequence, Tenant};
use crate::named::named;
use crate::package::Grant;
use crate::scheduling::Adjustment;
use crate::submission::LineError;

use super::RefusalCode;

/// A request about one execution on `fiec.api.<verb>.<tenant>`: `status`, `cancel`, `pause`,
/// `resume`, `retry`, `yield`, `reconfigure`, `adjust`, `why`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExecutionRequest {
    /// The execution's UUID, or the client's id.
    pub id: String,
    /// The person or program that asks. The history keeps it.
    #[serde(default)]
    pub who: String,
    /// For `yield`: the node to move to. Absent: the policy service chooses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<NodeId>,
    /// For `reconfigure`: the resources to change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grant: Option<Grant>,
    /// For `adjust`: the change. For `retry`: settings that change with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change: Option<Adjustment>,
    /// For `retry`: the boundary to start from. 0 is the beginning. Absent: the last committed one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_boundary: Option<BoundaryIndex>,
}

/// A request about one node on `fiec.api.node.<verb>`: `cordon`, `uncordon`, `drain`, `undrain`,
/// `revoke`, `release`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NodeRequest {
    /// The node.
    pub node: NodeId,
    /// The person or program that asks.
    #[serde(default)]
    pub who: String,
    /// For `drain`: seconds after which a remaining execution is stopped there. For `revoke`:
    /// seconds until the node goes away.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<u32>,
}

/// A request about the envelopes of a node, on `fiec.api.node.envelope`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EnvelopeRequest {
    /// The node.
    pub node: NodeId,
    /// The person or program that asks. The history keeps it.
    #[serde(default)]
    pub who: String,
    /// The change. Absent: only show the envelopes in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change: Option<EnvelopeChange>,
}

/// A change of a node's envelopes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum EnvelopeChange {
    /// Sets envelopes. Each replaces the one for its signal and device. Other envelopes stay.
    Set {
        /// The new envelopes, in the form of [`crate::envelope::Envelope`].
        envelopes: serde_json::Value,
    },
    /// Replaces all envelopes.
    Replace {
        /// The new envelopes.
        envelopes: serde_json::Value,
    },
    /// Removes envelopes.
    Clear {
        /// Only envelopes of this signal.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        signal: Option<crate::hardware::Signal>,
        /// Only envelopes of this device.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        device: Option<String>,
    },
}

/// A request about a tenant's quota, on `fiec.api.quota.<tenant>`. Without a change it only shows
/// the quota in force.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct QuotaRequest {
    /// The person or program that asks. It is kept with the quota.
    #[serde(default)]
    pub who: String,
    /// The change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change: Option<QuotaChange>,
}

/// A change of a tenant's quota.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct QuotaChange {
    /// Removes all limits and the weight before the other fields are set.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub clear: bool,
    /// Most executions that are bound or running at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running: Option<u32>,
    /// Most of them that use devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<u32>,
    /// Most bytes of memory that they ask for together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Most executions that wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<u32>,
    /// Share relative to other tenants, from 1 to 1000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
}

/// The answer about quotas of tenants.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct QuotaReply {
    /// Why the request was refused, and what to do. Absent if it was done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Reason for programs. Present if `error` is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<RefusalCode>,
    /// A warning although the request was done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
    /// The requested tenant, or all tenants with a quota.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tenants: Vec<TenantQuota>,
}

/// A tenant's quota and its reservations.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TenantQuota {
    /// The tenant.
    pub tenant: Tenant,
    /// The quota in force. Absent: no limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota: Option<crate::quota::Quota>,
    /// Executions with a reservation now. Without limits, only batches with `at_once` and gangs
    /// have reservations.
    pub running: u32,
    /// Devices that these hold.
    pub devices: u32,
    /// Bytes of memory that these ask for.
    pub memory_bytes: u64,
    /// Executions that wait. Absent if the policy service does not know it yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<u32>,
}

/// A request about a whole batch on `fiec.api.batch.<verb>.<tenant>`: `status`, `cancel`, `pause`,
/// `resume`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BatchRequest {
    /// The batch's UUID, or the client's name for it. In its place `array` or `ids` may be given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch: Option<String>,
    /// The client's id of an array: its elements.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub array: Option<String>,
    /// The beginning of clients' ids with `*` at its end: all executions whose ids begin so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ids: Option<String>,
    /// The person or program that asks. The history keeps it.
    #[serde(default)]
    pub who: String,
    /// Time limit of the answer in ms: 5000 by default, 8000 at most. [`BatchReply::left`] says how
    /// many executions remain. The same request with [`BatchReply::cursor`] continues with them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within_ms: Option<u64>,
    /// [`Untaken::upto`] of the previous answer: the request waits until these messages are taken
    /// in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub untaken: Option<Sequence>,
    /// [`BatchReply::cursor`] of the previous answer: this request continues there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
    /// For `retry`: what was cancelled stays so.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub failed: bool,
}

impl BatchRequest {
    /// The group that the request names.
    pub fn of(&self) -> Dependency {
        Dependency {
            id: self.ids.clone(),
            batch: self.batch.clone(),
            array: self.array.clone(),
            ..Dependency::default()
        }
    }
}

/// An execution of a batch, and how it stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Member {
    /// The execution.
    pub id: ExecutionId,
    /// The id that its client gave it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_id: Option<ClientId>,
    /// Its phase.
    pub phase: PhaseKind,
}

/// Submission messages of a tenant that no policy service has taken in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Untaken {
    /// Number of messages.
    pub messages: u64,
    /// Sequence of the oldest message.
    pub oldest: Sequence,
    /// Sequence of the last message to wait for. Later messages came after the request.
    pub upto: Sequence,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The answer about a whole batch.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BatchReply {
    /// Why the request was refused, and what to do. Absent if it was done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Reason for programs. Present if `error` is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<RefusalCode>,
    /// The batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch: Option<BatchId>,
    /// Number of its executions in each phase, after this request. If a worker has accepted the
    /// request but not done it, its execution counts in its present phase. Empty while ledgers are
    /// unread.
    #[serde(default, skip_serializing_if = "std::collections::BTreeMap::is_empty")]
    pub phases: std::collections::BTreeMap<PhaseKind, u32>,
    /// Executions for which this answer's request was done.
    #[serde(default)]
    pub done: u32,
    /// Executions whose workers have accepted the request and will do it at their next boundaries.
    #[serde(default)]
    pub underway: u32,
    /// Executions without a change: they have ended, or are in the requested state.
    #[serde(default)]
    pub unconcerned: u32,
    /// Executions for which the request failed.
    #[serde(default)]
    pub failed: u32,
    /// Executions that this request did not reach: send it again.
    #[serde(default)]
    pub left: u32,
    /// Ledgers of the tenant that were not read: send the request again with the cursor.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub unread: u64,
    /// Cursor of the next request, which continues where this answer ended. It is valid for a
    /// minute. Absent once the request is complete. Without a valid cursor, the next request reads
    /// all ledgers again and does the rest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
    /// Messages that were not taken in within a second. They may hold executions of the batch: send
    /// the request again, with [`Untaken::upto`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub untaken: Option<Untaken>,
    /// Reasons of the first few failures.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reasons: Vec<String>,
    /// For `status`: the first few executions that failed, are held or were cancelled.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ended_badly: Vec<Member>,
}

/// The answer to every request that is not a submission.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ApiReply {
    /// Why the request was refused, and what to do. Absent if it was done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Reason for programs. Present if `error` is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<RefusalCode>,
    /// What the request did, for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// The execution's state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<Arc<ExecutionState>>,
    /// Its progress beyond the last commit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<RunningProgress>,
    /// The fetch of its state, while its node fetches it to start it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arriving: Option<ArrivingState>,
    /// For `why`: the explanation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<Why>,
    /// For `nodes`: all nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<NodeStatus>,
    /// For `envelope`: the envelopes in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub envelopes: Option<NodeEnvelopes>,
}

/// Why an execution runs where it runs, waits, or has ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Why {
    /// The reason in one sentence.
    pub summary: String,
    /// All nodes with the present verdict on each.
    pub candidates: Vec<crate::event::Candidate>,
    /// Changes that would help.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub would_help: Vec<String>,
    /// Requests among these changes (at most 12). A program can send them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub remedies: Vec<Remedy>,
    /// Its phase.
    pub phase: PhaseKind,
    /// Its place, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<Place>,
    /// Cause of its binding. If it waits for a rebinding, cause of that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<Cause>,
    /// The decision for its place: the candidates, and why others were rejected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decision: Option<Decision>,
    /// The thresholds in force for it: each signal with its threshold and its reading.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub thresholds: Vec<InForce>,
    /// For a placed execution: events that would move it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub would_move: Vec<String>,
    /// For a placed execution without an order to move: the first few nodes that could run it now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub would_go_to: Option<Vec<NodeId>>,
    /// Conditions that it waits for besides a node, each a sentence.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waits_for: Vec<String>,
    /// Who must act next and by when, as its ledger says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<crate::duty::Duty>,
}

/// A request to a policy service that would help an execution.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum Remedy {
    /// Resume it.
    Resume,
    /// Retry it.
    Retry {
        /// It needs more memory than this, in bytes.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        more_memory_than: Option<u64>,
    },
    /// Lift an operator's restrictions of its nodes.
    Unpin,
    /// Place work on a cordoned node again.
    Uncordon {
        /// The node.
        node: NodeId,
    },
    /// End the drain of a node.
    Undrain {
        /// The node.
        node: NodeId,
    },
}

/// The place of an execution.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Place {
    /// The node.
    pub node: NodeId,
    /// The substrate on it.
    pub substrate: String,
    /// The epoch of its binding.
    pub epoch: Epoch,
    /// The node that it came from, if the ledger still shows that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<NodeId>,
}

/// A threshold in force for an execution, with the state of its signal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct InForce {
    /// The signal.
    pub signal: crate::hardware::Signal,
    /// The device. Absent: the node itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// The threshold.
    pub threshold: crate::hardware::Threshold,
    /// True if the execution sets it, false if it is the node's.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub own: bool,
    /// The last reading, in [0, 1]. Absent if no reading is recent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
    /// How the signal stands.
    pub state: Viability,
}

/// A node as a policy service sees it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NodeStatus {
    /// The descriptor with which it joined.
    pub descriptor: NodeDescriptor,
    /// The operators' flags.
    pub flags: NodeFlags,
    /// Whether it may compute.
    pub viability: Viability,
    /// The signals that are not viable, each a sentence.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pressing: Vec<String>,
    /// Programs that it cannot start, and gets only to try them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub set_aside: Vec<SetAside>,
    /// The last vector.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vector: Option<crate::hardware::HardwareVector>,
    /// Milliseconds since its last message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub silent_ms: Option<u64>,
    /// Executions bound to it.
    pub bound: u32,
    /// Its numeric contracts and their standing, on each substrate.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub contracts: Vec<ContractStanding>,
}

/// A program for which a node is set aside, because it cannot start it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SetAside {
    /// The program. Absent: all programs, since several could not be started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    /// What the worker said, and when it is tried again.
    pub reason: String,
    /// Failures in a row.
    pub failures: u32,
}

named! {
    /// How a node, or one of its signals, stands with its thresholds.
    pub enum Viability {
        /// No fresh reading.
        Unknown,
        /// Below the threshold.
        Viable,
        /// At or above `high`, not yet for the dwell.
        Suspect,
        /// At or above `high` for the dwell.
        Unviable,
        /// Below `low`, not yet for the dwell.
        Recovering,
        /// The node is lost. No signal has this state.
        Lost,
    }
}

named! {
    /// Whether work under a numeric contract may go to a place.
    pub enum StandingKind {
        /// It has proved the contract.
        Proved,
        /// It has not, or its canaries could not run.
        Unproved,
        /// Its proof does not count.
        Refused,
        /// Its proof is of an earlier start or environment, or from before its release.
        Outdated,
        /// Its proof is too old.
        Expired,
        /// Its canaries broke the contract.
        Failed,
        /// It has lost the contract until an operator gives it back.
        Quarantined,
    }
}

/// Standing of a node with a numeric contract.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ContractStanding {
    /// The contract.
    pub contract: crate::submission::Contract,
    /// The substrate.
    pub substrate: String,
    /// The standing.
    pub standing: StandingKind,
    /// Details in words: until when, or why not.
    pub detail: String,
}

/// A request for what one policy service believes of live executions, on `fiec.api.view.<service>`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ViewRequest {
    /// Only executions with a greater id: the last one of the page before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<ExecutionId>,
}

/// The answer to `fiec.api.view.<service>`: a page, ordered by id.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ViewReply {
    /// Why the request was refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Reason for programs. Present if `error` is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<RefusalCode>,
    /// Live executions, at most [`VIEW_PAGE`].
    pub executions: Vec<Believed>,
    /// True if executions with greater ids follow.
    pub more: bool,
}

/// Most executions in a [`ViewReply`].
pub const VIEW_PAGE: usize = 2_000;

/// What a policy service believes of one execution. Its ledger is the truth.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Believed {
    /// The execution.
    pub execution: ExecutionId,
    /// Its phase.
    pub phase: PhaseKind,
    /// Sequence of the last message known; 0 before the first is stored.
    pub seq: Sequence,
    /// Epoch of its last binding.
    pub epoch: Epoch,
    /// The node that it is bound to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeId>,
    /// True while an append of the service is in flight.
    pub appending: bool,
}

/// The answer to `fiec.api.submit.<tenant>`: one result for every line that is not blank.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SubmitReply {
    /// Why the whole request was refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Reason for programs. Present if `error` is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<RefusalCode>,
    /// The batch of the lines, if there are several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch: Option<BatchId>,
    /// Accepted lines.
    pub accepted: Vec<Accepted>,
    /// Refused lines.
    pub errors: Vec<LineError>,
    /// A note for the tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// An accepted line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Accepted {
    /// Line in the batch, from 1.
    pub line: u32,
    /// The execution.
    pub id: ExecutionId,
    /// The client's id, if it gave one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_id: Option<ClientId>,
    /// True if the same submission existed before. For an array: if all of its elements did.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub existing: bool,
    /// If it existed before: its phase, unless it ended long ago. None for an array.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<PhaseKind>,
    /// For an array: all its executions in order of their indices. `id` is the first one. Empty if
    /// there are more than 10,000: their ids follow from their names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub elements: Vec<ExecutionId>,
    /// For an array: the number of its elements.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u32>,
}
