//! Forgets nodes that have been silent for long and hold nothing. Workers whose names come once, as in
//! an autoscaled group, leave nothing behind. What an operator has said of a name stays: a cordon, a
//! drain, a quarantine.

use crate::Action;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::{NodeIx, Presence};
use crate::lifecycle::gate::Gate;
use crate::time::Millis;

/// Time between two reviews, in ms.
const REVIEW_MS: u64 = 60_000;

impl Lifecycle {
    /// Has the broker forget absent nodes. Each replica forgets a node itself once its descriptor is
    /// deleted.
    pub(crate) fn look_at_absent(&mut self, gate: &mut impl Gate) {
        let now = self.now;
        if now.mono.since(self.absent_looked) < REVIEW_MS.min(self.config.forget_ms) {
            return;
        }
        self.absent_looked = now.mono;
        let absent = self.cluster.keys().into_iter();
        let absent: Vec<_> = absent
            .filter(|ix| self.is_absent(gate, now.mono, *ix))
            .collect();
        for ix in absent.into_iter().take(self.config.burst) {
            let node = self.cluster.node(ix);
            let (name, instance) = (node.id.clone(), node.life);
            let is_unknown = node.descriptor.is_none();
            if self.speaks_for(&name) {
                self.out.push(Action::Forget {
                    node: name,
                    instance,
                });
            }
            if is_unknown {
                self.forget_node(ix);
            }
        }
    }

    /// True if a node was silent for long, and nothing refers to it.
    fn is_absent(&self, gate: &impl Gate, now: Millis, ix: NodeIx) -> bool {
        let node = self.cluster.node(ix);
        let gone = node.descriptor.is_none() || matches!(node.presence, Presence::Lost { .. });
        let word = node.flags.are_of_the_name() || !node.trust.quarantine.entries.is_empty();
        gone && !word
            && !node.is_used()
            && now.since(node.heard) >= self.config.forget_ms
            && !gate.is_needed(ix)
    }
}
