//! Chooses the leading gang, for which free places are kept ([`crate::lifecycle::queue::leading`]).

use std::sync::Arc;

use fiec_schemas::ExecutionId;

use super::{Gangs, Members, is_ready};
use crate::lifecycle::Lifecycle;
use crate::lifecycle::bonds::GangKey;
use crate::lifecycle::cluster::Stage;
use crate::lifecycle::queue::leading::{Leading, Turn};
use crate::lifecycle::queue::order;

/// Interval between two choices of the leading gang, in ms.
const LOOK_MS: u64 = 500;
/// Most gangs that one choice checks for places.
const TRIES: usize = 4;

impl Gangs {
    /// Chooses the leading gang, and whether free places are reserved for it.
    pub fn choose_leading(&mut self, life: &mut Lifecycle, of: &impl Members) {
        let now = life.now;
        if self.gangs.is_empty() {
            self.from = 0;
            life.changed().places |= life.lead(None).is_some();
            return;
        }
        let waits = |id: &ExecutionId| {
            let e = life.cluster().execution(*id);
            e.is_some_and(|e| e.stage == Stage::Pending && !e.is_appending())
        };
        let stands = |leading: &Leading| leading.members.iter().all(waits);
        let gone = life.leading().is_some_and(|leading| !stands(leading));
        if !gone && now.mono.since(self.looked) < LOOK_MS {
            return;
        }
        self.looked = now.mono;
        if gone {
            self.from = 0;
        }
        let mut waiting = self.waiting_gangs(life, of);
        waiting.sort_by(|a, b| a.turn.order(&b.turn));
        let (from, count) = (self.look_from(life, &waiting), waiting.len());
        let tried = waiting.into_iter().skip(from).take(TRIES);
        let found = self.first_with_places(life, tried);
        // If none of these gangs can ever have room, the next round checks the ones after them.
        self.from = match &found {
            Some(_) => from,
            None if from + TRIES < count => from + TRIES,
            None => 0,
        };
        let found = found.map(|mut leading| {
            leading.goes_on(life.leading());
            Box::new(leading)
        });
        let before = life.lead(found);
        self.look_again_at_waiting(life, before.as_deref());
    }

    /// The first of these gangs for which the empty cluster has room.
    fn first_with_places(
        &mut self,
        life: &mut Lifecycle,
        tried: impl Iterator<Item = Leading>,
    ) -> Option<Leading> {
        for gang in tried {
            let key = gang.key.clone();
            let placed = self.with_places(life, gang);
            if let Some(gang) = self.gangs.get_mut(&key) {
                gang.is_too_large = placed.is_none();
            }
            if placed.is_some() {
                return placed;
            }
        }
        None
    }

    /// Index of the first gang to check, in order of turn. The current leading gang stays within
    /// the next [`TRIES`].
    fn look_from(&self, life: &Lifecycle, waiting: &[Leading]) -> usize {
        let from = self.from;
        if from >= waiting.len() {
            return 0;
        }
        let leading = life.leading().filter(|_| from > 0);
        let at = leading.and_then(|l| waiting.iter().position(|gang| gang.key == l.key));
        at.map_or(from, |at| from.min(at).max((at + 1).saturating_sub(TRIES)))
    }

    /// Marks the policy dirty if places that were reserved for a gang are free for others now.
    fn look_again_at_waiting(&mut self, life: &mut Lifecycle, before: Option<&Leading>) {
        let now = life.now;
        let leading = life.leading().filter(|leading| leading.keeps);
        // A moment in the past counts as none.
        let ends = leading.and_then(|leading| leading.ends.filter(|at| *at > now.mono));
        let known = self.ends.filter(|at| *at > now.mono);
        let differs = match (ends, known) {
            // Every boundary shifts the estimate a little.
            (Some(a), Some(b)) => a.max(b).since(a.min(b)) >= 2 * LOOK_MS,
            (a, b) => a.is_some() != b.is_some(),
        };
        if differs {
            self.ends = ends;
        }
        let frees = |before: &Leading| {
            let keeps = |leading: &Leading| {
                leading.key == before.key && before.places.is_within(&leading.places)
            };
            before.keeps && (differs || !leading.is_some_and(keeps))
        };
        let frees = before.is_some_and(frees);
        life.changed().places |= frees;
    }

    /// Complete gangs whose members are all ready and reserved: only places are missing.
    fn waiting_gangs(&mut self, life: &Lifecycle, of: &impl Members) -> Vec<Leading> {
        let now = life.now;
        let keys: Vec<GangKey> = self.gangs.keys().cloned().collect();
        let mut found = Vec::new();
        for key in keys {
            let Some(gang) = self.gangs.get(&key) else {
                continue;
            };
            let members = gang.complete().filter(|_| gang.begun.is_none());
            let members = members.filter(|all| all.iter().all(|id| is_ready(of, life, *id)));
            let Some(gang) = self.gangs.get_mut(&key) else {
                continue;
            };
            let Some(members) = members else {
                gang.ready_since = None;
                continue;
            };
            let since = *gang.ready_since.get_or_insert(now.mono);
            if !of.have_reserved(&key.0, &members) {
                continue;
            }
            let Some(waiter) = life.waiter_of(members[0]) else {
                continue;
            };
            let aged = order::aged(&life.config, now.mono.since(since), waiter.service_ms);
            let asked = |id: &ExecutionId| of.is_yielded_to(*id);
            let kept = life.leading();
            let kept = kept.is_some_and(|f| f.keeps && f.key == key);
            let waited = now.mono.since(since) >= life.config.gangs.keep_ms;
            let keeps = waited || kept || members.iter().any(asked);
            found.push(Leading {
                turn: Turn {
                    effective: waiter.priority.saturating_add(aged),
                    share: life.share_of(waiter.tenant),
                    rank: waiter.rank,
                },
                priority: waiter.priority,
                tenant: waiter.tenant,
                key,
                members,
                since,
                places: Arc::default(),
                ends: None,
                until: None,
                keeps,
            });
        }
        found
    }
}
