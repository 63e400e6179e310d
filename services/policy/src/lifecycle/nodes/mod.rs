//! Nodes: what they say of themselves, and what operators say of them.
//!
//! * [`vectors`]: hardware vectors, and viability; [`arriving`]: fetches of states.
//! * [`presence`]: silence, probes and loss; [`absent`] forgets nodes.
//! * [`leaving`] empties a node before it leaves.
//! * [`holdings`] compares ledgers with what nodes hold, [`starts`] counts starts that failed.
//! * [`trust`]: proofs, and contracts that were lost.

mod absent;
mod arriving;
mod holdings;
pub(crate) mod leaving;
mod presence;
mod starts;
mod trust;
mod vectors;

use std::sync::Arc;

use fiec_schemas::messages::{NodeEventKind, Record};
use fiec_schemas::{HardwareVector, InstanceId, NodeDescriptor, NodeFlags, NodeId};

use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::profile::ProfileIx;
use crate::lifecycle::cluster::starts::Starts;
use crate::lifecycle::cluster::watch::Watch;
use crate::lifecycle::cluster::{NodeIx, Presence};
use crate::lifecycle::gate::Gate;
use crate::{Action, UnknownNode};

impl Lifecycle {
    pub(crate) fn descriptor(&mut self, gate: &mut impl Gate, descriptor: NodeDescriptor) {
        if let Some((vector, age_ms)) = self.join(descriptor) {
            self.vector(gate, vector, age_ms);
        }
    }

    pub(crate) fn flags(&mut self, gate: &mut impl Gate, name: &NodeId, flags: NodeFlags) {
        if let Some(ix) = self.set_flags(name, flags) {
            self.review_holds(gate, ix);
            self.hurry(ix);
        }
    }

    pub(crate) fn vector(&mut self, gate: &mut impl Gate, vector: HardwareVector, age_ms: u64) {
        if let Some(ix) = self.hear_vector(vector, age_ms) {
            self.review_holds(gate, ix);
        }
    }

    /// Reviews a node on a tick.
    pub(crate) fn look_at_node(&mut self, gate: &mut impl Gate, ix: NodeIx) {
        if self.look_after_node(ix) {
            self.review_holds(gate, ix);
            self.hurry(ix);
        }
    }

    pub(crate) fn probed(
        &mut self,
        gate: &mut impl Gate,
        name: &NodeId,
        answered: Option<InstanceId>,
    ) {
        if let Some(ix) = self.note_probe(name, answered) {
            self.review_holds(gate, ix);
        }
    }

    pub(crate) fn gone(&mut self, name: &NodeId) {
        let now = self.now;
        let Some(ix) = self.cluster.find(name) else {
            return;
        };
        let node = self.cluster.node_mut(ix);
        let was_there = node.descriptor.is_some();
        node.describe(None);
        node.hear(None);
        node.base = None;
        node.overrides.clear();
        node.confirmed = None;
        if !node.assigned.is_empty() {
            node.presence = Presence::Probing { since: now.mono };
            self.out.push(Action::Probe { node: name.clone() });
        }
        if !was_there {
            return;
        }
        self.record(
            ix,
            NodeEventKind::Left,
            "its descriptor was deleted".to_owned(),
            None,
        );
    }

    /// Records a fact about a node, if this replica is the preferred one.
    pub(crate) fn record(
        &mut self,
        ix: NodeIx,
        what: NodeEventKind,
        detail: String,
        descriptor: Option<Arc<NodeDescriptor>>,
    ) {
        self.record_as(ix, (what, detail), None, descriptor);
    }

    /// The same, with the person who asked for it.
    pub(crate) fn record_as(
        &mut self,
        ix: NodeIx,
        (what, detail): (NodeEventKind, String),
        who: Option<String>,
        descriptor: Option<Arc<NodeDescriptor>>,
    ) {
        let now = self.now;
        let node = self.cluster.node(ix);
        if !self.replicas.prefers_self(node.id.as_str().as_bytes()) {
            return;
        }
        let instance = node.descriptor.as_ref().map(|d| d.instance);
        self.out.push(Action::record(Record::Node {
            node: node.id.clone(),
            instance: instance.or(node.confirmed.map(|(i, _)| i)),
            what,
            contract: None,
            substrate: None,
            detail,
            who,
            at: now.wall,
            descriptor: descriptor.map(|d| Box::new((*d).clone())),
        }));
    }

    /// Notes a node's descriptor. Returns a vector that arrived before it, and its age in ms.
    pub(crate) fn join(&mut self, descriptor: NodeDescriptor) -> Option<(HardwareVector, u64)> {
        let now = self.now;
        let ix = self.cluster.intern(now.mono, &descriptor.node);
        let node = self.cluster.node_mut(ix);
        let before = node.life;
        let new_life = before != Some(descriptor.instance);
        let descriptor = Arc::new(descriptor);
        if node
            .base
            .as_ref()
            .is_none_or(|b| *b.thresholds() != descriptor.thresholds)
        {
            node.base = Some(Watch::new(descriptor.thresholds.clone(), now.mono));
            node.overrides.clear();
        }
        let key = descriptor.identity.as_ref().map(|i| i.key.as_str());
        node.trust.stranger = self.config.stranger(&descriptor.node, key);
        node.describe(Some(Arc::clone(&descriptor)));
        if new_life {
            node.heard = node.heard.max(now.mono);
            // Its environment may be another.
            node.starts = Starts::default();
            // A vector of an earlier instance says nothing about the capacity now.
            let told = node.hear(None);
            node.hear(told.filter(|v| v.instance == descriptor.instance));
        }
        if new_life && self.loaded {
            node.presence = Presence::Probing { since: now.mono };
            self.out.push(Action::Probe {
                node: node.id.clone(),
            });
        } else if new_life {
            node.presence = Presence::Up;
        }
        let profiles: Vec<ProfileIx> = self
            .cluster
            .profiles
            .with_thresholds()
            .map(|(ix, _)| ix)
            .collect();
        for profile in profiles {
            if !self.cluster.node(ix).overrides.contains_key(&profile) {
                self.watch_override(ix, profile);
            }
        }
        self.cluster.changed.places = true;
        if new_life {
            let detail = format!("{} slots, {}", descriptor.slots, descriptor.isa);
            self.record(
                ix,
                NodeEventKind::Joined,
                detail,
                Some(Arc::clone(&descriptor)),
            );
        }
        let (heard, vector) = self.strangers.take(&descriptor.node)?;
        Some((vector, now.mono.since(heard)))
    }

    /// Notes an operator's flags. Returns the node if its executions must leave.
    pub(crate) fn set_flags(&mut self, name: &NodeId, flags: NodeFlags) -> Option<NodeIx> {
        let now = self.now;
        // The key of a forgotten node was deleted.
        if flags == NodeFlags::default() && self.cluster.find(name).is_none() {
            return None;
        }
        let ix = self.cluster.intern(now.mono, name);
        let node = self.cluster.node_mut(ix);
        let before = std::mem::replace(&mut node.flags, flags.clone());
        self.cluster.changed.places = true;
        if !self.loaded {
            return None;
        }
        if let Some((what, detail)) = said(&before, &flags) {
            let who = Some(flags.who).filter(|who| !who.is_empty());
            self.record_as(ix, (what, detail), who, None);
        }
        self.cluster.node(ix).is_draining().then_some(ix)
    }

    /// The error for a node that has not joined, with the names of those that have.
    pub(crate) fn no_such(&self, name: &NodeId) -> UnknownNode {
        let joined = self.cluster.nodes().map(|(_, node)| node);
        let joined = joined.filter(|node| node.descriptor.is_some());
        UnknownNode::new(name.clone(), joined.map(|node| node.id.clone()).collect())
    }

    /// True for a joined node.
    pub(crate) fn has_node(&self, node: &NodeId) -> bool {
        self.cluster
            .find(node)
            .is_some_and(|ix| self.cluster.node(ix).descriptor.is_some())
    }
}

/// Name and description of a change of a node's flags. None if nothing changed.
fn said(before: &NodeFlags, flags: &NodeFlags) -> Option<(NodeEventKind, String)> {
    let who = format!("requested by {}", flags.who);
    if let Some(at) = flags
        .revoked_at
        .filter(|_| (before.revoked_at, before.revoked) != (flags.revoked_at, flags.revoked))
    {
        return Some((
            NodeEventKind::Revoked,
            format!("it ends at {at}, announced by {}", flags.who),
        ));
    }
    if flags.draining && (!before.draining || before.drain_by != flags.drain_by) {
        let by = flags
            .drain_by
            .map(|at| format!("; it is to be empty by {at}"));
        return Some((NodeEventKind::Draining, who + &by.unwrap_or_default()));
    }
    if flags.cordoned && !before.cordoned {
        return Some((NodeEventKind::Cordoned, who));
    }
    let closed = |f: &NodeFlags| f.cordoned || f.draining || f.revoked_at.is_some();
    (closed(before) && !closed(flags)).then_some((NodeEventKind::Uncordoned, who))
}
