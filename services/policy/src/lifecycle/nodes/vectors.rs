//! Hardware vectors, and whether a node is viable by them.

use std::sync::Arc;

use fiec_schemas::messages::{NodeEventKind, Viability};
use fiec_schemas::{HardwareVector, Reading, Signal};

use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::hysteresis::State;
use crate::lifecycle::cluster::{NodeIx, Presence};
use crate::time::Millis;

impl Lifecycle {
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
