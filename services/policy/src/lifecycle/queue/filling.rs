//! Binds waiting executions in order: effective priority, then tenant share, then rank within the
//! tenant ([`crate::lifecycle::queue::order`]).
//!
//! A round is bounded: it binds at most `burst` executions and tries four times as many. A failed
//! try of an execution without a history of its own blocks its whole profile until something
//! changes. A round that runs out of tries is continued by the next one.

use crate::lifecycle::Lifecycle;
use crate::lifecycle::binding::bind::Placed;
use crate::lifecycle::gate::Gate;
use crate::lifecycle::queue::waiting::Sweep;

impl Lifecycle {
    /// Binds waiting executions in order, as far as there is room. If the only change is a new
    /// waiting execution, those that found no place before are not tried again.
    pub(crate) fn fill(&mut self, gate: &mut impl Gate) {
        let now = self.now;
        if self.cluster.changed.places {
            self.sweep = Sweep::default();
        }
        let changed = self.changed();
        (changed.places, changed.newcomers) = (false, false);
        self.waiting.age(&self.config, now.mono);
        let mut budget = self.config.burst;
        let mut looks = 4 * self.config.burst;
        self.keep_promises(gate, &mut budget);
        let mut sweep = std::mem::take(&mut self.sweep);
        for mut level in self.levels() {
            while let Some(at) = level.first() {
                let (_, lane, cursor) = &mut level.lanes[at];
                let (lane, blocked) = (*lane, &sweep.blocked);
                let next = self.waiting.next(lane, cursor, |p| blocked.contains(&p));
                let Some((id, profile)) = next else {
                    level.lanes.swap_remove(at);
                    continue;
                };
                if sweep.tried.contains(&id) {
                    continue;
                }
                if budget == 0 || looks == 0 {
                    self.changed().newcomers = true;
                    self.sweep = sweep;
                    return;
                }
                looks -= 1;
                match self.bind_waiting(gate, id) {
                    Placed::Yes => {
                        budget -= 1;
                        self.stop_waiting(id);
                        level.lanes[at].0 = self.share_of(lane.1);
                    }
                    Placed::Moot => self.stop_waiting(id),
                    Placed::NoRoom if self.is_plain(id) || !self.is_open(profile) => {
                        sweep.blocked.insert(profile);
                    }
                    Placed::NoRoom | Placed::Deferred => {
                        sweep.tried.insert(id);
                    }
                }
            }
        }
        self.sweep = sweep;
    }

    /// Binds executions first for which others were preempted.
    fn keep_promises(&mut self, gate: &mut impl Gate, budget: &mut usize) {
        let now = self.now;
        let promised: Vec<_> = self.promised.iter().map(|(i, at)| (*i, *at)).collect();
        for (id, since) in promised {
            let over = now.mono.since(since) >= self.config.take_ms;
            if !self.waiting.contains(id) || over {
                self.promised.remove(&id);
            } else if *budget > 0 {
                match self.bind_waiting(gate, id) {
                    Placed::Yes => {
                        *budget -= 1;
                        self.stop_waiting(id);
                        self.promised.remove(&id);
                    }
                    Placed::Moot => {
                        self.stop_waiting(id);
                        self.promised.remove(&id);
                    }
                    Placed::NoRoom | Placed::Deferred => {}
                }
            }
        }
    }
}
