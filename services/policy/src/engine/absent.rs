//! Forgets nodes that have been silent for long and hold nothing. Workers whose names come once, as in
//! an autoscaled group, leave nothing behind. What an operator has said of a name stays: a cordon, a
//! drain, a quarantine.

use super::{Action, Policy};
use crate::lifecycle::cluster::{NodeIx, Presence};
use crate::time::Millis;

/// Time between two reviews, in ms.
const REVIEW_MS: u64 = 60_000;

impl Policy {
    /// Has the broker forget absent nodes. Each replica forgets a node itself once its descriptor is
    /// deleted.
    pub(crate) fn look_at_absent(&mut self) {
        let now = self.life.now;
        if now.mono.since(self.life.absent_looked) < REVIEW_MS.min(self.life.config.forget_ms) {
            return;
        }
        self.life.absent_looked = now.mono;
        let absent = self.life.cluster().keys().into_iter();
        let absent: Vec<_> = absent.filter(|ix| self.is_absent(now.mono, *ix)).collect();
        for ix in absent.into_iter().take(self.life.config.burst) {
            let node = self.life.cluster().node(ix);
            let (name, instance) = (node.id.clone(), node.life);
            let is_unknown = node.descriptor.is_none();
            if self.life.speaks_for(&name) {
                self.life.out.push(Action::Forget {
                    node: name,
                    instance,
                });
            }
            if is_unknown {
                self.life.forget_node(ix);
            }
        }
    }

    /// True if a node was silent for long, and nothing refers to it.
    fn is_absent(&self, now: Millis, ix: NodeIx) -> bool {
        let node = self.life.cluster().node(ix);
        let gone = node.descriptor.is_none() || matches!(node.presence, Presence::Lost { .. });
        let word = node.flags.are_of_the_name() || !node.trust.quarantine.entries.is_empty();
        gone && !word
            && !node.is_used()
            && now.since(node.heard) >= self.life.config.forget_ms
            && !self.machines.verification.names(ix)
    }
}
