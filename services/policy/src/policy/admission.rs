//! What must hold before an execution may wait for a place, in this order: its parts have ended
//! ([`crate::spreading`]), what it waits for has ended ([`crate::prerequisites`]), its gang may start
//! ([`crate::gangs`]), and it has reserved ([`crate::quotas`]).

use fiec_schemas::{ExecutionId, Tenant};

use super::machines::Machines;
use crate::gangs::{Gangs, Members};
use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::Stage;
use crate::parking;
use crate::prerequisites::Prerequisites;
use crate::quotas::{Quotas, Sets};
use crate::sharing::Sharing;
use crate::spreading::Claims;

impl Machines {
    pub(crate) fn let_ranges_grow(&mut self, life: &mut Lifecycle) {
        for root in self.ranges.review(life) {
            let Some(one) = self.ranges.candidate(life, root) else {
                continue;
            };
            let claims = Claims {
                gang_gathers: self.gangs.gathers(life),
                denied: self.quotas.denies_one_more(life, one.id),
            };
            self.ranges.grow(life, root, one, claims);
        }
    }

    pub(crate) fn preempt(&mut self, life: &mut Lifecycle) {
        // The replica that holds the reservations of all members acts, whichever is preferred now.
        let admitted = |id: &ExecutionId| self.quotas.is_admitted(life, *id);
        let leading = life.leading();
        let leading = leading.filter(|leading| leading.members.iter().all(admitted));
        let lacking = leading.and_then(|_| self.gangs.lacking(life));
        self.sharing.preempt(life, lacking, parking::park_for);
    }

    /// An execution has yielded to this one, which is bound next.
    pub(crate) fn gave_way(&mut self, life: &mut Lifecycle, by: ExecutionId) {
        self.sharing.yielded_to(by);
        life.promise(by);
        self.gangs.hurry(life, by);
    }

    /// Queues those of these executions that may wait for a place again.
    pub(crate) fn wait_again(
        &mut self,
        life: &mut Lifecycle,
        ids: impl IntoIterator<Item = ExecutionId>,
    ) {
        for id in ids {
            self.wait_if_pending(life, id);
        }
    }

    pub(crate) fn wait_if_pending(&mut self, life: &mut Lifecycle, id: ExecutionId) {
        let pending = life.cluster().execution(id);
        if pending.is_some_and(|e| e.stage == Stage::Pending && !e.is_appending()) {
            life.wait(self, id);
        }
    }

    /// True if no execution is held back and no tenant has limits.
    pub(crate) fn is_unbound(&self, life: &Lifecycle) -> bool {
        life.all_bonds().len() == 0 && self.quotas.is_idle()
    }

    /// Acts on changes of what executions wait for apart from places.
    pub(crate) fn act_on_admission(&mut self, life: &mut Lifecycle) {
        if self.is_unbound(life) {
            return;
        }
        let members = OfMembers {
            prerequisites: &self.prerequisites,
            quotas: &self.quotas,
            sharing: &self.sharing,
        };
        self.gangs.choose_leading(life, &members);
        if life.cluster().changed.places {
            self.gangs.retry_leading(life);
        }
        let sweep = self.sweep(life);
        let is_due = self.prerequisites.is_due(life.now.wall);
        if !std::mem::take(&mut life.changed().admission) && !sweep && !is_due {
            return;
        }
        let quotas = &self.quotas;
        let reserved_by = |id| quotas.tenant_of(id).cloned();
        let free = self.prerequisites.act(life, reserved_by);
        self.wait_again(life, free);
        let members = OfMembers {
            prerequisites: &self.prerequisites,
            quotas: &self.quotas,
            sharing: &self.sharing,
        };
        let round = self.gangs.act(life, &members);
        for id in round.unreserved {
            self.quotas.admit(life, id);
        }
        self.wait_again(life, round.alone);
        let sets = OfReservations {
            prerequisites: &self.prerequisites,
            gangs: &self.gangs,
        };
        let stale = self.quotas.ask(life, &sets);
        self.wait_again(life, stale);
    }

    /// Returns true if it was time to look for unused reservations.
    fn sweep(&mut self, life: &mut Lifecycle) -> bool {
        let sharing = &self.sharing;
        let asked = |id| sharing.is_yielded_to(id);
        let Some(swept) = self.quotas.sweep(life, asked) else {
            return false;
        };
        let ranges = &self.ranges;
        let again = swept.requeue.into_iter();
        let again = again.filter(|id| !ranges.awaits_parts(*id));
        self.quotas.queue_again(life, again);
        let now = life.now.mono;
        self.prerequisites.look_for(now, swept.unknown);
        life.changed().admission |= self.gangs.has_due();
        true
    }
}

/// What quotas ask, answered by the other machines.
pub(crate) struct OfReservations<'a> {
    pub prerequisites: &'a Prerequisites,
    pub gangs: &'a Gangs,
}

/// What gangs ask, answered by the other machines.
pub(crate) struct OfMembers<'a> {
    pub prerequisites: &'a Prerequisites,
    pub quotas: &'a Quotas,
    pub sharing: &'a Sharing,
}

impl Members for OfMembers<'_> {
    fn is_free(&self, id: ExecutionId) -> bool {
        self.prerequisites.is_free(id)
    }

    fn is_admitted(&self, life: &Lifecycle, id: ExecutionId) -> bool {
        self.quotas.is_admitted(life, id)
    }

    fn have_reserved(&self, tenant: &Tenant, ids: &[ExecutionId]) -> bool {
        self.quotas.have_reserved(tenant, ids)
    }

    fn is_yielded_to(&self, id: ExecutionId) -> bool {
        self.sharing.is_yielded_to(id)
    }
}

impl Sets for OfReservations<'_> {
    fn is_free(&self, id: ExecutionId) -> bool {
        self.prerequisites.is_free(id)
    }

    fn set_of(&self, life: &Lifecycle, id: ExecutionId) -> Option<Vec<ExecutionId>> {
        self.gangs.set_of(life, id)
    }
}
