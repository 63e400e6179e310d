//! Quotas: how much of a tenant's, a batch's or a gang's share may run at once, and who is counted.
//!
//! Three kinds of pending execution need a reservation: those of a tenant with limits, of a batch
//! that limits concurrency, and of a gang. Only the replica that has reserved may bind.
//!
//! ```text
//! queued ─▶ reserved ─▶ bound, running ─▶ freed, when it ended
//!    ▲         │ no place in time           │ too many, longer than the grace period
//!    └─────────┴────────────────────────────┘ (ordered to yield)
//! ```
//!
//! Three rules ensure that no limit is exceeded:
//!
//! 1. A reservation is made by compare-and-set on all of the tenant's reservations.
//! 2. Only the replica that made it binds under it and, while the execution lives, frees it. It
//!    frees only when no append of its own is in flight.
//! 3. If that replica is gone, another one takes the reservation over. It frees it only after the
//!    execution's ledger has moved on, so that an append still in flight must fail ([`freeing`]).
//!
//! A replica that was stalled or cut off reads its reservations again before it trusts them.
//!
//! A replica that cannot read the ledgers is silent, so it counts as gone while it still acts. It
//! stops binding under a reservation when it learns of the new owner. Until then its append and that
//! of the new owner follow the same message, so the ledger accepts one of them.
//!
//! One replica is preferred for each reservation. If it does not act, another one reserves, or takes
//! over, after a grace period. Given up: a binding waits for the round trip that reserves.
//!
//! * [`change`]: a change to a tenant's reservations, and whether a limit admits it.
//! * [`reserving`], [`freeing`] and [`adopting`] plan the changes; [`table`] has what is known.
//! * [`batch`]: the smallest limit that a live member of a batch states.
//! * [`trimming`] preempts what is beyond a quota, [`excess`] chooses it.
//!
//! It reads the cluster, and changes it by orders to yield and by messages without events. Executions
//! that may wait for a place are returned to the caller.

mod adopting;
mod batch;
mod change;
mod excess;
mod freeing;
mod reserving;
mod settings;
mod table;
mod trimming;
mod turns;

use std::collections::{BTreeMap, BTreeSet};

use fiec_schemas::quota::{Quota, Reservations};
use fiec_schemas::{BatchId, ExecutionId, InstanceId, Sequence, Tenant};

use crate::lifecycle::Lifecycle;
use crate::time::Millis;
use batch::Limited;
use table::{Place, Queued, Table, Trimmed};

pub use settings::QuotasSettings;

pub use change::Change;

/// After this many answers in a row that are older than the known state, the answer counts.
const BEHIND: u8 = 3;

/// What quotas ask about the executions that want a reservation.
pub(crate) trait Sets {
    /// True if it waits for no other execution to end.
    fn is_free(&self, id: ExecutionId) -> bool;

    /// The executions that are reserved together with it: the members of its gang, or only itself.
    /// None if members are missing.
    fn set_of(&self, life: &Lifecycle, id: ExecutionId) -> Option<Vec<ExecutionId>>;
}

/// The state of quotas.
#[derive(Debug)]
pub(crate) struct Quotas {
    /// This replica's name.
    own: InstanceId,
    /// Tenants over their quota, with the time since when.
    over: BTreeMap<Tenant, Millis>,
    /// Executions that were ordered to yield for their quota and have not done so yet.
    trimmed: BTreeMap<ExecutionId, Trimmed>,
    /// Time of the last check of quotas.
    over_looked: Millis,
    /// The largest share of memory that a slot has on any node, in bytes.
    share_bytes: u64,
    /// The quotas of tenants.
    limits: BTreeMap<Tenant, Quota>,
    /// The reservations of tenants.
    tables: BTreeMap<Tenant, Table>,
    /// Executions that want a reservation.
    queue: BTreeMap<Tenant, BTreeSet<Place>>,
    /// For each of them, how it waits.
    queued: BTreeMap<ExecutionId, Queued>,
    /// Reservations of this replica whose executions wait for a place, with the time since when.
    unplaced: BTreeMap<ExecutionId, Millis>,
    /// Time of the last complete sweep.
    swept: Millis,
    /// Time at which the ledgers had been read.
    began: Millis,
    /// Named batches.
    batches: BTreeMap<BatchId, Limited>,
}

impl Quotas {
    /// Nobody has a quota yet. `own` is this replica's id.
    pub fn new(own: InstanceId) -> Self {
        Self {
            own,
            over: BTreeMap::new(),
            trimmed: BTreeMap::new(),
            over_looked: Millis(0),
            share_bytes: 0,
            limits: BTreeMap::new(),
            tables: BTreeMap::new(),
            queue: BTreeMap::new(),
            queued: BTreeMap::new(),
            unplaced: BTreeMap::new(),
            swept: Millis(0),
            began: Millis(0),
            batches: BTreeMap::new(),
        }
    }

    /// True if no tenant has limits or reservations.
    pub fn is_idle(&self) -> bool {
        self.limits.is_empty() && self.tables.is_empty()
    }

    /// The ledgers have been read.
    pub fn begin(&mut self, now: Millis) {
        self.began = now;
    }

    /// Adds an execution to its batch.
    pub fn join(&mut self, life: &Lifecycle, id: ExecutionId) {
        if let Some(bonds) = life.bonds(id)
            && let Some(batch) = bonds.batch
        {
            let batch = self.batches.entry(batch).or_default();
            batch.insert(id, bonds.at_once);
        }
    }

    /// Forgets an execution that no longer lives; its reservation is freed.
    pub fn forget(&mut self, life: &mut Lifecycle, id: ExecutionId) {
        let Some(tenant) = life.tenant(id) else {
            return;
        };
        if let Some(batch) = life.bonds(id).and_then(|bonds| bonds.batch)
            && let Some(limited) = self.batches.get_mut(&batch)
        {
            limited.remove(id);
            if limited.is_empty() {
                self.batches.remove(&batch);
            }
        }
        self.unplaced.remove(&id);
        self.dequeue(&tenant, id);
        self.free_soon(life, &tenant, id);
    }

    /// True for a tenant with limits.
    pub fn is_limited(&self, tenant: &Tenant) -> bool {
        self.limits.get(tenant).is_some_and(Quota::limits)
    }

    /// The limit on waiting executions in a tenant's quota, if it has one.
    pub fn waiting_limit(&self, tenant: &Tenant) -> Option<u32> {
        self.limits.get(tenant)?.waiting
    }

    /// Most executions of a batch that run at once.
    pub fn at_once(&self, batch: Option<BatchId>) -> Option<u32> {
        self.batches.get(&batch?)?.at_once()
    }

    /// Stores a tenant's reservations. Returns false if a newer state is known. `read`: an answer
    /// to a question, not news that may be late.
    fn learn_table(
        &mut self,
        tenant: &Tenant,
        seq: Sequence,
        table: &Reservations,
        read: bool,
    ) -> bool {
        let known = self.tables.entry(tenant.clone()).or_default();
        if read {
            known.asked = None;
            known.freeing.clear();
        }
        if seq < known.seq {
            // An answer may be older than news that has overtaken it. Repeated old answers mean
            // that the stream was created again.
            known.behind += u8::from(read);
            if known.behind < BEHIND {
                return false;
            }
        }
        known.behind = 0;
        known.fresh |= read;
        known.seq = seq;
        known.entries = table
            .entries
            .iter()
            .map(|entry| (entry.execution, entry.clone()))
            .collect();
        known.to_free.retain(|id, _| {
            table
                .entries
                .binary_search_by_key(id, |e| e.execution)
                .is_ok()
        });
        true
    }

    /// Distrusts the known reservations after a stall or a lost connection.
    pub fn distrust(&mut self) {
        for table in self.tables.values_mut() {
            table.fresh = false;
        }
    }

    /// True if this replica may bind a pending execution under its reservation.
    fn is_reserved(&self, tenant: &Tenant, id: ExecutionId) -> bool {
        self.tables.get(tenant).is_some_and(|table| {
            let own = table
                .entries
                .get(&id)
                .is_some_and(|entry| entry.by == self.own);
            let leaves = table.freeing.contains(&id) || table.to_free.contains_key(&id);
            own && table.fresh && !leaves
        })
    }

    /// Queues an execution for a reservation, no earlier than `from`. Returns false if it is queued
    /// already.
    fn enqueue(&mut self, tenant: &Tenant, place: Place, from: Millis) -> bool {
        if self.queued.contains_key(&place.2) {
            return false;
        }
        let left = None;
        self.queued.insert(place.2, Queued { place, from, left });
        let queue = self.queue.entry(tenant.clone()).or_default();
        queue.insert(place);
        true
    }

    /// Removes an execution from that queue.
    pub fn dequeue(&mut self, tenant: &Tenant, id: ExecutionId) {
        let Some(Queued { place, .. }) = self.queued.remove(&id) else {
            return;
        };
        if let Some(queue) = self.queue.get_mut(tenant) {
            queue.remove(&place);
            if queue.is_empty() {
                self.queue.remove(tenant);
            }
        }
    }

    /// The tenant with a reservation for an execution.
    pub fn tenant_of(&self, id: ExecutionId) -> Option<&Tenant> {
        let mut reserved = self.tables.iter();
        let found = reserved.find(|(_, table)| table.entries.contains_key(&id));
        found.map(|(tenant, _)| tenant)
    }

    /// True if all of these have reserved, whichever replica did.
    pub fn have_reserved(&self, tenant: &Tenant, ids: &[ExecutionId]) -> bool {
        let table = self.tables.get(tenant);
        table.is_some_and(|table| ids.iter().all(|id| table.entries.contains_key(id)))
    }
}
