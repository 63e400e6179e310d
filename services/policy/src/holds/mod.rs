//! The reasons that hold an execution back although there may be room: dependencies, its gang, and
//! the limits of its batch and its tenant. Only executions with such a field, and tenants with
//! limits, have entries here.

pub mod first;
pub mod room;

use std::collections::{BTreeMap, BTreeSet};

use fiec_schemas::quota::{Quota, Reservations};
use fiec_schemas::scheduling::{AfterOutcome, Dependency, Gang};
use fiec_schemas::{
    BatchId, BatchName, ExecutionId, InstanceId, Sequence, Submission, Tenant, Timestamp,
};
use serde::Deserialize;

use crate::fate::{Fate, Seen};
use crate::quotas::batch::Limited;
use crate::quotas::table::{Place, Queued, Table, Trimmed};
use crate::time::Millis;

/// After this many answers in a row that are older than the known state, the answer counts.
const BEHIND: u8 = 3;

/// The fields of a submission that may hold it back.
#[derive(Debug, Default, Deserialize)]
pub struct HoldSpec {
    /// Its batch, if named.
    #[serde(default)]
    pub batch: Option<BatchName>,
    /// The executions that must end first.
    #[serde(default)]
    pub after: Vec<Dependency>,
    /// Most executions of its batch that run at once.
    #[serde(default)]
    pub at_once: Option<u32>,
    /// The gang with which it starts.
    #[serde(default)]
    pub gang: Option<Gang>,
}

impl HoldSpec {
    /// Reads a submission. None if it holds nothing back.
    pub fn of(spec: &Submission) -> Option<Self> {
        let any = spec.batch.is_some() || !spec.after.is_empty() || spec.gang.is_some();
        any.then(|| Self {
            batch: spec.batch.clone(),
            after: spec.after.clone(),
            at_once: spec.at_once,
            gang: spec.gang.clone(),
        })
    }

    /// Reads a submission in JSON. None if it holds nothing back.
    pub fn read(json: &str) -> Option<Self> {
        let spec: Self = serde_json::from_str(json).ok()?;
        let any = spec.batch.is_some() || !spec.after.is_empty() || spec.gang.is_some();
        any.then_some(spec)
    }
}

/// An execution that must end first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Awaited {
    /// Its id.
    pub id: ExecutionId,
    /// Its name in the submission.
    pub name: String,
    /// The required outcome.
    pub on: AfterOutcome,
}

/// A dependency whose outcome is not the required one.
#[derive(Debug, Clone)]
pub struct InVain {
    /// The dependency.
    pub awaited: Awaited,
    /// What became of it, in words.
    pub words: String,
}

/// The holds of one execution.
#[derive(Debug, Clone, Default)]
pub struct Held {
    /// Dependencies that have not ended yet.
    pub after: Vec<Awaited>,
    /// The dependency because of which it can no longer run.
    pub fails: Option<InVain>,
    /// Its batch, if named.
    pub batch: Option<BatchId>,
    /// Most executions of its batch that run at once.
    pub at_once: Option<u32>,
    /// The gang with which it starts.
    pub gang: Option<Gang>,
}

impl Held {
    /// Handles what was seen of a dependency. `old`: its ledger would exist by now. Returns true if
    /// something changed.
    pub fn learn(&mut self, id: ExecutionId, seen: Seen, old: bool) -> bool {
        let Some(at) = self.after.iter().position(|a| a.id == id) else {
            return false;
        };
        let (name, on) = (&self.after[at].name, self.after[at].on);
        let awaited = self.after[at].clone();
        let in_vain = |words| InVain { awaited, words };
        match (seen, on) {
            (Seen::Ended(Fate::Completed), _) | (Seen::Ended(_), AfterOutcome::Any) => {}
            (Seen::Ended(fate), AfterOutcome::Ok) => {
                let words = format!("it waits for {name}, which {}", fate.in_words());
                self.fails = Some(in_vain(words));
            }
            (Seen::Vanished, AfterOutcome::Any) if old => {}
            (Seen::Vanished, AfterOutcome::Ok) if old => {
                let words = format!(
                    "it waits for {name}, of which nothing is known any more: it was refused, or it \
                     ended more than 30 days ago"
                );
                self.fails = Some(in_vain(words));
            }
            (Seen::Lives | Seen::Vanished, _) => return false,
        }
        self.after.retain(|a| a.id != id);
        true
    }
}

/// Identifies a gang.
pub type GangKey = (Tenant, BatchName);

/// A gang: a set of executions that starts together.
#[derive(Debug, Default)]
pub struct Together {
    /// Its number of members.
    pub size: u32,
    /// The live members, oldest first.
    pub members: BTreeSet<(Timestamp, ExecutionId)>,
    /// Time at which the first member was seen to start.
    pub begun: Option<Millis>,
    /// The started members were ordered to yield, so that all start again.
    pub dissolving: bool,
    /// Its bindings were given back because not all members were bound in time.
    pub given_back: bool,
    /// Its capsules were sent.
    pub sent: bool,
    /// The gang is not tried before this moment.
    pub retry_at: Millis,
    /// Time since which it lacks only places.
    pub ready_since: Option<Millis>,
    /// Members that found no place in the last attempt. None before the first attempt.
    pub lacking: Option<Vec<ExecutionId>>,
}

impl Together {
    /// The members of the gang: the oldest, as many as its size. None if members are missing.
    pub fn complete(&self) -> Option<Vec<ExecutionId>> {
        let size = self.size as usize;
        let first: Vec<_> = self.members.iter().take(size).map(|(_, id)| *id).collect();
        (first.len() == size).then_some(first)
    }
}

/// The state of all holds.
#[derive(Debug, Default)]
pub struct Holds {
    /// Executions with holds.
    pub held: BTreeMap<ExecutionId, Box<Held>>,
    /// For each awaited execution, those that wait for it.
    pub waiters: BTreeMap<ExecutionId, BTreeSet<ExecutionId>>,
    /// Awaited executions that are not known here, with the time of the next look at their ledgers.
    pub look_at: BTreeMap<ExecutionId, Millis>,
    /// Executions that can no longer run.
    pub failing: BTreeSet<ExecutionId>,
    /// Named batches.
    pub batches: BTreeMap<BatchId, Limited>,
    /// Gangs.
    pub gangs: BTreeMap<GangKey, Together>,
    /// Gangs with a change.
    pub gangs_due: BTreeSet<GangKey>,
    /// The leading gang.
    pub first: Option<Box<first::First>>,
    /// Time of the last choice of the leading gang.
    pub first_looked: Millis,
    /// Index from which gangs are checked. The gangs before it would not have room even on an empty
    /// cluster.
    pub first_from: usize,
    /// Start of the leading gang that the last review of the queue used.
    pub first_ends: Option<Millis>,
    /// Tenants over their quota, with the time since when.
    pub over: BTreeMap<Tenant, Millis>,
    /// Executions that were ordered to yield for their quota and have not done so yet.
    pub trimmed: BTreeMap<ExecutionId, Trimmed>,
    /// Time of the last check of quotas.
    pub over_looked: Millis,
    /// The largest share of memory that a slot has on any node, in bytes.
    pub share_bytes: u64,
    /// The quotas of tenants.
    pub quotas: BTreeMap<Tenant, Quota>,
    /// The reservations of tenants.
    pub tables: BTreeMap<Tenant, Table>,
    /// Executions that want a reservation.
    pub queue: BTreeMap<Tenant, BTreeSet<Place>>,
    /// For each of them, how it waits.
    pub queued: BTreeMap<ExecutionId, Queued>,
    /// Reservations of this replica whose executions wait for a place, with the time since when.
    pub unplaced: BTreeMap<ExecutionId, Millis>,
    /// Time of the last complete sweep.
    pub swept: Millis,
    /// Time at which the ledgers had been read.
    pub began: Millis,
}

impl Holds {
    /// True if no execution is held back and no tenant has limits.
    pub fn is_idle(&self) -> bool {
        self.held.is_empty() && self.quotas.is_empty() && self.tables.is_empty()
    }

    /// A tenant's share relative to others.
    pub fn weight(&self, tenant: &Tenant) -> u32 {
        self.quotas.get(tenant).map_or(1, Quota::weight)
    }

    /// True for a tenant with limits.
    pub fn limits(&self, tenant: &Tenant) -> bool {
        self.quotas.get(tenant).is_some_and(Quota::limits)
    }

    /// Most executions of a batch that run at once.
    pub fn at_once(&self, batch: Option<BatchId>) -> Option<u32> {
        self.batches.get(&batch?)?.at_once()
    }

    /// Stores a tenant's reservations. Returns false if a newer state is known. `read`: an answer
    /// to a question, not news that may be late.
    pub fn learn_table(
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
    pub fn is_reserved(&self, tenant: &Tenant, id: ExecutionId, own: InstanceId) -> bool {
        self.tables.get(tenant).is_some_and(|table| {
            let own = table.entries.get(&id).is_some_and(|entry| entry.by == own);
            let leaves = table.freeing.contains(&id) || table.to_free.contains_key(&id);
            own && table.fresh && !leaves
        })
    }

    /// Queues an execution for a reservation, no earlier than `from`. Returns false if it is queued
    /// already.
    pub fn enqueue(&mut self, tenant: &Tenant, place: Place, from: Millis) -> bool {
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
}
