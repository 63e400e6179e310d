//! The results of this service's appends.

use fiec_schemas::{ExecutionId, Phase, Sequence};

use super::Policy;
use crate::lifecycle::cluster::Stage;
use crate::lifecycle::transitions::Settled;

impl Policy {
    /// Handles a stored append of this service.
    pub(crate) fn appended(&mut self, id: ExecutionId, seq: Sequence, epoch: u64, phase: &Phase) {
        let now = self.life.now;
        // The feed may have been faster: a newer message is known, or the execution has ended.
        let Some(e) = self.life.cluster().execution(id) else {
            return;
        };
        if seq <= e.seq {
            return;
        }
        let stage = match phase {
            Phase::Bound(b) => Stage::Bound(self.life.intern(&b.node), b.instance),
            Phase::Started(b) => Stage::Started(self.life.intern(&b.node), b.instance),
            Phase::Paused { .. } => Stage::Paused,
            Phase::Held { .. } => Stage::Held,
            Phase::Verifying { .. } => Stage::Verifying,
            Phase::Pending => Stage::Pending,
            Phase::Completed | Phase::Failed | Phase::Cancelled | Phase::Returned => {
                self.machines.note_end(&mut self.life, id, phase.kind());
                let holder =
                    self.machines
                        .ranges
                        .ended(&mut self.life, id, None, (phase.kind(), None));
                self.machines.wait_again(&mut self.life, holder);
                self.forget(id);
                return;
            }
        };
        let moved = self
            .life
            .cluster()
            .execution(id)
            .is_some_and(|e| e.stage != stage);
        if moved {
            let claim = self.life.claim_of(id, stage, phase);
            self.life.set_stage(id, stage, claim, now.mono);
        }
        let settled = Settled {
            seq,
            epoch,
            stage,
            moved,
        };
        self.life.settle(id, settled);
        self.machines.sharing.note_deadline(&self.life, id);
        match stage {
            Stage::Bound(..) => {
                self.life.settle_binding(id, moved);
                self.life.stop_waiting(id);
                let alone = self.machines.gangs.hear(&mut self.life, id);
                self.machines.wait_again(&mut self.life, alone);
                let due = now.mono.plus(self.life.balance_check());
                self.life.set_due(id, due);
            }
            Stage::Pending => self.machines.wait(&mut self.life, id),
            Stage::Paused | Stage::Held | Stage::Verifying | Stage::Started(..) => {
                self.life.stop_waiting(id);
            }
        }
    }
}
