//! Follows nodes: descriptors, vectors, presence.

use fiec_schemas::{HardwareVector, InstanceId, NodeDescriptor, NodeFlags, NodeId};

use super::Policy;
use crate::lifecycle::cluster::NodeIx;

impl Policy {
    pub(crate) fn descriptor(&mut self, descriptor: NodeDescriptor) {
        if let Some((vector, age_ms)) = self.life.join(descriptor) {
            self.vector(vector, age_ms);
        }
    }

    pub(crate) fn flags(&mut self, name: &NodeId, flags: NodeFlags) {
        if let Some(ix) = self.life.set_flags(name, flags) {
            self.review_holds(ix);
            self.hurry(ix);
        }
    }

    pub(crate) fn vector(&mut self, vector: HardwareVector, age_ms: u64) {
        if let Some(ix) = self.life.hear_vector(vector, age_ms) {
            self.review_holds(ix);
        }
    }

    /// Reviews a node on a tick.
    pub(crate) fn look_at_node(&mut self, ix: NodeIx) {
        if self.life.look_after_node(ix) {
            self.review_holds(ix);
            self.hurry(ix);
        }
    }

    pub(crate) fn probed(&mut self, name: &NodeId, answered: Option<InstanceId>) {
        if let Some(ix) = self.life.note_probe(name, answered) {
            self.review_holds(ix);
        }
    }
}
