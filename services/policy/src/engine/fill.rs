//! Binds waiting executions in order: effective priority, then tenant share, then rank within the
//! tenant ([`crate::share::order`]).
//!
//! A round is bounded: it binds at most `burst` executions and tries four times as many. A failed
//! try of an execution without a history of its own blocks its whole profile until something
//! changes. A round that runs out of tries is continued by the next one.

use fiec_schemas::{Cause, ExecutionId};

use super::bind::Placed;
use super::{Policy, aside};
use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::profile::ProfileIx;
use crate::lifecycle::cluster::tenants::TenantIx;
use crate::lifecycle::cluster::{Execution, Stage};
use crate::lifecycle::placement::Ask;
use crate::share::order::{self, Discipline};
use crate::share::queue::{Cursor, LaneKey, Sweep, Waiter};
use crate::time::Millis;

/// Lanes of one effective priority, with their tenants' shares and cursors.
struct Level {
    lanes: Vec<(f64, LaneKey, Cursor)>,
}

impl Level {
    /// The lane whose tenant has the smallest share.
    fn first(&self) -> Option<usize> {
        let key = |n: &usize| (&self.lanes[*n].0, &self.lanes[*n].1);
        (0..self.lanes.len()).min_by(|a, b| {
            let ((share, lane), (other, others)) = (key(a), key(b));
            share.total_cmp(other).then_with(|| lane.cmp(others))
        })
    }
}

impl Lifecycle {
    /// The queue entry that an execution has or would have.
    pub(crate) fn waiter_of(&self, id: ExecutionId) -> Option<Waiter> {
        let now = self.now;
        let e = self.cluster.execution(id)?;
        let profile = self.cluster.profiles.get(e.profile)?;
        let attained = e.attained_ms(now.mono);
        let aside = aside::since(now, e);
        let since = match (e.stage, e.parked()) {
            (Stage::Pending, _) if attained == 0 => now.moment_of(e.submitted_at),
            (Stage::Pending, _) => aside.unwrap_or(e.since),
            (_, Some(parked)) => now.moment_of(parked.at),
            _ => now.mono,
        };
        let shared = self.config.discipline == Discipline::Shared;
        let level = order::level(&self.config, profile, attained);
        let patience = order::patience_ms(&self.config, level);
        let waiter = Waiter {
            priority: order::priority(&self.config, profile),
            // Other disciplines ignore tenants.
            tenant: if shared {
                self.cluster.tenants.find(&e.tenant).unwrap_or(TenantIx(0))
            } else {
                TenantIx(0)
            },
            profile: e.profile,
            rank: order::rank(&self.config, profile, attained, e.submitted_at, id),
            since,
            service_ms: order::rest_ms(profile, attained),
            returns: aside.zip(patience).map(|(since, ms)| since.plus(ms)),
        };
        Some(waiter.at(now.mono))
    }

    /// The lanes, grouped by effective priority, highest first.
    fn levels(&self) -> Vec<Level> {
        let lanes = self.waiting.lanes();
        let groups = lanes.chunk_by(|a, b| a.0 == b.0);
        let level = |lanes: &[LaneKey]| Level {
            lanes: lanes
                .iter()
                .map(|lane| (self.share_of(lane.1), *lane, Cursor::default()))
                .collect(),
        };
        groups.map(level).collect()
    }

    /// A tenant's share, or 0 if the discipline ignores it.
    pub(crate) fn share_of(&self, tenant: TenantIx) -> f64 {
        match self.config.discipline {
            Discipline::Shared => self.cluster.tenants.share(tenant),
            _ => 0.0,
        }
    }

    /// Returns waiting executions in queue order. Skips profiles in `skip` and executions in
    /// `leave_out`. Tenants alternate as if each execution were bound at once.
    pub(crate) fn first_waiting(
        &self,
        limit: usize,
        skip: impl Fn(ProfileIx) -> bool,
        leave_out: impl Fn(ExecutionId) -> bool,
    ) -> Vec<ExecutionId> {
        let mut found = Vec::new();
        for mut level in self.levels() {
            while let Some(at) = level.first() {
                let (share, lane, cursor) = &mut level.lanes[at];
                let Some((id, _)) = self.waiting.next(*lane, cursor, &skip) else {
                    level.lanes.swap_remove(at);
                    continue;
                };
                if leave_out(id) {
                    continue;
                }
                if self.config.discipline == Discipline::Shared {
                    *share += 1.0 / self.cluster.tenants.weight(lane.1);
                }
                found.push(id);
                if found.len() >= limit {
                    return found;
                }
            }
        }
        found
    }

    /// True for an execution that finds the same places as any other of its profile.
    fn is_plain(&self, id: ExecutionId) -> bool {
        let e = self.cluster.execution(id);
        e.is_some_and(|e| {
            e.stage == Stage::Pending && e.avoided().is_empty() && e.left().is_empty()
        })
    }

    /// True if an execution of this profile finds a place. The places of an execution with a
    /// history of its own are a subset.
    fn is_open(&mut self, profile: ProfileIx) -> bool {
        self.choose(&Ask::new(profile)).is_some()
    }
}

impl Policy {
    /// Queues an execution for a binding.
    pub(super) fn wait(&mut self, id: ExecutionId) {
        let now = self.life.now;
        if !self.may_wait(id) {
            return;
        }
        let Some(waiter) = self.life.waiter_of(id) else {
            return;
        };
        self.life
            .waiting
            .insert(&self.life.config, now.mono, waiter);
        self.share.crowded.get_or_insert(now.mono);
        self.share.sweep.tried.remove(&id);
        self.life.cluster.changed.newcomers = true;
    }

    /// Removes an execution from the queue.
    pub(super) fn stop_waiting(&mut self, id: ExecutionId) {
        self.life.waiting.remove(id);
        if self.life.waiting.is_empty() {
            self.share.crowded = None;
        }
    }

    /// Binds waiting executions in order, as far as there is room. If the only change is a new
    /// waiting execution, those that found no place before are not tried again.
    pub(super) fn fill(&mut self) {
        let now = self.life.now;
        if self.life.cluster.changed.places {
            self.share.sweep = Sweep::default();
        }
        let changed = &mut self.life.cluster.changed;
        (changed.places, changed.newcomers) = (false, false);
        self.life.waiting.age(&self.life.config, now.mono);
        let mut budget = self.life.config.burst;
        let mut looks = 4 * self.life.config.burst;
        self.keep_promises(&mut budget);
        let mut sweep = std::mem::take(&mut self.share.sweep);
        for mut level in self.life.levels() {
            while let Some(at) = level.first() {
                let (_, lane, cursor) = &mut level.lanes[at];
                let (lane, blocked) = (*lane, &sweep.blocked);
                let next = self
                    .life
                    .waiting
                    .next(lane, cursor, |p| blocked.contains(&p));
                let Some((id, profile)) = next else {
                    level.lanes.swap_remove(at);
                    continue;
                };
                if sweep.tried.contains(&id) {
                    continue;
                }
                if budget == 0 || looks == 0 {
                    self.life.cluster.changed.newcomers = true;
                    self.share.sweep = sweep;
                    return;
                }
                looks -= 1;
                match self.bind_waiting(id) {
                    Placed::Yes => {
                        budget -= 1;
                        self.stop_waiting(id);
                        level.lanes[at].0 = self.life.share_of(lane.1);
                    }
                    Placed::Moot => self.stop_waiting(id),
                    Placed::NoRoom if self.life.is_plain(id) || !self.life.is_open(profile) => {
                        sweep.blocked.insert(profile);
                    }
                    Placed::NoRoom | Placed::Deferred => {
                        sweep.tried.insert(id);
                    }
                }
            }
        }
        self.share.sweep = sweep;
    }

    /// Binds executions first for which others were preempted.
    fn keep_promises(&mut self, budget: &mut usize) {
        let now = self.life.now;
        let promised: Vec<_> = self
            .share
            .promised
            .iter()
            .map(|(i, at)| (*i, *at))
            .collect();
        for (id, since) in promised {
            let over = now.mono.since(since) >= self.life.config.take_ms;
            if !self.life.waiting.contains(id) || over {
                self.share.promised.remove(&id);
            } else if *budget > 0 {
                match self.bind_waiting(id) {
                    Placed::Yes => {
                        *budget -= 1;
                        self.stop_waiting(id);
                        self.share.promised.remove(&id);
                    }
                    Placed::Moot => {
                        self.stop_waiting(id);
                        self.share.promised.remove(&id);
                    }
                    Placed::NoRoom | Placed::Deferred => {}
                }
            }
        }
    }

    /// Until when a preempted execution leaves its place to the execution that took it.
    pub(super) fn steps_back_for(&self, e: &Execution) -> Option<Millis> {
        let now = self.life.now;
        let extra = e.extra.as_ref()?;
        let (cause, since) = match (e.stage, e.parked()) {
            (Stage::Pending, _) => (extra.cause.as_ref()?, e.since),
            (Stage::Started(..), Some(parked)) => {
                (extra.why_parked.as_ref()?, now.moment_of(parked.at))
            }
            _ => return None,
        };
        let Cause::Preempted { by: Some(by), .. } = cause else {
            return None;
        };
        if self.is_first(*by) {
            // A gang takes the freed places only once it has all of them.
            return Some(now.mono.plus(self.life.config.take_ms));
        }
        let until = since.plus(self.life.config.take_ms);
        (now.mono < until && self.life.waiting.contains(*by)).then_some(until)
    }
}
