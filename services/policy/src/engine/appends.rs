//! The results of this service's appends.

use fiec_schemas::{Event, ExecutionId, Phase, Sequence};

use super::{Action, Policy};
use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::Stage;
use crate::lifecycle::cluster::places::Claim;

/// Pause before the policy decides again after a reread that showed an older message than is known.
const DECIDE_AGAIN_MS: u64 = 1_000;
/// Number of older messages in a row after which the policy believes them. The last messages of the
/// ledger were removed then: a replica of the broker that lags has caught up by that time.
const OLD_REREADS: u8 = 5;

impl Lifecycle {
    /// The resources of its node that an execution uses in a phase.
    fn claim_of(&mut self, id: ExecutionId, stage: Stage, phase: &Phase) -> Claim {
        let (Some(ix), Some(binding)) = (stage.node(), phase.binding()) else {
            return Claim::Host;
        };
        let device = self.cluster.device(ix, &binding.substrate);
        let profile = self.cluster.execution(id).map(|e| e.profile);
        Claim::of(profile.and_then(|ix| self.cluster.profiles.get(ix)), device)
    }

    /// Handles a reread that shows an older message than is known. The result of the append in
    /// flight is still unknown. If it is stored, or another message is, the feed shows that. If
    /// not, the policy must decide again. Returns true if the last messages were removed: then the
    /// older one counts.
    pub(crate) fn doubt(&mut self, id: ExecutionId) -> bool {
        let now = self.now;
        let e = self.cluster.execution_mut(id);
        let Some(e) = e.filter(|e| e.is_appending()) else {
            return false;
        };
        let extra = e.extra();
        extra.old_rereads = extra.old_rereads.saturating_add(1);
        if extra.old_rereads >= OLD_REREADS {
            return true;
        }
        self.cluster.take_back(id);
        self.cluster.set_due(id, now.mono.plus(DECIDE_AGAIN_MS));
        false
    }
}

impl Policy {
    /// Appends one event with which an execution waits for nothing more: it ends, or is held.
    pub(super) fn end_with(&mut self, id: ExecutionId, event: Event) {
        self.stop_waiting(id);
        let Some(e) = self.life.cluster.execution_mut(id) else {
            return;
        };
        e.begin_append();
        self.life.out.push(Action::Append {
            execution: id,
            tenant: e.tenant.clone(),
            expected: e.seq,
            events: vec![event],
            ticket: None,
        });
    }

    /// Handles a stored append of this service.
    pub(super) fn appended(&mut self, id: ExecutionId, seq: Sequence, epoch: u64, phase: &Phase) {
        let now = self.life.now;
        // The feed may have been faster: a newer message is known, or the execution has ended.
        let Some(e) = self.life.cluster.execution(id) else {
            return;
        };
        if seq <= e.seq {
            return;
        }
        let stage = match phase {
            Phase::Bound(b) => {
                Stage::Bound(self.life.cluster.intern(now.mono, &b.node), b.instance)
            }
            Phase::Started(b) => {
                Stage::Started(self.life.cluster.intern(now.mono, &b.node), b.instance)
            }
            Phase::Paused { .. } => Stage::Paused,
            Phase::Held { .. } => Stage::Held,
            Phase::Verifying { .. } => Stage::Verifying,
            Phase::Pending => Stage::Pending,
            Phase::Completed | Phase::Failed | Phase::Cancelled | Phase::Returned => {
                self.note_end(id, phase.kind());
                let orphan = self.spread.orphans.get(&id).map(|o| o.who.clone());
                self.note_part_end(id, None, (phase.kind(), orphan.as_deref()));
                self.forget(id);
                return;
            }
        };
        let moved = self
            .life
            .cluster
            .execution(id)
            .is_some_and(|e| e.stage != stage);
        if moved {
            let claim = self.life.claim_of(id, stage, phase);
            self.life.cluster.set_stage(id, stage, claim, now.mono);
        }
        if let Some(e) = self.life.cluster.execution_mut(id) {
            // A later message that leaves it pending does not begin its wait anew.
            let waits_on = stage == Stage::Pending && !moved && e.seq > 0;
            e.seq = seq;
            e.epoch = epoch;
            e.end_append();
            if !waits_on {
                e.since = now.mono;
            }
            let rests = matches!(stage, Stage::Paused | Stage::Held);
            if let Some(extra) = e.extra.as_mut().filter(|_| rests) {
                extra.request = None;
            }
        }
        self.note_deadline(id);
        match stage {
            Stage::Bound(..) => {
                if let Some(e) = self.life.cluster.execution_mut(id) {
                    // The arrival of a binding chosen here stays the moment of the choice: the node's
                    // instance of that moment may be gone.
                    if moved {
                        e.arrived = now.mono;
                    }
                    if let Some(extra) = &mut e.extra {
                        (extra.cause, extra.note, extra.resent, extra.deferred) =
                            (None, None, 0, None);
                    }
                }
                self.stop_waiting(id);
                self.note_gang(id);
                let due = now.mono.plus(self.life.balance_check());
                self.life.cluster.set_due(id, due);
            }
            Stage::Pending => self.wait(id),
            Stage::Paused | Stage::Held | Stage::Verifying | Stage::Started(..) => {
                self.stop_waiting(id);
            }
        }
    }
}
