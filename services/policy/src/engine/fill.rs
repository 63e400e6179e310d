//! Binds waiting executions in order: effective priority, then tenant share, then rank within the
//! tenant ([`crate::lifecycle::order`]).
//!
//! A round is bounded: it binds at most `burst` executions and tries four times as many. A failed
//! try of an execution without a history of its own blocks its whole profile until something
//! changes. A round that runs out of tries is continued by the next one.

use fiec_schemas::{Cause, ExecutionId};

use super::Policy;
use super::bind::Placed;
use crate::lifecycle::cluster::{Execution, Stage};
use crate::lifecycle::queue::Sweep;
use crate::time::Millis;

impl Policy {
    /// Queues an execution for a binding.
    pub(crate) fn wait(&mut self, id: ExecutionId) {
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
        self.share.sweep.tried.remove(&id);
        self.life.changed().newcomers = true;
    }

    /// Binds waiting executions in order, as far as there is room. If the only change is a new
    /// waiting execution, those that found no place before are not tried again.
    pub(crate) fn fill(&mut self) {
        let now = self.life.now;
        if self.life.cluster().changed.places {
            self.share.sweep = Sweep::default();
        }
        let changed = self.life.changed();
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
                    self.life.changed().newcomers = true;
                    self.share.sweep = sweep;
                    return;
                }
                looks -= 1;
                match self.bind_waiting(id) {
                    Placed::Yes => {
                        budget -= 1;
                        self.life.stop_waiting(id);
                        level.lanes[at].0 = self.life.share_of(lane.1);
                    }
                    Placed::Moot => self.life.stop_waiting(id),
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
                        self.life.stop_waiting(id);
                        self.share.promised.remove(&id);
                    }
                    Placed::Moot => {
                        self.life.stop_waiting(id);
                        self.share.promised.remove(&id);
                    }
                    Placed::NoRoom | Placed::Deferred => {}
                }
            }
        }
    }

    /// Until when a preempted execution leaves its place to the execution that took it.
    pub(crate) fn steps_back_for(&self, e: &Execution) -> Option<Millis> {
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
        if self.life.leads(*by) {
            // A gang takes the freed places only once it has all of them.
            return Some(now.mono.plus(self.life.config.take_ms));
        }
        let until = since.plus(self.life.config.take_ms);
        (now.mono < until && self.life.waiting.contains(*by)).then_some(until)
    }
}
