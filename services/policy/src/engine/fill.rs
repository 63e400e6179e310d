//! Binds waiting executions in order: effective priority, then tenant share, then rank within the
//! tenant ([`crate::lifecycle::order`]).
//!
//! A round is bounded: it binds at most `burst` executions and tries four times as many. A failed
//! try of an execution without a history of its own blocks its whole profile until something
//! changes. A round that runs out of tries is continued by the next one.

use fiec_schemas::ExecutionId;

use super::Policy;
use crate::lifecycle::bind::Placed;
use crate::lifecycle::queue::Sweep;

impl Policy {
    /// Binds waiting executions in order, as far as there is room. If the only change is a new
    /// waiting execution, those that found no place before are not tried again.
    pub(crate) fn fill(&mut self) {
        let now = self.life.now;
        if self.life.cluster().changed.places {
            self.life.sweep = Sweep::default();
        }
        let changed = self.life.changed();
        (changed.places, changed.newcomers) = (false, false);
        self.life.waiting.age(&self.life.config, now.mono);
        let mut budget = self.life.config.burst;
        let mut looks = 4 * self.life.config.burst;
        self.keep_promises(&mut budget);
        let mut sweep = std::mem::take(&mut self.life.sweep);
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
                    self.life.sweep = sweep;
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
        self.life.sweep = sweep;
    }

    /// Binds executions first for which others were preempted.
    fn keep_promises(&mut self, budget: &mut usize) {
        let now = self.life.now;
        let promised: Vec<_> = self.life.promised.iter().map(|(i, at)| (*i, *at)).collect();
        for (id, since) in promised {
            let over = now.mono.since(since) >= self.life.config.take_ms;
            if !self.life.waiting.contains(id) || over {
                self.life.promised.remove(&id);
            } else if *budget > 0 {
                match self.bind_waiting(id) {
                    Placed::Yes => {
                        *budget -= 1;
                        self.life.stop_waiting(id);
                        self.life.promised.remove(&id);
                    }
                    Placed::Moot => {
                        self.life.stop_waiting(id);
                        self.life.promised.remove(&id);
                    }
                    Placed::NoRoom | Placed::Deferred => {}
                }
            }
        }
    }
}
