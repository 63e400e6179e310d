//! Inputs of the core: news from the broker, outcomes of its effects, and questions of the API.

use fiec_broker::feed::FeedItem;
use fiec_broker::{AppendError, Entry, Tip};
use fiec_policy::{ControlOutcome, Ticket};
use fiec_policy::{FoundMembers, Named, Seen};
use fiec_schemas::hardware::{ArrivingState, RunningProgress};
use fiec_schemas::messages::{CapsuleBinding, Holding, NodeStatus, ViewReply, Why};
use fiec_schemas::quota::{Quota, Reservations};
use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::surroundings::Offers;
use fiec_schemas::trust::{Quarantine, SignedProof, SignedVerdict, Verdict, VerifiedUpTo};
use fiec_schemas::{
    Digest, Event, ExecutionId, FieldError, HardwareVector, InstanceId, LineError, NodeDescriptor,
    NodeFlags, NodeId, Sequence, Submission, Tenant,
};
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::sync::oneshot;

use crate::allowance::Allowance;
use crate::intake::{Cursor, Line};
use crate::refusal::Refusal;
use crate::vetting::Vetting;

/// News from the broker, in the order of each source.
#[derive(Debug)]
pub enum News {
    /// A ledger message.
    Feed(FeedItem),
    /// The feed has delivered all messages that existed at the start.
    Loaded,
    /// A hardware vector.
    Vector(Box<HardwareVector>),
    /// A node's descriptor.
    Descriptor(Box<NodeDescriptor>),
    /// A node's descriptor was deleted.
    Gone(NodeId),
    /// An operator's flags.
    Flags(NodeId, NodeFlags),
    /// A node's signed proof.
    Proof(NodeId, Box<SignedProof>),
    /// The contracts that a node has lost.
    Quarantine(NodeId, Quarantine),
    /// A node's verdict after it computed a part of an execution again.
    Verdict(Box<SignedVerdict>),
    /// A pushed program runs in a container.
    Container(String),
    /// Ledger messages up to this sequence will soon drop out of the stream.
    Aged(Sequence),
    /// A tenant's quota, or its removal.
    Quota(Tenant, Option<Quota>),
    /// A tenant's reservations, with the sequence of their message.
    Reserved(Tenant, Sequence, Reservations),
    /// Another replica announced itself. True if it is leaving.
    Replica(InstanceId, bool),
}

/// Result of an effect that the core started, or a question to the core.
#[derive(Debug)]
pub enum Outcome {
    /// Result of a first append.
    First(Box<Line>, Result<Box<Tip>, AppendError>),
    /// The existing ledger that a first append met.
    Existing(Box<Line>, Result<Option<Box<Entry>>, String>),
    /// A large submission was stored, or why not. Its line can continue.
    Large(Box<Line>, Result<(), String>),
    /// Whether a line's program is registered.
    Program(Box<Line>, Result<Option<FieldError>, String>),
    /// What there is under the client's id of a line.
    Name(Box<Line>, UnderName),
    /// A message was checked as a whole.
    Vetted(Box<Cursor>, Result<Vetting, Refusal>),
    /// Result of a later append.
    Append(ExecutionId, Option<Ticket>, AppendEnd),
    /// A binding whose capsule message must be sent again.
    Capsule(Box<CapsuleBinding>),
    /// A large submission was fetched. `None` if its execution has ended.
    Spec(ExecutionId, Result<Option<Arc<Submission>>, NoSpec>),
    /// Result of an order to yield, park or unpark.
    Ordered(ExecutionId, u64, ControlOutcome, Option<Ticket>),
    /// Result of an order to split.
    Split(ExecutionId, u64, ControlOutcome),
    /// The last message of a part's ledger that this service did not know.
    Found(Box<Entry>),
    /// How far an execution was verified before, or why that is unknown now. Also the outputs that
    /// its ledger names.
    Recalled(ExecutionId, Result<Option<VerifiedUpTo>, String>, Named),
    /// A node refused to compute a part again.
    Verdict(Box<Verdict>),
    /// Reservations after a change. `None` if the result is unknown.
    Reserved(Tenant, Option<(Sequence, Reservations)>),
    /// Whether an execution has ended.
    Ended(ExecutionId, Seen),
    /// The members of a tenant's groups for which executions wait. Empty if they could not be read.
    Members(Tenant, Vec<FoundMembers>),
    /// The broker keeps nothing more of a node, whose descriptor was of this instance.
    Forgotten(NodeId, Option<InstanceId>),
    /// Result of a probe.
    Probed(NodeId, Option<InstanceId>),
    /// All executions that this life of a node holds, ordered by id.
    Held(NodeId, InstanceId, Vec<Holding>),
    /// A rejection of a line of this message was recorded, or why not.
    Recorded(u64, Result<(), String>),
    /// An operator's events were appended to a ledger. This is its tip.
    Changed(Box<Tip>, Vec<Event>),
    /// A line of this message was lost: its effect panicked.
    LineLost(Sequence),
    /// A question.
    Ask(Ask),
}

/// What there is under a client's id.
#[derive(Debug)]
pub enum UnderName {
    /// Nothing: it is new.
    Nothing,
    /// A ledger. Its last message.
    Ledger(Box<Entry>),
    /// An execution that has ended and whose ledger is gone. The digest of its submission.
    Ended(Digest),
    /// The broker gave no answer.
    Unknown,
}

/// Why a large submission could not be fetched.
#[derive(Debug)]
pub enum NoSpec {
    /// It is missing or damaged.
    Lost(String),
    /// The broker gave no answer.
    Unknown(String),
}

/// Result of a later append.
#[derive(Debug)]
pub enum AppendEnd {
    /// It is stored.
    Stored(Box<Tip>),
    /// It is stored, with these events.
    Changed(Box<Tip>, Vec<Event>),
    /// Another writer was first. This is the last message.
    Overtaken(Box<Entry>),
    /// The ledger no longer exists.
    Vanished,
    /// The result is unknown. The ledger must be read again.
    Failed(String),
}

/// A question of the API.
#[derive(Debug)]
pub enum Ask {
    /// Why an execution waits, or runs where it runs.
    Why(ExecutionId, oneshot::Sender<Option<Why>>),
    /// All nodes.
    Nodes(oneshot::Sender<Vec<NodeStatus>>),
    /// The nodes that count as lost.
    Lost(oneshot::Sender<BTreeSet<NodeId>>),
    /// The resources that the nodes can offer.
    Offers(oneshot::Sender<Offers>),
    /// What this service believes of live executions, after this one in order.
    View(Option<ExecutionId>, oneshot::Sender<ViewReply>),
    /// The progress of a running execution, or of the fetch of a bound one's state.
    Progress(
        ExecutionId,
        oneshot::Sender<(Option<RunningProgress>, Option<ArrivingState>)>,
    ),
    /// Move an execution.
    Yield {
        /// The execution.
        execution: ExecutionId,
        /// The destination, if the asker chose one.
        to: Option<NodeId>,
        /// The person or program that asks.
        who: String,
        /// The answer.
        reply: oneshot::Sender<Result<String, Refusal>>,
    },
    /// Effect of an adjustment of an execution, in words, or why no node could run it then.
    Foresee(
        ExecutionId,
        Box<Adjustment>,
        oneshot::Sender<Result<String, String>>,
    ),
    /// How many waiting executions a tenant has and may have.
    Allowance(Tenant, oneshot::Sender<Allowance>),
    /// Lines that the API refused.
    Rejected(Box<Rejected>),
}

impl Ask {
    /// True if it can change something: without an answer, nobody knows whether it has.
    pub fn is_order(&self) -> bool {
        matches!(self, Self::Yield { .. })
    }
}

/// Lines that were refused before they were stored.
#[derive(Debug)]
pub struct Rejected {
    /// The subject's tenant.
    pub tenant: String,
    /// Each error with the beginning of its line.
    pub lines: Vec<(LineError, String)>,
}
