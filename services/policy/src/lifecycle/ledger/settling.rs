//! The results of this service's appends.

use fiec_schemas::{Bound, ExecutionId, Phase, Sequence, Started};

use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::Stage;
use crate::lifecycle::gate::Gate;
use crate::lifecycle::transitions::Settled;

impl Lifecycle {
    /// Handles a stored append of this service.
    pub(crate) fn appended(
        &mut self,
        gate: &mut impl Gate,
        id: ExecutionId,
        seq: Sequence,
        epoch: u64,
        phase: &Phase,
    ) {
        let now = self.now;
        // The feed may have been faster: a newer message is known, or the execution has ended.
        let Some(e) = self.cluster.execution(id) else {
            return;
        };
        if seq <= e.seq {
            return;
        }
        let stage = match phase {
            Phase::Bound(Bound { binding: b, .. }) => {
                Stage::Bound(self.intern(&b.node), b.instance)
            }
            Phase::Started(Started { binding: b, .. }) => {
                Stage::Started(self.intern(&b.node), b.instance)
            }
            Phase::Paused { .. } => Stage::Paused,
            Phase::Held { .. } => Stage::Held,
            Phase::Verifying { .. } => Stage::Verifying,
            Phase::Pending { .. } => Stage::Pending,
            Phase::Completed | Phase::Failed | Phase::Cancelled | Phase::Returned => {
                gate.ended_by_append(self, id, phase.kind());
                self.forget(gate, id);
                return;
            }
        };
        let moved = self.cluster.execution(id).is_some_and(|e| e.stage != stage);
        if moved {
            let claim = self.claim_of(id, stage, phase);
            self.set_stage(id, stage, claim, now.mono);
        }
        let settled = Settled {
            seq,
            epoch,
            stage,
            moved,
        };
        self.settle(id, settled);
        gate.changed(self, id);
        match stage {
            Stage::Bound(..) => {
                self.settle_binding(id, moved);
                self.stop_waiting(id);
                gate.moved(self, id);
                let due = now.mono.plus(self.balance_check());
                self.set_due(id, due);
            }
            Stage::Pending => self.wait(gate, id),
            Stage::Paused | Stage::Held | Stage::Verifying | Stage::Started(..) => {
                self.stop_waiting(id);
            }
        }
    }
}
