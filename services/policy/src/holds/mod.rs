//! What holds an execution back although there may be room for it: others that must have ended
//! before, the gang with which it starts, and what its batch and its tenant may run at once. Only
//! executions that say so, and tenants with limits, have anything here.

pub mod excess;
pub mod first;
pub mod reserve;
pub mod room;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use fiec_schemas::quota::{Quota, Reservation, Reservations};
use fiec_schemas::scheduling::{AfterOutcome, Dependency, Gang};
use fiec_schemas::{
    BatchId, BatchName, Cause, ExecutionId, InstanceId, PhaseKind, Sequence, Submission, Tenant,
    Timestamp,
};
use serde::Deserialize;

use crate::time::Millis;

/// So many answers in a row that are older than what is known are the truth.
const BEHIND: u8 = 3;

/// How an execution ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It is done.
    Completed,
    /// It was given up.
    Failed,
    /// Somebody ended it.
    Cancelled,
    /// A part that has ended early: what it had left is its holder's.
    Returned,
}

impl Fate {
    /// Of a phase; none for one in which an execution lives.
    pub fn of(phase: PhaseKind) -> Option<Self> {
        match phase {
            PhaseKind::Completed => Some(Fate::Completed),
            PhaseKind::Failed => Some(Fate::Failed),
            PhaseKind::Cancelled => Some(Fate::Cancelled),
            PhaseKind::Returned => Some(Fate::Returned),
            PhaseKind::Pending
            | PhaseKind::Bound
            | PhaseKind::Started
            | PhaseKind::Paused
            | PhaseKind::Verifying => None,
        }
    }

    /// For people.
    pub fn in_words(self) -> &'static str {
        match self {
            Fate::Completed => "completed",
            Fate::Failed => "failed",
            Fate::Cancelled => "was cancelled",
            Fate::Returned => "was given back",
        }
    }
}

/// What a look at the last message of a ledger has shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// It has ended.
    Ended(Fate),
    /// It has not.
    Lives,
    /// There is no message.
    Vanished,
}

/// The part of a submission that may hold it back.
#[derive(Debug, Default, Deserialize)]
pub struct HoldSpec {
    /// Its batch, where it has a name.
    #[serde(default)]
    pub batch: Option<BatchName>,
    /// What must have ended before.
    #[serde(default)]
    pub after: Vec<Dependency>,
    /// How many of its batch run at once.
    #[serde(default)]
    pub at_once: Option<u32>,
    /// With whom it starts.
    #[serde(default)]
    pub gang: Option<Gang>,
}

impl HoldSpec {
    /// Of a submission; none where nothing holds it back.
    pub fn of(spec: &Submission) -> Option<Self> {
        let any = spec.batch.is_some() || !spec.after.is_empty() || spec.gang.is_some();
        any.then(|| Self {
            batch: spec.batch.clone(),
            after: spec.after.clone(),
            at_once: spec.at_once,
            gang: spec.gang.clone(),
        })
    }

    /// Of a submission as JSON; none where nothing holds it back.
    pub fn read(json: &str) -> Option<Self> {
        let spec: Self = serde_json::from_str(json).ok()?;
        let any = spec.batch.is_some() || !spec.after.is_empty() || spec.gang.is_some();
        any.then_some(spec)
    }
}

/// Another execution that must end first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Awaited {
    /// Which.
    pub id: ExecutionId,
    /// As the submission names it.
    pub name: String,
    /// How it must have ended.
    pub on: AfterOutcome,
}

/// What holds one execution.
#[derive(Debug, Clone, Default)]
pub struct Held {
    /// What has not ended yet.
    pub after: Vec<Awaited>,
    /// Why it cannot run any more.
    pub fails: Option<String>,
    /// Its batch, where it has a name.
    pub batch: Option<BatchId>,
    /// How many of its batch run at once.
    pub at_once: Option<u32>,
    /// With whom it starts.
    pub gang: Option<Gang>,
}

impl Held {
    /// Takes in that something it may wait for was seen so; `old`: nothing of it should be to come.
    /// True where something has changed.
    pub fn learn(&mut self, id: ExecutionId, seen: Seen, old: bool) -> bool {
        let Some(at) = self.after.iter().position(|a| a.id == id) else {
            return false;
        };
        let (name, on) = (&self.after[at].name, self.after[at].on);
        match (seen, on) {
            (Seen::Ended(Fate::Completed), _) | (Seen::Ended(_), AfterOutcome::Any) => {}
            (Seen::Ended(fate), AfterOutcome::Ok) => {
                self.fails = Some(format!("it waits for {name}, which {}", fate.in_words()));
            }
            (Seen::Vanished, AfterOutcome::Any) if old => {}
            (Seen::Vanished, AfterOutcome::Ok) if old => {
                self.fails = Some(format!(
                    "it waits for {name}, of which nothing is known any more: it was refused, or it \
                     ended more than 30 days ago"
                ));
            }
            (Seen::Lives | Seen::Vanished, _) => return false,
        }
        self.after.retain(|a| a.id != id);
        true
    }
}

/// A batch of which only some run at once.
#[derive(Debug, Default)]
pub struct Limited {
    /// Its live executions, each with the limit that it gives.
    members: BTreeMap<ExecutionId, Option<u32>>,
    /// How many of them give each limit: asked for with every look at one of a hundred thousand.
    limits: BTreeMap<u32, u32>,
}

impl Limited {
    /// Takes in a live execution with the limit that it gives.
    pub fn insert(&mut self, id: ExecutionId, limit: Option<u32>) {
        self.remove(id);
        self.members.insert(id, limit);
        if let Some(limit) = limit {
            *self.limits.entry(limit).or_default() += 1;
        }
    }

    /// Takes one out that lives no more.
    pub fn remove(&mut self, id: ExecutionId) {
        let Some(Some(limit)) = self.members.remove(&id) else {
            return;
        };
        if let Some(count) = self.limits.get_mut(&limit) {
            *count -= 1;
            if *count == 0 {
                self.limits.remove(&limit);
            }
        }
    }

    /// True where none lives.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// How many run at once: the smallest number that one of them gives.
    pub fn at_once(&self) -> Option<u32> {
        self.limits.first_key_value().map(|(limit, _)| *limit)
    }
}

/// Names a gang.
pub type GangKey = (Tenant, BatchName);

/// A set that starts together.
#[derive(Debug, Default)]
pub struct Together {
    /// How many it has.
    pub size: u32,
    /// The live ones, oldest first.
    pub members: BTreeSet<(Timestamp, ExecutionId)>,
    /// When the first of them was seen to compute.
    pub begun: Option<Millis>,
    /// Those that compute were told to yield, so that all begin anew.
    pub dissolving: bool,
    /// It was given back because it was not bound in full in time.
    pub given_back: bool,
    /// Its capsules were sent.
    pub sent: bool,
    /// It is not tried before.
    pub retry_at: Millis,
    /// Since when only room keeps it from starting.
    pub ready_since: Option<Millis>,
    /// Those of its members that found no place when it was tried last; none before that.
    pub lacking: Option<Vec<ExecutionId>>,
}

impl Together {
    /// The members that make the gang up: the oldest, as many as it has. None where some are
    /// missing.
    pub fn complete(&self) -> Option<Vec<ExecutionId>> {
        let size = self.size as usize;
        let first: Vec<_> = self.members.iter().take(size).map(|(_, id)| *id).collect();
        (first.len() == size).then_some(first)
    }
}

/// What a tenant has reserved, as far as it is known here.
#[derive(Debug, Default)]
pub struct Table {
    /// Sequence of the message.
    pub seq: Sequence,
    /// What it says.
    pub entries: BTreeMap<ExecutionId, Reservation>,
    /// A change was asked for and has not been answered, since when.
    pub asked: Option<Millis>,
    /// What that change frees.
    pub freeing: BTreeSet<ExecutionId>,
    /// It was read, and not only told, since the last stall.
    pub fresh: bool,
    /// Answers in a row that were older than what is known.
    pub behind: u8,
    /// Executions that run have been looked through for ones without a reservation.
    pub scanned: bool,
    /// What its entries count for was looked at anew.
    pub amended: bool,
    /// To be freed, from when on.
    pub to_free: BTreeMap<ExecutionId, Millis>,
}

/// One that was told to give way to its tenant's quota.
#[derive(Debug, Clone, PartialEq)]
pub struct Trimmed {
    /// Under which epoch.
    pub epoch: u64,
    /// How often it was told.
    pub tries: u32,
    /// Why.
    pub cause: Cause,
}

/// Where an execution stands among those that want a reservation: higher priority first, then
/// older first.
pub type Place = (Reverse<i16>, Timestamp, ExecutionId);

/// All of it.
#[derive(Debug, Default)]
pub struct Holds {
    /// Executions that are held, or may be.
    pub held: BTreeMap<ExecutionId, Box<Held>>,
    /// For each one that is waited for, by whom.
    pub waiters: BTreeMap<ExecutionId, BTreeSet<ExecutionId>>,
    /// Ones that are waited for and not known here, and when to look at their ledgers (again).
    pub look_at: BTreeMap<ExecutionId, Millis>,
    /// Executions that cannot run any more.
    pub failing: BTreeSet<ExecutionId>,
    /// Named batches.
    pub batches: BTreeMap<BatchId, Limited>,
    /// Gangs.
    pub gangs: BTreeMap<GangKey, Together>,
    /// Gangs of which something has changed.
    pub gangs_due: BTreeSet<GangKey>,
    /// The one of them that goes first.
    pub first: Option<Box<first::First>>,
    /// When that was looked at.
    pub first_looked: Millis,
    /// The place in their order from which on they are looked at: those before it could have no
    /// room even if nothing else were there.
    pub first_from: usize,
    /// When it can begin, as what waits was looked at by last.
    pub first_ends: Option<Millis>,
    /// Tenants that have more than they may, since when.
    pub over: BTreeMap<Tenant, Millis>,
    /// Executions that were told to give way for that, as long as they have not.
    pub trimmed: BTreeMap<ExecutionId, Trimmed>,
    /// When that was looked at.
    pub over_looked: Millis,
    /// The largest share of a node's memory that a slot has, in bytes.
    pub share_bytes: u64,
    /// What tenants may use at once.
    pub quotas: BTreeMap<Tenant, Quota>,
    /// What they have reserved.
    pub tables: BTreeMap<Tenant, Table>,
    /// Who wants a reservation.
    pub queue: BTreeMap<Tenant, BTreeSet<Place>>,
    /// Since when, or not before when.
    pub queued: BTreeMap<ExecutionId, (Place, Millis)>,
    /// Reservations of this replica whose executions wait for room, since when.
    pub unplaced: BTreeMap<ExecutionId, Millis>,
    /// Something has changed.
    pub due: bool,
    /// When everything was last looked through.
    pub swept: Millis,
    /// When the ledgers had been taken over.
    pub began: Millis,
}

impl Holds {
    /// True where nothing is held and nobody has limits.
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

    /// How many of its batch run at once.
    pub fn at_once(&self, batch: Option<BatchId>) -> Option<u32> {
        self.batches.get(&batch?)?.at_once()
    }

    /// Takes in what a tenant has reserved; false where something newer is known. `read`: it is
    /// the answer to a question, not news that may be late.
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
            // An answer may be older than news that has overtaken it; again and again it says that
            // the stream was made anew.
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

    /// After a stall or a cut, what was known of reservations may be out of date.
    pub fn distrust(&mut self) {
        for table in self.tables.values_mut() {
            table.fresh = false;
        }
        self.due = true;
    }

    /// True where this replica may bind a pending execution under its reservation.
    pub fn is_reserved(&self, tenant: &Tenant, id: ExecutionId, own: InstanceId) -> bool {
        self.tables.get(tenant).is_some_and(|table| {
            let own = table.entries.get(&id).is_some_and(|entry| entry.by == own);
            let leaves = table.freeing.contains(&id) || table.to_free.contains_key(&id);
            own && table.fresh && !leaves
        })
    }

    /// Puts an execution among those that want a reservation, not before then.
    pub fn enqueue(&mut self, tenant: &Tenant, place: Place, from: Millis) {
        if self.queued.contains_key(&place.2) {
            return;
        }
        self.queued.insert(place.2, (place, from));
        let queue = self.queue.entry(tenant.clone()).or_default();
        queue.insert(place);
        self.due = true;
    }

    /// Takes it away from there.
    pub fn dequeue(&mut self, tenant: &Tenant, id: ExecutionId) {
        let Some((place, _)) = self.queued.remove(&id) else {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_runs_as_few_at_once_as_one_of_its_live_members_says() {
        let id = |number| ExecutionId(uuid::Uuid::from_u128(number));
        let mut batch = Limited::default();
        batch.insert(id(1), None);
        assert_eq!(batch.at_once(), None);
        batch.insert(id(2), Some(5));
        batch.insert(id(3), Some(3));
        batch.insert(id(4), Some(3));
        // The same one with another limit.
        batch.insert(id(4), Some(4));
        assert_eq!(batch.at_once(), Some(3));
        batch.remove(id(3));
        assert_eq!(batch.at_once(), Some(4));
        batch.remove(id(4));
        batch.remove(id(4));
        assert_eq!(batch.at_once(), Some(5));
        batch.remove(id(2));
        batch.remove(id(1));
        assert!(batch.is_empty() && batch.at_once().is_none());
    }
}
