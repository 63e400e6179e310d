//! What executions count for among what their tenants have reserved, and reservations for what runs
//! without one.

use fiec_schemas::quota::{Quota, Reservation};
use fiec_schemas::{ExecutionId, Tenant};

use super::Policy;
use crate::cluster::{Execution, Stage};
use crate::holds::reserve::Change;

impl Policy {
    /// What an execution takes of its tenant's limits.
    pub(super) fn reservation(&self, id: ExecutionId) -> Option<Reservation> {
        let e = self.cluster.execution(id)?;
        let needs = self.cluster.profiles.get(e.profile).map(|p| &p.requires);
        let held = self.holds.held.get(&id);
        let batch = held.and_then(|h| h.batch);
        let at_once = self.holds.at_once(batch);
        let asked = needs.and_then(|r| r.memory_bytes.max(r.free_memory_bytes));
        let limit = self.holds.quotas.get(&e.tenant);
        let limit = limit.and_then(|quota| quota.memory_bytes);
        let memory = match (asked, limit) {
            (Some(bytes), _) => bytes,
            // What a worker grants it where nothing is said; at most what its tenant may have, and
            // as much as that where nobody knows yet what it will be.
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
            by: self.seed,
            firm: None,
            devices: u32::from(device),
            memory_bytes: memory,
            batch: batch.filter(|_| at_once.is_some()),
            at_once,
            gang: held.and_then(|h| Some(h.gang.as_ref()?.name.clone())),
        })
    }

    /// What a slot's share of memory is where it is bound, in bytes; none where it is not, or where
    /// its node has gone or has not joined yet.
    fn share_there(&self, e: &Execution) -> Option<u64> {
        let share = self.cluster.node(e.stage.node()?).share_bytes();
        Some(share).filter(|bytes| *bytes > 0)
    }

    /// True where what a tenant runs may not be what is reserved.
    pub(super) fn is_behind(&self, tenant: &Tenant, quota: &Quota) -> bool {
        let tenants = &self.cluster.tenants;
        let held = tenants.find(tenant).map_or(0, |ix| tenants.held(ix)) as usize;
        match self.holds.tables.get(tenant) {
            None => held > 0,
            Some(table) => {
                let memory = quota.memory_bytes.is_some() && !table.entries.is_empty();
                !table.scanned && held > 0 || !table.amended && memory
            }
        }
    }

    /// What has come to count for more or less memory: where it was bound, its node's share is
    /// known, and what it asks for may have been changed.
    fn plan_amending(&self, tenant: &Tenant, change: &mut Change) {
        let limit = self.holds.quotas.get(tenant).and_then(|q| q.memory_bytes);
        let table = self.holds.tables.get(tenant);
        let Some(table) = table.filter(|_| limit.is_some()) else {
            return;
        };
        // A node that has gone may come back: until then what it has counts as before.
        let known = |entry: &&Reservation| {
            let e = self.cluster.execution(entry.execution);
            e.is_some_and(|e| match e.stage.node() {
                Some(_) => self.share_there(e).is_some(),
                None => self.holds.share_bytes > 0,
            })
        };
        let own = table.entries.values().filter(|e| e.by == self.seed);
        for entry in own.filter(known) {
            let counts = self.reservation(entry.execution);
            let counts = counts.map_or(entry.memory_bytes, |r| r.memory_bytes);
            if counts != entry.memory_bytes {
                change.amend.push((entry.execution, self.seed, counts));
            }
        }
    }

    /// What runs without a reservation counts from now on: its tenant has got limits since.
    pub(super) fn plan_adopting(&mut self, tenant: &Tenant, change: &mut Change) {
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
            self.cluster.those_that(runs)
        } else {
            let held = self.holds.held.iter();
            let held = held.filter(|(id, h)| {
                self.cluster.execution(**id).is_some_and(runs)
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
