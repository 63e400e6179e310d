//! What must hold before an execution may wait for a place, in this order: its parts have ended
//! ([`crate::spreading`]), what it waits for has ended ([`crate::prerequisites`]), its gang may start
//! ([`crate::gangs`]), and it has reserved ([`crate::quotas`]).

use fiec_schemas::{BatchId, ExecutionId, PhaseKind, Tenant};

use super::machines::Machines;
use crate::fate::Fate;
use crate::gangs::{Gangs, Members};
use crate::lifecycle::Lifecycle;
use crate::lifecycle::bonds::{BondSpec, Bonds};
use crate::lifecycle::cluster::Stage;
use crate::lifecycle::cluster::profile::ProfileIx;
use crate::parking;
use crate::prerequisites::Prerequisites;
use crate::quotas::{Quotas, Sets};
use crate::sharing::Sharing;
use crate::spreading::Claims;

impl Machines {
    /// Queues an execution for a binding, if it lacks only a place.
    pub(crate) fn wait(&mut self, life: &mut Lifecycle, id: ExecutionId) {
        if self.may_wait(life, id) {
            life.queue_up(id);
        }
    }

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
        self.sharing.obeyed(by);
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

    /// True for a new execution that must not be bound by its first message.
    pub(crate) fn begins_held(&self, tenant: &Tenant, spec: Option<&BondSpec>) -> bool {
        let batch = |name| BatchId::from_client(tenant, name);
        self.quotas.is_limited(tenant)
            || spec.is_some_and(|spec| {
                let limited = self.quotas.at_once(spec.batch.as_ref().map(batch));
                let own = !spec.after.is_empty() || spec.gang.is_some() || spec.at_once.is_some();
                own || limited.is_some()
            })
    }

    pub(crate) fn wait_if_pending(&mut self, life: &mut Lifecycle, id: ExecutionId) {
        let pending = life.cluster().execution(id);
        if pending.is_some_and(|e| e.stage == Stage::Pending && !e.is_appending()) {
            self.wait(life, id);
        }
    }

    /// True if no execution is held back and no tenant has limits.
    pub(crate) fn is_unbound(&self, life: &Lifecycle) -> bool {
        life.all_bonds().len() == 0 && self.quotas.is_idle()
    }

    /// True if the execution lacks only a place. If it lacks a reservation, this requests one.
    pub(crate) fn may_wait(&mut self, life: &mut Lifecycle, id: ExecutionId) -> bool {
        if self.ranges.awaits_parts(id) {
            return false;
        }
        let pending = life.cluster().execution(id);
        if self.is_unbound(life) || pending.is_none_or(|e| e.stage != Stage::Pending) {
            return true;
        }
        // Its holds and its reservation are not known yet.
        if pending.is_some_and(|e| e.profile == ProfileIx::UNKNOWN) {
            return false;
        }
        if !self.prerequisites.is_free(id) {
            return false;
        }
        if self.gangs.holds_back(life, id) {
            return false;
        }
        self.quotas.admit(life, id)
    }

    /// Stores what a new execution says of others. `bound`: it was bound before, so its dependencies have
    /// ended.
    pub(crate) fn note_bonds(
        &mut self,
        life: &mut Lifecycle,
        id: ExecutionId,
        tenant: &Tenant,
        spec: Option<BondSpec>,
        bound: bool,
    ) {
        let Some(spec) = spec else {
            return;
        };
        let after = spec.after;
        let batch = spec.batch.as_ref();
        let bonds = Bonds {
            batch: batch.map(|name| BatchId::from_client(tenant, name)),
            at_once: spec.at_once,
            gang: spec.gang,
        };
        life.note_bonds(id, bonds);
        self.quotas.join(life, id);
        life.changed().holds = true;
        if !bound {
            self.prerequisites.join(life, id, tenant, &after);
        }
        self.gangs.join(life, id);
    }

    /// Forgets what an execution says of others that no longer lives.
    pub(crate) fn forget_bonds(&mut self, life: &mut Lifecycle, id: ExecutionId) {
        if !life.knows(id) || self.is_unbound(life) {
            return;
        }
        self.gangs.forget(life, id);
        self.prerequisites.forget(id);
        self.quotas.forget(life, id);
        life.forget_bonds(id);
    }

    /// Handles the end of an execution, as its ledger says.
    pub(crate) fn note_end(&mut self, life: &mut Lifecycle, id: ExecutionId, phase: PhaseKind) {
        if let Some(fate) = Fate::of(phase)
            && !self.is_unbound(life)
        {
            let free = self.prerequisites.ended(life, id, fate);
            self.wait_again(life, free);
        }
    }

    /// For people: why an execution may not be bound now, independent of room.
    pub(crate) fn held_in_words(&self, life: &Lifecycle, id: ExecutionId) -> Option<String> {
        let e = life.cluster().execution(id)?;
        if e.stage != Stage::Pending {
            return None;
        }
        if let Some(words) = self.ranges.parts_in_words(life, id) {
            return Some(words);
        }
        if let Some(words) = self.prerequisites.in_words(life, id) {
            return Some(words);
        }
        let prerequisites = &self.prerequisites;
        let sets = OfReservations {
            prerequisites,
            gangs: &self.gangs,
        };
        let unreserved = |id| self.quotas.in_words(life, id, &sets);
        let members = OfMembers {
            prerequisites,
            quotas: &self.quotas,
            sharing: &self.sharing,
        };
        self.gangs
            .in_words(life, id, &members, unreserved)
            .or_else(|| unreserved(id))
            .or_else(|| life.kept_in_words(id))
    }

    /// For people: what would let it be bound.
    pub(crate) fn help_for_held(&self, life: &Lifecycle, id: ExecutionId) -> Vec<String> {
        let Some(e) = life.cluster().execution(id) else {
            return Vec::new();
        };
        if let Some(help) = self.ranges.help_for_parts(id) {
            return vec![help];
        }
        let bonds = life.bonds(id);
        let batch = bonds.and_then(|bonds| bonds.batch);
        let is_free = self.prerequisites.is_free(id);
        let help = match self.prerequisites.help(id) {
            None if !is_free => return Vec::new(),
            Some(help) if !is_free => help,
            _ if bonds.is_some_and(|b| b.gang.is_some()) && !self.gangs.is_alone(life, id) => {
                "all members of its gang being ready, and room for all of them at once".to_owned()
            }
            _ if self.quotas.is_admitted(life, id) => {
                "that gang having started, or more nodes".to_owned()
            }
            _ if self.quotas.at_once(batch).is_some() => {
                "the end of another execution of its batch".to_owned()
            }
            _ => format!(
                "the end of another execution of {0}, or more for it: `fiec quota set {0}`",
                e.tenant
            ),
        };
        vec![help]
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
        let sweep = self.sweep(life);
        if !std::mem::take(&mut life.changed().holds) && !sweep {
            return;
        }
        let quotas = &self.quotas;
        let reserved_by = |id| quotas.tenant_of(id).cloned();
        self.prerequisites.act(life, reserved_by);
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
        life.changed().holds |= self.gangs.has_due();
        true
    }
}

/// What quotas ask, answered by the other machines.
pub(crate) struct OfReservations<'a> {
    prerequisites: &'a Prerequisites,
    gangs: &'a Gangs,
}

/// What gangs ask, answered by the other machines.
pub(crate) struct OfMembers<'a> {
    prerequisites: &'a Prerequisites,
    quotas: &'a Quotas,
    sharing: &'a Sharing,
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
