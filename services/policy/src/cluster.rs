//! What the policy knows: nodes and live executions, kept small. An execution costs a few hundred
//! bytes; its ledger's last message is read again when somebody must append to it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use fiec_schemas::scheduling::Parked;
use fiec_schemas::substrate::HOST;
use fiec_schemas::{
    ExecutionId, HardwareVector, InstanceId, NodeDescriptor, NodeFlags, NodeId, Timestamp,
};

use crate::capacity::Speed;
use crate::changes::Changes;
use crate::config::Config;
use crate::places::{Claim, DeviceIx, Devices, Judged};
use crate::profile::{Profile, ProfileIx, Profiles};
use crate::quick::QuickMap;
use crate::share::tenants::Tenants;
use crate::time::Millis;
use crate::trust::Trust;
use crate::watch::Watch;

pub use crate::execution::{Attained, Execution, Extra, Order, Stage, Wanted};

/// Index of a node; never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeIx(pub u32);

/// Whether a node is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// Heard within the liveness time, or not yet doubted.
    Up,
    /// Silent; a probe is on its way.
    Probing {
        /// Since when.
        since: Millis,
    },
    /// Silent, and a probe was not answered.
    Lost {
        /// When that was found.
        since: Millis,
    },
}

/// A node.
#[derive(Debug)]
pub struct Node {
    /// Its name.
    pub id: NodeId,
    /// What it said when it joined; none for one that only ledgers name, or that left.
    /// [`Node::describe`] changes it.
    pub descriptor: Option<Arc<NodeDescriptor>>,
    /// The instance that this is of.
    pub life: Option<InstanceId>,
    /// What operators said.
    pub flags: NodeFlags,
    /// What it has proved and lost.
    pub trust: Trust,
    /// The last vector. [`Node::hear`] changes it.
    pub vector: Option<Arc<HardwareVector>>,
    /// True where that says that it drains.
    pub drains: bool,
    /// When that was.
    pub vector_at: Millis,
    /// When it was last heard in any way.
    pub heard: Millis,
    /// Whether it is there.
    pub presence: Presence,
    /// The instance that spoke last, and since when this is known.
    pub confirmed: Option<(InstanceId, Millis)>,
    /// Under its own thresholds.
    pub base: Option<Watch>,
    /// Under the thresholds of submissions.
    pub overrides: BTreeMap<ProfileIx, Watch>,
    /// Its devices, and what is taken of them.
    pub devices: Devices,
    /// Executions bound to it or started on it, appends under way included.
    pub holds: BTreeSet<ExecutionId>,
    /// Of those, the ones started for longer than the horizon.
    pub long: u32,
    /// Of those, the started ones; those that are parked are not counted.
    pub started: u32,
    /// Of those, the parked ones, which have no slot.
    pub parked: u32,
    /// Orders to yield or unpark that name it as their destination.
    pub expected: u32,
    /// How fast it is.
    pub speed: Speed,
    /// When its executions were last looked at for ones of an earlier life.
    pub reviewed: Millis,
    /// When it was last asked what it holds.
    pub holdings_asked: Millis,
    /// When it is asked again.
    pub holdings_due: Millis,
    /// What was last recorded of its viability.
    pub said: &'static str,
}

impl Node {
    /// What it says of itself now, if it is there.
    pub fn describe(&mut self, descriptor: Option<Arc<NodeDescriptor>>) {
        self.life = descriptor.as_ref().map(|d| d.instance);
        let substrates = descriptor.as_ref().map(|d| &*d.substrates);
        self.devices.describe(substrates.unwrap_or_default());
        self.descriptor = descriptor;
    }

    /// What it tells of its hardware now, if anything; what it told before is given back.
    pub fn hear(&mut self, vector: Option<Arc<HardwareVector>>) -> Option<Arc<HardwareVector>> {
        self.drains = vector.as_ref().is_some_and(|v| v.draining);
        std::mem::replace(&mut self.vector, vector)
    }

    /// Executions that it runs at once.
    pub fn slots(&self) -> u32 {
        self.descriptor.as_ref().map_or(0, |d| d.slots)
    }

    /// The share of its memory that one of its slots has, in bytes: what a worker grants where
    /// nothing is asked for.
    pub fn share_bytes(&self) -> u64 {
        let limit = self.descriptor.as_ref().map_or(0, |d| d.memory_limit_bytes);
        limit / u64::from(self.slots().max(1))
    }

    /// Executions that count against its capacity.
    pub fn held(&self) -> u32 {
        u32::try_from(self.holds.len())
            .unwrap_or(u32::MAX)
            .saturating_sub(self.parked)
            .saturating_add(self.expected)
    }

    /// How many it may hold now.
    pub fn limit(&self, now: Millis, config: &Config) -> u32 {
        let slots = self.slots();
        slots.saturating_add(self.speed.ahead(now, slots, self.long, config))
    }

    /// True while its last vector is evidence.
    pub fn is_fresh(&self, now: Millis, config: &Config) -> bool {
        self.vector.is_some() && now.since(self.vector_at) <= config.liveness_ms
    }

    /// True while an operator or the node itself wants it empty.
    pub fn is_draining(&self) -> bool {
        self.flags.draining
            || self.flags.revoked_at.is_some() && self.revoked_at().is_some()
            || self.drains
    }

    /// When this life of it will be gone, if somebody has said so.
    pub fn revoked_at(&self) -> Option<Timestamp> {
        self.flags.revocation_of(self.life?)
    }

    /// The watch that judges executions of this profile.
    pub fn watch(&self, profile: ProfileIx) -> Option<&Watch> {
        self.overrides.get(&profile).or(self.base.as_ref())
    }

    /// Whose readings judge an execution at this place of it.
    pub fn judged(&self, profile: Option<&Profile>, device: Option<DeviceIx>) -> Judged<'_> {
        let device = device.and_then(|ix| self.devices.get(ix));
        Judged::of(profile, device)
    }
}

/// What an execution counts for on the node that it is tied to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Weight {
    node: Option<NodeIx>,
    claim: Claim,
    /// It has a slot, or will: it is tied to the node and not parked.
    slot: bool,
    started: bool,
    long: bool,
    parked: bool,
}

impl Weight {
    fn of(e: &Execution) -> Self {
        let (node, parked) = (e.stage.node(), e.parked().is_some());
        Self {
            node,
            claim: e.takes(),
            slot: node.is_some() && !parked,
            started: e.computes(),
            long: e.long && !parked,
            parked,
        }
    }
}

/// Nodes and executions.
#[derive(Debug, Default)]
pub struct Cluster {
    nodes: Vec<Node>,
    /// Nodes by name, to be found.
    named: QuickMap<NodeId, NodeIx>,
    /// And in order of their names.
    by_name: BTreeMap<NodeId, NodeIx>,
    /// Which nodes were changed.
    pub changes: Changes,
    /// Profiles in use.
    pub profiles: Profiles,
    /// What tenants hold.
    pub tenants: Tenants,
    /// True once a place has become free; whoever looks for what it is good for takes it back.
    pub freed: bool,
    executions: QuickMap<ExecutionId, Box<Execution>>,
    /// How many of them are parked.
    parked: u32,
    agenda: BTreeSet<(Millis, ExecutionId)>,
}

impl Cluster {
    /// The node of this name, made where missing.
    pub fn intern(&mut self, now: Millis, name: &NodeId) -> NodeIx {
        if let Some(ix) = self.named.get(name) {
            return *ix;
        }
        let ix = NodeIx(u32::try_from(self.nodes.len()).unwrap_or(u32::MAX));
        self.named.insert(name.clone(), ix);
        self.by_name.insert(name.clone(), ix);
        self.nodes.push(Node {
            id: name.clone(),
            descriptor: None,
            life: None,
            flags: NodeFlags::default(),
            trust: Trust::default(),
            vector: None,
            drains: false,
            vector_at: Millis(0),
            heard: now,
            presence: Presence::Up,
            confirmed: None,
            base: None,
            overrides: BTreeMap::new(),
            devices: Devices::default(),
            holds: BTreeSet::new(),
            long: 0,
            started: 0,
            parked: 0,
            expected: 0,
            speed: Speed::default(),
            reviewed: Millis(0),
            holdings_asked: Millis(0),
            holdings_due: Millis(0),
            said: "",
        });
        ix
    }

    /// The node of this name, if any.
    pub fn find(&self, name: &NodeId) -> Option<NodeIx> {
        self.named.get(name).copied()
    }

    /// A node. Indices come from this cluster only.
    pub fn node(&self, ix: NodeIx) -> &Node {
        &self.nodes[ix.0 as usize]
    }

    /// A node, to change it.
    pub fn node_mut(&mut self, ix: NodeIx) -> &mut Node {
        self.changed(ix);
        &mut self.nodes[ix.0 as usize]
    }

    /// A node, to change what no choice of a place depends on, as most that it tells; whoever
    /// changes more calls [`Cluster::changed`].
    pub fn node_quietly(&mut self, ix: NodeIx) -> &mut Node {
        &mut self.nodes[ix.0 as usize]
    }

    /// The device of a node with this id, made where missing; none for the host.
    pub fn device(&mut self, ix: NodeIx, id: &str) -> Option<DeviceIx> {
        if id == HOST {
            return None;
        }
        self.node_mut(ix).devices.intern(id)
    }

    /// A choice of a place may depend on what has changed about a node.
    pub fn changed(&mut self, ix: NodeIx) {
        self.changes.note(ix, self.nodes.len());
    }

    /// All nodes in order of their names.
    pub fn nodes(&self) -> impl Iterator<Item = (NodeIx, &Node)> {
        self.by_name.values().map(|ix| (*ix, self.node(*ix)))
    }

    /// How many nodes have ever been named.
    pub fn node_count(&self) -> u32 {
        u32::try_from(self.nodes.len()).unwrap_or(u32::MAX)
    }

    /// How many executions live.
    pub fn live(&self) -> usize {
        self.executions.len()
    }

    /// An execution.
    pub fn execution(&self, id: ExecutionId) -> Option<&Execution> {
        self.executions.get(&id).map(Box::as_ref)
    }

    /// An execution, to change it (not its stage: [`Cluster::set_stage`]).
    pub fn execution_mut(&mut self, id: ExecutionId) -> Option<&mut Execution> {
        self.executions.get_mut(&id).map(Box::as_mut)
    }

    /// All live executions, in no order.
    pub fn executions(&self) -> impl Iterator<Item = (&ExecutionId, &Execution)> {
        self.executions.iter().map(|(id, e)| (id, &**e))
    }

    /// The live executions of which that is true, in order of their ids; all are looked at, so it
    /// is not for what is done often.
    pub fn those_that(&self, is: impl Fn(&Execution) -> bool) -> Vec<ExecutionId> {
        let all = self.executions.iter();
        let mut found: Vec<_> = all.filter(|(_, e)| is(e)).map(|(id, _)| *id).collect();
        found.sort_unstable();
        found
    }

    /// How many of them are parked.
    pub fn parked(&self) -> u32 {
        self.parked
    }

    /// Adds an execution that is not there yet.
    pub fn insert(&mut self, id: ExecutionId, execution: Execution) {
        self.tenants.intern(&execution.tenant);
        let weight = Weight::of(&execution);
        self.weigh(id, Weight::default(), weight);
        if weight.slot {
            self.tenants.hold(&execution.tenant, true);
        }
        self.executions.insert(id, Box::new(execution));
    }

    /// Changes an execution's stage, with what it takes of its node, and its nodes' counts.
    pub fn set_stage(&mut self, id: ExecutionId, stage: Stage, claim: Claim, since: Millis) {
        self.change(id, |e| {
            let before = std::mem::replace(&mut e.stage, stage);
            e.claim = claim;
            e.since = since;
            let same =
                matches!((before, stage), (Stage::Started(a, _), Stage::Started(b, _)) if a == b);
            e.long &= same;
            if !same && let Some(extra) = &mut e.extra {
                extra.parked = None;
            }
        });
    }

    /// Notes that an execution is parked where it is, or no more.
    pub fn set_parked(&mut self, id: ExecutionId, parked: Option<Parked>) {
        self.change(id, |e| {
            if e.parked() != parked {
                e.extra().parked = parked;
            }
        });
    }

    /// Changes an execution, and with it what it counts for.
    fn change(&mut self, id: ExecutionId, change: impl FnOnce(&mut Execution)) {
        let Some(e) = self.executions.get_mut(&id) else {
            return;
        };
        let before = Weight::of(e);
        change(e);
        let after = Weight::of(e);
        if before.slot != after.slot {
            self.tenants.hold(&e.tenant, after.slot);
        }
        if before != after {
            self.weigh(id, before, after);
        }
    }

    /// Counts again what an execution takes of its node, once its profile is known.
    pub fn claim_anew(&mut self, id: ExecutionId) {
        if let Some(e) = self.executions.get(&id) {
            let claim = Claim::of(self.profiles.get(e.profile), e.device());
            let (stage, since) = (e.stage, e.since);
            self.set_stage(id, stage, claim, since);
        }
    }

    /// Notes that an execution has run for longer than the horizon.
    pub fn mark_long(&mut self, id: ExecutionId) {
        self.change(id, |e| e.long |= e.computes());
    }

    /// Counts what an execution takes of its node, in place of what it took before.
    fn weigh(&mut self, id: ExecutionId, before: Weight, after: Weight) {
        self.parked = self.parked + u32::from(after.parked) - u32::from(before.parked);
        let begins = Weight {
            started: after.started,
            ..before
        };
        if let Some(ix) = after.node.filter(|_| begins == after) {
            // No choice of a place depends on that.
            let node = self.node_quietly(ix);
            node.started = node.started + u32::from(after.started) - u32::from(before.started);
            return;
        }
        if let Some(ix) = before.node {
            self.freed |= before.slot && !after.slot
                || before.node != after.node
                || before.claim != after.claim;
            let node = self.node_mut(ix);
            node.holds.remove(&id);
            node.devices.remove(before.claim);
            node.started -= u32::from(before.started);
            node.parked -= u32::from(before.parked);
            node.long -= u32::from(before.long);
        }
        if let Some(ix) = after.node {
            let node = self.node_mut(ix);
            node.holds.insert(id);
            node.devices.add(after.claim);
            node.started += u32::from(after.started);
            node.parked += u32::from(after.parked);
            node.long += u32::from(after.long);
        }
    }

    /// Takes an execution's order away and frees what it reserved.
    pub fn clear_order(&mut self, id: ExecutionId) -> Option<Order> {
        let order = self.executions.get_mut(&id)?.extra.as_mut()?.order.take()?;
        if let Some(to) = order.to {
            let node = self.node_mut(to);
            node.expected = node.expected.saturating_sub(1);
            node.devices.remove(order.claim);
            self.freed = true;
        }
        Some(order)
    }

    /// Gives an execution an order and reserves its place.
    pub fn set_order(&mut self, id: ExecutionId, order: Order) {
        self.clear_order(id);
        if let Some(to) = order.to {
            let node = self.node_mut(to);
            node.expected += 1;
            node.devices.add(order.claim);
        }
        if let Some(execution) = self.executions.get_mut(&id) {
            execution.extra().order = Some(order);
        }
    }

    /// Forgets an execution.
    pub fn remove(&mut self, id: ExecutionId) -> Option<Box<Execution>> {
        self.clear_order(id);
        self.set_due(id, Millis(0));
        let execution = self.executions.remove(&id)?;
        let weight = Weight::of(&execution);
        self.weigh(id, weight, Weight::default());
        if weight.slot {
            self.tenants.hold(&execution.tenant, false);
        }
        self.release_profile(execution.profile);
        Some(execution)
    }

    /// One user of a profile less.
    pub fn release_profile(&mut self, ix: ProfileIx) {
        if self.profiles.release(ix) {
            for node in &mut self.nodes {
                node.overrides.remove(&ix);
            }
        }
    }

    /// Sets when an execution is looked at again; 0 for not at all.
    pub fn set_due(&mut self, id: ExecutionId, due: Millis) {
        let Some(execution) = self.executions.get_mut(&id) else {
            return;
        };
        if execution.due == due {
            return;
        }
        if execution.due != Millis(0) {
            self.agenda.remove(&(execution.due, id));
        }
        execution.due = due;
        if due != Millis(0) {
            self.agenda.insert((due, id));
        }
    }

    /// The next execution whose time has come, taken from the agenda.
    pub fn pop_due(&mut self, now: Millis) -> Option<ExecutionId> {
        let (due, id) = *self.agenda.first()?;
        if due > now {
            return None;
        }
        self.agenda.pop_first();
        if let Some(execution) = self.executions.get_mut(&id) {
            execution.due = Millis(0);
        }
        Some(id)
    }

    /// When the agenda's first entry is due.
    pub fn next_due(&self) -> Option<Millis> {
        self.agenda.first().map(|(due, _)| *due)
    }
}
