//! The inputs of a step. They write and read themselves as JSON, for traces.

use std::sync::Arc;

use fiec_schemas::messages::Holding;
use fiec_schemas::quota::{Quota, Reservations};
use fiec_schemas::trust::{Proof, Quarantine, SignedProof, Verdict, VerifiedUpTo};
use fiec_schemas::{
    ExecutionId, HardwareVector, InstanceId, NodeDescriptor, NodeFlags, NodeId, Phase, Sequence,
    Submission, Tenant,
};
use serde::{Deserialize, Serialize};

use crate::fate::Seen;
use crate::prerequisites::FoundMembers;
use crate::verification::Named;

/// Identifies a question that waits for its answer.
pub type Ticket = u64;

/// Stands for a sentence for people that a trace does not have.
fn no_sentence() -> String {
    "~".to_owned()
}

/// Result of a control request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ControlOutcome {
    /// The node accepts the request.
    Taken,
    /// The node refuses, with its reason for people.
    Refused(#[serde(skip, default = "no_sentence")] String),
    /// The node refuses for now, with its reason for people: the execution is about to start there,
    /// or to leave.
    Moving(#[serde(skip, default = "no_sentence")] String),
    /// The node does not hold the execution.
    NotHeld,
    /// No answer came.
    NoAnswer,
}

/// Result of the check of a proof's signature.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Judged {
    /// The proof's content.
    Counts(Proof),
    /// Why it does not count, for people.
    Not(#[serde(skip, default = "no_sentence")] String),
}

impl From<Result<Proof, String>> for Judged {
    fn from(judged: Result<Proof, String>) -> Self {
        match judged {
            Ok(proof) => Self::Counts(proof),
            Err(reason) => Self::Not(reason),
        }
    }
}

/// How far an execution was verified before.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Remembered {
    /// The stored value is not available now, with the reason for people.
    Unknown(#[serde(skip, default = "no_sentence")] String),
    /// It was not.
    Nothing,
    /// Up to here.
    Stored(VerifiedUpTo),
}

impl From<Result<Option<VerifiedUpTo>, String>> for Remembered {
    fn from(stored: Result<Option<VerifiedUpTo>, String>) -> Self {
        match stored {
            Ok(Some(up_to)) => Self::Stored(up_to),
            Ok(None) => Self::Nothing,
            Err(reason) => Self::Unknown(reason),
        }
    }
}

/// One input of the policy. Submissions and ledger messages have calls of their own,
/// [`Policy::submit`](super::Policy::submit) and [`Policy::follow`](super::Policy::follow).
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Input {
    /// A submission that was stored apart because its ledger message would have been too large.
    Spec {
        /// The execution.
        execution: ExecutionId,
        /// Its submission.
        spec: Arc<Submission>,
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
        phase: Phase,
    },
    /// An append of ours failed and the ledger is empty.
    Vanished {
        /// The execution.
        execution: ExecutionId,
    },
    /// A pushed program runs in a container.
    Container {
        /// Its name with its version.
        program: String,
    },
    /// A node's key in `FIEC_NODES`.
    Descriptor {
        /// Its value.
        descriptor: Box<NodeDescriptor>,
    },
    /// A node's key in `FIEC_NODES` was removed.
    Gone {
        /// The node.
        node: NodeId,
    },
    /// An operator's flags.
    Flags {
        /// The node.
        node: NodeId,
        /// The flags.
        flags: NodeFlags,
    },
    /// A node's proof, with the result of the signature check.
    Proof {
        /// The node.
        node: NodeId,
        /// The proof as stored.
        signed: Box<SignedProof>,
        /// The result.
        judged: Judged,
    },
    /// The contracts that a node has lost.
    Quarantine {
        /// The node.
        node: NodeId,
        /// The contracts.
        quarantine: Quarantine,
    },
    /// Result of a node that computed a part of an execution again. Its signature has been checked.
    Verdict {
        /// The result.
        verdict: Box<Verdict>,
    },
    /// The answer to `Action::Recall`.
    Recalled {
        /// The execution.
        execution: ExecutionId,
        /// How far it was verified.
        up_to: Remembered,
        /// The outputs that its ledger names.
        named: Named,
    },
    /// A node's vector.
    Vector {
        /// The vector.
        vector: Box<HardwareVector>,
        /// Its age, in ms.
        age_ms: u64,
    },
    /// Result of a probe.
    Probe {
        /// The node.
        node: NodeId,
        /// The instance that answered, if one did.
        answered: Option<InstanceId>,
    },
    /// The answer to `Action::AskHoldings`.
    Holdings {
        /// The node.
        node: NodeId,
        /// The instance of its agent that answered.
        instance: InstanceId,
        /// All executions that it holds, ordered by id.
        held: Vec<Holding>,
    },
    /// The holder's answer to an order to yield, park or unpark.
    Ordered {
        /// The execution.
        execution: ExecutionId,
        /// The epoch of the order.
        epoch: u64,
        /// The answer.
        answer: ControlOutcome,
    },
    /// The answer to an order to split.
    SplitAnswered {
        /// The execution.
        execution: ExecutionId,
        /// The epoch of the order.
        epoch: u64,
        /// The answer.
        answer: ControlOutcome,
    },
    /// The answer to `Action::Lookup`, and to `Action::MakePart` if the part has ended.
    Ended {
        /// The execution.
        execution: ExecutionId,
        /// What its ledger shows.
        seen: Seen,
    },
    /// The answer to `Action::FindMembers`.
    Members {
        /// The tenant.
        tenant: Tenant,
        /// The groups with their members. Empty if they could not be read.
        found: Vec<FoundMembers>,
    },
    /// Ledger messages will soon drop out of the stream by their age.
    Aged {
        /// The last of them.
        up_to: Sequence,
    },
    /// A tenant's quota.
    Quota {
        /// The tenant.
        tenant: Tenant,
        /// None: unlimited.
        quota: Option<Quota>,
    },
    /// A tenant's reservations.
    Reserved {
        /// The tenant.
        tenant: Tenant,
        /// Sequence and content of the message. None if the result of an `Action::Reserve` is
        /// unknown.
        table: Option<(Sequence, Arc<Reservations>)>,
        /// True for the answer to `Action::Reserve`. Otherwise it is news, which may be late.
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
        to: Option<NodeId>,
        /// The operator.
        who: String,
    },
    /// An operator's setting for a tenant.
    Tenant {
        /// The tenant.
        tenant: Tenant,
        /// Its share relative to others, 1 by default.
        weight: f64,
    },
    /// The connection to the broker is up, or not.
    Connected {
        /// True if it is.
        connected: bool,
    },
    /// The broker has lost messages since this service read its ledgers. The holders of bindings
    /// append them again, and the policy binds nothing until then.
    Lost,
    /// All that existed at the start has been read.
    Loaded,
    /// Time passes.
    Tick,
}
