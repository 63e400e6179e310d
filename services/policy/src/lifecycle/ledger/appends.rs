//! Appends whose result is not known.

use fiec_schemas::{Event, ExecutionId, Phase};

use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::Stage;
use crate::lifecycle::cluster::places::Claim;

/// Pause before the policy decides again after a reread that showed an older message than is known.
const DECIDE_AGAIN_MS: u64 = 1_000;
/// Number of older messages in a row after which the policy believes them. The last messages of the
/// ledger were removed then: a replica of the broker that lags has caught up by that time.
const OLD_REREADS: u8 = 5;

impl Lifecycle {
    /// Appends one event with which an execution waits for nothing more: it ends, or is held.
    pub(crate) fn end_with(&mut self, id: ExecutionId, event: Event) {
        self.stop_waiting(id);
        self.append(id, vec![event]);
    }

    /// The resources of its node that an execution uses in a phase.
    pub(crate) fn claim_of(&mut self, id: ExecutionId, stage: Stage, phase: &Phase) -> Claim {
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
