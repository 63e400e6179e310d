//! Computes how much of its tenant's limits an execution uses, and reserves for executions that run
//! without a reservation.

use fiec_schemas::quota::{Quota, Reservation};
use fiec_schemas::{ExecutionId, Tenant};

use crate::engine::Policy;
use crate::lifecycle::cluster::{Execution, Stage};
use crate::quotas::change::Change;

impl Policy {
    /// The part of its tenant's limits that an execution uses.
    pub(crate) fn reservation(&self, id: ExecutionId) -> Option<Reservation> {
        let e = self.life.cluster().execution(id)?;
        let needs = self
            .life
            .cluster()
            .profiles
            .get(e.profile)
            .map(|p| &p.requires);
        let held = self.holds.held.get(&id);
        let batch = held.and_then(|h| h.batch);
        let at_once = self.holds.at_once(batch);
        let asked = needs.and_then(|r| r.memory_bytes.max(r.free_memory_bytes));
        let limit = self.holds.quotas.get(&e.tenant);
        let limit = limit.and_then(|quota| quota.memory_bytes);
        let memory = match (asked, limit) {
            (Some(bytes), _) => bytes,
            // The memory that a worker grants by default, and at most the tenant's limit. As long
            // as the grant is unknown, the limit itself.
            (None, Some(limit)) => {
                let anywhere = Some(self.holds.share_bytes).filter(|bytes| *bytes > 0);
                let share = self.share_there(e).or(anywhere);
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
            gang: held.and_then(|h| Some(h.gang.as_ref()?.name.clone())),
        })
    }

    /// A slot's share of memory on its node, in bytes. None if the execution has no node, or the
    /// node is gone or has not joined yet.
    fn share_there(&self, e: &Execution) -> Option<u64> {
        let share = self.life.cluster().node(e.stage.node()?).share_bytes();
        Some(share).filter(|bytes| *bytes > 0)
    }

    /// True if a tenant's reservations may not match what it runs.
    pub(crate) fn is_behind(&self, tenant: &Tenant, quota: &Quota) -> bool {
        let tenants = &self.life.cluster().tenants;
        let held = tenants.find(tenant).map_or(0, |ix| tenants.held(ix)) as usize;
        match self.holds.tables.get(tenant) {
            None => held > 0,
            Some(table) => {
                let memory = quota.memory_bytes.is_some() && !table.entries.is_empty();
                !table.scanned && held > 0 || !table.amended && memory
            }
        }
    }

    /// Corrects the memory of reservations: a binding makes its node's share known, and an operator
    /// may have changed the request.
    fn plan_amending(&self, tenant: &Tenant, change: &mut Change) {
        let limit = self.holds.quotas.get(tenant).and_then(|q| q.memory_bytes);
        let table = self.holds.tables.get(tenant);
        let Some(table) = table.filter(|_| limit.is_some()) else {
            return;
        };
        // A node that is gone may return; until then its executions count as before.
        let known = |entry: &&Reservation| {
            let e = self.life.cluster().execution(entry.execution);
            e.is_some_and(|e| match e.stage.node() {
                Some(_) => self.share_there(e).is_some(),
                None => self.holds.share_bytes > 0,
            })
        };
        let own = table.entries.values().filter(|e| e.by == self.own);
        for entry in own.filter(known) {
            let counts = self.reservation(entry.execution);
            let counts = counts.map_or(entry.memory_bytes, |r| r.memory_bytes);
            if counts != entry.memory_bytes {
                change.amend.push((entry.execution, self.own, counts));
            }
        }
    }

    /// Reserves for executions that run without a reservation, because their tenant got limits
    /// later.
    pub(crate) fn plan_adopting(&mut self, tenant: &Tenant, change: &mut Change) {
        let limits = self.holds.limits(tenant);
        let Some(table) = self.holds.tables.get_mut(tenant) else {
            return;
        };
        let amended = std::mem::replace(&mut table.amended, true);
        let scanned = std::mem::replace(&mut table.scanned, true);
        if !amended {
            self.plan_amending(tenant, change);
        }
        if scanned {
            return;
        }
        let runs = |e: &Execution| {
            e.tenant == *tenant && matches!(e.stage, Stage::Bound(..) | Stage::Started(..))
        };
        let ids: Vec<ExecutionId> = if limits {
            self.life.cluster().those_that(runs)
        } else {
            let held = self.holds.held.iter();
            let held = held.filter(|(id, h)| {
                self.life.cluster().execution(**id).is_some_and(runs)
                    && self.holds.at_once(h.batch).is_some()
            });
            held.map(|(id, _)| *id).collect()
        };
        for id in ids {
            let known = self.holds.tables.get(tenant);
            if known.is_some_and(|table| !table.entries.contains_key(&id)) {
                change.adopt.extend(self.reservation(id));
            }
        }
    }
}
