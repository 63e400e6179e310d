//! A live execution in the policy. It is kept small, since there may be a hundred thousand. Rare
//! fields are stored apart.

use fiec_schemas::duty::Request;
use fiec_schemas::scheduling::{Adjustment, Keep, Parked, Rule};
use fiec_schemas::{
    Cause, Decision, InstanceId, PhaseKind, RequestKind, Sequence, Tenant, Timestamp,
};

use crate::lifecycle::cluster::NodeIx;
use crate::lifecycle::cluster::places::{Claim, DeviceIx};
use crate::lifecycle::cluster::profile::ProfileIx;
use crate::time::{Millis, Now};

/// Stage of an execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// It waits for a binding.
    Pending,
    /// It is bound to a node that has not started it.
    Bound(NodeIx, InstanceId),
    /// The node has started it.
    Started(NodeIx, InstanceId),
    /// It is paused until somebody resumes it.
    Paused,
    /// It has failed, and is kept until somebody retries it.
    Held,
    /// It is computed, and verified before that counts.
    Verifying,
}

impl Stage {
    /// The phase that it stands for.
    pub fn phase(self) -> PhaseKind {
        match self {
            Stage::Pending => PhaseKind::Pending,
            Stage::Bound(..) => PhaseKind::Bound,
            Stage::Started(..) => PhaseKind::Started,
            Stage::Paused => PhaseKind::Paused,
            Stage::Held => PhaseKind::Held,
            Stage::Verifying => PhaseKind::Verifying,
        }
    }

    /// The node that it is bound to.
    pub fn node(self) -> Option<NodeIx> {
        match self {
            Stage::Bound(node, _) | Stage::Started(node, _) => Some(node),
            _ => None,
        }
    }
}

/// The content of an order to the holder of an execution. The order to yield keeps this name down
/// to the ledger: `ControlRequest::Yield`, the child's order and report `yield`, the event
/// `yielded`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// Yield at the next boundary to the order's destination. Without a destination the execution
    /// becomes pending.
    Yield,
    /// Park at the next boundary, and keep this memory.
    Park(Keep),
    /// Resume where the execution is parked. The order's destination is that node, so that its slot
    /// is counted.
    Unpark,
}

impl Wanted {
    /// The order's name.
    pub fn as_str(self) -> &'static str {
        match self {
            Wanted::Yield => "yield",
            Wanted::Park(_) => "park",
            Wanted::Unpark => "unpark",
        }
    }
}

/// An order to the holder of an execution.
#[derive(Debug, Clone)]
pub struct Order {
    /// Its content.
    pub wants: Wanted,
    /// Its destination.
    pub to: Option<NodeIx>,
    /// The reservation there beside a slot.
    pub claim: Claim,
    /// Its cause.
    pub cause: Cause,
    /// The choice of the destination.
    pub decision: Option<Decision>,
    /// True once the node has accepted it.
    pub taken: bool,
}

impl Order {
    /// An order without a destination.
    pub fn new(wants: Wanted, cause: Cause) -> Self {
        Self {
            wants,
            to: None,
            claim: Claim::Host,
            cause,
            decision: None,
            taken: false,
        }
    }

    /// The order for people. `name` gives the name of a node.
    pub fn in_words(&self, name: impl Fn(NodeIx) -> String) -> String {
        let order = self.wants.as_str();
        let to = match (self.wants, self.to) {
            (Wanted::Yield, Some(to)) => format!(" to {}", name(to)),
            _ => String::new(),
        };
        let cause = self.cause.in_words();
        if self.taken && self.wants != Wanted::Unpark {
            format!("will {order}{to} at its next boundary: {cause}")
        } else {
            format!("is being asked to {order}{to}: {cause}")
        }
    }
}

/// A node that refused an execution or did not answer an order, and is avoided for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Avoided {
    /// The node.
    pub node: NodeIx,
    /// The end of that time.
    pub until: Millis,
    /// Number of refusals in a row.
    pub refusals: u8,
}

/// Most doublings of the time for which a node is avoided. Repeated refusals (a damaged package)
/// must not become repeated offers.
const DOUBLINGS: u8 = 3;

/// A request that the worker has confirmed and not carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenRequest {
    /// The request.
    pub what: RequestKind,
    /// Who asked.
    pub who: Box<str>,
    /// The worker's duty that follows from it.
    pub duty: Request,
}

/// The rare fields of an execution.
#[derive(Debug, Clone, Default)]
pub struct Extra {
    /// Nodes that it left because of pressure.
    pub left: Vec<(NodeIx, Timestamp)>,
    /// The current order.
    pub order: Option<Order>,
    /// The reason why it must be bound again.
    pub cause: Option<Cause>,
    /// Nodes to avoid for a while.
    pub avoid: Vec<Avoided>,
    /// A note on its place, for people.
    pub note: Option<String>,
    /// Number of times its capsule was sent again.
    pub resent: u8,
    /// Progress of the fetch of its state, before it starts.
    pub arriving: Option<Arrived>,
    /// Its changes since the submission.
    pub adjusted: Option<Box<Adjustment>>,
    /// The author of the last change, if known.
    pub changed_by: Option<Box<str>>,
    /// Set while it is parked at its last boundary.
    pub parked: Option<Parked>,
    /// The reason for the park, if known.
    pub why_parked: Option<Cause>,
    /// The open request to its worker.
    pub request: Option<OpenRequest>,
    /// True if its program asks for more than its place has.
    pub asks: bool,
    /// Time until which it is not ordered to park, because it could not.
    pub cannot_park: Option<Millis>,
    /// Time since which this replica leaves it to the preferred one.
    pub deferred: Option<Millis>,
    /// Set if it has started on a node that may not hold it.
    pub missing: Option<Missing>,
    /// Nodes whose worker ended while it computed there, since its last commit.
    pub deaths: Vec<Box<str>>,
    /// Number of rereads in a row that showed an older message than is known.
    pub old_rereads: u8,
}

/// Progress of the fetch of a state by the node of a binding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrived {
    /// The epoch of the binding.
    pub epoch: u64,
    /// The most bytes that were reported.
    pub bytes: u64,
    /// Time of that report.
    pub at: Millis,
}

/// Evidence that a node does not hold an execution that has started there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    /// The answer to a question at this time did not contain it.
    Since(Millis),
    /// A later answer did not contain it either: it must be bound again.
    Orphaned,
}

impl Extra {
    /// Avoids a node until then.
    pub fn avoid_until(&mut self, node: NodeIx, until: Millis) {
        match self.avoid.iter_mut().find(|a| a.node == node) {
            Some(avoided) => avoided.until = until,
            None => self.avoid.push(Avoided {
                node,
                until,
                refusals: 0,
            }),
        }
    }

    /// Avoids a node after a refusal for `ms`, doubled for each refusal in a row up to eight times
    /// as long.
    pub fn refused(&mut self, node: NodeIx, now: Millis, ms: u64) {
        let found = self.avoid.iter().find(|a| a.node == node);
        let refusals = found.map_or(0, |a| a.refusals);
        self.avoid.retain(|a| a.node != node);
        let until = now.plus(ms.saturating_mul(1 << refusals.min(DOUBLINGS)));
        self.avoid.push(Avoided {
            node,
            until,
            refusals: refusals.saturating_add(1),
        });
    }
}

/// Computing time of an execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Attained {
    /// Up to its last commit, in ms.
    pub ms: u64,
    /// Time of that commit.
    pub at: Millis,
}

/// The policy's view of an execution before an append of this service. The policy acts as if the
/// append were stored, and returns to this view if it is not.
#[derive(Debug, Clone, Copy)]
pub struct Before {
    /// Its stage.
    pub stage: Stage,
    /// Its use of its node beside a slot.
    pub claim: Claim,
    /// Start of the stage.
    pub since: Millis,
    /// Time of its binding to the node.
    pub arrived: Millis,
}

/// A live execution.
#[derive(Debug)]
pub struct Execution {
    /// Its tenant.
    pub tenant: Tenant,
    /// Sequence of the last message known; 0 before the first is stored.
    pub seq: Sequence,
    /// Epoch of the last binding, as stored.
    pub epoch: u64,
    /// Its requirements.
    pub profile: ProfileIx,
    /// Set while an append of this service is in flight.
    pub in_flight: Option<Box<Before>>,
    /// True if it has run for longer than the horizon.
    pub long: bool,
    /// True for a part of a range.
    pub is_part: bool,
    /// Its stage.
    pub stage: Stage,
    /// Its use of its node beside a slot.
    pub claim: Claim,
    /// Start of the stage.
    pub since: Millis,
    /// Time of its binding to the node.
    pub arrived: Millis,
    /// Time of the next review; 0 for none.
    pub due: Millis,
    /// Time of the submission.
    pub submitted_at: Timestamp,
    /// Size of its last σ, in bytes.
    pub state_bytes: u64,
    /// Sequence of the message that carries its last σ; 0 for none.
    pub state_seq: Sequence,
    /// Its computing time at its last commit.
    pub attained: Attained,
    /// The rare fields.
    pub extra: Option<Box<Extra>>,
}

impl Execution {
    /// A pending execution of which nothing is appended yet.
    pub fn new(tenant: Tenant, profile: ProfileIx, submitted_at: Timestamp, since: Millis) -> Self {
        Self {
            tenant,
            seq: 0,
            epoch: 0,
            profile,
            in_flight: None,
            long: false,
            is_part: false,
            stage: Stage::Pending,
            claim: Claim::Host,
            since,
            arrived: since,
            due: Millis(0),
            submitted_at,
            state_bytes: 0,
            state_seq: 0,
            attained: Attained::default(),
            extra: None,
        }
    }

    /// True if the execution is parked because it was preempted.
    pub fn is_preempted(&self) -> bool {
        let why = self.extra.as_ref().and_then(|x| x.why_parked.as_ref());
        self.parked().is_some() && matches!(why, Some(Cause::Preempted { .. }))
    }

    /// Start of the wait of a preempted execution, including one that gave up what its park kept. None
    /// for all others.
    pub fn preempted_since(&self, now: Now) -> Option<Millis> {
        if self.is_preempted() {
            return self.parked().map(|parked| now.moment_of(parked.at));
        }
        let cause = self.extra.as_ref().and_then(|x| x.cause.as_ref());
        let stood = match cause {
            // Giving up a park names no preempting execution.
            Some(Cause::Preempted { rule, by: None, .. }) => *rule != Rule::Quota,
            _ => false,
        };
        (self.stage == Stage::Pending && stood).then_some(self.attained.at)
    }

    /// True while an append of this service is in flight.
    pub fn is_appending(&self) -> bool {
        self.in_flight.is_some()
    }

    /// Notes that an append of this service begins. Call it before changes that hold only once the
    /// append is stored.
    pub fn begin_append(&mut self) {
        let before = Before {
            stage: self.stage,
            claim: self.claim,
            since: self.since,
            arrived: self.arrived,
        };
        self.in_flight.get_or_insert_with(|| Box::new(before));
    }

    /// Notes that a message shows the ledger after the append.
    pub fn end_append(&mut self) {
        self.in_flight = None;
    }

    /// Evidence that its node does not hold it.
    pub fn missing(&self) -> Option<Missing> {
        self.extra.as_ref().and_then(|x| x.missing)
    }

    /// True if it has started on a node that does not hold it.
    pub fn is_orphan(&self) -> bool {
        self.missing() == Some(Missing::Orphaned)
    }

    /// The rare fields, created if missing.
    pub fn extra(&mut self) -> &mut Extra {
        self.extra.get_or_insert_default()
    }

    /// Its computing time, in ms.
    pub fn attained_ms(&self, now: Millis) -> u64 {
        let since = self.attained.at.max(self.since);
        let present = if self.computes() { now.since(since) } else { 0 };
        self.attained.ms.saturating_add(present)
    }

    /// Its device. None on the host or without a node.
    pub fn device(&self) -> Option<DeviceIx> {
        self.claim.device()
    }

    /// The current order.
    pub fn order(&self) -> Option<&Order> {
        self.extra.as_ref()?.order.as_ref()
    }

    /// Set while it is parked at its last boundary.
    pub fn parked(&self) -> Option<Parked> {
        self.extra.as_ref()?.parked
    }

    /// True if it has started and is not parked.
    pub fn computes(&self) -> bool {
        matches!(self.stage, Stage::Started(..)) && self.parked().is_none()
    }

    /// Its use of its node beside a slot. Parked in host memory it uses no device.
    pub fn takes(&self) -> Claim {
        match self.parked() {
            Some(Parked {
                keep: Keep::Host, ..
            }) => Claim::Host,
            _ => self.claim,
        }
    }

    /// Nodes to avoid for a while.
    pub fn avoided(&self) -> &[Avoided] {
        self.extra.as_ref().map_or(&[], |e| &e.avoid)
    }

    /// True while its node is avoided because an order was refused or not answered.
    pub fn was_told(&self, now: Millis) -> bool {
        let mut avoided = self.avoided().iter();
        avoided.any(|a| Some(a.node) == self.stage.node() && now < a.until)
    }

    /// Nodes that it left because of pressure.
    pub fn left(&self) -> &[(NodeIx, Timestamp)] {
        self.extra.as_ref().map_or(&[], |e| &e.left)
    }
}
