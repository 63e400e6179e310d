//! Moves running executions. The destination is chosen first and told to prepare. Then the holder
//! is ordered to yield to it; only the holder appends. If there is no destination, the execution
//! stays and stores the reason.

use std::collections::BTreeSet;

use fiec_schemas::{Cause, ExecutionId, NodeId};

use super::{Action, Policy, Ticket};
use crate::lifecycle::bind::Placed;
use crate::lifecycle::cluster::{NodeIx, Stage};
use crate::lifecycle::orders::leaves;
use crate::lifecycle::placement::Ask;
use crate::parking;

impl Policy {
    /// Reviews all executions that a node holds: must one leave?
    pub(crate) fn review_holds(&mut self, ix: NodeIx) {
        let mut ids: Vec<_> = self.life.cluster().node(ix).holds.iter().copied().collect();
        parking::parked_first(&self.life, ix, &mut ids);
        if self.life.leave_by(ix).is_some() {
            self.longest_first(&mut ids);
        }
        // If one execution finds no destination, others of its profile find none either.
        let mut in_vain = BTreeSet::new();
        for id in ids {
            let Some(e) = self.life.cluster().execution(id) else {
                continue;
            };
            let plain = e.extra.is_none();
            if e.is_appending() || e.order().is_some() || (plain && in_vain.contains(&e.profile)) {
                continue;
            }
            let profile = e.profile;
            let placed = self.review_one(id, ix);
            if placed == Placed::NoRoom && plain {
                in_vain.insert(profile);
            }
        }
    }

    pub(crate) fn review_one(&mut self, id: ExecutionId, ix: NodeIx) -> Placed {
        let now = self.life.now;
        let Some(e) = self.life.cluster().execution(id) else {
            return Placed::Moot;
        };
        let started = matches!(e.stage, Stage::Started(..));
        if let Some(cause) = self.life.loss(now, id) {
            let placed = self.rebind(id, cause, Some(ix));
            if placed == Placed::NoRoom {
                self.machines.wait(&mut self.life, id);
            }
            return placed;
        }
        if self.life.cluster().node(ix).presence != crate::lifecycle::cluster::Presence::Up {
            return Placed::Moot;
        }
        let cause = if let Some(cause) = self.life.must_go(id, ix, started) {
            cause
        } else if let Some(cause) = self.life.pressure_on(id, ix) {
            cause
        } else {
            return Placed::Moot;
        };
        if started {
            self.yield_elsewhere(id, ix, cause)
        } else {
            self.rebind(id, cause, Some(ix))
        }
    }

    /// Orders a yield to the best other node. Without one the execution stays.
    pub(crate) fn yield_elsewhere(&mut self, id: ExecutionId, ix: NodeIx, cause: Cause) -> Placed {
        let now = self.life.now;
        let Some(e) = self.life.cluster().execution(id) else {
            return Placed::Moot;
        };
        // A refused or unanswered order delays the next attempt.
        if e.avoided()
            .iter()
            .any(|a| a.node == ix && now.mono < a.until)
        {
            return Placed::Moot;
        }
        let ask = Ask { ..Ask::of(e) }.leaves(Some(leaves(e, ix, &cause)));
        let ask = Ask {
            // A parked execution has no slot to take with it.
            counted: ask.counted.filter(|_| e.parked().is_none()),
            ..ask
        };
        let Some(choice) = self.life.choose(&ask) else {
            let note = format!(
                "it should leave ({}), but no other node can take it",
                cause.in_words()
            );
            self.life.note(id, note);
            return parking::without_place(&mut self.life, id, &cause);
        };
        if !matches!(cause, Cause::Pressure { .. })
            && self.life.defers(id, self.life.config.order_grace_ms)
        {
            return Placed::Deferred;
        }
        self.life.order_yield_to(id, choice, cause, None);
        Placed::Yes
    }

    /// Handles an operator's request to move an execution.
    pub(crate) fn operator_yield(
        &mut self,
        ticket: Ticket,
        id: ExecutionId,
        to: Option<&NodeId>,
        who: &str,
    ) {
        match self.life.plan_yield(id, to) {
            Err(refusal) => self.life.out.push(Action::Refuse { ticket, refusal }),
            Ok((choice, true)) => {
                let cause = Cause::Operator {
                    who: who.to_owned(),
                };
                self.life.order_yield_to(id, choice, cause, Some(ticket));
            }
            Ok((choice, false)) => {
                let cause = Cause::Operator {
                    who: who.to_owned(),
                };
                self.append_bound(id, choice, cause, Some(ticket));
            }
        }
    }
}
