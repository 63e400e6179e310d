//! Orders to nodes about their executions: yield, park, resume, give up.

use super::*;
use crate::broken::Rule;
use crate::node::{Order, Write};

/// Timeout of a request to a node, in microseconds.
const CONTROL_TIMEOUT_US: u64 = 2_000_000;

/// A request in flight to a node.
#[derive(Debug)]
pub(super) struct Asked {
    pub sent: u64,
    pub execution: u32,
    pub epoch: u64,
    pub request: ControlRequest,
    /// True if the policy service no longer waits for the answer.
    pub late: bool,
}

impl Asked {
    /// True if the policy gets the result.
    pub fn is_answered(&self) -> bool {
        !matches!(
            self.request,
            ControlRequest::GiveUp { .. } | ControlRequest::Cancel { .. }
        )
    }

    /// The event that carries the result to the policy.
    pub fn answer(&self, p: u8, outcome: ControlOutcome) -> What {
        let (e, epoch, outcome) = (self.execution, self.epoch, Box::new(outcome));
        match self.request {
            ControlRequest::Split { .. } => What::Split(p, e, epoch, outcome),
            _ => What::Ordered(p, e, epoch, outcome),
        }
    }
}

impl<D: Decide> World<'_, D> {
    /// Sends a request of a policy service to a node.
    pub(super) fn send_control(&mut self, p: usize, node: &NodeId, request: ControlRequest) {
        let Some(ix) = self.by_name.get(node).copied() else {
            return;
        };
        let (execution, epoch) = match &request {
            ControlRequest::Yield {
                execution, epoch, ..
            } => {
                self.tally.orders += 1;
                (*execution, *epoch)
            }
            ControlRequest::GiveUp {
                execution, epoch, ..
            }
            | ControlRequest::Park {
                execution, epoch, ..
            }
            | ControlRequest::Unpark {
                execution, epoch, ..
            }
            | ControlRequest::Split { execution, epoch } => (*execution, *epoch),
            ControlRequest::Cancel { execution, .. } => {
                let state = self.exec(self.number_of(*execution)).state.as_ref();
                (*execution, state.map_or(0, |s| s.epoch))
            }
            // The simulation needs no preparation, and nodes get no other requests.
            _ => return,
        };
        let asked = Box::new(Asked {
            sent: self.now,
            execution: self.number_of(execution),
            epoch,
            request,
            late: false,
        });
        if self.is_lost() {
            self.no_answer(p as u8, &asked);
        } else {
            let at = self.arrival();
            self.queue.plan(at, What::Control(p as u8, ix, asked));
        }
    }

    /// Lets the policy service's wait for an answer time out.
    pub(super) fn no_answer(&mut self, p: u8, asked: &Asked) {
        if asked.is_answered() {
            let answer = asked.answer(p, ControlOutcome::NoAnswer);
            self.queue.plan(asked.sent + CONTROL_TIMEOUT_US, answer);
        }
    }

    /// Time at which the policy service's wait ends.
    pub(super) fn gives_up(asked: &Asked) -> u64 {
        asked.sent + CONTROL_TIMEOUT_US
    }

    /// A request reaches a node.
    pub(super) fn control(
        &mut self,
        p: u8,
        node: usize,
        mut asked: Box<Asked>,
    ) -> Result<(), Wrong> {
        let number = node as u32;
        if !self.nodes[node].is_reachable(self.now) {
            if !asked.late {
                self.no_answer(p, &asked);
            }
            return Ok(());
        }
        let until = self.nodes[node].stalled_until;
        if until > self.now {
            if until > Self::gives_up(&asked) && !asked.late {
                asked.late = true;
                self.no_answer(p, &asked);
            }
            self.queue.plan(until, What::Control(p, number, asked));
            return Ok(());
        }
        let (e, epoch) = (asked.execution, asked.epoch);
        let answer_lost = self.is_lost();
        let at = self.arrival();
        let outcome = self.obey(node, e, epoch, &asked.request)?;
        if asked.late {
            return Ok(());
        }
        if answer_lost {
            self.no_answer(p, &asked);
        } else if asked.is_answered() {
            let answer = asked.answer(p, outcome);
            self.queue.plan(at, answer);
        }
        Ok(())
    }

    /// Accepts an order, or refuses it with a reason.
    fn obey(
        &mut self,
        node: usize,
        e: u32,
        epoch: u64,
        request: &ControlRequest,
    ) -> Result<ControlOutcome, Wrong> {
        let refused = |reason: &str| Ok(ControlOutcome::Refused(reason.to_owned()));
        let n = &self.nodes[node];
        let Some(run) = n.runs.iter().find(|r| r.exec == e && r.epoch == epoch) else {
            return refused("it does not run here under that epoch");
        };
        let leaves = match &run.writing {
            Some(Write::Order(_, order)) => !matches!(**order, Order::Park { .. }),
            Some(Write::Finish | Write::Refuse(..)) => true,
            _ => false,
        };
        let busy = run.writing.is_some() || run.order.is_some();
        let order = match request {
            _ if leaves => return Ok(ControlOutcome::Taken),
            ControlRequest::Yield {
                cause,
                to,
                decision,
                ..
            } => Order::Yield {
                cause: cause.clone(),
                to: to.clone(),
                decision: decision.clone(),
            },
            ControlRequest::GiveUp { cause, .. } => {
                self.given_up_in_need(node, e, epoch)?;
                Order::GiveUp {
                    cause: cause.clone(),
                }
            }
            ControlRequest::Park { cause, keep, .. } => {
                let leaving = run
                    .writing
                    .as_ref()
                    .is_some_and(|w| !matches!(w, Write::Commit(_)));
                if run.parked || run.order.is_some() || leaving || !run.started {
                    return refused("it is parked already, or leaving, or has not begun");
                }
                if n.parks_taken() >= n.descriptor.parks && !self.overfills() {
                    return refused("no more may be parked here");
                }
                Order::Park {
                    cause: cause.clone(),
                    keep: *keep,
                }
            }
            ControlRequest::Split { .. } => return Ok(self.told_to_split(node, e, epoch)),
            ControlRequest::Cancel { who, .. } => Order::Cancel { who: who.clone() },
            ControlRequest::Unpark { .. } if busy || !run.parked => {
                return refused("it is not parked, or leaving");
            }
            ControlRequest::Unpark { reason, .. } => {
                return self.unpark(node, e, epoch, reason.clone());
            }
            _ => return refused("that is not played"),
        };
        if let Some(run) = self.nodes[node].run(e, epoch) {
            run.order = Some(Box::new(order));
            if run.started && run.writing.is_none() {
                self.plan_look(node, e, epoch);
            }
        }
        Ok(ControlOutcome::Taken)
    }

    /// Resumes a parked execution if a slot is free.
    fn unpark(
        &mut self,
        node: usize,
        e: u32,
        epoch: u64,
        reason: String,
    ) -> Result<ControlOutcome, Wrong> {
        let n = &mut self.nodes[node];
        if n.computing() >= n.descriptor.slots as usize {
            return Ok(ControlOutcome::Refused("no slot is free".to_owned()));
        }
        n.parked -= 1;
        if let Some(run) = n.run(e, epoch) {
            run.parked = false;
            run.base = self.now;
            run.writing = Some(Write::Unpark(reason));
        }
        self.write(node, e, epoch);
        Ok(ControlOutcome::Taken)
    }

    /// The park is stored: its slot is free.
    pub(super) fn parked(&mut self, node: usize, e: u32, epoch: u64) -> Result<(), Wrong> {
        let now = self.now;
        let n = &mut self.nodes[node];
        let Some(run) = n.run(e, epoch) else {
            return Ok(());
        };
        self.tally.busy_us += now.saturating_sub(run.base);
        run.rebase(now);
        (run.parked, run.split) = (true, false);
        let told = run.order.is_some();
        n.parked += 1;
        let (parked, parks) = (n.parked, n.descriptor.parks);
        if parked > parks {
            let said = format!(
                "{} has {parked} parked, and {parks} may be",
                n.descriptor.node
            );
            return Err((Some(e), (Rule::Capacity, said)));
        }
        if told {
            self.plan_look(node, e, epoch);
        }
        self.take_queued(node)
    }

    /// True if a broken worker starts executions without a slot.
    pub(super) fn overfills(&self) -> bool {
        self.replicas.iter().any(|r| {
            let policy = r.policy.as_ref();
            policy.is_some_and(Decide::overfills)
        })
    }
}
