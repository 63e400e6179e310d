//! The policy's nodes and live executions, kept small. An execution takes a few hundred bytes; its
//! ledger's last message is read again before an append to it.

pub mod capacity;
pub(crate) mod changed;
pub mod changes;
pub mod execution;
pub mod hysteresis;
pub mod node;
pub mod places;
pub mod profile;
pub mod starts;
pub mod strangers;
pub mod tenants;
pub mod trust;
pub mod watch;

use std::collections::{BTreeMap, BTreeSet};

use fiec_schemas::scheduling::Parked;
use fiec_schemas::substrate::HOST;
use fiec_schemas::{ExecutionId, NodeId};

use rustc_hash::FxHashMap;
use slotmap::SlotMap;

use self::changed::Changed;
use self::places::{Claim, DeviceIx};
use self::profile::{ProfileIx, Profiles};
use self::tenants::Tenants;
use crate::time::Millis;

pub use self::execution::{Execution, Order, Stage, Wanted};
pub use self::node::{Node, NodeIx, Presence};

/// The part of an execution in its node's counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Weight {
    node: Option<NodeIx>,
    claim: Claim,
    /// True if it has or will have a slot: it has a node and is not parked.
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

/// All nodes and live executions.
#[derive(Debug, Default)]
pub struct Cluster {
    nodes: SlotMap<NodeIx, Node>,
    /// Stands for each forgotten node.
    nobody: Node,
    /// Nodes by name, for lookups.
    named: FxHashMap<NodeId, NodeIx>,
    /// Nodes ordered by name.
    by_name: BTreeMap<NodeId, NodeIx>,
    /// Changes that nobody has acted on yet.
    pub(crate) changed: Changed,
    /// Profiles in use.
    pub profiles: Profiles,
    /// The tenants' held slots and usage.
    pub tenants: Tenants,
    executions: FxHashMap<ExecutionId, Box<Execution>>,
    /// Number of parked executions.
    parked: u32,
    agenda: BTreeSet<(Millis, ExecutionId)>,
}

impl Cluster {
    /// The node of this name, created if missing.
    pub fn intern(&mut self, now: Millis, name: &NodeId) -> NodeIx {
        if let Some(ix) = self.named.get(name) {
            return *ix;
        }
        let ix = self.nodes.insert(Node::new(name.clone(), now));
        self.named.insert(name.clone(), ix);
        self.by_name.insert(name.clone(), ix);
        ix
    }

    /// Forgets a node that holds and expects nothing.
    pub fn forget(&mut self, ix: NodeIx) {
        if self.node(ix).is_used() {
            return;
        }
        // Rankings drop its places.
        self.changed(ix);
        if let Some(node) = self.nodes.remove(ix) {
            self.named.remove(&node.id);
            self.by_name.remove(&node.id);
        }
    }

    /// The node of this name, if known.
    pub fn find(&self, name: &NodeId) -> Option<NodeIx> {
        self.named.get(name).copied()
    }

    /// A node. A forgotten one never joined and holds nothing.
    pub fn node(&self, ix: NodeIx) -> &Node {
        self.nodes.get(ix).unwrap_or(&self.nobody)
    }

    /// Mutable access to a node; marks it as changed.
    pub(in crate::lifecycle) fn node_mut(&mut self, ix: NodeIx) -> &mut Node {
        self.changed(ix);
        self.node_quietly(ix)
    }

    /// Mutable access that does not mark the node for re-ranking. Call [`Cluster::changed`] after
    /// you modify a field that placement reads.
    pub(in crate::lifecycle) fn node_quietly(&mut self, ix: NodeIx) -> &mut Node {
        match self.nodes.get_mut(ix) {
            Some(node) => node,
            None => {
                // Nobody has nothing, whatever was written to it before.
                self.nobody = Node::default();
                &mut self.nobody
            }
        }
    }

    /// The device of a node with this id, created if missing. None for the host.
    pub fn device(&mut self, ix: NodeIx, id: &str) -> Option<DeviceIx> {
        if id == HOST {
            return None;
        }
        self.node_mut(ix).devices.intern(id)
    }

    /// Marks a node for re-ranking.
    pub fn changed(&mut self, ix: NodeIx) {
        self.changed.node(ix, self.nodes.len());
    }

    /// All nodes, ordered by name.
    pub fn nodes(&self) -> impl Iterator<Item = (NodeIx, &Node)> {
        self.by_name.values().map(|ix| (*ix, self.node(*ix)))
    }

    /// The keys of all nodes, in their order.
    pub fn keys(&self) -> Vec<NodeIx> {
        self.nodes.keys().collect()
    }

    /// Number of nodes that are not forgotten.
    pub fn node_count(&self) -> u32 {
        u32::try_from(self.nodes.len()).unwrap_or(u32::MAX)
    }

    /// Number of live executions.
    pub fn live(&self) -> usize {
        self.executions.len()
    }

    /// An execution.
    pub fn execution(&self, id: ExecutionId) -> Option<&Execution> {
        self.executions.get(&id).map(Box::as_ref)
    }

    /// Mutable access to an execution. To change its stage, use [`Cluster::set_stage`].
    pub(in crate::lifecycle) fn execution_mut(
        &mut self,
        id: ExecutionId,
    ) -> Option<&mut Execution> {
        self.executions.get_mut(&id).map(Box::as_mut)
    }

    /// All live executions, unordered.
    pub fn executions(&self) -> impl Iterator<Item = (&ExecutionId, &Execution)> {
        self.executions.iter().map(|(id, e)| (id, &**e))
    }

    /// The live executions that satisfy `is`, ordered by id. It reads all executions, so keep it
    /// off the hot path.
    pub fn those_that(&self, is: impl Fn(&Execution) -> bool) -> Vec<ExecutionId> {
        let all = self.executions.iter();
        let mut found: Vec<_> = all.filter(|(_, e)| is(e)).map(|(id, _)| *id).collect();
        found.sort_unstable();
        found
    }

    /// Number of parked executions.
    pub fn parked(&self) -> u32 {
        self.parked
    }

    /// Adds a new execution.
    pub fn insert(&mut self, id: ExecutionId, execution: Execution) {
        self.tenants.intern(&execution.tenant);
        let weight = Weight::of(&execution);
        self.weigh(id, Weight::default(), weight);
        if weight.slot {
            self.tenants.hold(&execution.tenant, true);
        }
        if weight.node.is_none() {
            self.tenants.wait(&execution.tenant, true);
        }
        self.executions.insert(id, Box::new(execution));
    }

    /// Changes an execution's stage and claim, and updates the counts of its nodes.
    pub fn set_stage(&mut self, id: ExecutionId, stage: Stage, claim: Claim, since: Millis) {
        if let Stage::Bound(ix, _) = stage {
            self.note_try(id, ix, since);
        }
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

    /// An execution is bound to a node that perhaps cannot start its program.
    fn note_try(&mut self, id: ExecutionId, ix: NodeIx, now: Millis) {
        if self.node(ix).starts.are_good() {
            return;
        }
        let profile = self.executions.get(&id).map(|e| e.profile);
        let profile = profile.and_then(|ix| self.profiles.get(ix));
        if let Some(node) = self.nodes.get_mut(ix)
            && let Some(profile) = profile
        {
            node.starts.bound(now, &profile.program);
        }
        self.changed(ix);
    }

    /// Ends the append in flight, and returns to what was known before it.
    pub fn take_back(&mut self, id: ExecutionId) {
        let Some(e) = self.executions.get_mut(&id) else {
            return;
        };
        if let Some(before) = e.in_flight.take() {
            e.arrived = before.arrived;
            self.set_stage(id, before.stage, before.claim, before.since);
        }
    }

    /// Sets whether an execution is parked.
    pub fn set_parked(&mut self, id: ExecutionId, parked: Option<Parked>) {
        self.change(id, |e| {
            if e.parked() != parked {
                e.extra().parked = parked;
            }
        });
    }

    /// Changes an execution and updates the counts.
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
        if before.node.is_none() != after.node.is_none() {
            self.tenants.wait(&e.tenant, after.node.is_none());
        }
        if before != after {
            self.weigh(id, before, after);
        }
    }

    /// Recomputes an execution's claim once its profile is known.
    pub fn claim_anew(&mut self, id: ExecutionId) {
        if let Some(e) = self.executions.get(&id) {
            let claim = Claim::of(self.profiles.get(e.profile), e.device());
            let (stage, since) = (e.stage, e.since);
            self.set_stage(id, stage, claim, since);
        }
    }

    /// Marks an execution that has run for longer than the horizon.
    pub fn mark_long(&mut self, id: ExecutionId) {
        self.change(id, |e| e.long |= e.computes());
    }

    /// Replaces an execution's part in the counts of its nodes.
    fn weigh(&mut self, id: ExecutionId, before: Weight, after: Weight) {
        self.parked = self.parked + u32::from(after.parked) - u32::from(before.parked);
        let begins = Weight {
            started: after.started,
            ..before
        };
        if let Some(ix) = after.node.filter(|_| begins == after) {
            // Placement does not read this count.
            let node = self.node_quietly(ix);
            node.started = node.started + u32::from(after.started) - u32::from(before.started);
            return;
        }
        if let Some(ix) = before.node {
            self.changed.places |= before.slot && !after.slot
                || before.node != after.node
                || before.claim != after.claim;
            let node = self.node_mut(ix);
            node.assigned.remove(&id);
            node.devices.remove(before.claim);
            node.started -= u32::from(before.started);
            node.parked -= u32::from(before.parked);
            node.long -= u32::from(before.long);
        }
        if let Some(ix) = after.node {
            let node = self.node_mut(ix);
            node.assigned.insert(id);
            node.devices.add(after.claim);
            node.started += u32::from(after.started);
            node.parked += u32::from(after.parked);
            node.long += u32::from(after.long);
        }
    }

    /// Removes an execution's order and frees the reserved place.
    pub fn clear_order(&mut self, id: ExecutionId) -> Option<Order> {
        let order = self.executions.get_mut(&id)?.extra.as_mut()?.order.take()?;
        if let Some(to) = order.to {
            let node = self.node_mut(to);
            node.expected = node.expected.saturating_sub(1);
            node.devices.remove(order.claim);
            self.changed.places = true;
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
        if weight.node.is_none() {
            self.tenants.wait(&execution.tenant, false);
        }
        self.release_profile(execution.profile);
        Some(execution)
    }

    /// Removes one user of a profile.
    pub fn release_profile(&mut self, ix: ProfileIx) {
        if self.profiles.release(ix) {
            for node in self.nodes.values_mut() {
                node.overrides.remove(&ix);
            }
        }
    }

    /// Schedules the next review of an execution; 0 for none.
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

    /// Removes and returns the next execution that is due.
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
}
