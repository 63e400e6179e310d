//! Compares ledgers with what nodes hold.
//!
//! A ledger in phase `started` names a node that must take the next step. If that node lives
//! without the execution, no process would ever act. Causes are a lost append, a broker that lost
//! its last messages, or a defect. So each node is asked for everything that it holds. An execution
//! that two answers lack is bound again.
//!
//! A wrong verdict costs only a recomputation since the last commit: the new binding is a
//! compare-and-set on the judged message, and fences the old holder.

use fiec_schemas::messages::Holding;
use fiec_schemas::{ExecutionId, InstanceId, NodeId};

use crate::lifecycle::Lifecycle;
use crate::lifecycle::binding::bind::Placed;
use crate::lifecycle::cluster::NodeIx;
use crate::lifecycle::gate::Gate;

impl Lifecycle {
    /// Compares the executions that have started on a node with the node's answer.
    pub(crate) fn reconcile(
        &mut self,
        gate: &mut impl Gate,
        name: &NodeId,
        instance: InstanceId,
        held: &[Holding],
    ) {
        let Some(ix) = self.cluster.find(name) else {
            return;
        };
        let orphans = self.orphans_of(ix, instance, held);
        for id in orphans {
            self.bind_orphan(gate, id, ix);
        }
    }

    /// Binds an execution again that its node does not hold.
    pub(crate) fn bind_orphan(&mut self, gate: &mut impl Gate, id: ExecutionId, ix: NodeIx) {
        let now = self.now;
        let Some(cause) = self.loss(now, id) else {
            return;
        };
        if self.rebind(gate, id, cause, Some(ix)) == Placed::NoRoom {
            self.wait(gate, id);
        }
    }
}
