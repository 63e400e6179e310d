//! How a policy service takes submissions in: in order, and one that finds no free slot is held for a
//! short time.

use std::collections::VecDeque;

use fiec_policy::{NewExecution, Submitted};

use super::services::REDELIVERY_US;
use super::*;

/// The submissions that have reached a policy service.
#[derive(Debug, Default)]
pub(super) struct Intake {
    lines: VecDeque<u32>,
    hold: Hold,
}

/// Whether the first submission may be held.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Hold {
    #[default]
    Possible,
    /// It is held, until this time at the latest.
    Until(u64),
    /// One was held in vain at this number of completions.
    InVain { completions: u64 },
}

impl<D: Decide> World<'_, D> {
    /// A submission reaches a policy service. Submissions to a dead one are delivered to another.
    pub(super) fn submit(&mut self, p: u8, e: u32) -> Result<(), Wrong> {
        if self.replicas[p as usize].policy.is_none() {
            let other = ((p as usize + 1) % self.replicas.len()) as u8;
            self.deliver_again(other, e);
            return Ok(());
        }
        let Some(What::Submit(p, e)) = self.waits(p, What::Submit(p, e)) else {
            return Ok(());
        };
        self.replicas[p as usize].intake.lines.push_back(e);
        self.perform(p as usize)
    }

    pub(super) fn deliver_again(&mut self, p: u8, e: u32) {
        self.queue
            .plan(self.now + REDELIVERY_US, What::Submit(p, e));
    }

    /// The broker delivers what a dead policy service had not taken in.
    pub(super) fn redeliver_lines(&mut self, p: u8) {
        let intake = std::mem::take(&mut self.replicas[p as usize].intake);
        for e in intake.lines {
            self.deliver_again(p, e);
        }
    }

    pub(super) fn take_lines_in(&mut self, p: usize) {
        while let Some(e) = self.replicas[p].intake.lines.front().copied() {
            let spec = Arc::clone(&self.exec(e).spec);
            let (tenant, at) = (self.tenant(e), self.exec(e).submitted);
            let new = NewExecution {
                execution: self.id_of(e),
                tenant: &tenant,
                spec: &spec,
                submitted_at: self.stamp(at),
            };
            let (now, hold_us) = (self.moment(), self.scenario.hold_ms * 1_000);
            let replica = &mut self.replicas[p];
            let Some(policy) = &mut replica.policy else {
                return;
            };
            self.tally.inputs += 1;
            let intake = &mut replica.intake;
            let may_hold = hold_us > 0
                && match intake.hold {
                    Hold::Possible | Hold::Until(_) => true,
                    Hold::InVain { completions } => completions != policy.policy().completions(),
                };
            match policy.submit(now, new, may_hold, &mut replica.out) {
                Submitted::Append(events) => {
                    replica.out.push(new.append(events));
                    intake.lines.pop_front();
                    if matches!(intake.hold, Hold::Until(_)) {
                        intake.hold = Hold::Possible;
                    }
                }
                Submitted::Hold => {
                    self.tally.held_lines += 1;
                    if !matches!(intake.hold, Hold::Until(_)) {
                        let until = self.now + hold_us;
                        intake.hold = Hold::Until(until);
                        let ends = What::HoldEnds(p as u8, replica.life);
                        self.queue.plan(until, ends);
                    }
                    return;
                }
            }
        }
    }

    /// The submission that was held is appended without a slot, unless it has one by now.
    pub(super) fn hold_ends(&mut self, p: u8, life: u32) -> Result<(), Wrong> {
        if !self.is_alive(p, life) || self.waits(p, What::HoldEnds(p, life)).is_none() {
            return Ok(());
        }
        let replica = &mut self.replicas[p as usize];
        let is_due = matches!(replica.intake.hold, Hold::Until(until) if until <= self.now);
        if let Some(policy) = replica.policy.as_ref().filter(|_| is_due) {
            let completions = policy.policy().completions();
            replica.intake.hold = Hold::InVain { completions };
        }
        self.perform(p as usize)
    }
}
