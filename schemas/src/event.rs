//! What a ledger message says: the events that happened together, and the cumulative state after
//! them. The transitions themselves are in [`crate::fold`].

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use crate::cause::{Candidate, Cause, CauseKind, Decision, Entrusted, Evidence};
use crate::energy::{Energy, EnergyTotals};
use crate::ids::{
    BatchId, BoundaryIndex, Digest, Epoch, ExecutionId, InstanceId, NodeId, Ordinal, Sequence,
    Tenant, Timestamp,
};
use crate::limits::EVENT_HEADER_LIMIT;
use crate::named::named;
use crate::package::Grant;
use crate::scheduling::{Adjustment, Keep, Parked};
use crate::spread::Spreading;
use crate::submission::{Contract, Submission};
use crate::tagged::tagged;

/// One message of a ledger: events that became true together, and the state after them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LedgerMessage {
    /// Version of this message: 1.
    pub v: u8,
    /// What happened, in order.
    pub events: Vec<Event>,
    /// The state after it; this alone suffices to go on.
    pub state: ExecutionState,
    /// Place for a signature by the binding's holder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sig: Option<String>,
}

/// A ledger message that cannot be encoded or decoded.
#[derive(Debug, thiserror::Error)]
pub enum MessageError {
    /// Over the limit of the header.
    #[error(
        "ledger message of {size} bytes is over the {EVENT_HEADER_LIMIT} that a header may have"
    )]
    TooLarge {
        /// Its size in bytes.
        size: usize,
    },
    /// No JSON of this form.
    #[error("ledger message is not of the expected form: {0}")]
    Json(#[from] serde_json::Error),
    /// A version that this program does not know.
    #[error("ledger message has version {0}, this program knows 1: upgrade it")]
    Version(u8),
}

impl LedgerMessage {
    /// The header's value.
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

    /// Reads a header's value; `sequence` is the message's own and takes the place of 0 wherever
    /// the message speaks of itself.
    ///
    /// # Errors
    /// When it is no such message.
    pub fn decode(text: &str, sequence: Sequence) -> Result<Self, MessageError> {
        let mut message: Self = serde_json::from_str(text)?;
        if message.v != 1 {
            return Err(MessageError::Version(message.v));
        }
        message.state.resolve(sequence);
        Ok(message)
    }
}

tagged! { "type", "Event", EventKind,
    /// Something that happened to an execution.
    #[derive(Debug, Clone, PartialEq, JsonSchema)]
    pub enum Event {
        /// It exists.
        Submitted,
        /// It is tied to a node under a new epoch.
        Bound {
            /// The new epoch: one more than before.
            epoch: Epoch,
            /// The node.
            node: NodeId,
            /// Which life of the node's agent.
            instance: InstanceId,
            /// Which place on it.
            substrate: String,
            /// Why.
            cause: Cause,
            /// Whom the choice was made from; absent when a decision lies in another message.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            decision: Option<Decision>,
        },
        /// Its node computes.
        Started {
            /// Under which epoch.
            epoch: Epoch,
            /// When its first capsule of this binding began.
            computing_since: Timestamp,
        },
        /// A boundary became durable.
        Boundary(BoundaryEvent),
        /// Messages to the outside became durable; they are published now.
        Emitted {
            /// Which.
            outbox: Outbox,
        },
        /// The node gave it up at its last committed boundary.
        Yielded {
            /// Why.
            cause: Cause,
            /// When the last capsule on this node ended.
            computed_until: Timestamp,
        },
        /// The node did not take it.
        Refused {
            /// Why.
            reason: String,
            /// Slots that it could offer.
            offer: u32,
        },
        /// It waits until somebody resumes it.
        Paused {
            /// Who asked.
            who: String,
        },
        /// It may be bound again.
        Resumed {
            /// Who asked.
            who: String,
        },
        /// Somebody asked for something that the holder of the binding will do.
        Requested {
            /// Who asked.
            who: String,
            /// What.
            what: RequestKind,
        },
        /// The tail of what is left to it is a part of its own from now on: in the message of the
        /// boundary whose σ ends before it.
        Split {
            /// The part: [`crate::spread::part_id`].
            part: ExecutionId,
            /// How often it was split before.
            nth: u32,
            /// The part's first tile.
            from: u64,
            /// The one behind its last.
            to: u64,
        },
        /// It has taken the last of its parts, which has ended: in the message of the boundary
        /// whose σ has that part's tiles.
        Merged {
            /// The part.
            part: ExecutionId,
        },
        /// A part has ended with what it has done: what was left to it is its holder's.
        Returned {
            /// Its holder.
            to: ExecutionId,
        },
        /// It is given more or less from its next boundary on, as long as it is where it is.
        Reconfigured {
            /// Who asked.
            who: String,
            /// What it may use then.
            grant: Grant,
        },
        /// Something about it is changed from now on.
        Adjusted {
            /// Who asked: an operator, or `program`.
            who: String,
            /// What is changed.
            change: Adjustment,
        },
        /// It waits at its last committed boundary, where it is.
        Parked {
            /// Why.
            cause: Cause,
            /// What it keeps.
            keep: Keep,
            /// When the last capsule before that ended.
            computed_until: Timestamp,
        },
        /// It goes on where it is parked.
        Unparked {
            /// Why, or who asked.
            reason: String,
            /// When its next capsule began.
            computing_since: Timestamp,
        },
        /// The program ended without completing; it is tried again from the last commit.
        Crashed {
            /// Crashes so far.
            attempt: u32,
            /// Exit status or signal, in words.
            exit: String,
            /// The end of what it wrote to stderr.
            stderr: String,
            /// How long the next attempt waits.
            backoff_ms: u64,
        },
        /// It is done.
        Completed {
            /// What the program says of its result; absent where `object` has it.
            #[serde(default, skip_serializing_if = "Value::is_null")]
            result: Value,
            /// A result over 4 KiB, stored beside the ledger.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            object: Option<ResultObject>,
            /// When its last capsule ended.
            computed_until: Timestamp,
            /// Capsules in all.
            capsules: BoundaryIndex,
            /// Outputs made since the last commit.
            #[serde(default, skip_serializing_if = "Vec::is_empty")]
            outputs: Vec<Output>,
            /// Energy since the last commit; absent where it was not measured.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            energy: Option<Energy>,
        },
        /// Its program has ended, and what it has made is compared before it counts; `completed`
        /// follows `verified`.
        Computed {
            /// What the program says of its result; absent where `object` has it.
            #[serde(default, skip_serializing_if = "Value::is_null")]
            result: Value,
            /// A result over 4 KiB, stored beside the ledger.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            object: Option<ResultObject>,
            /// When its last capsule ended.
            computed_until: Timestamp,
            /// Capsules in all.
            capsules: BoundaryIndex,
            /// Outputs made since the last commit.
            #[serde(default, skip_serializing_if = "Vec::is_empty")]
            outputs: Vec<Output>,
            /// Energy since the last commit; absent where it was not measured.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            energy: Option<Energy>,
        },
        /// Other nodes have computed it once more, with the same bits.
        Verified {
            /// Who.
            by: Vec<NodeId>,
            /// In how many segments.
            segments: u32,
        },
        /// What it has reached is not to be trusted: it goes on from an earlier boundary.
        SteppedBack {
            /// From which; none: from the beginning. Its `seq` is 0 where this message carries σ.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            to: Option<StatePlace>,
            /// Why.
            cause: Cause,
        },
        /// The broker had lost messages of this ledger, and the holder of the binding says again
        /// what they came to. Nothing was computed twice.
        Healed {
            /// Ordinal of the message that was left; 0 where none was.
            kept: Ordinal,
            /// Messages that were lost.
            lost: u64,
            /// Digest of the header of the last of them.
            over: Digest,
        },
        /// It cannot complete.
        Failed {
            /// Why, for a person.
            reason: String,
            /// The end of what the program wrote to stderr.
            #[serde(default, skip_serializing_if = "String::is_empty")]
            stderr: String,
        },
        /// Somebody ended it.
        Cancelled {
            /// Who.
            who: String,
        },
    }
}

/// Messages that an execution emitted since its last commit, packed into one chunk of
/// `FIEC_CHUNK`, from where they are published on `fiec.outbox.<tenant>.<execution>.<name>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Outbox {
    /// Sequence of the chunk; it is dropped once they are published.
    pub seq: Sequence,
    /// Digest of the chunk.
    pub digest: Digest,
    /// Its bytes.
    pub bytes: u32,
    /// Messages in it.
    pub count: u32,
    /// The last boundary at which one of them was emitted. What is emitted again at an earlier one
    /// is the same and is left out.
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
    /// Boundaries in all, where the program knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of: Option<BoundaryIndex>,
    /// The program's own short word on its progress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Outputs that become visible with this commit.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub outputs: Vec<Output>,
    /// Energy since the commit before, or since the program began here; absent where it was not
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

/// The cumulative state of an execution; the last message alone gives it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ExecutionState {
    /// Which execution.
    pub execution: ExecutionId,
    /// Whose.
    pub tenant: Tenant,
    /// The message's place in the ledger, from 1.
    pub ordinal: Ordinal,
    /// Digest of the `Fiec-Event` header of the message before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prev: Option<Digest>,
    /// Who wrote the message: `policy/<id>` or `worker/<node>/<instance>`.
    pub author: String,
    /// When, by the author's clock.
    pub at: Timestamp,
    /// Digest of the canonical submission.
    pub submission: Digest,
    /// The submission itself, if it is small, while the execution lives and in a first message that
    /// ends it; a large one lies in `FIEC_DATA`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spec: Option<Arc<Submission>>,
    /// The contract under which it may move.
    #[serde(default, skip_serializing_if = "is_bitwise")]
    pub contract: Contract,
    /// True where outputs and completion are visible only once they were verified.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub guarded: bool,
    /// Its batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch: Option<BatchPlace>,
    /// When it was submitted, by the broker's clock.
    pub submitted_at: Timestamp,
    /// Where it stands.
    pub phase: Phase,
    /// Epoch of the last binding; 0 before the first.
    pub epoch: Epoch,
    /// The last committed boundary, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boundary: Option<StatePlace>,
    /// When it was last bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moved_at: Option<Timestamp>,
    /// Nodes that it left because of pressure, the last 8.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left: Vec<Left>,
    /// Something that was asked of the holder and is not yet done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requested: Option<Requested>,
    /// What was changed about it since it was submitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adjusted: Option<Box<Adjustment>>,
    /// Set while it waits at its last boundary, where it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parked: Option<Parked>,
    /// How it shares its range of tiles with others, where it may or is a part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spread: Option<Box<Spreading>>,
    /// What it emitted last. Whoever takes it over makes sure that it is published.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outbox: Option<Outbox>,
    /// Counters over its whole life.
    pub totals: Totals,
}

fn is_bitwise(contract: &Contract) -> bool {
    *contract == Contract::Bitwise
}

tagged! { "is", "Phase", PhaseKind,
    /// Where an execution stands.
    #[derive(Debug, Clone, PartialEq, JsonSchema)]
    pub enum Phase {
        /// Waits to be bound.
        Pending,
        /// Tied to a node that has not started it yet.
        Bound(Binding),
        /// Computing there.
        Started(Binding),
        /// Waits for `resume`.
        Paused {
            /// Who paused it.
            who: String,
        },
        /// Computed to its end; others compute it once more before that counts.
        Verifying {
            /// Where it was computed last.
            node: NodeId,
        },
        /// Done.
        Completed,
        /// Given up.
        Failed,
        /// Ended by somebody.
        Cancelled,
        /// A part that has ended before all of its range was done; the rest is its holder's.
        Returned,
    }
}

impl EventKind {
    /// True for one that ends an execution.
    pub const fn is_end(self) -> bool {
        matches!(
            self,
            Self::Completed | Self::Failed | Self::Cancelled | Self::Returned
        )
    }
}

impl PhaseKind {
    /// True when nothing more will happen.
    pub const fn is_terminal(self) -> bool {
        matches!(
            self,
            Self::Completed | Self::Failed | Self::Cancelled | Self::Returned
        )
    }
}

impl Phase {
    /// The name in SQL, metrics and for people.
    pub const fn as_str(&self) -> &'static str {
        self.kind().as_str()
    }

    /// True when nothing more will happen.
    pub fn is_terminal(&self) -> bool {
        self.kind().is_terminal()
    }

    /// The binding in force, if any.
    pub fn binding(&self) -> Option<&Binding> {
        match self {
            Phase::Bound(binding) | Phase::Started(binding) => Some(binding),
            _ => None,
        }
    }
}

/// The tie between an execution and one life of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Binding {
    /// The node.
    pub node: NodeId,
    /// Which life of its agent.
    pub instance: InstanceId,
    /// Which place on it.
    pub substrate: String,
    /// Sequence of the message that made the binding and identifies it.
    pub seq: Sequence,
    /// When it was made.
    pub at: Timestamp,
}

/// The last committed boundary and where its σ is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StatePlace {
    /// Capsules completed before it.
    pub index: BoundaryIndex,
    /// Digest of σ.
    pub digest: Digest,
    /// Bytes of σ.
    pub bytes: u64,
    /// Sequence of the message whose body is σ, or the list of its chunks where it is larger than
    /// 768 KiB; absent where an earlier version put it whole into the object store `FIEC_STATE`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq: Option<Sequence>,
    /// Ordinal of the message that carries it.
    pub ordinal: Ordinal,
}

/// A node that was left because of pressure.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Left {
    /// The node.
    pub node: NodeId,
    /// When.
    pub at: Timestamp,
}

named! {
    /// What can be requested of the holder of a binding, through the ledger.
    pub enum RequestKind {
        /// End it.
        Cancel,
        /// Give it up at its next boundary and leave it paused.
        Pause,
    }
}

/// An order that the holder of the binding has taken and will carry out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Requested {
    /// What.
    pub what: RequestKind,
    /// By whom.
    pub who: String,
    /// When; absent where an earlier version wrote it.
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
    /// Bindings after the first, whatever the cause.
    #[serde(default, skip_serializing_if = "none64")]
    pub rebindings: u64,
    /// Of those, the ones for pressure.
    #[serde(default, skip_serializing_if = "none64")]
    pub pressure: u64,
    /// Crashes of the program.
    #[serde(default, skip_serializing_if = "none64")]
    pub crashes: u64,
    /// Microseconds spent computing, as committed.
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

impl ExecutionState {
    /// Puts a message's own sequence in the place of 0.
    pub fn resolve(&mut self, sequence: Sequence) {
        if let Phase::Bound(binding) | Phase::Started(binding) = &mut self.phase
            && binding.seq == 0
        {
            binding.seq = sequence;
        }
        if let Some(place) = &mut self.boundary
            && place.seq == Some(0)
        {
            place.seq = Some(sequence);
        }
    }

    /// The index of the last committed boundary; 0 where nothing was committed.
    pub fn boundary_index(&self) -> BoundaryIndex {
        self.boundary.as_ref().map_or(0, |b| b.index)
    }
}
