//! Reservations. Three kinds of pending execution need one: those of a tenant with limits, of a
//! batch that limits concurrency, and of a gang. Only the replica that has reserved may bind.
//!
//! Three rules ensure that no limit is exceeded:
//!
//! 1. A reservation is made by compare-and-set on all of the tenant's reservations.
//! 2. Only the replica that made it binds under it and, while the execution lives, frees it. It
//!    frees only when no append of its own is in flight.
//! 3. If that replica is gone, another one takes the reservation over. It frees it only after the
//!    execution's ledger has moved on, so that an append still in flight must fail ([`super::freeing`]).
//!
//! A replica that was stalled or cut off reads its reservations again before it trusts them.
//!
//! A replica that cannot read the ledgers is silent, so it counts as gone while it still acts. It
//! stops binding under a reservation when it learns of the new owner. Until then its append and that
//! of the new owner follow the same message, so the ledger accepts one of them.
//!
//! One replica is preferred for each reservation. If it does not act, another one reserves, or takes
//! over, after a grace period.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use fiec_schemas::quota::{Quota, Reservation, Reservations};
use fiec_schemas::{ExecutionId, PhaseKind, Sequence, Tenant};

use crate::engine::{Action, Policy};
use crate::fate::Fate;
use crate::lifecycle::cluster::Stage;
use crate::quotas::change::{Change, Denied, Sum};
use crate::time::Millis;

/// Most sets of reservations in one change.
const SETS: usize = 256;
/// Most queue entries that are read for one change.
const LOOKED_AT: usize = 20_000;

impl Policy {
    /// True for an execution that needs a reservation before it is bound.
    pub(crate) fn reserves(&self, id: ExecutionId) -> bool {
        let Some(e) = self.life.cluster().execution(id) else {
            return false;
        };
        let held = self.holds.held.get(&id);
        self.holds.limits(&e.tenant)
            || held.is_some_and(|h| h.gang.is_some() || self.holds.at_once(h.batch).is_some())
    }

    /// True if an execution holds, or waits for, something shared: a part of a quota, of a batch's
    /// limit, or a place in a gang.
    pub fn reserves_for(&self, id: ExecutionId) -> bool {
        (!self.holds.is_idle() && self.reserves(id)) || self.withholds(id)
    }

    /// True if reservations do not prevent a binding of the execution.
    pub(crate) fn is_admitted(&self, id: ExecutionId) -> bool {
        if self.holds.is_idle() || !self.reserves(id) {
            return true;
        }
        let tenant = self.life.cluster().execution(id).map(|e| &e.tenant);
        tenant.is_some_and(|tenant| self.holds.is_reserved(tenant, id, self.own))
    }

    /// The same, and queues the execution for a reservation if it is not admitted.
    pub(crate) fn admit(&mut self, id: ExecutionId) -> bool {
        if self.is_admitted(id) {
            return true;
        }
        if let Some(tenant) = self.life.tenant(id) {
            self.requeue(&tenant, id, Millis(0));
        }
        false
    }

    /// Queues an execution for a reservation, no earlier than `from`.
    pub(crate) fn requeue(&mut self, tenant: &Tenant, id: ExecutionId, from: Millis) {
        if let Some(e) = self.life.cluster().execution(id) {
            let profile = self.life.cluster().profiles.get(e.profile);
            let priority = profile.map_or(0, |p| p.priority);
            let place = (Reverse(priority), e.submitted_at, id);
            if self.holds.enqueue(tenant, place, from) {
                self.life.changed().holds = true;
            }
        }
    }

    /// The executions that are reserved together: the gang, or only this one.
    fn set_of(&self, id: ExecutionId) -> Option<Vec<ExecutionId>> {
        let held = self.holds.held.get(&id);
        match held.and_then(|h| h.gang.as_ref()) {
            Some(gang) if !self.is_alone(id) => {
                let tenant = self.life.cluster().execution(id)?.tenant.clone();
                let together = self.holds.gangs.get(&(tenant, gang.name.clone()))?;
                together.complete()
            }
            _ => Some(vec![id]),
        }
    }

    /// Stores a tenant's quota.
    pub(crate) fn quota(&mut self, tenant: &Tenant, quota: Option<Quota>) {
        let weight = quota.as_ref().map_or(1, Quota::weight);
        self.life.set_weight(tenant, f64::from(weight));
        match quota {
            Some(quota) => self.holds.quotas.insert(tenant.clone(), quota),
            None => self.holds.quotas.remove(tenant),
        };
        if let Some(table) = self.holds.tables.get_mut(tenant) {
            (table.scanned, table.amended) = (false, false);
        }
        self.life.changed().holds = true;
        // Executions that queued for a limit that is gone wait for a place only.
        let queued = self.holds.queue.get(tenant).cloned().unwrap_or_default();
        let limits = self.holds.limits(tenant);
        for (_, _, id) in queued {
            if !limits && self.is_admitted(id) {
                self.holds.dequeue(tenant, id);
                self.wait_if_pending(id);
            }
        }
    }

    /// Stores a tenant's reservations.
    pub(crate) fn reserved(
        &mut self,
        tenant: &Tenant,
        table: Option<(Sequence, &Reservations)>,
        answer: bool,
    ) {
        let now = self.life.now;
        let Some((seq, table)) = table else {
            return self.not_reserved(tenant);
        };
        if !self.holds.learn_table(tenant, seq, table, answer) {
            return;
        }
        self.life.changed().holds = true;
        self.life.changed().places = true;
        let queued: Vec<_> = self
            .holds
            .queue
            .get(tenant)
            .into_iter()
            .flatten()
            .copied()
            .collect();
        for (_, _, id) in queued {
            if self.holds.is_reserved(tenant, id, self.own) {
                self.holds.dequeue(tenant, id);
                self.holds.unplaced.insert(id, now.mono);
                self.wait_if_pending(id);
            }
        }
    }

    /// The result of a change is unknown.
    fn not_reserved(&mut self, tenant: &Tenant) {
        if let Some(table) = self.holds.tables.get_mut(tenant) {
            // The adopted and amended entries may not be stored.
            (table.asked, table.fresh) = (None, false);
            (table.scanned, table.amended) = (false, false);
            table.freeing.clear();
        }
    }

    /// Finds unused reservations, and executions that run without one.
    pub(crate) fn sweep_reservations(&mut self) {
        let now = self.life.now;
        let old = |at: &Millis, ms: u64| now.mono.since(*at) >= ms;
        let mut orphans = Vec::new();
        let mut requeue = Vec::new();
        let first = self.holds.first.as_deref().filter(|first| first.keeps);
        let nodes = self
            .life
            .cluster()
            .nodes()
            .map(|(_, node)| node.share_bytes());
        self.holds.share_bytes = nodes.max().unwrap_or(0);
        for (tenant, table) in &mut self.holds.tables {
            let tenants = &self.life.cluster().tenants;
            let held = tenants.find(tenant).map_or(0, |ix| tenants.held(ix)) as usize;
            let slots = table.entries.keys().filter(|id| {
                let e = self.life.cluster().execution(**id);
                e.is_some_and(|e| e.stage.node().is_some() && e.parked().is_none())
            });
            // If more executions run than have reserved, scan for the missing ones.
            table.scanned &= held <= slots.count();
            table.amended = false;
            if table
                .asked
                .is_some_and(|at| old(&at, 2 * self.life.config.reserve_ms))
            {
                (table.asked, table.fresh) = (None, false);
                table.freeing.clear();
            }
            for (id, entry) in &table.entries {
                let own = entry.by == self.own;
                match self.life.cluster().execution(*id) {
                    // The execution may not be known here yet: look at its ledger.
                    None if !table.to_free.contains_key(id) => {
                        orphans.push((tenant.clone(), *id));
                    }
                    Some(e)
                        if matches!(e.stage, Stage::Paused | Stage::Held | Stage::Verifying)
                            && own
                            && !e.is_appending() =>
                    {
                        table.to_free.insert(*id, now.mono);
                    }
                    Some(e) if e.stage == Stage::Pending && own && !e.is_appending() => {
                        let since = self.holds.unplaced.entry(*id).or_insert(now.mono);
                        // Another execution yields for it, or places are reserved.
                        let asked = self.share.asking.contains_key(id)
                            || self.share.promised.contains_key(id)
                            || first.is_some_and(|first| first.members.contains(id));
                        if old(since, self.life.config.reserve_ms) && !asked {
                            table.to_free.insert(*id, now.mono);
                            requeue.push(*id);
                        }
                    }
                    Some(_) => {
                        self.holds.unplaced.remove(id);
                    }
                    None => {}
                }
            }
        }
        for id in requeue {
            self.holds.unplaced.remove(&id);
            self.life.stop_waiting(id);
            if self.ranges.awaits_parts(id) {
                continue;
            }
            if let Some(tenant) = self.life.tenant(id) {
                self.requeue(&tenant, id, now.mono.plus(self.life.config.reserve_ms));
            }
        }
        for (_, id) in orphans {
            self.holds.look_at.entry(id).or_insert(now.mono);
        }
        self.life.changed().holds |= !self.holds.queue.is_empty();
        let tables = self.holds.tables.values();
        self.life.changed().holds |= tables.into_iter().any(|t| !t.entries.is_empty());
        self.life.changed().holds |= !self.holds.gangs_due.is_empty();
    }

    /// Requests wanted and free reservations, one change of a tenant at a time.
    pub(crate) fn ask_for_reservations(&mut self) {
        let now = self.life.now;
        let mut tenants: BTreeSet<Tenant> = self.holds.queue.keys().cloned().collect();
        let free = self.holds.tables.iter();
        let free = free.filter(|(_, table)| {
            let widowed = |entry| self.is_gone(entry);
            !table.to_free.is_empty() || table.entries.values().any(widowed)
        });
        tenants.extend(free.map(|(tenant, _)| tenant.clone()));
        let limited = self.holds.quotas.iter().filter(|(_, quota)| quota.limits());
        let limited = limited.filter(|(tenant, quota)| self.is_behind(tenant, quota));
        tenants.extend(limited.map(|(tenant, _)| tenant.clone()));
        for tenant in tenants {
            let table = self.holds.tables.entry(tenant.clone()).or_default();
            if table.asked.is_some() {
                continue;
            }
            let mut change = Change {
                fence: !table.fresh && table.seq > 0,
                ..Change::default()
            };
            let unread = !table.fresh;
            self.plan_freeing(&tenant, &mut change);
            self.plan_taking(&tenant, &mut change);
            self.plan_adopting(&tenant, &mut change);
            self.plan_reserving(&tenant, &mut change);
            if change.is_empty() && !unread {
                continue;
            }
            let table = self.holds.tables.entry(tenant.clone()).or_default();
            table.asked = Some(now.mono);
            table.freeing = change.free.iter().map(|(id, _)| *id).collect();
            for id in &table.freeing {
                table.to_free.remove(id);
            }
            self.life.out.push(Action::Reserve {
                quota: self.holds.quotas.get(&tenant).cloned(),
                tenant,
                change: Box::new(change),
            });
        }
    }

    fn plan_reserving(&mut self, tenant: &Tenant, change: &mut Change) {
        let now = self.life.now;
        let Some(queue) = self.holds.queue.get(tenant) else {
            return;
        };
        let empty = Default::default();
        let entries = self.holds.tables.get(tenant).map_or(&empty, |t| &t.entries);
        let freed: BTreeSet<_> = change.free.iter().map(|(id, _)| *id).collect();
        let mut sum = Sum::of(
            entries
                .values()
                .filter(|entry| !freed.contains(&entry.execution))
                .chain(&change.adopt),
        );
        let quota = self.holds.quotas.get(tenant);
        let mut seen = BTreeSet::new();
        let mut stale = Vec::new();
        let mut scarce = false;
        let (mut left, mut others) = (Vec::new(), Vec::new());
        for (_, _, id) in queue.iter().take(LOOKED_AT) {
            if change.sets.len() >= SETS {
                break;
            }
            let Some(queued) = self.holds.queued.get(id) else {
                continue;
            };
            // Its owner binds it, or another replica takes it over.
            if entries.get(id).is_some_and(|entry| entry.by != self.own) {
                others.push(*id);
                continue;
            }
            if queued.from > now.mono || seen.contains(id) {
                continue;
            }
            let pending = |id: &ExecutionId| {
                let e = self.life.cluster().execution(*id);
                e.is_some_and(|e| e.stage == Stage::Pending)
            };
            // An execution that waits for others could block the very ones it waits for.
            let held = self.holds.held.get(id);
            let held = held.is_some_and(|h| !h.after.is_empty() || h.fails.is_some());
            if !pending(id) || held || !self.reserves(*id) {
                stale.push(*id);
                continue;
            }
            let Some(set) = self.set_of(*id) else {
                continue;
            };
            seen.extend(set.iter().copied());
            let mut wanted = Vec::new();
            let mut foreign = false;
            for member in &set {
                match entries.get(member) {
                    Some(entry) if entry.by == self.own => {}
                    Some(_) => foreign = true,
                    None => wanted.extend(self.reservation(*member)),
                }
            }
            if foreign || wanted.is_empty() {
                continue;
            }
            let asks = wanted
                .iter()
                .any(|entry| entry.devices > 0 || entry.memory_bytes > 0);
            if scarce && asks {
                continue;
            }
            match sum.admits(quota, &wanted) {
                Ok(()) => {}
                // An execution that needs neither device nor memory may pass one that waits for
                // them.
                Err(Denied::Tenant { ever: false, .. })
                    if asks && sum.has_count(quota, &wanted) =>
                {
                    scarce = true;
                    continue;
                }
                Err(Denied::Tenant { ever: false, .. }) => break,
                Err(_) => continue,
            }
            wanted.iter().for_each(|entry| sum.add(entry));
            // An entry that another replica is about to reserve keeps its room. If that replica
            // does not, this one does after a grace period.
            let mine = if set.len() > 1 {
                self.places_gangs()
            } else {
                self.life.is_mine(*id)
            };
            let is_late = |at: Millis| now.mono.since(at) >= self.life.config.grace_ms;
            if mine || queued.left.is_some_and(is_late) {
                change.sets.push(wanted);
            } else if queued.left.is_none() {
                left.push(*id);
            }
        }
        for id in left {
            if let Some(queued) = self.holds.queued.get_mut(&id) {
                queued.left = Some(now.mono);
            }
        }
        // After another replica has had it in vain, it is the turn of others. A look may see the end
        // of that late.
        let turn = self.life.config.reserve_ms + self.life.config.look_ms;
        for id in others {
            if let Some(queued) = self.holds.queued.get_mut(&id) {
                (queued.from, queued.left) = (now.mono.plus(turn), None);
            }
        }
        for id in stale {
            self.holds.dequeue(tenant, id);
            self.wait_if_pending(id);
        }
    }

    /// Why the tenant's limits have no room for a further part of an execution. None if they have.
    pub(crate) fn denies_one_more(&self, like: ExecutionId) -> Option<String> {
        let tenant = &self.life.cluster().execution(like)?.tenant;
        if !self.holds.limits(tenant) {
            return None;
        }
        let part = Reservation {
            batch: None,
            at_once: None,
            gang: None,
            ..self.reservation(like)?
        };
        let entries = self.holds.tables.get(tenant).map(|t| t.entries.values());
        let sum = Sum::of(entries.into_iter().flatten());
        let denied = sum.admits(self.holds.quotas.get(tenant), &[part]);
        if self.holds.queue.contains_key(tenant) {
            return Some("others of the tenant wait for it".to_owned());
        }
        denied.err().map(|denied| denied.in_words())
    }

    /// Explains why an execution has no reservation yet.
    pub(crate) fn unreserved_in_words(&self, id: ExecutionId) -> Option<String> {
        if self.is_admitted(id) {
            return None;
        }
        let tenant = &self.life.cluster().execution(id)?.tenant;
        let wanted: Vec<_> = self
            .set_of(id)?
            .into_iter()
            .filter_map(|id| self.reservation(id))
            .collect();
        let empty = Default::default();
        let entries = self.holds.tables.get(tenant).map_or(&empty, |t| &t.entries);
        if entries.contains_key(&id) {
            return Some("it has reserved, and is being bound".to_owned());
        }
        let denied = Sum::of(entries.values()).admits(self.holds.quotas.get(tenant), &wanted);
        Some(match denied {
            Err(denied) => denied.in_words(),
            Ok(()) => "it is reserving, in turn after those before it".to_owned(),
        })
    }

    /// Handles the end of an execution, as its ledger says.
    pub(crate) fn note_end(&mut self, id: ExecutionId, phase: PhaseKind) {
        if let Some(fate) = Fate::of(phase)
            && !self.holds.is_idle()
        {
            self.ended(id, fate);
        }
    }
}
