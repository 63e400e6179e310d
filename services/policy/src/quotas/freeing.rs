//! Frees reservations, and takes over those of a gone replica.
//!
//! An append of a gone replica may be in flight for any time: in the buffer of its connection, or
//! in a process that is suspended. So no period makes it safe to free what was taken over. Only a
//! later message in the ledger makes such an append fail. If none comes by itself, this replica
//! appends one without events. That costs one message for each reservation taken over in vain.

use fiec_schemas::quota::Reservation;
use fiec_schemas::{ExecutionId, Tenant};

use super::Quotas;
use super::change::Change;
use crate::fate::Seen;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::{Execution, Stage};
use crate::time::Millis;

/// True if an append of the replica before could still bind the execution under its reservation.
fn may_be_bound(e: &Execution, entry: &Reservation) -> bool {
    e.stage == Stage::Pending && entry.firm.is_some_and(|seq| e.seq <= seq)
}

impl Quotas {
    /// An execution has ended: its reservation is freed, by the owner at once.
    pub fn free_soon(&mut self, life: &mut Lifecycle, tenant: &Tenant, id: ExecutionId) {
        if let Some(table) = self.tables.get_mut(tenant)
            && table.entries.contains_key(&id)
        {
            table.to_free.insert(id, Millis(0));
            life.changed().admission = true;
        }
    }

    /// Result of a look at the ledger of a reservation's execution.
    pub fn orphan_seen(&mut self, life: &mut Lifecycle, id: ExecutionId, seen: Seen) {
        let now = life.now;
        if seen == Seen::Lives || life.knows(id) {
            return;
        }
        for table in self.tables.values_mut() {
            if table.entries.contains_key(&id) {
                table.to_free.insert(id, now.mono);
                life.changed().admission = true;
            }
        }
    }

    /// Frees what is due. What was taken over is fenced first.
    pub fn plan_freeing(&mut self, life: &mut Lifecycle, tenant: &Tenant, change: &mut Change) {
        let now = life.now;
        let Some(table) = self.tables.get(tenant) else {
            return;
        };
        let (mut settled, mut unfenced) = (Vec::new(), Vec::new());
        for (id, at) in &table.to_free {
            let Some(entry) = table.entries.get(id) else {
                settled.push(*id);
                continue;
            };
            let live = life.cluster().execution(*id);
            if entry.by == self.own && live.is_some_and(|e| may_be_bound(e, entry)) {
                unfenced.push(*id);
                continue;
            }
            // It was resumed or bound in the meantime.
            let needed = live.is_some_and(|e| {
                e.is_appending() || matches!(e.stage, Stage::Bound(..) | Stage::Started(..))
            });
            if needed || (live.is_some() && entry.by != self.own) {
                settled.push(*id);
            } else if entry.by == self.own
                || self.is_gone(life, entry)
                || *at != Millis(0) && now.mono.since(*at) >= life.config.quotas.reserve_ms
            {
                change.free.push((*id, entry.by));
            }
        }
        if let Some(table) = self.tables.get_mut(tenant) {
            table.to_free.retain(|id, _| !settled.contains(id));
            // Another owner gets some time to free it.
            for at in table.to_free.values_mut().filter(|at| **at == Millis(0)) {
                *at = now.mono;
            }
        }
        for id in unfenced {
            self.fence(life, id);
        }
    }

    /// Appends a message without events, so that an append of the gone replica must fail.
    fn fence(&mut self, life: &mut Lifecycle, id: ExecutionId) {
        let e = life.cluster().execution(id);
        if e.is_some_and(|e| !e.is_appending()) {
            life.append(id, Vec::new());
        }
    }

    /// True for a reservation whose owner is gone. Shortly after this replica's start it is false:
    /// the owner may not have been heard yet.
    pub fn is_gone(&self, life: &Lifecycle, entry: &Reservation) -> bool {
        let now = life.now;
        let young = now.mono.since(self.began) < 2 * life.config.replica_ms;
        !young && !life.replicas().is_present(entry.by)
    }

    /// Takes over a gone owner's reservations for live executions. If the preferred replica does
    /// not, this one does after a grace period.
    pub fn plan_taking(&mut self, life: &mut Lifecycle, tenant: &Tenant, change: &mut Change) {
        let now = life.now;
        let Some(table) = self.tables.get(tenant) else {
            return;
        };
        let grace = life.config.grace_ms;
        let is_late = table.left.is_some_and(|at| now.mono.since(at) >= grace);
        let mut is_left = false;
        for (id, entry) in &table.entries {
            let Some(e) = life.cluster().execution(*id) else {
                continue;
            };
            if !self.is_gone(life, entry) {
                continue;
            }
            let mine = match entry.gang {
                Some(_) => life.places_gangs(),
                None => life.is_mine(*id),
            };
            if mine || is_late {
                change.take.push((*id, entry.by, self.own, e.seq));
            } else {
                is_left = true;
            }
        }
        if let Some(table) = self.tables.get_mut(tenant) {
            table.left = table
                .left
                .filter(|_| is_left)
                .or(is_left.then_some(now.mono));
        }
    }
}
