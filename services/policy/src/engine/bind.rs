//! Creates bindings: for new submissions, for waiting executions, and for bindings that no worker
//! starts.

use fiec_schemas::{Cause, Event, ExecutionId, Submission, Tenant, Timestamp};
use serde::Serialize;

use super::refusal::YieldRefusal;
use super::{Action, Policy, Ticket};
use crate::lifecycle::bind::Placed;
use crate::lifecycle::bonds::BondSpec;
use crate::lifecycle::cluster::places::Claim;
use crate::lifecycle::cluster::profile::ProfileIx;
use crate::lifecycle::cluster::{NodeIx, Stage};
use crate::lifecycle::orders::leaves;
use crate::lifecycle::placement::{Ask, Choice};
use crate::parking;
use crate::time::Now;

/// A submission whose execution is not known yet.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct NewExecution<'a> {
    /// Its id.
    pub execution: ExecutionId,
    /// Its owner.
    pub tenant: &'a Tenant,
    /// Its submission.
    pub spec: &'a Submission,
    /// Time of the submission, by the broker's clock.
    pub submitted_at: Timestamp,
}

impl NewExecution<'_> {
    /// The append that begins its ledger with these events.
    pub fn append(&self, events: Vec<Event>) -> Action {
        Action::Append {
            execution: self.execution,
            tenant: self.tenant.clone(),
            expected: 0,
            events,
            ticket: None,
        }
    }
}

/// The policy's answer to a submission.
#[derive(Debug, Clone, PartialEq)]
#[must_use]
pub enum Submitted {
    /// Append these events as the first message of the ledger: `submitted`, and `bound` if a slot
    /// is free.
    Append(Vec<Event>),
    /// Every suitable node is full, and the policy stores nothing. Submit it again when an
    /// execution has completed.
    Hold,
}

impl Policy {
    /// Processes a submission, and pushes further actions. `may_hold` permits [`Submitted::Hold`].
    pub fn submit(
        &mut self,
        now: Now,
        new: NewExecution<'_>,
        may_hold: bool,
        out: &mut Vec<Action>,
    ) -> Submitted {
        self.begin_step(now);
        let answer = self.take_in(new, may_hold);
        out.append(&mut self.life.out);
        answer
    }

    fn take_in(&mut self, new: NewExecution<'_>, may_hold: bool) -> Submitted {
        let now = self.life.now;
        let NewExecution {
            execution: id,
            tenant,
            spec,
            submitted_at,
        } = new;
        if self.life.knows(id) {
            // The compare-and-set will fail and the shell will compare the two submissions.
            return Submitted::Append(vec![Event::Submitted]);
        }
        if self.life.cluster().changed.places {
            // Waiting executions have the first claim on free room.
            self.serve_waiting();
        }
        let profile = self.life.acquire_spec(spec);
        // An execution that waits for others, or needs a reservation, is bound in a later step.
        let hold = BondSpec::of(spec);
        if self.machines.begins_held(tenant, hold.as_ref()) {
            self.life.insert_new(id, tenant, profile, submitted_at);
            self.machines
                .note_bonds(&mut self.life, id, tenant, hold, false);
            return Submitted::Append(vec![Event::Submitted]);
        }
        let kept = self.life.kept_from_new(id, tenant, profile, submitted_at);
        let ask = Ask {
            kept,
            ..Ask::new(profile)
        };
        let choice = self.life.choose(&ask);
        // A held submission is invisible. Executions for devices are appended at once, so that
        // preemption can see them.
        let profile_of = self.life.cluster().profiles.get(profile);
        let on_host = profile_of.is_some_and(|p| p.requires.device.is_none());
        if choice.is_none() && may_hold && on_host && self.life.is_only_full(profile) {
            self.life.release(profile);
            return Submitted::Hold;
        }
        // If the last round did not try all waiting executions, the rest of the queue goes first.
        let choice = choice
            .filter(|_| !self.life.cluster().changed.newcomers || self.life.waiting.is_empty());
        let mut events = vec![Event::Submitted];
        let (mut stage, mut claim) = (Stage::Pending, Claim::Host);
        if let Some(choice) = choice {
            let node = choice.node;
            claim = Claim::of(self.life.cluster().profiles.get(profile), choice.device);
            if let Some((event, at)) = self.life.bound(1, choice, Cause::Initial) {
                events.push(event);
                stage = Stage::Bound(node, at);
            }
        }
        self.life.insert_new(id, tenant, profile, submitted_at);
        self.machines
            .note_bonds(&mut self.life, id, tenant, hold, false);
        if let Stage::Bound(..) = stage {
            self.life.set_stage(id, stage, claim, now.mono);
        }
        Submitted::Append(events)
    }

    pub(crate) fn bind_waiting(&mut self, id: ExecutionId) -> Placed {
        let now = self.life.now;
        let Some(e) = self.life.cluster().execution(id) else {
            return Placed::Moot;
        };
        if e.is_appending() {
            return Placed::Moot;
        }
        if e.stage == Stage::Pending && self.machines.sharing.is_late(&self.life, id) {
            return self.machines.sharing.let_fail(&mut self.life, id);
        }
        if let Some(until) = self.life.steps_back_for(e) {
            self.life.set_due(id, until);
            return Placed::Deferred;
        }
        let known = e.extra.as_ref().and_then(|x| x.cause.clone());
        let stage = e.stage;
        match stage {
            Stage::Pending => self.rebind(id, known.unwrap_or(Cause::Initial), None),
            Stage::Bound(node, _) | Stage::Started(node, _) => match self.life.loss(now, id) {
                Some(cause) => self.rebind(id, cause, Some(node)),
                None if matches!(stage, Stage::Started(..)) => parking::resume(&mut self.life, id),
                None => {
                    // Its node has returned, perhaps without the capsule. The binding is reviewed
                    // as usual.
                    let due = now.mono.plus(self.life.balance_check());
                    self.life.set_due(id, due);
                    Placed::Moot
                }
            },
            Stage::Paused | Stage::Held | Stage::Verifying => Placed::Moot,
        }
    }

    /// Binds an execution by an append of this service.
    pub(crate) fn rebind(
        &mut self,
        id: ExecutionId,
        cause: Cause,
        leaving: Option<NodeIx>,
    ) -> Placed {
        let now = self.life.now;
        let Some(e) = self.life.cluster().execution(id) else {
            return Placed::Moot;
        };
        if e.is_appending() {
            return Placed::Moot;
        }
        if self.carry_out_request(id, &cause) {
            return Placed::Yes;
        }
        let Some(e) = self.life.cluster().execution(id) else {
            return Placed::Moot;
        };
        if e.profile == ProfileIx::UNKNOWN {
            return Placed::Moot;
        }
        if e.stage == Stage::Pending && !self.machines.may_wait(&mut self.life, id) {
            return Placed::Moot;
        }
        if self.life.hold_if_deadly(id, &cause) {
            return Placed::Yes;
        }
        let apart = self.life.apart_from(now, id);
        let Some(e) = self.life.cluster().execution(id) else {
            return Placed::Moot;
        };
        // A lost node that returns with a new instance is as good as any other. Its old holdings do
        // not count against its capacity.
        let lost = matches!(cause, Cause::Lost { .. } | Cause::Orphaned { .. });
        let kept = self.life.kept_from(id);
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
        let Some(choice) = self.life.choose(&ask) else {
            return Placed::NoRoom;
        };
        if self.life.defers(id, self.life.config.grace_ms) {
            return Placed::Deferred;
        }
        self.append_bound(id, choice, cause, None);
        Placed::Yes
    }

    pub(crate) fn append_bound(
        &mut self,
        id: ExecutionId,
        choice: Choice,
        cause: Cause,
        ticket: Option<Ticket>,
    ) {
        let Some(e) = self.life.cluster().execution(id) else {
            return;
        };
        if e.stage == Stage::Pending && !self.machines.quotas.is_admitted(&self.life, id) {
            if let Some(ticket) = ticket {
                let words = self
                    .machines
                    .held_in_words(&self.life, id)
                    .unwrap_or_default();
                self.life.out.push(Action::Refuse {
                    ticket,
                    refusal: YieldRefusal::Held(words),
                });
            }
            return;
        }
        self.life.append_bound(id, choice, cause, ticket);
    }

    pub(crate) fn look_at_execution(&mut self, id: ExecutionId) {
        let now = self.life.now;
        let Some(e) = self.life.cluster().execution(id) else {
            return;
        };
        if e.is_appending() || self.obey_change(id) {
            return;
        }
        let Some(e) = self.life.cluster().execution(id) else {
            return;
        };
        match e.stage {
            Stage::Pending => {
                self.life.set_due(id, self.life.next_chance(id));
                self.machines.wait(&mut self.life, id);
            }
            Stage::Paused | Stage::Held | Stage::Verifying => {}
            Stage::Bound(ix, _) => self.sweep_bound(id, ix),
            Stage::Started(ix, _) if e.is_orphan() => self.bind_orphan(id, ix),
            Stage::Started(..) => {
                if !e.long && now.mono.since(e.since) >= self.life.config.horizon_ms {
                    self.life.mark_long(id);
                }
                if !self.grant_wish(id) {
                    self.life.repeat_order(id);
                }
            }
        }
    }

    /// Handles a binding that has not started: balance it, send its capsule again, or bind it
    /// elsewhere.
    /// Moves an execution to a node with more if its program has asked for more.
    fn grant_wish(&mut self, id: ExecutionId) -> bool {
        let Some((ix, cause)) = parking::wish(&self.life, id) else {
            return false;
        };
        let placed = self.yield_elsewhere(id, ix, cause);
        if matches!(placed, Placed::NoRoom | Placed::Moot) {
            let again = self.life.now.mono.plus(self.life.config.order_retry_ms);
            self.life.set_due(id, again);
        }
        true
    }

    fn sweep_bound(&mut self, id: ExecutionId, ix: NodeIx) {
        let now = self.life.now;
        if let Some(cause) = self.life.loss(now, id) {
            if self.rebind(id, cause, Some(ix)) == Placed::NoRoom {
                self.machines.wait(&mut self.life, id);
            }
            return;
        }
        if self.machines.gangs.awaits_members(&mut self.life, id) {
            return;
        }
        let Some(e) = self.life.cluster().execution(id) else {
            return;
        };
        let waited = now.mono.since(e.since);
        let arrived = e.arrived_of_state();
        let late = now.mono.since(e.owed_since(e.since));
        let state_bytes = e.state_bytes;
        let resent = e.extra.as_ref().map_or(0, |x| x.resent);
        let node = self.life.cluster().node(ix);
        let has_slots = node.slots() > 0;
        let busy = has_slots
            && (node
                .vector
                .as_ref()
                .is_some_and(|v| v.queued_count > 0 || v.running_count >= v.slots)
                || node.started >= node.slots());
        let stuck = has_slots && node.long >= node.slots();
        let again = now.mono.plus(self.life.balance_check());
        if stuck && waited >= self.life.config.balance_ms {
            match self.rebind(id, Cause::Balance, Some(ix)) {
                Placed::Yes | Placed::Deferred => return,
                Placed::NoRoom | Placed::Moot => {}
            }
        }
        let limit = if busy {
            self.life.config.take_busy_ms
        } else {
            self.life.config.take_ms
        };
        if late >= limit.saturating_mul(u64::from(resent) + 1) {
            if self.life.defers(id, self.life.config.grace_ms) {
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
                && self.rebind(id, cause, Some(ix)) == Placed::Yes
            {
                return;
            }
            self.life.note_resent(id, resent.saturating_add(1));
            self.life.send_capsule(id);
        }
        self.life.set_due(id, again);
    }
}
