//! Ledger messages: the events that happened together, and the cumulative state after them. The
//! transitions are in [`crate::fold`].

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use crate::cause::{Candidate, Cause, CauseKind, Decision, Entrusted, Evidence};
use crate::energy::{Energy, EnergyTotals};
use crate::fault::{Fault, FaultKind};
use crate::ids::{
    BatchId, BoundaryIndex, ClientId, Digest, Epoch, ExecutionId, InstanceId, NodeId, Ordinal,
    Sequence, Tenant, Timestamp,
};
use crate::limits::EVENT_HEADER_LIMIT;
use crate::named::named;
use crate::package::Grant;
use crate::scheduling::{Adjustment, Keep, Parked};
use crate::series::Series;
use crate::spread::Spreading;
use crate::submission::{Contract, Submission};
use crate::tagged::tagged;

/// One message of a ledger: events that happened together, and the state after them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LedgerMessage {
    /// Version of this message: 1.
    pub v: u8,
    /// The events, in order. None: the message only makes appends after earlier messages fail.
    pub events: Vec<Event>,
    /// The state after the events. It alone suffices to continue.
    pub state: Arc<ExecutionState>,
    /// Reserved for a signature by the binding's holder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sig: Option<String>,
}

/// A ledger message that cannot be encoded or decoded.
#[derive(Debug, thiserror::Error)]
pub enum MessageError {
    /// It exceeds the limit of the header.
    #[error(
        "ledger message of {size} bytes is over the {EVENT_HEADER_LIMIT} that a header may have"
    )]
    TooLarge {
        /// Its size in bytes.
        size: usize,
    },
    /// It is not JSON of this form.
    #[error("ledger message is not of the expected form: {0}")]
    Json(#[from] serde_json::Error),
    /// A version that this program does not know.
    #[error("ledger message has version {0}, this program knows 1: upgrade it")]
    Version(u8),
}

impl LedgerMessage {
    /// Encodes the header's value.
    ///
    /// # Errors
    /// [`MessageError::TooLarge`] over [`EVENT_HEADER_LIMIT`].
    pub fn encode(&self) -> Result<String, MessageError> {
        let text = serde_json::to_string(self)?;
        if text.len() > EVENT_HEADER_LIMIT {
            return Err(MessageError::TooLarge { size: text.len() });
        }
        Ok(text)
    }

    /// Decodes a header's value. `sequence` is the message's own. It replaces 0 where the message
    /// refers to itself.
    ///
    /// # Errors
    /// If the text is not such a message.
    pub fn decode(text: &str, sequence: Sequence) -> Result<Self, MessageError> {
        let mut message: Self = serde_json::from_str(text)?;
        if message.v != 1 {
            return Err(MessageError::Version(message.v));
        }
        Arc::make_mut(&mut message.state).resolve(sequence);
        Ok(message)
    }
}

tagged! { "type", EventKind,
    /// An event of an execution.
    #[derive(Debug, Clone, PartialEq, JsonSchema)]
    pub enum Event {
        /// The execution was submitted.
        Submitted,
        /// The execution was bound to a node, with a new epoch.
        Bound {
            /// The new epoch: one more than the last.
            epoch: Epoch,
            /// The node.
            node: NodeId,
            /// The life of the node's agent.
            instance: InstanceId,
            /// The substrate on it.
            substrate: String,
            /// The reason.
            cause: Cause,
            /// The candidates of the choice. Absent if another message has the decision.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            decision: Option<Decision>,
        },
        /// The node has started the execution.
        Started {
            /// The epoch of the binding.
            epoch: Epoch,
            /// When the first capsule of this binding began.
            computing_since: Timestamp,
        },
        /// A boundary became durable.
        Boundary(BoundaryEvent),
        /// Numbers that the program reported since the last commit, by the boundary that ends their
        /// capsule.
        Noted {
            /// The points of each name.
            numbers: Series,
        },
        /// Emitted messages became durable. They are published now.
        Emitted {
            /// The messages.
            outbox: Outbox,
        },
        /// The node yielded the execution at its last committed boundary.
        Yielded {
            /// The reason.
            cause: Cause,
            /// When the last capsule on this node ended.
            computed_until: Timestamp,
        },
        /// The node refused the binding.
        Refused {
            /// The reason.
            reason: String,
            /// Slots that the node could offer.
            offer: u32,
            /// What stopped it. Absent if it is nobody's fault, or if an earlier version wrote this.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            fault: Option<Box<Fault>>,
        },
        /// The execution pauses until somebody resumes it.
        Paused {
            /// Who asked.
            who: String,
        },
        /// The execution may be bound again.
        Resumed {
            /// Who asked.
            who: String,
        },
        /// Somebody requested something that the holder of the binding will do.
        Requested {
            /// Who asked.
            who: String,
            /// The request.
            what: RequestKind,
        },
        /// The last tiles of its remaining range became a part. This is in the message of the
        /// boundary whose σ ends before the part.
        Split {
            /// The part: [`crate::spread::part_id`].
            part: ExecutionId,
            /// How often the execution was split before.
            nth: u32,
            /// The part's first tile.
            from: u64,
            /// The tile after the part's last one.
            to: u64,
        },
        /// The execution took back the last of its parts, which has ended. This is in the message
        /// of the boundary whose σ has the part's tiles.
        Merged {
            /// The part.
            part: ExecutionId,
        },
        /// A part has ended early. Its holder gets the remaining tiles.
        Returned {
            /// Its holder.
            to: ExecutionId,
        },
        /// The grant of the execution changes at its next boundary, until it moves.
        Reconfigured {
            /// Who asked.
            who: String,
            /// The new grant.
            grant: Grant,
        },
        /// An adjustment of the execution, in force from now on.
        Adjusted {
            /// Who asked: an operator, or `program`.
            who: String,
            /// The change.
            change: Adjustment,
        },
        /// The execution is parked on its node at its last committed boundary.
        Parked {
            /// The reason.
            cause: Cause,
            /// What it keeps.
            keep: Keep,
            /// When its last capsule ended.
            computed_until: Timestamp,
        },
        /// The execution continues on the node where it was parked.
        Unparked {
            /// The reason, or who asked.
            reason: String,
            /// When its next capsule began.
            computing_since: Timestamp,
        },
        /// The program ended without completing. It is retried from the last commit.
        Crashed {
            /// Crashes since the last commit, with this one. Earlier versions counted all crashes so
            /// far.
            attempt: u32,
            /// Exit status or signal, in words.
            exit: String,
            /// The end of its output to stderr.
            stderr: String,
            /// Pause before the next attempt, in ms.
            backoff_ms: u64,
            /// How it ended: a fault of the program. Absent if an earlier version wrote this, or if the
            /// worker's own code failed, which counts like a crash.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            fault: Option<Box<Fault>>,
        },
        /// The execution has completed.
        Completed {
            /// The program's result. Absent if `object` has it.
            #[serde(default, skip_serializing_if = "Value::is_null")]
            result: Value,
            /// A result over 4 KiB, stored beside the ledger.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            object: Option<ResultObject>,
            /// When the last capsule ended.
            computed_until: Timestamp,
            /// Number of all capsules.
            capsules: BoundaryIndex,
            /// Outputs made since the last commit.
            #[serde(default, skip_serializing_if = "Vec::is_empty")]
            outputs: Vec<Output>,
            /// Energy since the last commit. Absent if it was not measured.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            energy: Option<Energy>,
        },
        /// The program has ended. Its outputs and result are compared before they count.
        /// `completed` follows `verified`.
        Computed {
            /// The program's result. Absent if `object` has it.
            #[serde(default, skip_serializing_if = "Value::is_null")]
            result: Value,
            /// A result over 4 KiB, stored beside the ledger.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            object: Option<ResultObject>,
            /// When the last capsule ended.
            computed_until: Timestamp,
            /// Number of all capsules.
            capsules: BoundaryIndex,
            /// Outputs made since the last commit.
            #[serde(default, skip_serializing_if = "Vec::is_empty")]
            outputs: Vec<Output>,
            /// Energy since the last commit. Absent if it was not measured.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            energy: Option<Energy>,
        },
        /// Other nodes have computed the execution again, with the same bits.
        Verified {
            /// The nodes.
            by: Vec<NodeId>,
            /// Number of segments.
            segments: u32,
        },
        /// The last boundaries of the execution are not trusted. It continues from an earlier one.
        SteppedBack {
            /// The boundary to continue from. Absent: the beginning. Its `seq` is 0 if this message
            /// carries σ.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            to: Option<StatePlace>,
            /// The reason.
            cause: Cause,
        },
        /// The broker had lost messages of this ledger. The holder of the binding states their
        /// result again. Nothing was computed twice.
        Healed {
            /// Ordinal of the last message that was left, 0 if none was.
            kept: Ordinal,
            /// Number of lost messages.
            lost: u64,
            /// Digest of the last lost message's header.
            over: Digest,
        },
        /// The execution cannot complete.
        Failed {
            /// The reason, for a person.
            reason: String,
            /// The end of the program's output to stderr.
            #[serde(default, skip_serializing_if = "String::is_empty")]
            stderr: String,
            /// What ended it. Absent if an earlier version wrote this.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            fault: Option<Box<Fault>>,
        },
        /// The execution cannot go on by itself. It is held with its last committed σ until somebody
        /// retries or cancels it.
        Held {
            /// The reason, for a person.
            reason: String,
            /// The end of the program's output to stderr.
            #[serde(default, skip_serializing_if = "String::is_empty")]
            stderr: String,
            /// What stopped it.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            fault: Option<Box<Fault>>,
        },
        /// The execution starts again from its last commit, after it failed, was held or was cancelled.
        Retried {
            /// Who asked.
            who: String,
        },
        /// Somebody cancelled the execution.
        Cancelled {
            /// Who.
            who: String,
        },
    }
}

/// Messages that an execution emitted since its last commit. They are packed into one chunk of
/// `FIEC_CHUNK`, and published from there on `fiec.outbox.<tenant>.<execution>.<name>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Outbox {
    /// Sequence of the chunk. It is dropped after its messages are published.
    pub seq: Sequence,
    /// Digest of the chunk.
    pub digest: Digest,
    /// Its bytes.
    pub bytes: u32,
    /// Messages in it.
    pub count: u32,
    /// The last boundary at which one of them was emitted. A repeated computation emits the same
    /// messages at earlier boundaries, which are left out.
    pub through: BoundaryIndex,
}

/// A committed boundary.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BoundaryEvent {
    /// Capsules completed before it.
    pub index: BoundaryIndex,
    /// Digest of σ.
    pub digest: Digest,
    /// Bytes of σ.
    pub bytes: u64,
    /// When the capsule before it ended.
    pub computed_at: Timestamp,
    /// Time spent computing since the commit before, in microseconds.
    pub compute_us: u64,
    /// Number of all boundaries, if the program knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of: Option<BoundaryIndex>,
    /// The program's own short note on its progress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Outputs that become visible with this commit.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub outputs: Vec<Output>,
    /// Energy since the last commit, or since the program began here. Absent if it was not
    /// measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy: Option<Energy>,
}

/// An output, in `FIEC_DATA` by its digest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Output {
    /// The program's name for it.
    pub name: String,
    /// Digest of its bytes.
    pub digest: Digest,
    /// Its size.
    pub bytes: u64,
}

/// A result that is too large for its ledger message: JSON in `FIEC_DATA` by its digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ResultObject {
    /// Digest of the JSON.
    pub digest: Digest,
    /// Its bytes.
    pub bytes: u32,
}

/// The cumulative state of an execution. The last message alone contains it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ExecutionState {
    /// The execution.
    pub execution: ExecutionId,
    /// Its tenant.
    pub tenant: Tenant,
    /// The message's place in the ledger, from 1.
    pub ordinal: Ordinal,
    /// Digest of the `Fiec-Event` header of the message before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prev: Option<Digest>,
    /// Author of the message: `policy/<id>` or `worker/<node>/<instance>`.
    pub author: String,
    /// Time of the message, by the author's clock.
    pub at: Timestamp,
    /// Digest of the canonical submission.
    pub submission: Digest,
    /// The submission itself, if it is small. Present while the execution lives or can be retried, and
    /// in a first message that ends it. A large one is in `FIEC_DATA`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spec: Option<Arc<Submission>>,
    /// The id that its client gave it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_id: Option<ClientId>,
    /// The numeric contract for moves.
    #[serde(default, skip_serializing_if = "is_bitwise")]
    pub contract: Contract,
    /// True if outputs and completion are visible only after verification. False once it has
    /// completed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub guarded: bool,
    /// Its batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch: Option<BatchPlace>,
    /// When it was submitted, by the broker's clock.
    pub submitted_at: Timestamp,
    /// Its phase.
    #[serde(flatten, with = "beside")]
    #[schemars(with = "beside::Read")]
    pub phase: Phase,
    /// Epoch of the last binding; 0 before the first.
    pub epoch: Epoch,
    /// The last committed boundary, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boundary: Option<StatePlace>,
    /// When it was last bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moved_at: Option<Timestamp>,
    /// The last 8 nodes that it left because of pressure.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left: Vec<Left>,
    /// Adjustments since the submission.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adjusted: Option<Box<Adjustment>>,
    /// How it shares its range of tiles. Present if it may share it or is a part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spread: Option<Box<Spreading>>,
    /// The messages that it emitted last. Its next holder makes sure that they are published.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outbox: Option<Outbox>,
    /// Crashes of the program since the last commit or retry. They count against the submission's `retries`.
    /// 0 in messages of earlier versions.
    #[serde(default, skip_serializing_if = "none32")]
    pub crashes_since_commit: u32,
    /// True if a lost node may have started it without saying so. Its next holder says that it has
    /// started before its program does, so that a program that ends its worker at once is noticed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lost_unstarted: bool,
    /// The last 8 nodes whose worker ended, or had no memory left, while it computed there, since the
    /// last commit or retry. Many of them in a row make its program suspect.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub deaths: Vec<NodeId>,
    /// Computing time at the last retry, in µs. The limit of the submission counts from there.
    #[serde(default, skip_serializing_if = "none64")]
    pub limited_from_us: u64,
    /// Counters over its whole life.
    pub totals: Totals,
}

fn is_bitwise(contract: &Contract) -> bool {
    *contract == Contract::Bitwise
}

tagged! { "is", PhaseKind,
    /// Phase of an execution.
    #[derive(Debug, Clone, PartialEq, JsonSchema)]
    pub enum Phase {
        /// Waits for a binding.
        Pending {
            /// What its last holder confirmed and did not do. It is done before the next binding.
            #[serde(skip)]
            requested: Option<Requested>,
        },
        /// Bound to a node that has not started it.
        Bound(Bound),
        /// Computes on its node, or is parked there.
        Started(Started),
        /// Waits for `resume`.
        Paused {
            /// Who paused it.
            who: String,
        },
        /// Failed, and kept with its last committed σ, as its submission wishes. Waits for `retry`.
        Held {
            /// What stopped it, if it is known.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            fault: Option<FaultKind>,
            /// The reason, for a person.
            reason: String,
        },
        /// Computed to its end. Other nodes compute it again before that counts.
        Verifying {
            /// The node where it was computed last.
            node: NodeId,
            /// What its last holder confirmed and did not do. It is moot if the result is right.
            #[serde(skip)]
            requested: Option<Requested>,
        },
        /// Completed.
        Completed,
        /// Failed permanently.
        Failed,
        /// Cancelled by somebody.
        Cancelled,
        /// A part that ended before its range was done. Its holder has the remaining tiles.
        Returned,
    }
}

impl EventKind {
    /// True for an event that ends an execution.
    pub const fn is_end(self) -> bool {
        matches!(
            self,
            Self::Completed | Self::Failed | Self::Cancelled | Self::Returned
        )
    }
}

impl PhaseKind {
    /// True if the execution has ended. Only `retried` can follow.
    pub const fn is_terminal(self) -> bool {
        matches!(
            self,
            Self::Completed | Self::Failed | Self::Cancelled | Self::Returned
        )
    }

    /// True if `retried` can follow.
    pub const fn can_be_retried(self) -> bool {
        matches!(self, Self::Failed | Self::Cancelled | Self::Held)
    }

    /// True if the last committed σ may still be needed: while the execution lives, and for a retry.
    pub const fn needs_state(self) -> bool {
        !self.is_terminal() || self.can_be_retried()
    }
}

impl Phase {
    /// The name in SQL, in metrics and for people.
    pub const fn as_str(&self) -> &'static str {
        self.kind().as_str()
    }

    /// True if the execution has ended. Only `retried` can follow.
    pub fn is_terminal(&self) -> bool {
        self.kind().is_terminal()
    }

    /// Pending, without an open request.
    pub const PENDING: Self = Self::Pending { requested: None };

    /// The binding in force, if any.
    pub fn binding(&self) -> Option<&Binding> {
        match self {
            Self::Bound(Bound { binding, .. }) | Self::Started(Started { binding, .. }) => {
                Some(binding)
            }
            _ => None,
        }
    }

    /// The same, to be changed.
    pub(crate) fn binding_mut(&mut self) -> Option<&mut Binding> {
        match self {
            Self::Bound(Bound { binding, .. }) | Self::Started(Started { binding, .. }) => {
                Some(binding)
            }
            _ => None,
        }
    }

    /// The request that is not done yet, if any.
    pub fn requested(&self) -> Option<&Requested> {
        match self {
            Self::Pending { requested }
            | Self::Bound(Bound { requested, .. })
            | Self::Started(Started { requested, .. })
            | Self::Verifying { requested, .. } => requested.as_ref(),
            _ => None,
        }
    }

    /// The place of the open request, in the phases that have one.
    fn requested_mut(&mut self) -> Option<&mut Option<Requested>> {
        match self {
            Self::Pending { requested }
            | Self::Bound(Bound { requested, .. })
            | Self::Started(Started { requested, .. })
            | Self::Verifying { requested, .. } => Some(requested),
            _ => None,
        }
    }

    /// Takes the open request along into the next phase.
    pub(crate) fn take_requested(&mut self) -> Option<Requested> {
        self.requested_mut().and_then(Option::take)
    }

    /// How it is parked, if it is.
    pub fn parked(&self) -> Option<Parked> {
        match self {
            Self::Started(Started { parked, .. }) => *parked,
            _ => None,
        }
    }
}

/// Of an execution that is bound and not started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct Bound {
    /// The binding.
    pub binding: Binding,
    /// What its last holder confirmed and did not do.
    #[serde(skip)]
    pub requested: Option<Requested>,
}

/// Of an execution that its node has started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct Started {
    /// The binding.
    pub binding: Binding,
    /// What its holder has confirmed and not done yet.
    #[serde(skip)]
    pub requested: Option<Requested>,
    /// Set while it is parked at its last boundary.
    #[serde(skip)]
    pub parked: Option<Parked>,
}

/// An execution is bound, or started, with nothing requested.
impl From<Binding> for Bound {
    fn from(binding: Binding) -> Self {
        Self {
            binding,
            requested: None,
        }
    }
}

impl From<Binding> for Started {
    fn from(binding: Binding) -> Self {
        Self {
            binding,
            requested: None,
            parked: None,
        }
    }
}

/// In JSON a request and a parking stand beside the phase that they belong to. Where the phase has
/// no place for them they are passed over.
mod beside {
    use super::{Deserialize, JsonSchema, Parked, Phase, Requested, Serialize, Started};
    use serde::{Deserializer, Serializer};

    #[derive(Serialize)]
    struct Written<'a> {
        phase: &'a Phase,
        #[serde(skip_serializing_if = "Option::is_none")]
        requested: Option<&'a Requested>,
        #[serde(skip_serializing_if = "Option::is_none")]
        parked: Option<Parked>,
    }

    /// The phase of an execution, and what belongs to it.
    #[derive(Deserialize, JsonSchema)]
    pub(super) struct Read {
        /// Its phase.
        phase: Phase,
        /// A request to the holder that is not done yet.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        requested: Option<Requested>,
        /// Present while it is parked at its last boundary.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        parked: Option<Parked>,
    }

    pub(super) fn serialize<S: Serializer>(phase: &Phase, to: S) -> Result<S::Ok, S::Error> {
        Written {
            phase,
            requested: phase.requested(),
            parked: phase.parked(),
        }
        .serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Phase, D::Error> {
        let read = Read::deserialize(from)?;
        let mut phase = read.phase;
        if let Phase::Started(Started { parked, .. }) = &mut phase {
            *parked = read.parked;
        }
        if let Some(requested) = phase.requested_mut() {
            *requested = read.requested;
        }
        Ok(phase)
    }
}

/// The tie between an execution and one life of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Binding {
    /// The node.
    pub node: NodeId,
    /// The life of its agent.
    pub instance: InstanceId,
    /// The substrate on it.
    pub substrate: String,
    /// Sequence of the message that made the binding and identifies it.
    pub seq: Sequence,
    /// When it was made.
    pub at: Timestamp,
}

/// The last committed boundary and the place of its σ.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StatePlace {
    /// Capsules completed before it.
    pub index: BoundaryIndex,
    /// Digest of σ.
    pub digest: Digest,
    /// Bytes of σ.
    pub bytes: u64,
    /// Sequence of the message whose body is σ, or the list of its chunks if σ is larger than 768
    /// KiB. Absent if an earlier version stored σ in the object store `FIEC_STATE`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq: Option<Sequence>,
    /// Ordinal of that message.
    pub ordinal: Ordinal,
}

/// A node that an execution left because of pressure.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Left {
    /// The node.
    pub node: NodeId,
    /// When.
    pub at: Timestamp,
}

named! {
    /// A request to the holder of a binding, through the ledger.
    pub enum RequestKind {
        /// End the execution.
        Cancel,
        /// Stop it at its next boundary and leave it paused.
        Pause,
    }
}

/// A request that the holder of the binding has accepted and will do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Requested {
    /// The request.
    pub what: RequestKind,
    /// Who asked.
    pub who: String,
    /// When. Absent if an earlier version wrote it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<Timestamp>,
}

/// A place in a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct BatchPlace {
    /// The batch.
    pub id: BatchId,
    /// Line in it, from 1.
    pub line: u32,
}

/// Counters over an execution's life.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Totals {
    /// Boundaries committed.
    #[serde(default, skip_serializing_if = "none64")]
    pub commits: u64,
    /// Bytes of σ committed.
    #[serde(default, skip_serializing_if = "none64")]
    pub state_bytes: u64,
    /// Bindings after the first, with any cause.
    #[serde(default, skip_serializing_if = "none64")]
    pub rebindings: u64,
    /// Rebindings because of pressure.
    #[serde(default, skip_serializing_if = "none64")]
    pub pressure: u64,
    /// All crashes of the program.
    #[serde(default, skip_serializing_if = "none64")]
    pub crashes: u64,
    /// Faults of nodes: what they could not start or go on with, and workers that went away.
    #[serde(default, skip_serializing_if = "none64")]
    pub node_faults: u64,
    /// Faults of the broker and of what is stored in it.
    #[serde(default, skip_serializing_if = "none64")]
    pub infrastructure_faults: u64,
    /// Computing time up to the last commit, in µs.
    #[serde(default, skip_serializing_if = "none64")]
    pub compute_us: u64,
    /// Steps back to an earlier boundary.
    #[serde(default, skip_serializing_if = "none64")]
    pub steps_back: u64,
    /// Energy of the intervals in which it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy: Option<EnergyTotals>,
}

fn none64(n: &u64) -> bool {
    *n == 0
}

fn none32(n: &u32) -> bool {
    *n == 0
}

impl Event {
    /// The number of crashes since the last commit, counted on from `before` by this event.
    pub const fn crashes_after(&self, before: u32) -> u32 {
        match self {
            Self::Crashed { .. } => before.saturating_add(1),
            Self::Boundary(_) | Self::Retried { .. } => 0,
            _ => before,
        }
    }
}

impl ExecutionState {
    /// True if no 0 stands for the message's own sequence.
    pub fn is_resolved(&self) -> bool {
        self.phase.binding().is_none_or(|binding| binding.seq != 0)
            && self
                .boundary
                .as_ref()
                .is_none_or(|place| place.seq != Some(0))
    }

    /// Replaces 0 by the message's own sequence.
    pub fn resolve(&mut self, sequence: Sequence) {
        if let Some(binding) = self.phase.binding_mut().filter(|binding| binding.seq == 0) {
            binding.seq = sequence;
        }
        if let Some(place) = &mut self.boundary
            && place.seq == Some(0)
        {
            place.seq = Some(sequence);
        }
    }

    /// The request that is not done yet, if any.
    pub fn requested(&self) -> Option<&Requested> {
        self.phase.requested()
    }

    /// How it is parked, if it is.
    pub fn parked(&self) -> Option<Parked> {
        self.phase.parked()
    }

    /// The index of the last committed boundary, 0 if there is none.
    pub fn boundary_index(&self) -> BoundaryIndex {
        self.boundary.as_ref().map_or(0, |b| b.index)
    }
}
