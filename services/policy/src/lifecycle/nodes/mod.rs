//! Nodes: what they say, their silence, and what operators say of them.

mod absent;
mod arriving;
mod emptying;
pub(crate) mod leaving;
mod news;
mod orphans;
mod reconcile;
mod starts;
mod trust;

use std::sync::Arc;

use fiec_schemas::messages::{NodeEventKind, Record, Viability};
use fiec_schemas::{
    HardwareVector, InstanceId, NodeDescriptor, NodeFlags, NodeId, Reading, Signal,
};

use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::hysteresis::State;
use crate::lifecycle::cluster::profile::ProfileIx;
use crate::lifecycle::cluster::starts::Starts;
use crate::lifecycle::cluster::watch::Watch;
use crate::lifecycle::cluster::{NodeIx, Presence};
use crate::time::Millis;
use crate::view::LedgerView;
use crate::{Action, UnknownNode};

/// Interval between two comparisons of a node's executions with its current instance, in ms.
const ANOTHER_LIFE_MS: u64 = 500;

impl Lifecycle {
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
        if !node.holds.is_empty() {
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

    /// A lost node whose worker writes again is up. Otherwise executions that it has started since
    /// would be taken from it until its next vector arrives.
    pub(crate) fn writes_again(&mut self, view: &LedgerView<'_>) {
        let Some(ix) = view
            .worker()
            .and_then(|name| self.cluster.find(&name.parse().ok()?))
        else {
            return;
        };
        if self.loaded && matches!(self.cluster.node(ix).presence, Presence::Lost { .. }) {
            self.cluster.node_mut(ix).presence = Presence::Up;
            self.cluster.changed.places = true;
            let detail = "its worker writes again".to_owned();
            self.record(ix, NodeEventKind::Returned, detail, None);
        }
    }

    /// True if an execution waits for free memory, which any vector may report.
    pub(crate) fn waits_for_memory(&self) -> bool {
        let mut waiting = self.waiting.profiles();
        waiting.any(|ix| {
            let profile = self.cluster.profiles.get(ix);
            profile.is_some_and(|p| p.requires.asks_of_vector())
        })
    }

    /// Feeds the automata with the last vector while it is fresh. `other`: the vector differs from
    /// the one before. Returns true if a state changed.
    pub(crate) fn watch_node(&mut self, ix: NodeIx, other: bool) -> bool {
        let now = self.now;
        let node = self.cluster.node_quietly(ix);
        let fresh = node.is_fresh(now.mono, &self.config);
        let vector = node.vector.as_deref().filter(|_| fresh);
        let mut changed = false;
        for watch in node.base.iter_mut().chain(node.overrides.values_mut()) {
            if other || !watch.holds(now.mono, fresh) {
                changed |= watch.observe(now.mono, vector);
            }
        }
        if changed {
            self.cluster.changed(ix);
        }
        changed
    }

    pub(crate) fn presses(&self, ix: NodeIx) -> bool {
        let node = self.cluster.node(ix);
        node.base
            .iter()
            .chain(node.overrides.values())
            .any(|w| w.presses())
    }

    /// Records a change between viable, unviable and unknown, once.
    pub(crate) fn say_viability(&mut self, ix: NodeIx) {
        let now = self.now;
        let node = self.cluster.node(ix);
        let Some(base) = &node.base else { return };
        let viability = match base.worst() {
            State::Viable | State::Suspect { .. } => Viability::Viable,
            State::Unviable { .. } | State::Recovering { .. } => Viability::Unviable,
            State::Unknown { .. } => Viability::Unknown,
        };
        if viability == node.recorded_viability.unwrap_or(Viability::Unknown) {
            return;
        }
        let complaints = base.complaints(now.mono).join("; ");
        let detail = if complaints.is_empty() {
            viability.to_string()
        } else {
            format!("{viability}: {complaints}")
        };
        self.cluster.node_quietly(ix).recorded_viability = Some(viability);
        self.record(ix, NodeEventKind::Viability, detail, None);
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

    /// Notes a vector. Returns the node if its executions must be reviewed.
    pub(crate) fn hear_vector(&mut self, vector: HardwareVector, age_ms: u64) -> Option<NodeIx> {
        let now = self.now;
        if age_ms > self.config.liveness_ms {
            return None;
        }
        let Some(ix) = self.cluster.find(&vector.node) else {
            let heard = Millis(now.mono.0.saturating_sub(age_ms));
            self.strangers.hold(heard, vector);
            return None;
        };
        let was_fresh = self.cluster.node(ix).is_fresh(now.mono, &self.config);
        let node = self.cluster.node_quietly(ix);
        // A vector of another instance does not count for the current one.
        let other_life = node.life.is_some_and(|life| life != vector.instance);
        let older = node
            .vector
            .as_ref()
            .is_some_and(|v| v.instance == vector.instance && v.count >= vector.count);
        if other_life || older {
            return None;
        }
        node.heard = node.heard.max(Millis(now.mono.0.saturating_sub(age_ms)));
        node.vector_at = node.heard;
        let instance = vector.instance;
        if node.confirmed.is_none_or(|(c, _)| c != instance) {
            node.confirmed = Some((instance, now.mono));
        }
        let first = node.vector.is_none();
        let same = |v: &Arc<HardwareVector>| says_the_same(v, &vector);
        let other = !was_fresh || !node.vector.as_ref().is_some_and(same);
        let drains = vector.draining && !node.drains;
        let arriving = !vector.arriving.is_empty();
        let before = node.hear(Some(Arc::new(vector)));
        let caps = |v: &HardwareVector| {
            let held = v.readings.iter().filter(|r| r.envelope.is_some());
            let cap = |r: &Reading| (r.device.clone(), r.envelope.as_ref().map(|e| e.cap));
            held.filter(|r| r.signal == Signal::Memory)
                .map(cap)
                .collect::<Vec<_>>()
        };
        // Under another cap, executions may fit that did not fit before.
        let offers = other && before.as_deref().map(caps) != node.vector.as_deref().map(caps);
        let was = std::mem::replace(&mut node.presence, Presence::Up);
        if arriving {
            self.note_arriving(ix);
        }
        if other || was != Presence::Up {
            self.cluster.changed(ix);
        }
        if matches!(was, Presence::Lost { .. }) {
            self.record(
                ix,
                NodeEventKind::Returned,
                "it sends vectors again".to_owned(),
                None,
            );
        }
        let news = first || offers || was != Presence::Up;
        if self.watch_node(ix, other) || news || self.waits_for_memory() {
            self.cluster.changed.places = true;
        }
        if !self.loaded {
            return None;
        }
        self.say_viability(ix);
        (drains || self.presses(ix)).then_some(ix)
    }

    /// Looks after a node on a tick. Returns true if its executions must be reviewed.
    pub(crate) fn look_after_node(&mut self, ix: NodeIx) -> bool {
        let now = self.now;
        if self.watch_node(ix, false) {
            self.cluster.changed.places = true;
        }
        if self.cluster.node(ix).descriptor.is_some() {
            self.say_viability(ix);
        }
        let node = self.cluster.node_quietly(ix);
        if node.starts.pass(now.mono, &self.config) {
            self.cluster.changed.places = true;
            self.cluster.changed(ix);
        }
        let limit = self.config.liveness_ms;
        let node = self.cluster.node_quietly(ix);
        let silent = now.mono.since(node.heard) > limit;
        let of_interest = node.descriptor.is_some() || !node.holds.is_empty();
        match node.presence {
            Presence::Up if silent && of_interest && self.connected => {
                node.presence = Presence::Probing { since: now.mono };
                self.out.push(Action::Probe {
                    node: node.id.clone(),
                });
                self.cluster.changed(ix);
            }
            // A probe without any answer, not even a failure: ask again.
            Presence::Probing { since } if now.mono.since(since) > limit && self.connected => {
                node.presence = Presence::Probing { since: now.mono };
                self.out.push(Action::Probe {
                    node: node.id.clone(),
                });
            }
            _ => {}
        }
        let node = self.cluster.node(ix);
        if node.holds.is_empty() || !self.connected {
            return false;
        }
        self.ask_for_holdings(ix);
        let node = self.cluster.node(ix);
        let another_life = now.mono.since(node.reviewed) >= ANOTHER_LIFE_MS
            && node.confirmed.is_some_and(|(confirmed, since)| {
                now.mono.since(since) < 10 * limit && node.life == Some(confirmed)
            });
        let lost = matches!(node.presence, Presence::Lost { .. });
        let review = lost || another_life || node.is_draining() || self.presses(ix);
        if review {
            self.cluster.node_quietly(ix).reviewed = now.mono;
        }
        review
    }

    /// Notes the result of a probe. Returns the node if its executions must be reviewed.
    pub(crate) fn note_probe(
        &mut self,
        name: &NodeId,
        answered: Option<InstanceId>,
    ) -> Option<NodeIx> {
        let now = self.now;
        let ix = self.cluster.find(name)?;
        let limit = self.config.liveness_ms;
        let node = self.cluster.node_mut(ix);
        match answered {
            Some(instance) => {
                node.heard = node.heard.max(now.mono);
                let was = std::mem::replace(&mut node.presence, Presence::Up);
                if node.confirmed.is_none_or(|(c, _)| c != instance) {
                    node.confirmed = Some((instance, now.mono));
                }
                self.cluster.changed.places = true;
                if matches!(was, Presence::Lost { .. }) {
                    self.record(
                        ix,
                        NodeEventKind::Returned,
                        "it answers again".to_owned(),
                        None,
                    );
                }
            }
            None => {
                let Presence::Probing { .. } = node.presence else {
                    return None;
                };
                let silent_ms = now.mono.since(node.heard);
                // A new instance is probed at once, and may not listen yet. Silence must last.
                if silent_ms <= limit && node.descriptor.is_some() {
                    node.presence = Presence::Up;
                    return None;
                }
                if !self.connected {
                    node.presence = Presence::Up;
                    return None;
                }
                node.presence = Presence::Lost { since: now.mono };
                let detail = format!("silent for {silent_ms} ms, and a probe was not answered");
                if node.descriptor.is_some() {
                    self.record(ix, NodeEventKind::Lost, detail, None);
                }
            }
        }
        Some(ix)
    }

    /// Silence before this moment does not count.
    pub(crate) fn start_clocks_anew(&mut self) {
        let now = self.now.mono;
        for ix in self.cluster.keys() {
            let node = self.cluster.node_mut(ix);
            node.heard = node.heard.max(now);
            if matches!(node.presence, Presence::Probing { .. }) {
                node.presence = Presence::Up;
            }
        }
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
    let who = format!("asked for by {}", flags.who);
    if let Some(at) = flags
        .revoked_at
        .filter(|_| (before.revoked_at, before.revoked) != (flags.revoked_at, flags.revoked))
    {
        return Some((
            NodeEventKind::Revoked,
            format!("it will be gone at {at}, said {}", flags.who),
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

/// True if two vectors of a node agree in everything that is judged.
fn says_the_same(before: &HardwareVector, after: &HardwareVector) -> bool {
    let same = |(a, b): (&Reading, &Reading)| {
        (a.signal, &a.device, a.value, a.raw, a.limit, &a.envelope)
            == (b.signal, &b.device, b.value, b.raw, b.limit, &b.envelope)
    };
    before.draining == after.draining
        && before.readings.len() == after.readings.len()
        && before.readings.iter().zip(&after.readings).all(same)
}
