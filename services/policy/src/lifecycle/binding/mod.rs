//! Bindings: for waiting executions, and for those whose binding no worker starts.
//!
//! * [`intake`] takes submissions in, [`bind`] makes the events of a binding.
//! * [`moving`] moves running executions, by [`orders`] to their holders; [`parked`]: whether one can
//!   go on in its place.
//! * [`requests`] carries out what a worker cannot any more; [`suspects`]: executions under which
//!   workers end; [`aging`]: records that are about to be deleted.

mod aging;
pub(crate) mod bind;
mod intake;
mod moving;
pub(crate) mod orders;
mod parked;
mod requests;
mod suspects;

use fiec_schemas::{Cause, ExecutionId};

use crate::YieldRefusal;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::binding::bind::Placed;
use crate::lifecycle::binding::orders::leaves;
use crate::lifecycle::cluster::profile::ProfileIx;
use crate::lifecycle::cluster::{NodeIx, Stage};
use crate::lifecycle::gate::Gate;
use crate::lifecycle::placement::{Ask, Choice};
use crate::{Action, Ticket};

impl Lifecycle {
    pub(crate) fn bind_waiting(&mut self, gate: &mut impl Gate, id: ExecutionId) -> Placed {
        let now = self.now;
        let Some(e) = self.cluster.execution(id) else {
            return Placed::Moot;
        };
        if e.is_appending() {
            return Placed::Moot;
        }
        if e.stage == Stage::Pending
            && let Some(placed) = gate.fail_late(self, id)
        {
            return placed;
        }
        let Some(e) = self.cluster.execution(id) else {
            return Placed::Moot;
        };
        if let Some(until) = self.steps_back_for(e) {
            self.set_due(id, until);
            return Placed::Deferred;
        }
        let known = e.extra.as_ref().and_then(|x| x.cause.clone());
        let stage = e.stage;
        match stage {
            Stage::Pending => self.rebind(gate, id, known.unwrap_or(Cause::Initial), None),
            Stage::Bound(node, _) | Stage::Started(node, _) => match self.loss(now, id) {
                Some(cause) => self.rebind(gate, id, cause, Some(node)),
                None if matches!(stage, Stage::Started(..)) => gate.resume(self, id),
                None => {
                    // Its node has returned, perhaps without the capsule. The binding is reviewed
                    // as usual.
                    let due = now.mono.plus(self.balance_check());
                    self.set_due(id, due);
                    Placed::Moot
                }
            },
            Stage::Paused | Stage::Held | Stage::Verifying => Placed::Moot,
        }
    }

    /// Binds an execution by an append of this service.
    pub(crate) fn rebind(
        &mut self,
        gate: &mut impl Gate,
        id: ExecutionId,
        cause: Cause,
        leaving: Option<NodeIx>,
    ) -> Placed {
        let now = self.now;
        let Some(e) = self.cluster.execution(id) else {
            return Placed::Moot;
        };
        if e.is_appending() {
            return Placed::Moot;
        }
        if self.carry_out_request(id, &cause) {
            return Placed::Yes;
        }
        let Some(e) = self.cluster.execution(id) else {
            return Placed::Moot;
        };
        if e.profile == ProfileIx::UNKNOWN {
            return Placed::Moot;
        }
        if e.stage == Stage::Pending && !gate.may_wait(self, id) {
            return Placed::Moot;
        }
        if self.hold_if_deadly(id, &cause) {
            return Placed::Yes;
        }
        let apart = self.apart_from(now, id);
        let Some(e) = self.cluster.execution(id) else {
            return Placed::Moot;
        };
        // A lost node that returns with a new instance is as good as any other. Its old holdings do
        // not count against its capacity.
        let lost = matches!(cause, Cause::Lost { .. } | Cause::Orphaned { .. });
        let kept = self.kept_from(id);
        let mut ask = Ask {
            apart,
            kept,
            free_slot: matches!(cause, Cause::Balance),
            ..Ask::of(e)
        };
        match leaving {
            Some(node) if lost => ask.counted = Some((node, e.claim)),
            Some(node) => ask = ask.leaves(Some(leaves(e, node, &cause))),
            None => {}
        }
        let Some(choice) = self.choose(&ask) else {
            return Placed::NoRoom;
        };
        if self.defers(id, self.config.grace_ms) {
            return Placed::Deferred;
        }
        self.bind(gate, id, choice, cause, None);
        Placed::Yes
    }

    pub(crate) fn bind(
        &mut self,
        gate: &mut impl Gate,
        id: ExecutionId,
        choice: Choice,
        cause: Cause,
        ticket: Option<Ticket>,
    ) {
        let Some(e) = self.cluster.execution(id) else {
            return;
        };
        if e.stage == Stage::Pending && !gate.is_admitted(self, id) {
            if let Some(ticket) = ticket {
                let words = gate.held_in_words(self, id).unwrap_or_default();
                self.out.push(Action::Refuse {
                    ticket,
                    refusal: YieldRefusal::Held(words),
                });
            }
            return;
        }
        self.append_bound(id, choice, cause, ticket);
    }

    pub(crate) fn look_at_execution(&mut self, gate: &mut impl Gate, id: ExecutionId) {
        let now = self.now;
        let Some(e) = self.cluster.execution(id) else {
            return;
        };
        if e.is_appending() || self.obey_change(gate, id) {
            return;
        }
        let Some(e) = self.cluster.execution(id) else {
            return;
        };
        match e.stage {
            Stage::Pending => {
                self.set_due(id, self.next_chance(id));
                self.wait(gate, id);
            }
            Stage::Paused | Stage::Held | Stage::Verifying => {}
            Stage::Bound(ix, _) => self.sweep_bound(gate, id, ix),
            Stage::Started(ix, _) if e.is_orphan() => self.bind_orphan(gate, id, ix),
            Stage::Started(..) => {
                if !e.long && now.mono.since(e.since) >= self.config.horizon_ms {
                    self.mark_long(id);
                }
                if !self.grant_wish(gate, id) {
                    self.repeat_order(id);
                }
            }
        }
    }

    /// Moves an execution to a node with more if its program has asked for more.
    fn grant_wish(&mut self, gate: &mut impl Gate, id: ExecutionId) -> bool {
        let Some((ix, cause)) = gate.wish(self, id) else {
            return false;
        };
        let placed = self.yield_elsewhere(gate, id, ix, cause);
        if matches!(placed, Placed::NoRoom | Placed::Moot) {
            let again = self.now.mono.plus(self.config.order_retry_ms);
            self.set_due(id, again);
        }
        true
    }

    /// Handles a binding that has not started: balance it, send its capsule again, or bind it
    /// elsewhere.
    fn sweep_bound(&mut self, gate: &mut impl Gate, id: ExecutionId, ix: NodeIx) {
        let now = self.now;
        if let Some(cause) = self.loss(now, id) {
            if self.rebind(gate, id, cause, Some(ix)) == Placed::NoRoom {
                self.wait(gate, id);
            }
            return;
        }
        if gate.awaits_gang(self, id) {
            return;
        }
        let Some(e) = self.cluster.execution(id) else {
            return;
        };
        let waited = now.mono.since(e.since);
        let arrived = e.arrived_of_state();
        let late = now.mono.since(e.owed_since(e.since));
        let state_bytes = e.state_bytes;
        let resent = e.extra.as_ref().map_or(0, |x| x.resent);
        let node = self.cluster.node(ix);
        let has_slots = node.slots() > 0;
        let busy = has_slots
            && (node
                .vector
                .as_ref()
                .is_some_and(|v| v.queued_count > 0 || v.running_count >= v.slots)
                || node.started >= node.slots());
        let stuck = has_slots && node.long >= node.slots();
        let again = now.mono.plus(self.balance_check());
        if stuck && waited >= self.config.balance_ms {
            match self.rebind(gate, id, Cause::Balance, Some(ix)) {
                Placed::Yes | Placed::Deferred => return,
                Placed::NoRoom | Placed::Moot => {}
            }
        }
        let limit = if busy {
            self.config.take_busy_ms
        } else {
            self.config.take_ms
        };
        if late >= limit.saturating_mul(u64::from(resent) + 1) {
            if self.defers(id, self.config.grace_ms) {
                return;
            }
            let reason = match arrived {
                None => format!("not started within {late} ms"),
                Some(arrived) => format!(
                    "not started, and no more of its state arrived for {late} ms: {} of {state_bytes} \
                     bytes",
                    arrived.bytes
                ),
            };
            if resent > 0
                && let cause = (Cause::NotTaken {
                    reason,
                    fault: None,
                })
                && self.rebind(gate, id, cause, Some(ix)) == Placed::Yes
            {
                return;
            }
            self.note_resent(id, resent.saturating_add(1));
            self.send_capsule(id);
        }
        self.set_due(id, again);
    }
}
