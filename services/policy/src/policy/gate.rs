//! What the machines answer the life cycle, and what they hear of it, each time in one order.

use fiec_schemas::scheduling::Rule;
use fiec_schemas::{BatchId, Cause, EventKind, ExecutionId, PhaseKind, Tenant};

use super::admission::{OfMembers, OfReservations};
use super::machines::Machines;
use crate::explanation::Reasons;
use crate::fate::Fate;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::binding::bind::Placed;
use crate::lifecycle::bonds::{BondSpec, Bonds};
use crate::lifecycle::cluster::profile::ProfileIx;
use crate::lifecycle::cluster::{Execution, NodeIx, Stage};
use crate::lifecycle::gate::Gate;
use crate::parking;
use crate::time::Now;
use crate::view::LedgerView;

impl Gate for Machines {
    fn begins_held(&self, tenant: &Tenant, spec: Option<&BondSpec>) -> bool {
        let batch = |name| BatchId::from_client(tenant, name);
        self.quotas.is_limited(tenant)
            || spec.is_some_and(|spec| {
                let limited = self.quotas.at_once(spec.batch.as_ref().map(batch));
                let own = spec.waits() || spec.gang.is_some() || spec.at_once.is_some();
                own || limited.is_some()
            })
    }

    fn may_wait(&mut self, life: &mut Lifecycle, id: ExecutionId) -> bool {
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

    fn is_admitted(&self, life: &Lifecycle, id: ExecutionId) -> bool {
        self.quotas.is_admitted(life, id)
    }

    fn held_in_words(&self, life: &Lifecycle, id: ExecutionId) -> Option<String> {
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

    fn awaits_gang(&mut self, life: &mut Lifecycle, id: ExecutionId) -> bool {
        self.gangs.awaits_members(life, id)
    }

    fn is_needed(&self, node: NodeIx) -> bool {
        self.verification.names(node)
    }

    fn fail_late(&mut self, life: &mut Lifecycle, id: ExecutionId) -> Option<Placed> {
        let late = self.sharing.is_late(life, id);
        late.then(|| self.sharing.let_fail(life, id))
    }

    fn without_place(&mut self, life: &mut Lifecycle, id: ExecutionId, cause: &Cause) -> Placed {
        parking::without_place(life, id, cause)
    }

    fn resume(&mut self, life: &mut Lifecycle, id: ExecutionId) -> Placed {
        parking::resume(life, id)
    }

    fn wish(&self, life: &Lifecycle, id: ExecutionId) -> Option<(NodeIx, Cause)> {
        parking::wish(life, id)
    }

    fn choose_to_leave(&self, life: &Lifecycle, node: NodeIx, ids: &mut Vec<ExecutionId>) {
        parking::parked_first(life, node, ids);
    }

    fn took_in(
        &mut self,
        life: &mut Lifecycle,
        id: ExecutionId,
        tenant: &Tenant,
        spec: Option<BondSpec>,
        bound: bool,
    ) {
        // Its place in the queue of reservations may have been that of an unknown submission.
        self.quotas.dequeue(tenant, id);
        let Some(spec) = spec else {
            return;
        };
        let batch = spec.batch.as_ref();
        let bonds = Bonds {
            batch: batch.map(|name| BatchId::from_client(tenant, name)),
            at_once: spec.at_once,
            gang: spec.gang.clone(),
        };
        life.note_bonds(id, bonds);
        self.quotas.join(life, id);
        life.changed().admission = true;
        if !bound {
            self.prerequisites.join(life, id, tenant, &spec);
        }
        self.gangs.join(life, id);
    }

    fn reread(&mut self, id: ExecutionId) {
        self.verification.reread(id);
    }

    fn heard(&mut self, life: &mut Lifecycle, view: &LedgerView<'_>) {
        let id = view.state.execution;
        self.ranges.hear(life, view);
        let is_spread = self.ranges.contains(id);
        self.verification.hear(life, view, is_spread);
        life.note_pace(view);
        let yielded = view.event(EventKind::Yielded).and_then(|y| y.cause());
        if let Some(Cause::Preempted { rule, by, .. }) = yielded {
            if rule == Rule::Quota {
                self.quotas.left(life, id);
            }
            if let Some(by) = by {
                self.gave_way(life, by);
            }
        }
        self.sharing.note_deadline(life, id);
    }

    fn moved(&mut self, life: &mut Lifecycle, id: ExecutionId) {
        let alone = self.gangs.hear(life, id);
        self.wait_again(life, alone);
    }

    fn parked(&mut self, life: &mut Lifecycle, view: &LedgerView<'_>) {
        if let Some(parked) = parking::hear(life, view) {
            life.wait(self, view.state.execution);
            if let Some(by) = parked.by {
                self.gave_way(life, by);
            }
        }
    }

    fn changed(&mut self, life: &Lifecycle, id: ExecutionId) {
        self.sharing.note_deadline(life, id);
    }

    fn ended(&mut self, life: &mut Lifecycle, view: &LedgerView<'_>) {
        let (id, phase) = (view.state.execution, view.state.phase.is);
        self.verification.drop_kept(life, id);
        self.no_longer_awaited(life, id, phase);
        let part_of = view.state.spread.as_ref().and_then(|s| s.part_of);
        let end = view.end();
        let why = end.and_then(|e| e.who.as_deref().or(e.reason.as_deref()));
        let holder = self.ranges.ended(life, id, part_of, (phase, why));
        self.wait_again(life, holder);
    }

    fn ended_by_append(&mut self, life: &mut Lifecycle, id: ExecutionId, phase: PhaseKind) {
        self.no_longer_awaited(life, id, phase);
        let holder = self.ranges.ended(life, id, None, (phase, None));
        self.wait_again(life, holder);
    }

    fn begins_again(&mut self, id: ExecutionId) {
        self.prerequisites.wakes(id);
    }

    fn forgotten(&mut self, life: &mut Lifecycle, id: ExecutionId) {
        self.verification.forget(id);
        if life.knows(id) && !self.is_unbound(life) {
            self.gangs.forget(life, id);
            self.prerequisites.forget(id);
            self.quotas.forget(life, id);
            life.forget_bonds(id);
        }
        self.sharing.forget(id);
        self.ranges.forget(life, id);
    }
}

impl Reasons for Machines {
    fn held_in_words(&self, life: &Lifecycle, id: ExecutionId) -> Option<String> {
        Gate::held_in_words(self, life, id)
    }

    fn help_for_held(&self, life: &Lifecycle, id: ExecutionId) -> Vec<String> {
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
            _ if self.gangs.is_too_large(life, id) => {
                "more nodes, or larger ones: the gang has no room on those that are here".to_owned()
            }
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

    fn notes_in_words(&self, life: &Lifecycle, id: ExecutionId) -> String {
        self.verification.in_words(life, id) + &self.ranges.in_words(life, id)
    }

    fn parked_in_words(&self, now: Now, e: &Execution) -> Option<String> {
        parking::in_words(now, e)
    }

    fn is_done_but_for_parts(&self, id: ExecutionId) -> bool {
        self.ranges.is_done_but_for_parts(id)
    }
}

impl Machines {
    /// Frees the executions that wait for one that has ended.
    fn no_longer_awaited(&mut self, life: &mut Lifecycle, id: ExecutionId, phase: PhaseKind) {
        if let Some(fate) = Fate::of(phase)
            && !self.is_unbound(life)
        {
            let free = self.prerequisites.ended(life, id, fate);
            self.wait_again(life, free);
        }
    }
}
