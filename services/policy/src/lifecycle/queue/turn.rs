//! The queue of executions that wait for a place, and who is first in it.

use std::cmp::Reverse;

use fiec_schemas::{Cause, ExecutionId};

use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::Execution;
use crate::lifecycle::cluster::Stage;
use crate::lifecycle::cluster::profile::ProfileIx;
use crate::lifecycle::cluster::tenants::TenantIx;
use crate::lifecycle::placement::Ask;
use crate::lifecycle::queue::order::{self, Discipline};
use crate::lifecycle::queue::waiting::{Cursor, LaneKey, Waiter};
use crate::time::Millis;

/// Lanes of one effective priority, with their tenants' shares and cursors.
pub(crate) struct Level {
    pub lanes: Vec<(f64, LaneKey, Cursor)>,
}

impl Level {
    /// The lane whose tenant has the smallest share.
    pub fn first(&self) -> Option<usize> {
        let key = |n: &usize| (&self.lanes[*n].0, &self.lanes[*n].1);
        (0..self.lanes.len()).min_by(|a, b| {
            let ((share, lane), (other, others)) = (key(a), key(b));
            share.total_cmp(other).then_with(|| lane.cmp(others))
        })
    }
}

impl Lifecycle {
    /// Queues an execution that lacks only a place.
    pub(crate) fn queue_up(&mut self, id: ExecutionId) {
        let Some(waiter) = self.waiter_of(id) else {
            return;
        };
        self.waiting.insert(&self.config, self.now.mono, waiter);
        self.sweep.tried.remove(&id);
        self.changed().newcomers = true;
    }

    /// Lets waiting executions age.
    pub(crate) fn age_queue(&mut self) {
        self.waiting.age(&self.config, self.now.mono);
    }

    /// Executions for which another one has yielded.
    pub(crate) fn promised(&self) -> impl Iterator<Item = &ExecutionId> {
        self.promised.keys()
    }

    /// True if another execution has yielded for this one.
    pub(crate) fn is_promised(&self, id: ExecutionId) -> bool {
        self.promised.contains_key(&id)
    }

    /// True if no execution of this profile has found a place since the last change.
    pub(crate) fn is_blocked(&self, profile: ProfileIx) -> bool {
        self.sweep.blocked.contains(&profile)
    }

    /// Another execution was preempted for this one, which is bound next.
    pub(crate) fn promise(&mut self, id: ExecutionId) {
        self.promised.insert(id, self.now.mono);
        self.changed().places = true;
    }

    /// True for an execution for which a place is kept, or becomes free.
    pub(crate) fn is_expected(&self, id: ExecutionId) -> bool {
        let leading = self.leading().filter(|leading| leading.keeps);
        self.promised.contains_key(&id) || leading.is_some_and(|l| l.members.contains(&id))
    }

    /// Until when a preempted execution leaves its place to the execution that took it.
    pub(crate) fn steps_back_for(&self, e: &Execution) -> Option<Millis> {
        let now = self.now;
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
        if self.leads(*by) {
            // A gang takes the freed places only once it has all of them.
            return Some(now.mono.plus(self.config.take_ms));
        }
        let until = since.plus(self.config.take_ms);
        (now.mono < until && self.waiting.contains(*by)).then_some(until)
    }

    /// Removes an execution from the queue.
    pub(crate) fn stop_waiting(&mut self, id: ExecutionId) {
        self.waiting.remove(id);
    }

    /// The queue entry that an execution has or would have.
    pub(crate) fn waiter_of(&self, id: ExecutionId) -> Option<Waiter> {
        let now = self.now;
        let e = self.cluster.execution(id)?;
        let profile = self.cluster.profiles.get(e.profile)?;
        let attained = e.attained_ms(now.mono);
        let aside = e.preempted_since(now);
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
    pub(crate) fn levels(&self) -> Vec<Level> {
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
    pub(crate) fn is_plain(&self, id: ExecutionId) -> bool {
        let e = self.cluster.execution(id);
        e.is_some_and(|e| {
            e.stage == Stage::Pending && e.avoided().is_empty() && e.left().is_empty()
        })
    }

    /// True if an execution of this profile finds a place. The places of an execution with a
    /// history of its own are a subset.
    pub(crate) fn is_open(&mut self, profile: ProfileIx) -> bool {
        self.choose(&Ask::new(profile)).is_some()
    }

    /// True if a waiting execution goes before a parked one. Executions that were just tried
    /// without a place do not count.
    pub(crate) fn is_outranked(&self, id: ExecutionId) -> bool {
        let now = self.now;
        let take_ms = self.config.take_ms;
        let mut promised = self.promised.values();
        if promised.any(|at| now.mono.since(*at) < take_ms) {
            return true;
        }
        if !self.knows(id) {
            return true;
        }
        let sweep = &self.sweep;
        let first = self.first_waiting(
            1,
            |profile| sweep.blocked.contains(&profile),
            |other| other == id || sweep.tried.contains(&other),
        );
        let first = first.first().and_then(|id| self.waiting.get(*id));
        let (Some((waiter, effective)), Some(own)) = (first, self.waiter_of(id)) else {
            return false;
        };
        let waited = now.mono.since(own.since);
        let aged = order::aged(&self.config, waited, own.service_ms);
        let stands = own.priority.saturating_add(aged);
        (effective, Reverse(waiter.rank)) > (stands, Reverse(own.rank))
    }
}
