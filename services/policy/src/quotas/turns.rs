//! Whose turn it is to reserve: in the order of the queue, as far as the limits have room.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

use fiec_schemas::quota::{Quota, Reservation};
use fiec_schemas::{ExecutionId, Tenant};

use super::change::{Change, Denied, Sum};
use super::{Quotas, Sets};
use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::Stage;
use crate::time::Millis;

/// Most sets of reservations in one change.
const SETS: usize = 256;
/// Most queue entries that are read for one change.
const LOOKED_AT: usize = 20_000;

/// The reservations of a tenant.
type Entries = BTreeMap<ExecutionId, Reservation>;

/// What the turn of an execution in the queue means.
enum Turn {
    /// Not yet, or it has come with another member of its gang.
    Later,
    /// Another replica has reserved for it: that one binds it, or its entry is taken over.
    OfAnother,
    /// It needs no reservation, or may not have one: it leaves the queue.
    Leaves,
    /// These executions are reserved together: its gang, or itself alone.
    Set(Vec<ExecutionId>),
}

/// The room that a tenant's limits have left in one look at the queue.
struct Room<'a> {
    quota: Option<&'a Quota>,
    used: Sum,
    /// One waits for devices or memory. Those behind it that need neither may pass.
    is_scarce: bool,
}

impl Room<'_> {
    /// Takes the room for a set. False if there is none for it. Breaks if there is none for anybody
    /// behind it either.
    fn take(&mut self, wanted: &[Reservation]) -> ControlFlow<(), bool> {
        let asks = |entry: &Reservation| entry.devices > 0 || entry.memory_bytes > 0;
        let asks = wanted.iter().any(asks);
        if self.is_scarce && asks {
            return ControlFlow::Continue(false);
        }
        match self.used.admits(self.quota, wanted) {
            Ok(()) => {
                wanted.iter().for_each(|entry| self.used.add(entry));
                ControlFlow::Continue(true)
            }
            Err(Denied::Tenant { ever: false, .. }) => {
                if !asks || !self.used.has_count(self.quota, wanted) {
                    return ControlFlow::Break(());
                }
                self.is_scarce = true;
                ControlFlow::Continue(false)
            }
            Err(_) => ControlFlow::Continue(false),
        }
    }
}

impl Quotas {
    /// Adds the sets to the change whose turn it is. Returns executions that leave the queue.
    pub(super) fn plan_reserving(
        &mut self,
        life: &Lifecycle,
        tenant: &Tenant,
        change: &mut Change,
        sets: &impl Sets,
    ) -> Vec<ExecutionId> {
        let now = life.now;
        let Some(queue) = self.queue.get(tenant) else {
            return Vec::new();
        };
        let empty = Entries::new();
        let entries = self.tables.get(tenant).map_or(&empty, |t| &t.entries);
        let freed: BTreeSet<_> = change.free.iter().map(|(id, _)| *id).collect();
        let kept = |entry: &&Reservation| !freed.contains(&entry.execution);
        let mut room = Room {
            quota: self.limits.get(tenant),
            used: Sum::of(entries.values().filter(kept).chain(&change.adopt)),
            is_scarce: false,
        };
        let mut seen = BTreeSet::new();
        let (mut stale, mut left, mut others) = (Vec::new(), Vec::new(), Vec::new());
        for (_, _, id) in queue.iter().take(LOOKED_AT) {
            if change.sets.len() >= SETS {
                break;
            }
            let Some(queued) = self.queued.get(id) else {
                continue;
            };
            let turn = match entries.get(id) {
                Some(entry) if entry.by != self.own => Turn::OfAnother,
                _ if queued.from > now.mono || seen.contains(id) => Turn::Later,
                _ => self.turn(life, sets, *id),
            };
            let set = match turn {
                Turn::Later => continue,
                Turn::OfAnother => {
                    others.push(*id);
                    continue;
                }
                Turn::Leaves => {
                    stale.push(*id);
                    continue;
                }
                Turn::Set(set) => set,
            };
            seen.extend(set.iter().copied());
            let wanted = self.lacking(life, entries, &set);
            if wanted.is_empty() {
                continue;
            }
            match room.take(&wanted) {
                ControlFlow::Continue(true) => {}
                ControlFlow::Continue(false) => continue,
                ControlFlow::Break(()) => break,
            }
            // An entry that another replica is about to reserve keeps its room. If that replica
            // does not, this one does after a grace period.
            let mine = match set.len() {
                1 => life.is_mine(*id),
                _ => life.places_gangs(),
            };
            let is_late = |at: Millis| now.mono.since(at) >= life.config.grace_ms;
            if mine || queued.left.is_some_and(is_late) {
                change.sets.push(wanted);
            } else if queued.left.is_none() {
                left.push(*id);
            }
        }
        for id in left {
            if let Some(queued) = self.queued.get_mut(&id) {
                queued.left = Some(now.mono);
            }
        }
        // After another replica has had it in vain, it is the turn of others. A look may see the end
        // of that late.
        let turn = life.config.quotas.reserve_ms + life.config.look_ms;
        for id in others {
            if let Some(queued) = self.queued.get_mut(&id) {
                (queued.from, queued.left) = (now.mono.plus(turn), None);
            }
        }
        for id in &stale {
            self.dequeue(tenant, *id);
        }
        stale
    }

    /// What the turn of an execution without a foreign reservation means.
    fn turn(&self, life: &Lifecycle, sets: &impl Sets, id: ExecutionId) -> Turn {
        let e = life.cluster().execution(id);
        let is_pending = e.is_some_and(|e| e.stage == Stage::Pending);
        // An execution that waits for others could block the very ones it waits for.
        if !is_pending || !sets.is_free(id) || !self.reserves(life, id) {
            return Turn::Leaves;
        }
        sets.set_of(life, id).map_or(Turn::Later, Turn::Set)
    }

    /// The reservations that members of a set lack. None if another replica has reserved for one.
    fn lacking(
        &self,
        life: &Lifecycle,
        entries: &Entries,
        set: &[ExecutionId],
    ) -> Vec<Reservation> {
        let foreign = |id| entries.get(id).is_some_and(|entry| entry.by != self.own);
        if set.iter().any(foreign) {
            return Vec::new();
        }
        let lacks = set.iter().filter(|id| !entries.contains_key(id));
        lacks.filter_map(|id| self.reservation(life, *id)).collect()
    }
}
