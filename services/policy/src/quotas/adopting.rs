//! Computes how much of its tenant's limits an execution uses, and reserves for executions that run
//! without a reservation.

use fiec_schemas::quota::{Quota, Reservation};
use fiec_schemas::{ExecutionId, Tenant};

use super::Quotas;
use super::change::Change;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::{Execution, Stage};

impl Quotas {
    /// The part of its tenant's limits that an execution uses.
    pub fn reservation(&self, life: &Lifecycle, id: ExecutionId) -> Option<Reservation> {
        let e = life.cluster().execution(id)?;
        let needs = life.cluster().profiles.get(e.profile).map(|p| &p.requires);
        let bonds = life.bonds(id);
        let batch = bonds.and_then(|b| b.batch);
        let at_once = self.at_once(batch);
        let asked = needs.and_then(|r| r.memory_bytes.max(r.free_memory_bytes));
        let limit = self.limits.get(&e.tenant);
        let limit = limit.and_then(|quota| quota.memory_bytes);
        let memory = match (asked, limit) {
            (Some(bytes), _) => bytes,
            // The memory that a worker grants by default, and at most the tenant's limit. As long
            // as the grant is unknown, the limit itself.
            (None, Some(limit)) => {
                let anywhere = Some(self.share_bytes).filter(|bytes| *bytes > 0);
                let share = self.share_there(life, e).or(anywhere);
                share.map_or(limit, |bytes| bytes.min(limit))
            }
            (None, None) => 0,
        };
        let device = needs.is_some_and(|r| r.device.is_some()) || e.device().is_some();
        Some(Reservation {
            execution: id,
            by: self.own,
            firm: None,
            devices: u32::from(device),
            memory_bytes: memory,
            batch: batch.filter(|_| at_once.is_some()),
            at_once,
            gang: bonds.and_then(|b| Some(b.gang.as_ref()?.name.clone())),
        })
    }

    /// A slot's share of memory on its node, in bytes. None if the execution has no node, or the
    /// node is gone or has not joined yet.
    fn share_there(&self, life: &Lifecycle, e: &Execution) -> Option<u64> {
        let share = life.cluster().node(e.stage.node()?).share_bytes();
        Some(share).filter(|bytes| *bytes > 0)
    }

    /// True if a tenant's reservations may not match what it runs.
    pub fn is_behind(&self, life: &Lifecycle, tenant: &Tenant, quota: &Quota) -> bool {
        let tenants = &life.cluster().tenants;
        let held = tenants.find(tenant).map_or(0, |ix| tenants.held(ix)) as usize;
        match self.tables.get(tenant) {
            None => held > 0,
            Some(table) => {
                let memory = quota.memory_bytes.is_some() && !table.entries.is_empty();
                !table.scanned && held > 0 || !table.amended && memory
            }
        }
    }

    /// Corrects the memory of reservations: a binding makes its node's share known, and an operator
    /// may have changed the request.
    fn plan_amending(&self, life: &Lifecycle, tenant: &Tenant, change: &mut Change) {
        let limit = self.limits.get(tenant).and_then(|q| q.memory_bytes);
        let table = self.tables.get(tenant);
        let Some(table) = table.filter(|_| limit.is_some()) else {
            return;
        };
        // A node that is gone may return; until then its executions count as before.
        let known = |entry: &&Reservation| {
            let e = life.cluster().execution(entry.execution);
            e.is_some_and(|e| match e.stage.node() {
                Some(_) => self.share_there(life, e).is_some(),
                None => self.share_bytes > 0,
            })
        };
        let own = table.entries.values().filter(|e| e.by == self.own);
        for entry in own.filter(known) {
            let counts = self.reservation(life, entry.execution);
            let counts = counts.map_or(entry.memory_bytes, |r| r.memory_bytes);
            if counts != entry.memory_bytes {
                change.amend.push((entry.execution, self.own, counts));
            }
        }
    }

    /// Reserves for executions that run without a reservation, because their tenant got limits
    /// later.
    pub fn plan_adopting(&mut self, life: &mut Lifecycle, tenant: &Tenant, change: &mut Change) {
        let limits = self.is_limited(tenant);
        let Some(table) = self.tables.get_mut(tenant) else {
            return;
        };
        let amended = std::mem::replace(&mut table.amended, true);
        let scanned = std::mem::replace(&mut table.scanned, true);
        if !amended {
            self.plan_amending(life, tenant, change);
        }
        if scanned {
            return;
        }
        let runs = |e: &Execution| {
            e.tenant == *tenant && matches!(e.stage, Stage::Bound(..) | Stage::Started(..))
        };
        let ids: Vec<ExecutionId> = if limits {
            life.cluster().those_that(runs)
        } else {
            let held = life.all_bonds();
            let held = held.filter(|(id, h)| {
                life.cluster().execution(**id).is_some_and(runs) && self.at_once(h.batch).is_some()
            });
            held.map(|(id, _)| *id).collect()
        };
        for id in ids {
            let known = self.tables.get(tenant);
            if known.is_some_and(|table| !table.entries.contains_key(&id)) {
                change.adopt.extend(self.reservation(life, id));
            }
        }
    }
}
