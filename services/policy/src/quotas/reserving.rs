//! Who needs a reservation, and the requests for one; finds unused ones.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use fiec_schemas::quota::{Quota, Reservation, Reservations};
use fiec_schemas::{ExecutionId, Sequence, Tenant};

use super::change::{Change, Sum};
use super::{Quotas, Sets};
use crate::Action;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::Stage;
use crate::time::Millis;

/// What a sweep has found.
pub(crate) struct Swept {
    /// Executions that found no place in time. Their reservations are freed.
    pub requeue: Vec<ExecutionId>,
    /// Executions with reservations that are not known here.
    pub unknown: Vec<ExecutionId>,
}

impl Quotas {
    /// True for an execution that needs a reservation before it is bound.
    pub fn reserves(&self, life: &Lifecycle, id: ExecutionId) -> bool {
        let Some(e) = life.cluster().execution(id) else {
            return false;
        };
        let bonds = life.bonds(id);
        self.is_limited(&e.tenant)
            || bonds.is_some_and(|b| b.gang.is_some() || self.at_once(b.batch).is_some())
    }

    /// True if reservations do not prevent a binding of the execution.
    pub fn is_admitted(&self, life: &Lifecycle, id: ExecutionId) -> bool {
        if !self.reserves(life, id) {
            return true;
        }
        let tenant = life.cluster().execution(id).map(|e| &e.tenant);
        tenant.is_some_and(|tenant| self.is_reserved(tenant, id))
    }

    /// The same, and queues the execution for a reservation if it is not admitted.
    pub fn admit(&mut self, life: &mut Lifecycle, id: ExecutionId) -> bool {
        if self.is_admitted(life, id) {
            return true;
        }
        if let Some(tenant) = life.tenant(id) {
            self.requeue(life, &tenant, id, Millis(0));
        }
        false
    }

    /// Queues an execution for a reservation, no earlier than `from`.
    pub fn requeue(
        &mut self,
        life: &mut Lifecycle,
        tenant: &Tenant,
        id: ExecutionId,
        from: Millis,
    ) {
        if let Some(e) = life.cluster().execution(id) {
            let profile = life.cluster().profiles.get(e.profile);
            let priority = profile.map_or(0, |p| p.priority);
            let place = (Reverse(priority), e.submitted_at, id);
            if self.enqueue(tenant, place, from) {
                life.changed().admission = true;
            }
        }
    }

    /// Stores a tenant's quota. Returns the executions that wait for a place only, since a limit is
    /// gone.
    #[must_use]
    pub fn set(
        &mut self,
        life: &mut Lifecycle,
        tenant: &Tenant,
        quota: Option<Quota>,
    ) -> Vec<ExecutionId> {
        let weight = quota.as_ref().map_or(1, Quota::weight);
        life.set_weight(tenant, f64::from(weight));
        match quota {
            Some(quota) => self.limits.insert(tenant.clone(), quota),
            None => self.limits.remove(tenant),
        };
        if let Some(table) = self.tables.get_mut(tenant) {
            (table.scanned, table.amended) = (false, false);
        }
        life.changed().admission = true;
        if self.is_limited(tenant) {
            return Vec::new();
        }
        let queued = self.queue.get(tenant).into_iter().flatten();
        let admitted: Vec<_> = queued
            .map(|(_, _, id)| *id)
            .filter(|id| self.is_admitted(life, *id))
            .collect();
        for id in &admitted {
            self.dequeue(tenant, *id);
        }
        admitted
    }

    /// Stores a tenant's reservations. Returns the executions that have reserved by them.
    #[must_use]
    pub fn reserved(
        &mut self,
        life: &mut Lifecycle,
        tenant: &Tenant,
        table: Option<(Sequence, &Reservations)>,
        answer: bool,
    ) -> Vec<ExecutionId> {
        let now = life.now;
        let Some((seq, table)) = table else {
            self.not_reserved(tenant);
            return Vec::new();
        };
        if !self.learn_table(tenant, seq, table, answer) {
            return Vec::new();
        }
        life.changed().admission = true;
        life.changed().places = true;
        let queued = self.queue.get(tenant).into_iter().flatten();
        let reserved: Vec<_> = queued
            .map(|(_, _, id)| *id)
            .filter(|id| self.is_reserved(tenant, *id))
            .collect();
        for id in &reserved {
            self.dequeue(tenant, *id);
            self.unplaced.insert(*id, now.mono);
        }
        reserved
    }

    /// The result of a change is unknown.
    fn not_reserved(&mut self, tenant: &Tenant) {
        if let Some(table) = self.tables.get_mut(tenant) {
            // The adopted and amended entries may not be stored.
            (table.asked, table.fresh) = (None, false);
            (table.scanned, table.amended) = (false, false);
            table.freeing.clear();
        }
    }

    /// Finds unused reservations, and executions that run without one, from time to time. `asked`:
    /// another execution was ordered to yield for this one.
    pub fn sweep(
        &mut self,
        life: &mut Lifecycle,
        asked: impl Fn(ExecutionId) -> bool,
    ) -> Option<Swept> {
        let now = life.now;
        if now.mono.since(self.swept) < life.config.look_ms {
            return None;
        }
        self.swept = now.mono;
        let old = |at: &Millis, ms: u64| now.mono.since(*at) >= ms;
        let mut unknown = Vec::new();
        let mut requeue = Vec::new();
        let nodes = life.cluster().nodes().map(|(_, node)| node.share_bytes());
        self.share_bytes = nodes.max().unwrap_or(0);
        for (tenant, table) in &mut self.tables {
            let tenants = &life.cluster().tenants;
            let held = tenants.find(tenant).map_or(0, |ix| tenants.held(ix)) as usize;
            let slots = table.entries.keys().filter(|id| {
                let e = life.cluster().execution(**id);
                e.is_some_and(|e| e.stage.node().is_some() && e.parked().is_none())
            });
            // If more executions run than have reserved, scan for the missing ones.
            table.scanned &= held <= slots.count();
            table.amended = false;
            if table
                .asked
                .is_some_and(|at| old(&at, 2 * life.config.quotas.reserve_ms))
            {
                (table.asked, table.fresh) = (None, false);
                table.freeing.clear();
            }
            for (id, entry) in &table.entries {
                let own = entry.by == self.own;
                match life.cluster().execution(*id) {
                    // The execution may not be known here yet: look at its ledger.
                    None if !table.to_free.contains_key(id) => {
                        unknown.push(*id);
                    }
                    Some(e)
                        if matches!(e.stage, Stage::Paused | Stage::Held | Stage::Verifying)
                            && own
                            && !e.is_appending() =>
                    {
                        table.to_free.insert(*id, now.mono);
                    }
                    Some(e) if e.stage == Stage::Pending && own && !e.is_appending() => {
                        let since = self.unplaced.entry(*id).or_insert(now.mono);
                        let expected = asked(*id) || life.is_expected(*id);
                        if old(since, life.config.quotas.reserve_ms) && !expected {
                            table.to_free.insert(*id, now.mono);
                            requeue.push(*id);
                        }
                    }
                    Some(_) => {
                        self.unplaced.remove(id);
                    }
                    None => {}
                }
            }
        }
        for id in &requeue {
            self.unplaced.remove(id);
            life.stop_waiting(*id);
        }
        life.changed().admission |= !self.queue.is_empty();
        let mut tables = self.tables.values();
        life.changed().admission |= tables.any(|t| !t.entries.is_empty());
        Some(Swept { requeue, unknown })
    }

    /// Queues executions again for which there was no place in time.
    pub fn queue_again(
        &mut self,
        life: &mut Lifecycle,
        ids: impl IntoIterator<Item = ExecutionId>,
    ) {
        let from = life.now.mono.plus(life.config.quotas.reserve_ms);
        for id in ids {
            if let Some(tenant) = life.tenant(id) {
                self.requeue(life, &tenant, id, from);
            }
        }
    }

    /// Requests wanted and free reservations, one change of a tenant at a time. Returns executions
    /// that need none any more.
    #[must_use]
    pub fn ask(&mut self, life: &mut Lifecycle, sets: &impl Sets) -> Vec<ExecutionId> {
        let mut stale = Vec::new();
        let now = life.now;
        let mut tenants: BTreeSet<Tenant> = self.queue.keys().cloned().collect();
        let free = self.tables.iter();
        let free = free.filter(|(_, table)| {
            let widowed = |entry| self.is_gone(life, entry);
            !table.to_free.is_empty() || table.entries.values().any(widowed)
        });
        tenants.extend(free.map(|(tenant, _)| tenant.clone()));
        let limited = self.limits.iter().filter(|(_, quota)| quota.limits());
        let limited = limited.filter(|(tenant, quota)| self.is_behind(life, tenant, quota));
        tenants.extend(limited.map(|(tenant, _)| tenant.clone()));
        for tenant in tenants {
            let table = self.tables.entry(tenant.clone()).or_default();
            if table.asked.is_some() {
                continue;
            }
            let mut change = Change {
                fence: !table.fresh && table.seq > 0,
                ..Change::default()
            };
            let unread = !table.fresh;
            self.plan_freeing(life, &tenant, &mut change);
            self.plan_taking(life, &tenant, &mut change);
            self.plan_adopting(life, &tenant, &mut change);
            stale.extend(self.plan_reserving(life, &tenant, &mut change, sets));
            if change.is_empty() && !unread {
                continue;
            }
            let table = self.tables.entry(tenant.clone()).or_default();
            table.asked = Some(now.mono);
            table.freeing = change.free.iter().map(|(id, _)| *id).collect();
            for id in &table.freeing {
                table.to_free.remove(id);
            }
            life.push(Action::Reserve {
                quota: self.limits.get(&tenant).cloned(),
                tenant,
                change: Box::new(change),
            });
        }
        stale
    }

    /// Why the tenant's limits have no room for a further part of an execution. None if they have.
    pub fn denies_one_more(&self, life: &Lifecycle, like: ExecutionId) -> Option<String> {
        let tenant = &life.cluster().execution(like)?.tenant;
        if !self.is_limited(tenant) {
            return None;
        }
        let part = Reservation {
            batch: None,
            at_once: None,
            gang: None,
            ..self.reservation(life, like)?
        };
        let entries = self.tables.get(tenant).map(|t| t.entries.values());
        let sum = Sum::of(entries.into_iter().flatten());
        let denied = sum.admits(self.limits.get(tenant), &[part]);
        if self.queue.contains_key(tenant) {
            return Some("others of the tenant wait for it".to_owned());
        }
        denied.err().map(|denied| denied.in_words())
    }

    /// Explains why an execution has no reservation yet.
    pub fn in_words(&self, life: &Lifecycle, id: ExecutionId, sets: &impl Sets) -> Option<String> {
        if self.is_admitted(life, id) {
            return None;
        }
        let tenant = &life.cluster().execution(id)?.tenant;
        let empty = Default::default();
        let entries = self.tables.get(tenant).map_or(&empty, |t| &t.entries);
        if entries.contains_key(&id) {
            return Some("it has reserved, and is being bound".to_owned());
        }
        let set = sets.set_of(life, id)?;
        let lacking = set.into_iter().filter(|id| !entries.contains_key(id));
        let wanted: Vec<_> = lacking
            .filter_map(|id| self.reservation(life, id))
            .collect();
        let denied = Sum::of(entries.values()).admits(self.limits.get(tenant), &wanted);
        Some(match denied {
            Err(denied) => denied.in_words(),
            Ok(()) => "it is reserving, in turn after those before it".to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::lifecycle::bonds::Bonds;
    use crate::lifecycle::cluster::profile::ProfileIx;
    use fiec_schemas::scheduling::Gang;
    use fiec_schemas::{BatchName, InstanceId, Timestamp};
    use uuid::Uuid;

    fn id(n: u128) -> ExecutionId {
        ExecutionId(Uuid::from_u128(n))
    }

    /// A gang of the executions 1 and 2.
    struct Pair;

    impl Sets for Pair {
        fn is_free(&self, _: ExecutionId) -> bool {
            true
        }

        fn set_of(&self, _: &Lifecycle, _: ExecutionId) -> Option<Vec<ExecutionId>> {
            Some(vec![id(1), id(2)])
        }
    }

    #[test]
    fn a_member_that_has_reserved_does_not_count_twice_in_what_the_others_wait_for() {
        let own = InstanceId(Uuid::from_u128(9));
        let tenant = Tenant::new("lab").unwrap();
        let mut life = Lifecycle::new(Config::default(), own);
        let mut quotas = Quotas::new(own);
        for n in [1, 2] {
            let at = Timestamp::from_micros(1);
            life.insert_new(id(n), &tenant, ProfileIx::UNKNOWN, at);
            let gang = Gang {
                name: BatchName::new("g").unwrap(),
                size: 2,
            };
            let gang = Some(gang);
            life.note_bonds(
                id(n),
                Bonds {
                    gang,
                    ..Bonds::default()
                },
            );
        }
        let two: Quota = serde_json::from_str(
            r#"{"v":1,"running":2,"who":"x","at":"2026-01-01T00:00:00.000000Z"}"#,
        )
        .unwrap();
        let _ = quotas.set(&mut life, &tenant, Some(two));
        let first = quotas.reservation(&life, id(1)).unwrap();
        let table = Reservations {
            v: 1,
            entries: vec![first],
        };
        let _ = quotas.reserved(&mut life, &tenant, Some((1, &table)), true);
        let words = quotas.in_words(&life, id(2), &Pair).unwrap();
        assert!(words.starts_with("it is reserving"), "{words}");
    }
}
