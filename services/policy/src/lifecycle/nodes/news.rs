//! Follows nodes: descriptors, vectors, presence.

use fiec_schemas::{HardwareVector, InstanceId, NodeDescriptor, NodeFlags, NodeId};

use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::NodeIx;
use crate::lifecycle::gate::Gate;

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
}
