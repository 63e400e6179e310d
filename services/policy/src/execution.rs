//! A live execution as the policy keeps it: small, since there may be a hundred thousand. What only
//! few have lies apart.

use fiec_schemas::duty::Request;
use fiec_schemas::scheduling::{Adjustment, Keep, Parked};
use fiec_schemas::{Cause, Decision, InstanceId, Sequence, Tenant, Timestamp};

use crate::cluster::NodeIx;
use crate::places::{Claim, DeviceIx};
use crate::profile::ProfileIx;
use crate::time::Millis;

/// Where an execution stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Waits to be bound.
    Pending,
    /// Tied to a node that has not started it.
    Bound(NodeIx, InstanceId),
    /// Computing there.
    Started(NodeIx, InstanceId),
    /// Waits for somebody.
    Paused,
    /// Computed, and compared before that counts.
    Verifying,
}

impl Stage {
    /// The node it is tied to.
    pub fn node(self) -> Option<NodeIx> {
        match self {
            Stage::Bound(node, _) | Stage::Started(node, _) => Some(node),
            _ => None,
        }
    }
}

/// What an order wants of the node that computes an execution. The order to yield keeps this name
/// down to the ledger: `ControlRequest::Yield`, the child's order and report `yield`, the event
/// `yielded`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// Yield at the next boundary, to the order's destination. Without one the execution is pending
    /// again.
    Yield,
    /// Park at the next boundary, and keep this.
    Park(Keep),
    /// Go on where the execution is parked. The order's destination is that node, so that its slot
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

/// An order that was given to an execution's holder.
#[derive(Debug, Clone)]
pub struct Order {
    /// What it wants.
    pub wants: Wanted,
    /// Where to.
    pub to: Option<NodeIx>,
    /// What is reserved there beside a slot.
    pub claim: Claim,
    /// Why.
    pub cause: Cause,
    /// How the destination was chosen.
    pub decision: Option<Decision>,
    /// True once the node said that it will.
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

    /// What the execution will do. `name` gives the name of a node.
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

/// A node that did not take an execution, or an order about it, and is left alone for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Avoided {
    /// Which.
    pub node: NodeIx,
    /// Until when.
    pub until: Millis,
    /// How often it refused it in a row.
    pub refusals: u8,
}

/// The longest that a node is left alone, in doublings of the first time: what a node refuses
/// again and again (a damaged package) must not be offered to it again and again.
const DOUBLINGS: u8 = 3;

/// What only few executions have.
#[derive(Debug, Clone, Default)]
pub struct Extra {
    /// Nodes left for pressure.
    pub left: Vec<(NodeIx, Timestamp)>,
    /// An order under way.
    pub order: Option<Order>,
    /// Why it must be bound anew.
    pub cause: Option<Cause>,
    /// Nodes that are not asked for a while.
    pub avoid: Vec<Avoided>,
    /// Why it is where it is, for people.
    pub note: Option<String>,
    /// How often its capsule was sent again.
    pub resent: u8,
    /// What was changed about it since it was submitted.
    pub adjusted: Option<Box<Adjustment>>,
    /// Who changed it last, where that was seen.
    pub changed_by: Option<Box<str>>,
    /// Set while it waits at its last boundary, where it is.
    pub parked: Option<Parked>,
    /// Why it is parked, where that was seen.
    pub why_parked: Option<Cause>,
    /// The request to its worker that is not done yet.
    pub request: Option<Request>,
    /// Its program has asked for more than its place has.
    pub asks: bool,
    /// Until when it is not told to park, since it could not.
    pub cannot_park: Option<Millis>,
    /// Since when this replica leaves it to the preferred one.
    pub deferred: Option<Millis>,
    /// It is started on a node that does not hold it.
    pub missing: Option<Missing>,
}

/// How far it is known that a node does not hold what is started there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    /// It was not in the answer to a question that was asked then.
    Since(Millis),
    /// Nor in a later one: it must be bound anew.
    Orphaned,
}

impl Extra {
    /// Leaves a node alone until then.
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

    /// Leaves a node that refused it alone for `ms`, doubled for each refusal in a row up to
    /// eight times as long.
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

/// How long an execution has computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Attained {
    /// Milliseconds, up to its last commit.
    pub ms: u64,
    /// When that was learned.
    pub at: Millis,
}

/// A live execution.
#[derive(Debug)]
pub struct Execution {
    /// Whose.
    pub tenant: Tenant,
    /// Sequence of the last message known; 0 before the first is stored.
    pub seq: Sequence,
    /// Epoch of the last binding, as stored.
    pub epoch: u64,
    /// What it asks for.
    pub profile: ProfileIx,
    /// True while an append of ours is under way.
    pub busy: bool,
    /// True when it has run for longer than the horizon.
    pub long: bool,
    /// Where it stands.
    pub stage: Stage,
    /// What it takes of its node beside a slot.
    pub claim: Claim,
    /// When it came to this stage.
    pub since: Millis,
    /// When it was bound to its node.
    pub arrived: Millis,
    /// When it is looked at again; 0 for not at all.
    pub due: Millis,
    /// When it was submitted.
    pub submitted_at: Timestamp,
    /// Bytes of its last σ.
    pub state_bytes: u64,
    /// How long it had computed at its last commit.
    pub attained: Attained,
    /// Rare things.
    pub extra: Option<Box<Extra>>,
}

impl Execution {
    /// How far it is known that its node does not hold it.
    pub fn missing(&self) -> Option<Missing> {
        self.extra.as_ref().and_then(|x| x.missing)
    }

    /// True where it is started on a node that does not hold it.
    pub fn is_orphan(&self) -> bool {
        self.missing() == Some(Missing::Orphaned)
    }

    /// Rare things, made where missing.
    pub fn extra(&mut self) -> &mut Extra {
        self.extra.get_or_insert_default()
    }

    /// How long it has computed, in milliseconds.
    pub fn attained_ms(&self, now: Millis) -> u64 {
        let since = self.attained.at.max(self.since);
        let present = if self.computes() { now.since(since) } else { 0 };
        self.attained.ms.saturating_add(present)
    }

    /// The device that it is on; none: the host, or nowhere.
    pub fn device(&self) -> Option<DeviceIx> {
        self.claim.device()
    }

    /// The order under way.
    pub fn order(&self) -> Option<&Order> {
        self.extra.as_ref()?.order.as_ref()
    }

    /// Set while it waits at its last boundary, where it is.
    pub fn parked(&self) -> Option<Parked> {
        self.extra.as_ref()?.parked
    }

    /// Whether it takes a slot and computes there.
    pub fn computes(&self) -> bool {
        matches!(self.stage, Stage::Started(..)) && self.parked().is_none()
    }

    /// What it takes of its node beside a slot: in the host's memory it keeps no device.
    pub fn takes(&self) -> Claim {
        match self.parked() {
            Some(Parked {
                keep: Keep::Host, ..
            }) => Claim::Host,
            _ => self.claim,
        }
    }

    /// Nodes that are not asked for a while.
    pub fn avoided(&self) -> &[Avoided] {
        self.extra.as_ref().map_or(&[], |e| &e.avoid)
    }

    /// True while its node is not asked again about it, since an order was refused or not answered.
    pub fn was_told(&self, now: Millis) -> bool {
        let mut avoided = self.avoided().iter();
        avoided.any(|a| Some(a.node) == self.stage.node() && now < a.until)
    }

    /// Nodes left for pressure.
    pub fn left(&self) -> &[(NodeIx, Timestamp)] {
        self.extra.as_ref().map_or(&[], |e| &e.left)
    }
}
