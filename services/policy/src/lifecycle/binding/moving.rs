//! Moves running executions. The destination is chosen first and told to prepare. Then the holder
//! is ordered to yield to it; only the holder appends. If there is no destination, the execution
//! stays and stores the reason.

use std::collections::BTreeSet;

use fiec_schemas::{Cause, ExecutionId, NodeId};

use crate::lifecycle::Lifecycle;
use crate::lifecycle::binding::bind::Placed;
use crate::lifecycle::binding::orders::leaves;
use crate::lifecycle::cluster::{NodeIx, Stage};
use crate::lifecycle::gate::Gate;
use crate::lifecycle::placement::Ask;
use crate::{Action, Ticket};

impl Lifecycle {
    /// Reviews all executions that a node holds: must one leave?
    pub(crate) fn review_holds(&mut self, gate: &mut impl Gate, ix: NodeIx) {
        let mut ids: Vec<_> = self.cluster.node(ix).assigned.iter().copied().collect();
        gate.choose_to_leave(self, ix, &mut ids);
        if self.leave_by(ix).is_some() {
            self.longest_first(&mut ids);
        }
        // If one execution finds no destination, others of its profile find none either.
        let mut in_vain = BTreeSet::new();
        for id in ids {
            let Some(e) = self.cluster.execution(id) else {
                continue;
            };
            let plain = e.extra.is_none();
            if e.is_appending() || e.order().is_some() || (plain && in_vain.contains(&e.profile)) {
                continue;
            }
            let profile = e.profile;
            let placed = self.review_one(gate, id, ix);
            if placed == Placed::NoRoom && plain {
                in_vain.insert(profile);
            }
        }
    }

    pub(crate) fn review_one(
        &mut self,
        gate: &mut impl Gate,
        id: ExecutionId,
        ix: NodeIx,
    ) -> Placed {
        let now = self.now;
        let Some(e) = self.cluster.execution(id) else {
            return Placed::Moot;
        };
        let started = matches!(e.stage, Stage::Started(..));
        if let Some(cause) = self.loss(now, id) {
            let placed = self.rebind(gate, id, cause, Some(ix));
            if placed == Placed::NoRoom {
                self.wait(gate, id);
            }
            return placed;
        }
        if self.cluster.node(ix).presence != crate::lifecycle::cluster::Presence::Up {
            return Placed::Moot;
        }
        let cause = if let Some(cause) = self.must_go(id, ix, started) {
            cause
        } else if let Some(cause) = self.pressure_on(id, ix) {
            cause
        } else {
            return Placed::Moot;
        };
        if started {
            self.yield_elsewhere(gate, id, ix, cause)
        } else {
            self.rebind(gate, id, cause, Some(ix))
        }
    }

    /// Orders a yield to the best other node. Without one the execution stays.
    pub(crate) fn yield_elsewhere(
        &mut self,
        gate: &mut impl Gate,
        id: ExecutionId,
        ix: NodeIx,
        cause: Cause,
    ) -> Placed {
        let now = self.now;
        let Some(e) = self.cluster.execution(id) else {
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
        let Some(choice) = self.choose(&ask) else {
            let note = format!(
                "it should leave ({}), but no other node can take it",
                cause.in_words()
            );
            self.note(id, note);
            return gate.without_place(self, id, &cause);
        };
        if !matches!(cause, Cause::Pressure { .. }) && self.defers(id, self.config.order_grace_ms) {
            return Placed::Deferred;
        }
        self.order_yield_to(id, choice, cause, None);
        Placed::Yes
    }

    /// Handles an operator's request to move an execution.
    pub(crate) fn operator_yield(
        &mut self,
        gate: &mut impl Gate,
        ticket: Ticket,
        id: ExecutionId,
        to: Option<&NodeId>,
        who: &str,
    ) {
        match self.plan_yield(id, to) {
            Err(refusal) => self.out.push(Action::Refuse { ticket, refusal }),
            Ok((choice, true)) => {
                let cause = Cause::Operator {
                    who: who.to_owned(),
                };
                self.order_yield_to(id, choice, cause, Some(ticket));
            }
            Ok((choice, false)) => {
                let cause = Cause::Operator {
                    who: who.to_owned(),
                };
                self.bind(gate, id, choice, cause, Some(ticket));
            }
        }
    }
}
