//! The actions of a step, which a shell carries out.

use fiec_schemas::messages::{ControlRequest, Record};
use fiec_schemas::quota::Quota;
use fiec_schemas::trust::VerifiedUpTo;
use fiec_schemas::{
    Cause, Contract, Digest, Event, ExecutionId, InstanceId, NodeId, Sequence, StatePlace, Tenant,
};

use serde::Serialize;

use super::Ticket;
use super::refusal::YieldRefusal;
use crate::prerequisites::SoughtGroup;
use crate::quotas::Change;

/// The boundary from which an execution resumes after a wrong result.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Good {
    /// This boundary, or the beginning.
    Known(Option<StatePlace>),
    /// The last boundary before the culprit's binding, if the ledger still shows it, else the
    /// beginning.
    BeforeTheCulprit,
}

/// One action for the shell. It writes itself as JSON, for traces.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// Append these events after the message of this sequence. The answer is `Input::Appended`,
    /// `Input::Vanished`, or the last message by [`Policy::follow`](super::Policy::follow). After success the shell sends a binding's capsule.
    Append {
        /// The execution of the ledger.
        execution: ExecutionId,
        /// Its tenant.
        tenant: Tenant,
        /// Sequence of the previous message; 0 for none.
        expected: Sequence,
        /// The events.
        events: Vec<Event>,
        /// The question that waits for the append.
        ticket: Option<Ticket>,
    },
    /// Append the state after the message of this sequence again, with σ and without events. The
    /// answer is the last message by [`Policy::follow`](super::Policy::follow), or `Input::Vanished`.
    Keep {
        /// The execution of the ledger.
        execution: ExecutionId,
        /// Its tenant.
        tenant: Tenant,
        /// Sequence of the previous message.
        expected: Sequence,
    },
    /// Send, or send again, the capsule of a stored binding.
    SendCapsule {
        /// The execution.
        execution: ExecutionId,
        /// Its tenant.
        tenant: Tenant,
        /// Sequence of the binding's message, which the node must follow.
        seq: Sequence,
    },
    /// Send a request to a node. The answer to an order is `Input::Ordered`.
    Control {
        /// The node.
        node: NodeId,
        /// The request.
        request: ControlRequest,
        /// The question that waits for the answer.
        ticket: Option<Ticket>,
    },
    /// Probe a node. The answer is `Input::Probe`.
    Probe {
        /// The node.
        node: NodeId,
    },
    /// Delete what the broker keeps of a node that has been silent for long: its descriptor, if it is
    /// of this instance or there is none, its proof, and its flags and quarantine if they say nothing.
    Forget {
        /// The node.
        node: NodeId,
        /// The instance of its descriptor, if it has one.
        instance: Option<InstanceId>,
    },
    /// Ask a node for all executions that it holds. The answer is `Input::Holdings`, or none if
    /// the node does not reply.
    AskHoldings {
        /// The node.
        node: NodeId,
    },
    /// Read a large submission. The answer is `Input::Spec`.
    FetchSpec {
        /// The execution.
        execution: ExecutionId,
        /// Sequence of its last message.
        seq: Sequence,
        /// Its tenant.
        tenant: Tenant,
    },
    /// Take a contract away from a node, durably.
    Quarantine {
        /// The node.
        node: NodeId,
        /// The contract.
        contract: Contract,
        /// The affected device, or all of the node if none.
        substrate: Option<String>,
        /// The reason, for people.
        #[serde(skip)]
        reason: String,
    },
    /// Append that an execution resumes from an earlier boundary, even if others append to it at
    /// the same time. The answer is its message by [`Policy::follow`](super::Policy::follow).
    StepBack {
        /// The execution.
        execution: ExecutionId,
        /// Its tenant.
        tenant: Tenant,
        /// The node that caused it, if known.
        culprit: Option<NodeId>,
        /// The boundary from which the execution resumes.
        to: Good,
        /// The reason.
        cause: Cause,
    },
    /// Read how far an execution was verified before, and its ledger. The answer is
    /// `Input::Recalled`.
    Recall {
        /// The execution.
        execution: ExecutionId,
        /// Its tenant.
        tenant: Tenant,
    },
    /// Store how far an execution is verified, then remove the σ that was kept before.
    Verified {
        /// The execution.
        execution: ExecutionId,
        /// The verified boundary.
        up_to: VerifiedUpTo,
        /// Digest of the σ that is no longer needed.
        drop: Option<Digest>,
    },
    /// Remove a σ that was kept beside the ledger, and the note about it: the execution has ended.
    DropKept {
        /// The execution.
        execution: ExecutionId,
        /// Digest of the σ.
        digest: Digest,
    },
    /// Read the last message of a ledger. The answer is `Input::Ended`.
    Lookup {
        /// The execution.
        execution: ExecutionId,
        /// Its tenant.
        tenant: Tenant,
    },
    /// Find the members of groups for which executions wait, once everything that was submitted up to
    /// the groups' moments has ledgers. The answer is `Input::Members`.
    FindMembers {
        /// The tenant of the groups.
        tenant: Tenant,
        /// The groups.
        sought: Vec<SoughtGroup>,
    },
    /// Begin the ledger of a part that its holder has split off. Do nothing if the ledger exists or
    /// the holder no longer has the part. The answer is its last message by
    /// [`Policy::follow`](super::Policy::follow), or `Input::Ended` if the part has ended.
    MakePart {
        /// The part.
        part: ExecutionId,
        /// The execution that split it off.
        holder: ExecutionId,
        /// The tenant of both.
        tenant: Tenant,
    },
    /// Change a tenant's reservations by [`Change::apply`]. The answer is
    /// `Input::Reserved`.
    Reserve {
        /// The tenant.
        tenant: Tenant,
        /// Its quota.
        quota: Option<Quota>,
        /// The change.
        change: Box<Change>,
    },
    /// Publish a record.
    Record {
        /// The record.
        record: Box<Record>,
    },
    /// Tell an operator why an execution does not move.
    Refuse {
        /// Names the question.
        ticket: Ticket,
        /// The reason.
        #[serde(skip)]
        refusal: YieldRefusal,
    },
}

impl Action {
    /// Publishes a record.
    pub(crate) fn record(record: Record) -> Self {
        Self::Record {
            record: Box::new(record),
        }
    }
}
