//! What happens: the inputs of a step.

use fiec_schemas::messages::Holding;
use fiec_schemas::quota::{Quota, Reservations};
use fiec_schemas::trust::{Proof, Quarantine, SignedProof, Verdict, VerifiedUpTo};
use fiec_schemas::{
    ExecutionId, HardwareVector, InstanceId, NodeDescriptor, NodeFlags, NodeId, Phase, Sequence,
    Submission, Tenant, Timestamp,
};

use crate::holds::Seen;
use crate::verify::Named;
use crate::view::LedgerView;

/// Names a question that waits for its [`Action::Reply`].
pub type Ticket = u64;

/// What became of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeOutcome {
    /// This instance answered.
    Answered(InstanceId),
    /// Nobody did.
    Silent,
}

/// What became of a control request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ControlOutcome {
    /// The node will do it.
    Taken,
    /// The node will not, and says why.
    Refused(String),
    /// The node does not hold the execution.
    NotHeld,
    /// No answer came.
    NoAnswer,
}

/// What happened.
#[derive(Debug)]
pub enum Input<'a> {
    /// [`Policy::submit`](super::Policy::submit) without a hold, as an input: its answer is an
    /// [`Action::Append`](super::Action::Append).
    Submission {
        /// Its id.
        execution: ExecutionId,
        /// Whose.
        tenant: &'a Tenant,
        /// What.
        spec: &'a Submission,
        /// By the broker's clock.
        submitted_at: Timestamp,
    },
    /// A message of a ledger.
    Ledger(&'a LedgerView<'a>),
    /// The last message of a ledger after an append of ours failed: it counts whatever was
    /// believed before.
    Reread(&'a LedgerView<'a>),
    /// A submission that was too large for its ledger message.
    Spec {
        /// Of which execution.
        execution: ExecutionId,
        /// It.
        spec: &'a Submission,
    },
    /// An append of ours is stored.
    Appended {
        /// To which ledger.
        execution: ExecutionId,
        /// As which message.
        seq: Sequence,
        /// The epoch after it.
        epoch: u64,
        /// The phase after it.
        phase: &'a Phase,
    },
    /// An append of ours failed and the ledger is empty.
    Vanished {
        /// Which.
        execution: ExecutionId,
    },
    /// A program that was pushed runs in a container.
    Container(&'a str),
    /// A node's key in `FIEC_NODES`.
    Descriptor(Box<NodeDescriptor>),
    /// A node's key is gone.
    Gone(&'a NodeId),
    /// An operator's flags.
    Flags(&'a NodeId, NodeFlags),
    /// A node's proof, and what a look at its signature has shown.
    Proof {
        /// Whose.
        node: &'a NodeId,
        /// As it is stored.
        signed: &'a SignedProof,
        /// What it states, or why that does not count.
        judged: Result<Proof, String>,
    },
    /// The contracts that a node has lost.
    Quarantine(&'a NodeId, Quarantine),
    /// What a node found that computed a part of an execution once more; its signature was
    /// checked.
    Verdict(Verdict),
    /// The answer to [`Action::Recall`]: how far it was verified before, if at all.
    Recalled {
        /// Which.
        execution: ExecutionId,
        /// What is stored, or why that cannot be said now.
        up_to: Result<Option<VerifiedUpTo>, String>,
        /// Which outputs its ledger names.
        named: Named,
    },
    /// A vector, and how old it is.
    Vector(HardwareVector, u64),
    /// What became of a probe.
    Probe(&'a NodeId, ProbeOutcome),
    /// The answer to [`Action::AskHoldings`].
    Holdings {
        /// Whose.
        node: &'a NodeId,
        /// Which life of its agent answered.
        instance: InstanceId,
        /// All executions that it holds, in order of their ids.
        held: &'a [Holding],
    },
    /// The holder's answer to an order to yield, park or unpark.
    Ordered {
        /// Which execution.
        execution: ExecutionId,
        /// Under which epoch.
        epoch: u64,
        /// The answer.
        outcome: ControlOutcome,
    },
    /// The answer to an order to split.
    SplitAnswered {
        /// Which execution.
        execution: ExecutionId,
        /// Under which epoch.
        epoch: u64,
        /// The answer.
        outcome: ControlOutcome,
    },
    /// The answer to [`Action::Lookup`], and to [`Action::MakePart`] where the part has ended.
    Ended {
        /// Which.
        execution: ExecutionId,
        /// What its ledger says.
        seen: Seen,
    },
    /// What a tenant may use at once; none: as much as there is.
    Quota(&'a Tenant, Option<Quota>),
    /// What a tenant has reserved.
    Reserved {
        /// Whose.
        tenant: &'a Tenant,
        /// The message's sequence, and what it says; none in answer to an [`Action::Reserve`]
        /// whose fate is not known.
        table: Option<(Sequence, &'a Reservations)>,
        /// The answer to [`Action::Reserve`]; otherwise news, which may be late.
        answer: bool,
    },
    /// Another policy service spoke.
    Replica {
        /// Which.
        id: InstanceId,
        /// For the last time.
        leaving: bool,
    },
    /// An operator wants an execution to move.
    Yield {
        /// For the reply.
        ticket: Ticket,
        /// Which.
        execution: ExecutionId,
        /// Where to, if there is a wish.
        to: Option<&'a NodeId>,
        /// Who asks.
        who: &'a str,
    },
    /// What an operator has set for a tenant.
    Tenant {
        /// Whose.
        tenant: &'a Tenant,
        /// Its share against those of others; 1 where nothing was set.
        weight: f64,
    },
    /// The connection to the broker is there (again), or not.
    Connected(bool),
    /// The broker has lost messages since this service knew its ledgers. Who holds a binding appends
    /// them again; until then nothing is bound.
    Lost,
    /// Everything that was there at the start has been told.
    Loaded,
    /// Time passes.
    Tick,
}
