//! Reads only the fields of a ledger message that the policy needs. It borrows them, without the
//! allocations and digests of a full decoding, because every commit of the cluster passes here.

use std::borrow::Cow;

use fiec_schemas::duty::{Request, Requested};
use fiec_schemas::event::MessageError;
use fiec_schemas::scheduling::{Adjustment, Parked};
use fiec_schemas::spread::Spreading;
use fiec_schemas::{
    Cause, Digest, EventKind, ExecutionId, Fault, InstanceId, Output, PhaseKind, RequestKind,
    ResultObject, Sequence, StatePlace, Tenant, Timestamp, author,
};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::lifecycle::cluster::execution::OpenRequest;

/// The fields of a ledger message that the policy reads. Traces write and read them too.
#[derive(Debug, Serialize, Deserialize)]
pub struct LedgerView<'a> {
    v: u8,
    /// Its sequence in the stream.
    #[serde(skip)]
    pub seq: Sequence,
    /// The events of the message.
    #[serde(borrow)]
    pub events: Vec<EventView<'a>>,
    /// The state after it.
    #[serde(borrow)]
    pub state: StateView<'a>,
}

/// An event with flattened fields.
#[derive(Debug, Serialize, Deserialize)]
pub struct EventView<'a> {
    /// Its type.
    #[serde(rename = "type")]
    pub kind: EventKind,
    #[serde(borrow)]
    cause: Option<&'a RawValue>,
    /// Reason of `refused`.
    #[serde(borrow)]
    pub reason: Option<Cow<'a, str>>,
    #[serde(borrow)]
    fault: Option<&'a RawValue>,
    /// Author of `adjusted` and other events.
    #[serde(borrow)]
    pub who: Option<Cow<'a, str>>,
    /// Of `boundary`: computing time since the previous commit, in microseconds.
    pub compute_us: Option<u64>,
    computing_since: Option<&'a str>,
    computed_until: Option<&'a str>,
    /// Of `boundary`.
    pub index: Option<u64>,
    /// Of `boundary`: the total number of boundaries, if the program knows.
    pub of: Option<u64>,
    digest: Option<&'a str>,
    #[serde(borrow)]
    outputs: Option<&'a RawValue>,
    #[serde(borrow)]
    result: Option<&'a RawValue>,
    /// Of `completed` and `computed`: the place of a large result.
    pub object: Option<ResultObject>,
    /// Of `completed` and `computed`.
    pub capsules: Option<u64>,
}

/// The state.
#[derive(Debug, Serialize, Deserialize)]
pub struct StateView<'a> {
    /// The execution.
    pub execution: ExecutionId,
    /// Its tenant.
    pub tenant: &'a str,
    /// The author of the message.
    #[serde(borrow)]
    pub author: Cow<'a, str>,
    #[serde(borrow)]
    spec: Option<&'a RawValue>,
    submission: Option<&'a str>,
    submitted_at: &'a str,
    at: &'a str,
    /// Its phase.
    #[serde(borrow)]
    pub phase: PhaseView<'a>,
    /// Epoch of the last binding.
    pub epoch: u64,
    /// The last committed boundary.
    #[serde(borrow)]
    pub boundary: Option<BoundaryView<'a>>,
    /// True if its results are visible only after verification.
    #[serde(default)]
    pub guarded: bool,
    #[serde(default)]
    totals: TotalsView,
    moved_at: Option<&'a str>,
    #[serde(borrow)]
    adjusted: Option<&'a RawValue>,
    /// Set while it is parked at its last boundary.
    pub parked: Option<Parked>,
    /// Its spread state, if it may be spread or is a part.
    pub spread: Option<Box<Spreading>>,
    /// The open request to its worker.
    #[serde(default, borrow)]
    pub requested: Option<RequestedView<'a>>,
    /// Nodes that it left because of pressure.
    #[serde(default, borrow)]
    pub left: Vec<LeftView<'a>>,
    /// Nodes whose worker ended while it computed there, since its last commit.
    #[serde(default, borrow, skip_serializing_if = "Vec::is_empty")]
    pub deaths: Vec<Cow<'a, str>>,
}

/// The phase with flattened fields.
#[derive(Debug, Serialize, Deserialize)]
pub struct PhaseView<'a> {
    /// Its kind.
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
    #[serde(borrow)]
    who: Cow<'a, str>,
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

/// A node that the execution left because of pressure.
#[derive(Debug, Serialize, Deserialize)]
pub struct LeftView<'a> {
    /// The node.
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
    /// If it is no ledger message.
    pub fn read(header: &'a str, seq: Sequence) -> Result<Self, MessageError> {
        let mut view: Self = serde_json::from_str(header)?;
        if view.v != 1 {
            return Err(MessageError::Version(view.v));
        }
        view.seq = seq;
        Ok(view)
    }

    /// True if the execution has ended.
    pub fn is_terminal(&self) -> bool {
        self.state.phase.is.is_terminal()
    }

    /// The event that ended it, if it has ended.
    pub fn end(&self) -> Option<&EventView<'a>> {
        self.events.iter().find(|e| e.kind.is_end())
    }

    /// The last committed boundary and the place of its σ.
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

    /// The first event of this kind.
    pub fn event(&self, kind: EventKind) -> Option<&EventView<'a>> {
        self.all(kind).next()
    }

    /// The events of this kind.
    pub fn all(&self, kind: EventKind) -> impl DoubleEndedIterator<Item = &EventView<'a>> {
        self.events.iter().filter(move |e| e.kind == kind)
    }

    /// The author of the message.
    pub fn author(&self) -> &str {
        &self.state.author
    }

    /// The node whose worker wrote the message. None for other authors.
    pub fn worker(&self) -> Option<&str> {
        Some(author::worker(&self.state.author)?.0)
    }
}

impl EventView<'_> {
    /// Cause of `bound` and `yielded`.
    pub fn cause(&self) -> Option<Cause> {
        serde_json::from_str(self.cause?.get()).ok()
    }

    /// Fault of `refused` and other events.
    pub fn fault(&self) -> Option<Fault> {
        serde_json::from_str(self.fault?.get()).ok()
    }

    /// Start of the computation, of `started`.
    pub fn computing_since(&self) -> Option<Timestamp> {
        self.computing_since.map(stamp)
    }

    /// End of the computation, of `yielded` and `completed`.
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

    /// Of `completed` and `computed`; null if `object` has it.
    pub fn result(&self) -> serde_json::Value {
        let raw = self.result.map(RawValue::get);
        raw.and_then(|raw| serde_json::from_str(raw).ok())
            .unwrap_or_default()
    }
}

impl<'a> StateView<'a> {
    /// Number of committed boundaries.
    pub fn commits(&self) -> u64 {
        self.totals.commits
    }

    /// Computing time up to the last commit, in microseconds.
    pub fn compute_us(&self) -> u64 {
        self.totals.compute_us
    }

    /// Number of steps back.
    pub fn steps_back(&self) -> u64 {
        self.totals.steps_back
    }

    /// The submission as JSON, if the message carries it.
    pub fn spec(&self) -> Option<&'a str> {
        self.spec.map(RawValue::get)
    }

    /// The changes since the submission.
    pub fn adjusted(&self) -> Option<Box<Adjustment>> {
        serde_json::from_str(self.adjusted?.get()).ok()
    }

    /// True if there are any.
    pub fn is_adjusted(&self) -> bool {
        self.adjusted.is_some()
    }

    /// Its tenant, parsed.
    pub fn tenant(&self) -> Option<Tenant> {
        self.tenant.parse().ok()
    }

    /// Digest of the submission.
    pub fn submission(&self) -> Option<Digest> {
        self.submission?.parse().ok()
    }

    /// Time of the submission.
    pub fn submitted_at(&self) -> Timestamp {
        stamp(self.submitted_at)
    }

    /// Time of the message.
    pub fn at(&self) -> Timestamp {
        stamp(self.at)
    }

    /// The open request to its worker, with its time limit.
    pub fn request(&self) -> Option<OpenRequest> {
        let requested = self.requested.as_ref()?;
        let duty = Request::of(Requested {
            what: requested.what,
            at: requested.at.map_or_else(|| self.at(), stamp),
            bound_at: self.moved_at().unwrap_or_default(),
            parked_at: self.parked.map(|parked| parked.at),
            commits: self.commits(),
            compute_us: self.compute_us(),
        });
        Some(OpenRequest {
            what: requested.what,
            who: (*requested.who).into(),
            duty,
        })
    }

    /// Time of the last binding.
    pub fn moved_at(&self) -> Option<Timestamp> {
        self.moved_at.map(stamp)
    }
}

impl LeftView<'_> {
    /// The time.
    pub fn at(&self) -> Timestamp {
        stamp(self.at)
    }
}
