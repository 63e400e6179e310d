//! The inputs of a step.

use fiec_schemas::messages::Holding;
use fiec_schemas::quota::{Quota, Reservations};
use fiec_schemas::trust::{Proof, Quarantine, SignedProof, Verdict, VerifiedUpTo};
use fiec_schemas::{
    ExecutionId, HardwareVector, InstanceId, NodeDescriptor, NodeFlags, NodeId, Phase, Sequence,
    Submission, Tenant,
};

use crate::holds::Seen;
use crate::verify::Named;
use crate::view::LedgerView;

/// Identifies a question that waits for its [`Action::Reply`].
pub type Ticket = u64;

/// Result of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeOutcome {
    /// This instance answered.
    Answered(InstanceId),
    /// No instance answered.
    Silent,
}

/// Result of a control request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ControlOutcome {
    /// The node accepts the request.
    Taken,
    /// The node refuses, with its reason for people.
    Refused(String),
    /// The node refuses for now, with its reason for people: the execution is about to start there,
    /// or to leave.
    Moving(String),
    /// The node does not hold the execution.
    NotHeld,
    /// No answer came.
    NoAnswer,
}

/// One input of the policy. Submissions have a call of their own, [`Policy::submit`](super::Policy::submit).
#[derive(Debug)]
pub enum Input<'a> {
    /// A message of a ledger, by any author. It also reports an append of ours whose
    /// acknowledgement was lost.
    Ledger(&'a LedgerView<'a>),
    /// The last message of a ledger after an append of ours failed. It replaces the policy's own
    /// view of the ledger. If the message is older than the last known one, the policy returns to
    /// what it knew before the append, and decides again after a pause.
    Reread(&'a LedgerView<'a>),
    /// A submission that was stored apart because its ledger message would have been too large.
    Spec {
        /// The execution.
        execution: ExecutionId,
        /// Its submission.
        spec: &'a Submission,
    },
    /// An append of ours is stored.
    Appended {
        /// The execution of the ledger.
        execution: ExecutionId,
        /// Sequence of the stored message.
        seq: Sequence,
        /// The epoch after the message.
        epoch: u64,
        /// The phase after the message.
        phase: &'a Phase,
    },
    /// An append of ours failed and the ledger is empty.
    Vanished {
        /// The execution.
        execution: ExecutionId,
    },
    /// A pushed program runs in a container.
    Container(&'a str),
    /// A node's key in `FIEC_NODES`.
    Descriptor(Box<NodeDescriptor>),
    /// A node's key in `FIEC_NODES` was removed.
    Gone(&'a NodeId),
    /// An operator's flags.
    Flags(&'a NodeId, NodeFlags),
    /// A node's proof, with the result of the signature check.
    Proof {
        /// The node.
        node: &'a NodeId,
        /// The proof as stored.
        signed: &'a SignedProof,
        /// The proof's content, or why it does not count.
        judged: Result<Proof, String>,
    },
    /// The contracts that a node has lost.
    Quarantine(&'a NodeId, Quarantine),
    /// Result of a node that computed a part of an execution again. Its signature has been checked.
    Verdict(Verdict),
    /// The answer to [`Action::Recall`]: how far the execution was verified before, if at all.
    Recalled {
        /// The execution.
        execution: ExecutionId,
        /// The stored value, or why it is not available now.
        up_to: Result<Option<VerifiedUpTo>, String>,
        /// The outputs that its ledger names.
        named: Named,
    },
    /// A vector, and its age in ms.
    Vector(HardwareVector, u64),
    /// Result of a probe.
    Probe(&'a NodeId, ProbeOutcome),
    /// The answer to [`Action::AskHoldings`].
    Holdings {
        /// The node.
        node: &'a NodeId,
        /// The instance of its agent that answered.
        instance: InstanceId,
        /// All executions that it holds, ordered by id.
        held: &'a [Holding],
    },
    /// The holder's answer to an order to yield, park or unpark.
    Ordered {
        /// The execution.
        execution: ExecutionId,
        /// The epoch of the order.
        epoch: u64,
        /// The answer.
        outcome: ControlOutcome,
    },
    /// The answer to an order to split.
    SplitAnswered {
        /// The execution.
        execution: ExecutionId,
        /// The epoch of the order.
        epoch: u64,
        /// The answer.
        outcome: ControlOutcome,
    },
    /// The answer to [`Action::Lookup`], and to [`Action::MakePart`] if the part has ended.
    Ended {
        /// The execution.
        execution: ExecutionId,
        /// What its ledger shows.
        seen: Seen,
    },
    /// Ledger messages up to this sequence will soon drop out of the stream by their age.
    Aged(Sequence),
    /// A tenant's quota. None: unlimited.
    Quota(&'a Tenant, Option<Quota>),
    /// A tenant's reservations.
    Reserved {
        /// The tenant.
        tenant: &'a Tenant,
        /// Sequence and content of the message. None if the result of an [`Action::Reserve`] is
        /// unknown.
        table: Option<(Sequence, &'a Reservations)>,
        /// True for the answer to [`Action::Reserve`]. Otherwise it is news, which may be late.
        answer: bool,
    },
    /// Another policy service sent a sign of life.
    Replica {
        /// The other replica.
        id: InstanceId,
        /// True for its last message before it stops.
        leaving: bool,
    },
    /// An operator orders an execution to move.
    Yield {
        /// Names the question for the reply.
        ticket: Ticket,
        /// The execution.
        execution: ExecutionId,
        /// The wanted destination, if any.
        to: Option<&'a NodeId>,
        /// The operator.
        who: &'a str,
    },
    /// An operator's setting for a tenant.
    Tenant {
        /// The tenant.
        tenant: &'a Tenant,
        /// Its share relative to others, 1 by default.
        weight: f64,
    },
    /// Whether the connection to the broker is up.
    Connected(bool),
    /// The broker has lost messages since this service read its ledgers. The holders of bindings
    /// append them again, and the policy binds nothing until then.
    Lost,
    /// All that existed at the start has been read.
    Loaded,
    /// Time passes.
    Tick,
}
