//! A ledger message read only as far as the policy needs it: borrowed, without the allocations
//! and the digests of a full decoding. The feed passes every commit of the cluster through here.

use std::borrow::Cow;

use fiec_schemas::duty::{Request, Requested};
use fiec_schemas::event::MessageError;
use fiec_schemas::scheduling::{Adjustment, Parked};
use fiec_schemas::spread::Spreading;
use fiec_schemas::{
    Cause, Digest, EventKind, ExecutionId, InstanceId, Output, PhaseKind, RequestKind,
    ResultObject, Sequence, StatePlace, Tenant, Timestamp, author,
};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// What the policy reads of a ledger message. Traces write it out and read it back.
#[derive(Debug, Serialize, Deserialize)]
pub struct LedgerView<'a> {
    v: u8,
    /// Its sequence in the stream.
    #[serde(skip)]
    pub seq: Sequence,
    /// What happened.
    #[serde(borrow)]
    pub events: Vec<EventView<'a>>,
    /// The state after it.
    #[serde(borrow)]
    pub state: StateView<'a>,
}

/// An event, flat.
#[derive(Debug, Serialize, Deserialize)]
pub struct EventView<'a> {
    /// Its type.
    #[serde(rename = "type")]
    pub kind: EventKind,
    #[serde(borrow)]
    cause: Option<&'a RawValue>,
    /// Of `refused`.
    #[serde(borrow)]
    pub reason: Option<Cow<'a, str>>,
    /// Who asked, of `adjusted` and others.
    #[serde(borrow)]
    pub who: Option<Cow<'a, str>>,
    /// Of `boundary`: microseconds spent computing since the commit before.
    pub compute_us: Option<u64>,
    computing_since: Option<&'a str>,
    computed_until: Option<&'a str>,
    /// Of `boundary`.
    pub index: Option<u64>,
    /// Of `boundary`: how many there are in all, where the program knows.
    pub of: Option<u64>,
    digest: Option<&'a str>,
    #[serde(borrow)]
    outputs: Option<&'a RawValue>,
    #[serde(borrow)]
    result: Option<&'a RawValue>,
    /// Of `completed` and `computed`: where a large result lies.
    pub object: Option<ResultObject>,
    /// Of `completed` and `computed`.
    pub capsules: Option<u64>,
}

/// The state.
#[derive(Debug, Serialize, Deserialize)]
pub struct StateView<'a> {
    /// Which execution.
    pub execution: ExecutionId,
    /// Whose.
    pub tenant: &'a str,
    /// Who wrote it.
    #[serde(borrow)]
    pub author: Cow<'a, str>,
    #[serde(borrow)]
    spec: Option<&'a RawValue>,
    submission: Option<&'a str>,
    submitted_at: &'a str,
    at: &'a str,
    /// Where it stands.
    #[serde(borrow)]
    pub phase: PhaseView<'a>,
    /// Epoch of the last binding.
    pub epoch: u64,
    /// The last committed boundary.
    #[serde(borrow)]
    pub boundary: Option<BoundaryView<'a>>,
    /// Nothing of it is visible before it was verified.
    #[serde(default)]
    pub guarded: bool,
    #[serde(default)]
    totals: TotalsView,
    moved_at: Option<&'a str>,
    #[serde(borrow)]
    adjusted: Option<&'a RawValue>,
    /// Set while it waits at its last boundary, where it is.
    pub parked: Option<Parked>,
    /// How it shares its range, where it may or is a part.
    pub spread: Option<Box<Spreading>>,
    /// The request to its worker that is not done yet.
    #[serde(default, borrow)]
    pub requested: Option<RequestedView<'a>>,
    /// Nodes left for pressure.
    #[serde(default, borrow)]
    pub left: Vec<LeftView<'a>>,
}

/// The phase, flat.
#[derive(Debug, Serialize, Deserialize)]
pub struct PhaseView<'a> {
    /// Which.
    pub is: PhaseKind,
    /// Of a binding.
    pub node: Option<&'a str>,
    /// Of a binding.
    pub instance: Option<InstanceId>,
    /// Of a binding.
    #[serde(borrow)]
    pub substrate: Option<Cow<'a, str>>,
}

/// A request to a worker.
#[derive(Debug, Serialize, Deserialize)]
pub struct RequestedView<'a> {
    what: RequestKind,
    at: Option<&'a str>,
}

/// The last boundary.
#[derive(Debug, Serialize, Deserialize)]
pub struct BoundaryView<'a> {
    /// Its index.
    pub index: u64,
    /// Bytes of σ.
    pub bytes: u64,
    digest: Option<&'a str>,
    seq: Option<Sequence>,
    #[serde(default)]
    ordinal: u64,
}

/// Counters.
#[derive(Debug, Default, Serialize, Deserialize)]
struct TotalsView {
    #[serde(default)]
    commits: u64,
    #[serde(default)]
    steps_back: u64,
    #[serde(default)]
    compute_us: u64,
}

/// A node left for pressure.
#[derive(Debug, Serialize, Deserialize)]
pub struct LeftView<'a> {
    /// Which.
    pub node: &'a str,
    at: &'a str,
}

fn stamp(text: &str) -> Timestamp {
    text.parse().unwrap_or_default()
}

impl<'a> LedgerView<'a> {
    /// Reads the `Fiec-Event` header of the message with this sequence.
    ///
    /// # Errors
    /// When it is no ledger message.
    pub fn read(header: &'a str, seq: Sequence) -> Result<Self, MessageError> {
        let mut view: Self = serde_json::from_str(header)?;
        if view.v != 1 {
            return Err(MessageError::Version(view.v));
        }
        view.seq = seq;
        Ok(view)
    }

    /// True when nothing more will happen.
    pub fn is_terminal(&self) -> bool {
        self.state.phase.is.is_terminal()
    }

    /// The event that ended it, if one did.
    pub fn end(&self) -> Option<&EventView<'a>> {
        self.events.iter().find(|e| e.kind.is_end())
    }

    /// The last committed boundary and where its σ is.
    pub fn place(&self) -> Option<StatePlace> {
        let boundary = self.state.boundary.as_ref()?;
        Some(StatePlace {
            index: boundary.index,
            digest: boundary.digest?.parse().ok()?,
            bytes: boundary.bytes,
            seq: boundary
                .seq
                .map(|seq| if seq == 0 { self.seq } else { seq }),
            ordinal: boundary.ordinal,
        })
    }

    /// The first event of this type.
    pub fn event(&self, kind: EventKind) -> Option<&EventView<'a>> {
        self.all(kind).next()
    }

    /// The events of this type.
    pub fn all(&self, kind: EventKind) -> impl DoubleEndedIterator<Item = &EventView<'a>> {
        self.events.iter().filter(move |e| e.kind == kind)
    }

    /// Who wrote the message.
    pub fn author(&self) -> &str {
        &self.state.author
    }

    /// The node whose worker wrote the message, if a worker did.
    pub fn worker(&self) -> Option<&str> {
        Some(author::worker(&self.state.author)?.0)
    }
}

impl EventView<'_> {
    /// Of `bound` and `yielded`.
    pub fn cause(&self) -> Option<Cause> {
        serde_json::from_str(self.cause?.get()).ok()
    }

    /// Of `started`.
    pub fn computing_since(&self) -> Option<Timestamp> {
        self.computing_since.map(stamp)
    }

    /// Of `yielded` and `completed`.
    pub fn computed_until(&self) -> Option<Timestamp> {
        self.computed_until.map(stamp)
    }
}

impl EventView<'_> {
    /// Of `boundary`.
    pub fn digest(&self) -> Option<Digest> {
        self.digest?.parse().ok()
    }

    /// Of `boundary`, `completed` and `computed`.
    pub fn outputs(&self) -> Vec<Output> {
        let raw = self.outputs.map(RawValue::get);
        raw.and_then(|raw| serde_json::from_str(raw).ok())
            .unwrap_or_default()
    }

    /// Of `completed` and `computed`; null where `object` has it.
    pub fn result(&self) -> serde_json::Value {
        let raw = self.result.map(RawValue::get);
        raw.and_then(|raw| serde_json::from_str(raw).ok())
            .unwrap_or_default()
    }
}

impl<'a> StateView<'a> {
    /// Boundaries committed in all.
    pub fn commits(&self) -> u64 {
        self.totals.commits
    }

    /// Time spent computing up to the last commit, in microseconds.
    pub fn compute_us(&self) -> u64 {
        self.totals.compute_us
    }

    /// Steps back in all.
    pub fn steps_back(&self) -> u64 {
        self.totals.steps_back
    }

    /// The submission as JSON, where the message carries it.
    pub fn spec(&self) -> Option<&'a str> {
        self.spec.map(RawValue::get)
    }

    /// What was changed about it since it was submitted.
    pub fn adjusted(&self) -> Option<Box<Adjustment>> {
        serde_json::from_str(self.adjusted?.get()).ok()
    }

    /// True where something was.
    pub fn is_adjusted(&self) -> bool {
        self.adjusted.is_some()
    }

    /// Whose, typed.
    pub fn tenant(&self) -> Option<Tenant> {
        self.tenant.parse().ok()
    }

    /// Digest of what was submitted.
    pub fn submission(&self) -> Option<Digest> {
        self.submission?.parse().ok()
    }

    /// When it was submitted.
    pub fn submitted_at(&self) -> Timestamp {
        stamp(self.submitted_at)
    }

    /// When the message was written.
    pub fn at(&self) -> Timestamp {
        stamp(self.at)
    }

    /// The request to its worker that is not done yet, with its time limit.
    pub fn request(&self) -> Option<Request> {
        let requested = self.requested.as_ref()?;
        Some(Request::of(Requested {
            what: requested.what,
            at: requested.at.map_or_else(|| self.at(), stamp),
            bound_at: self.moved_at().unwrap_or_default(),
            parked_at: self.parked.map(|parked| parked.at),
            commits: self.commits(),
            compute_us: self.compute_us(),
        }))
    }

    /// When it was last bound.
    pub fn moved_at(&self) -> Option<Timestamp> {
        self.moved_at.map(stamp)
    }
}

impl LeftView<'_> {
    /// When.
    pub fn at(&self) -> Timestamp {
        stamp(self.at)
    }
}
