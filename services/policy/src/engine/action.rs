//! What follows: the actions that a shell carries out.

use fiec_schemas::messages::{ControlRequest, Record};
use fiec_schemas::quota::Quota;
use fiec_schemas::trust::VerifiedUpTo;
use fiec_schemas::{
    Cause, Contract, Digest, Event, ExecutionId, NodeId, Sequence, StatePlace, Tenant,
};

use super::Ticket;
use super::refusal::YieldRefusal;
use crate::holds::reserve::Change;

/// The boundary to which an execution goes back.
#[derive(Debug, Clone, PartialEq)]
pub enum Good {
    /// This one, or the beginning.
    Known(Option<StatePlace>),
    /// The last one before the culprit had it, as far as its ledger still shows that; else the
    /// beginning.
    BeforeIt,
}

/// What the shell must do.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Append these events after the message of this sequence; answer with [`Input::Appended`],
    /// [`Input::Reread`] or [`Input::Vanished`]. After success a binding's capsule is sent.
    Append {
        /// To which ledger.
        execution: ExecutionId,
        /// Whose.
        tenant: Tenant,
        /// The message before; 0 for none.
        expected: Sequence,
        /// The events.
        events: Vec<Event>,
        /// Who waits for it.
        ticket: Option<Ticket>,
    },
    /// Send the capsule of a binding that is stored (again).
    SendCapsule {
        /// Which execution.
        execution: ExecutionId,
        /// Whose.
        tenant: Tenant,
        /// Sequence of the message that the node must follow.
        seq: Sequence,
    },
    /// Ask a node; answer an order with [`Input::Ordered`].
    Control {
        /// Which.
        node: NodeId,
        /// What.
        request: ControlRequest,
        /// Who waits for the answer.
        ticket: Option<Ticket>,
    },
    /// Ping a node and answer with [`Input::Probe`].
    Probe(NodeId),
    /// Ask a node for all executions that it holds; answer with [`Input::Holdings`], or not at all
    /// where it does not answer.
    AskHoldings(NodeId),
    /// Read a large submission and answer with [`Input::Spec`].
    FetchSpec {
        /// Which execution.
        execution: ExecutionId,
        /// Sequence of its last message.
        seq: Sequence,
        /// Whose.
        tenant: Tenant,
    },
    /// Take a contract away from a node, durably.
    Quarantine {
        /// Which node.
        node: NodeId,
        /// Which contract.
        contract: Contract,
        /// On which of its devices; none: on all of it.
        substrate: Option<String>,
        /// Why.
        reason: String,
    },
    /// Append that an execution goes on from an earlier boundary, whoever appends to it at the
    /// same time; answer with [`Input::Reread`].
    StepBack {
        /// Which.
        execution: ExecutionId,
        /// Whose.
        tenant: Tenant,
        /// Because of whom, where that is known.
        culprit: Option<NodeId>,
        /// From which boundary it goes on.
        good: Good,
        /// Why.
        cause: Cause,
    },
    /// Read how far an execution was verified before, and its ledger; answer with
    /// [`Input::Recalled`].
    Recall {
        /// Which.
        execution: ExecutionId,
        /// Whose.
        tenant: Tenant,
    },
    /// Store how far an execution is verified now, and then remove the σ that was kept before.
    Verified {
        /// Which.
        execution: ExecutionId,
        /// How far.
        up_to: VerifiedUpTo,
        /// The digest of the σ that is not needed any more.
        drop: Option<Digest>,
    },
    /// Remove a σ that was kept beside the ledger, and the note that it was: the execution has
    /// ended.
    DropKept {
        /// Of which execution.
        execution: ExecutionId,
        /// Its digest.
        digest: Digest,
    },
    /// Look at the last message of a ledger; answer with [`Input::Ended`].
    Lookup {
        /// Which.
        execution: ExecutionId,
        /// Whose.
        tenant: Tenant,
    },
    /// Begin the ledger of a part that its holder has split off, unless it is there already, or the
    /// holder has it no more; answer with [`Input::Reread`], or [`Input::Ended`] where it has ended.
    MakePart {
        /// Which.
        part: ExecutionId,
        /// Whose.
        holder: ExecutionId,
        /// The tenant of both.
        tenant: Tenant,
    },
    /// Change what a tenant has reserved, by [`crate::holds::reserve::apply`]; answer with
    /// [`Input::Reserved`].
    Reserve {
        /// Whose.
        tenant: Tenant,
        /// What it may use at once.
        quota: Option<Quota>,
        /// What to change.
        change: Box<Change>,
    },
    /// Publish a fact.
    Record(Box<Record>),
    /// Tell an operator why an execution does not move.
    Refuse(Ticket, YieldRefusal),
}
