//! What the core is told, by whom ever.

use fiec_broker::feed::FeedItem;
use fiec_broker::{AppendError, Entry, Tip};
use fiec_policy::holds::Seen;
use fiec_policy::verify::Named;
use fiec_policy::{ControlOutcome, ProbeOutcome, Ticket};
use fiec_schemas::hardware::RunningProgress;
use fiec_schemas::messages::{CapsuleBinding, Holding, NodeStatus, Why};
use fiec_schemas::quota::{Quota, Reservations};
use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::surroundings::Offers;
use fiec_schemas::trust::{Quarantine, SignedProof, SignedVerdict, Verdict, VerifiedUpTo};
use fiec_schemas::{
    Event, ExecutionId, HardwareVector, InstanceId, LineError, NodeDescriptor, NodeFlags, NodeId,
    Sequence, Submission, Tenant,
};
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::sync::oneshot;

use crate::intake::{Cursor, Line};
use crate::reading::Verdict as RefusedLines;
use crate::refusal::Refusal;

/// News from the broker, in the order in which each source tells them.
#[derive(Debug)]
pub enum News {
    /// A ledger message.
    Feed(FeedItem),
    /// The feed has told everything that was there at the start.
    Loaded,
    /// A vector as it arrived.
    Vector(Box<HardwareVector>),
    /// A node's descriptor.
    Descriptor(Box<NodeDescriptor>),
    /// A node's descriptor is gone.
    Gone(NodeId),
    /// An operator's flags.
    Flags(NodeId, NodeFlags),
    /// What a node has proved.
    Proof(NodeId, Box<SignedProof>),
    /// What a node has lost.
    Quarantine(NodeId, Quarantine),
    /// What a node found that computed a part of an execution once more.
    Verdict(Box<SignedVerdict>),
    /// A program that was pushed runs in a container.
    Container(String),
    /// What a tenant may use at once.
    Quota(Tenant, Option<Quota>),
    /// What a tenant has reserved.
    Reserved(Tenant, Sequence, Reservations),
    /// Another replica spoke.
    Replica(InstanceId, bool),
}

/// What became of something that the core had started, or a question to it.
#[derive(Debug)]
pub enum Outcome {
    /// A first append.
    First(Box<Line>, Result<Box<Tip>, AppendError>),
    /// A first append met an existing ledger.
    Existing(Box<Line>, Result<Option<Box<Entry>>, String>),
    /// A large submission is stored; its line can go on.
    Large(Box<Line>, Result<(), String>),
    /// Whether a line's program is registered.
    Program(Box<Line>, Result<bool, String>),
    /// A message was looked at as a whole.
    Vetted(Box<Cursor>, Result<RefusedLines, Refusal>),
    /// A later append.
    Later(ExecutionId, Option<Ticket>, Later),
    /// A capsule that was to be sent again.
    Capsule(Box<CapsuleBinding>),
    /// A large submission was fetched; none: its execution has ended.
    Spec(ExecutionId, Result<Option<Arc<Submission>>, NoSpec>),
    /// A yield order.
    Ordered(ExecutionId, u64, ControlOutcome, Option<Ticket>),
    /// An order to split.
    Split(ExecutionId, u64, ControlOutcome),
    /// The last message of the ledger of a part that was not known here.
    Found(Box<Entry>),
    /// How far an execution was verified before, or why that cannot be said now, and which outputs
    /// its ledger names.
    Recalled(ExecutionId, Result<Option<VerifiedUpTo>, String>, Named),
    /// A node did not take it to compute a part once more.
    Verdict(Box<Verdict>),
    /// What is reserved after a change; none: nobody knows.
    Reserved(Tenant, Option<(Sequence, Reservations)>),
    /// Whether an execution has ended.
    Ended(ExecutionId, Seen),
    /// A probe.
    Probed(NodeId, ProbeOutcome),
    /// All that this life of a node holds, in order of their ids.
    Held(NodeId, InstanceId, Vec<Holding>),
    /// A record about a rejected line is stored, or not.
    Recorded(u64, bool),
    /// An operator appended these events to a ledger; this is its tip.
    Changed(Box<Tip>, Vec<Event>),
    /// A question.
    Ask(Ask),
}

/// Why a large submission could not be fetched.
#[derive(Debug)]
pub enum NoSpec {
    /// It is not there, or damaged.
    Lost(String),
    /// The broker does not say.
    Unknown(String),
}

/// What became of a later append.
#[derive(Debug)]
pub enum Later {
    /// It is stored.
    Stored(Box<Tip>),
    /// It is stored; these were its events.
    Changed(Box<Tip>, Vec<Event>),
    /// Somebody else was first; this is the last message.
    Overtaken(Box<Entry>),
    /// There is no ledger any more.
    Vanished,
    /// Not known; nothing is changed.
    Failed(String),
}

/// A question of the API.
#[derive(Debug)]
pub enum Ask {
    /// Why an execution is where it is.
    Why(ExecutionId, oneshot::Sender<Option<Why>>),
    /// All nodes.
    Nodes(oneshot::Sender<Vec<NodeStatus>>),
    /// The nodes that count as lost.
    Lost(oneshot::Sender<BTreeSet<NodeId>>),
    /// What the nodes could give.
    Offers(oneshot::Sender<Offers>),
    /// What a running execution has reached.
    Progress(ExecutionId, oneshot::Sender<Option<RunningProgress>>),
    /// Move an execution.
    Yield {
        /// Which.
        execution: ExecutionId,
        /// Where to.
        to: Option<NodeId>,
        /// Who asks.
        who: String,
        /// The answer.
        reply: oneshot::Sender<Result<String, Refusal>>,
    },
    /// What a change of an execution would come to: in words, or why no node takes it then.
    Foresee(
        ExecutionId,
        Box<Adjustment>,
        oneshot::Sender<Result<String, String>>,
    ),
    /// Lines that the API refused.
    Rejected(Box<Rejected>),
}

/// Lines that were refused before they were stored.
#[derive(Debug)]
pub struct Rejected {
    /// The subject's tenant.
    pub tenant: String,
    /// Each with the line's beginning.
    pub lines: Vec<(LineError, String)>,
}
