//! A tenant that uses more than its quota allows, as after `fiec quota set`. Once that has lasted
//! for `quota_grace_ms`, the executions with the least value are preempted at their next boundary.
//! They wait as pending until the quota has room again. One policy service acts for a tenant. It
//! first frees reservations of executions that are not bound yet.
//!
//! Exactly the excess is preempted. A holder that did not answer an order may have received it, so
//! the policy repeats that order and asks no other execution. A preempted execution is not counted
//! until its reservation is freed, by any replica.
//!
//! One execution too many can be preempted in two cases. A holder that answers none of [`TRIES`]
//! orders is replaced by another, and may find its first order later. A policy service that takes
//! over after the grace period may choose other executions than its predecessor. An execution that
//! was preempted in vain returns as soon as a reservation is possible.

use fiec_schemas::quota::Quota;
use fiec_schemas::scheduling::Rule;
use fiec_schemas::{Cause, ExecutionId, Tenant};

use super::Quotas;
use super::excess::{self, Has};
use super::table::Trimmed;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::{Execution, Stage, Wanted};
use crate::lifecycle::queue::order;
use crate::lifecycle::queue::regret::Regret;
use crate::time::seconds;

/// Most spared executions that a reason names.
const NAMED: usize = 3;
/// Most orders to one execution before another one is preempted instead.
const TRIES: u32 = 10;

/// State of an execution's reservation while its tenant is over the quota.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Reserved and not being bound: the reservation is freed at once.
    Waits,
    /// Ordered to yield without a confirmation from the holder: it may still obey.
    Told,
    /// Started, whether it computes or is parked.
    Runs,
    /// Not available for a request now.
    Firm,
}

struct Entry {
    id: ExecutionId,
    state: State,
    regret: Option<Regret>,
    has: Has,
}

impl Quotas {
    /// Finds the tenants that use more than their quota, and trims them.
    pub fn review(&mut self, life: &mut Lifecycle) {
        let now = life.now;
        if self.limits.is_empty() {
            return;
        }
        if now.mono.since(self.over_looked) < life.config.sharing.review_ms {
            return;
        }
        self.over_looked = now.mono;
        let limited = self.limits.iter().filter(|(_, quota)| quota.limits());
        let limited: Vec<_> = limited.map(|(t, q)| (t.clone(), q.clone())).collect();
        let known = |tenant: &Tenant| limited.iter().any(|(t, _)| t == tenant);
        self.over.retain(|tenant, _| known(tenant));
        let cluster = life.cluster();
        self.trimmed.retain(|id, trimmed| {
            let e = cluster.execution(*id).filter(|e| known(&e.tenant));
            e.is_some_and(|e| e.epoch == trimmed.epoch && matches!(e.stage, Stage::Started(..)))
        });
        for (tenant, quota) in limited {
            let mine = life.replicas().prefers_self(tenant.as_str().as_bytes());
            let all = mine.then(|| self.entries_of(life, &tenant)).flatten();
            let over = |all: &[Entry]| excess::exceeds(all.iter().map(|e| &e.has), &quota);
            let enough = all.as_ref().is_some_and(|all| !over(all));
            let Some(all) = all.filter(|_| !enough) else {
                self.over.remove(&tenant);
                if enough {
                    self.forget_trimmed(life, &tenant);
                }
                continue;
            };
            let since = *self.over.entry(tenant.clone()).or_insert(now.mono);
            if now.mono.since(since) >= life.config.quotas.grace_ms {
                self.trim(life, &tenant, &quota, all);
            }
        }
    }

    /// All reservations of a tenant. None if the table may be out of date.
    fn entries_of(&self, life: &Lifecycle, tenant: &Tenant) -> Option<Vec<Entry>> {
        let now = life.now;
        let table = self.tables.get(tenant)?;
        if !table.fresh {
            return None;
        }
        let leaves = |id| table.to_free.contains_key(id) || table.freeing.contains(id);
        let entries = table.entries.values().filter(|e| !leaves(&e.execution));
        let entries = entries.filter_map(|entry| {
            let e = life.cluster().execution(entry.execution)?;
            let profile = life.cluster().profiles.get(e.profile);
            let own = entry.by == self.own;
            if !own && gave_way(e) && !self.is_gone(life, entry) {
                // The owner is about to free this reservation.
                return None;
            }
            let trimmed = self.trimmed.get(&entry.execution);
            let trimmed = trimmed.filter(|t| t.epoch == e.epoch);
            let state = match e.stage {
                _ if e.is_appending() || e.order().is_some() => State::Firm,
                Stage::Started(..) if trimmed.is_some_and(|t| t.tries < TRIES) => State::Told,
                _ if trimmed.is_some() || e.was_told(now.mono) => State::Firm,
                Stage::Pending if own => State::Waits,
                Stage::Started(..) => State::Runs,
                _ => State::Firm,
            };
            let regret = (state == State::Runs).then(|| {
                let rhythm = life.rhythm(entry.execution);
                Regret::of(e, rhythm, life.take_up(), now.mono)
            });
            Some(Entry {
                id: entry.execution,
                state,
                regret,
                has: Has {
                    devices: entry.devices,
                    memory_bytes: entry.memory_bytes,
                    may_go: state != State::Firm,
                    priority: match state {
                        // Executions that may leave in any case go first.
                        State::Told => i32::MIN,
                        State::Waits => i32::MIN + 1,
                        _ => profile.map_or(0, |p| order::priority(&life.config, p)),
                    },
                    regret_ms: regret.map_or(0.0, |r| r.total_ms()),
                },
            })
        });
        Some(entries.collect())
    }

    /// True if the execution already yields without a destination at its next boundary.
    fn is_going(&self, life: &Lifecycle, id: ExecutionId) -> bool {
        let order = life.cluster().execution(id).and_then(|e| e.order());
        order.is_some_and(|o| o.wants == Wanted::Yield && o.to.is_none())
    }

    fn trim(&mut self, life: &mut Lifecycle, tenant: &Tenant, quota: &Quota, mut all: Vec<Entry>) {
        let count = all.len();
        all.retain(|entry| !self.is_going(life, entry.id));
        let has: Vec<Has> = all.iter().map(|entry| entry.has).collect();
        let chosen = excess::choose(&has, quota);
        let mut spared: Vec<_> = (0..all.len())
            .filter(|n| !chosen.contains(n) && all[*n].state == State::Runs)
            .filter_map(|n| Some((all[n].id, all[n].regret?.total_ms())))
            .collect();
        spared.sort_by(|a, b| a.1.total_cmp(&b.1));
        let named: Vec<_> = spared
            .iter()
            .take(NAMED)
            .map(|(id, ms)| format!("{id} {}", seconds(*ms)))
            .collect();
        for n in chosen {
            let Entry {
                id, regret, state, ..
            } = &all[n];
            if *state == State::Told {
                self.tell_again(life, *id);
                continue;
            }
            let Some(regret) = regret else {
                self.unreserve(life, tenant, *id);
                continue;
            };
            let mut reason = format!(
                "its tenant {tenant} has {count} bound or running, and {} has set {}; its regret is {}",
                quota.who,
                quota.in_words(),
                regret.in_words()
            );
            if !named.is_empty() {
                reason += &format!("; spared: {}", named.join(", "));
                if spared.len() > NAMED {
                    reason += &format!(" and {} others", spared.len() - NAMED);
                }
            }
            let cause = Cause::Preempted {
                rule: Rule::Quota,
                by: None,
                reason,
            };
            self.tell(life, *id, cause, 1);
        }
    }

    fn tell(&mut self, life: &mut Lifecycle, id: ExecutionId, cause: Cause, tries: u32) {
        let Some(e) = life.cluster().execution(id) else {
            return;
        };
        let trimmed = Trimmed {
            epoch: e.epoch,
            tries,
            cause: cause.clone(),
        };
        self.trimmed.insert(id, trimmed);
        life.stop_waiting(id);
        life.order_yield(id, cause);
    }

    /// Repeats an order that the holder did not confirm.
    fn tell_again(&mut self, life: &mut Lifecycle, id: ExecutionId) {
        let now = life.now;
        let e = life.cluster().execution(id);
        let waits = e.is_none_or(|e| e.was_told(now.mono));
        if let Some(Trimmed { tries, cause, .. }) = self.trimmed.get(&id)
            && !waits
        {
            let (tries, cause) = (tries.saturating_add(1), cause.clone());
            self.tell(life, id, cause, tries);
        }
    }

    /// The tenant is within its quota again.
    fn forget_trimmed(&mut self, life: &mut Lifecycle, tenant: &Tenant) {
        let cluster = life.cluster();
        self.trimmed.retain(|id, _| {
            let e = cluster.execution(*id);
            e.is_some_and(|e| e.tenant != *tenant)
        });
    }

    /// Frees the reservation of an execution that was preempted for its tenant's quota.
    pub fn left(&mut self, life: &mut Lifecycle, id: ExecutionId) {
        let now = life.now;
        let Some(tenant) = life.tenant(id) else {
            return;
        };
        let own = self.tables.get(&tenant).is_some_and(|table| {
            let entry = table.entries.get(&id);
            entry.is_some_and(|entry| entry.by == self.own)
        });
        if own && let Some(table) = self.tables.get_mut(&tenant) {
            table.to_free.insert(id, now.mono);
            life.changed().admission = true;
        }
    }

    /// Frees the reservation of an execution that waits for a place.
    fn unreserve(&mut self, life: &mut Lifecycle, tenant: &Tenant, id: ExecutionId) {
        let now = life.now;
        self.left(life, id);
        self.unplaced.remove(&id);
        life.stop_waiting(id);
        self.requeue(life, tenant, id, now.mono);
    }
}

/// True for an execution that was preempted for its tenant's quota and not bound since.
fn gave_way(e: &Execution) -> bool {
    let cause = e.extra.as_ref().and_then(|x| x.cause.as_ref());
    let quota = matches!(
        cause,
        Some(Cause::Preempted {
            rule: Rule::Quota,
            ..
        })
    );
    e.stage == Stage::Pending && quota
}
