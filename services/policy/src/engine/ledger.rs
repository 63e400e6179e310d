//! Follows ledgers: messages of the feed, and messages that are read after a failed append.

use fiec_schemas::scheduling::Rule;
use fiec_schemas::{Cause, EventKind, ExecutionId, Submission};

use super::{Action, Policy};
use crate::lifecycle::bonds::BondSpec;
use crate::lifecycle::cluster::places::Claim;
use crate::lifecycle::cluster::profile::{Profile, ProfileIx};
use crate::lifecycle::cluster::{Attained, Execution, Presence, Stage};
use crate::parking;
use crate::time::Millis;
use crate::view::LedgerView;

impl Policy {
    /// Processes a message. `reread`: it was read after a failed append and replaces the policy's
    /// view.
    pub(crate) fn follow_ledger(&mut self, view: &LedgerView<'_>, reread: bool) {
        let now = self.life.now;
        let id = view.state.execution;
        if reread {
            self.machines.verification.reread(id);
        }
        let writer = self.life.writer(view);
        self.life.hear_writer(writer);
        let known = self.life.cluster().execution(id);
        let arrived = known.map_or(Millis(0), |e| e.arrived);
        let known = known.map_or(0, |e| e.seq);
        let is_old = view.seq < known && !(reread && self.life.doubt(id));
        if is_old || (view.seq == known && !reread) {
            return;
        }
        let lost = |ix| matches!(self.life.cluster().node(ix).presence, Presence::Lost { .. });
        if !reread && writer.is_some_and(lost) {
            self.life.writes_again(view);
        }
        if view.is_terminal() {
            self.life.note_starts(view, (writer, arrived));
            self.life.learn(view);
            self.machines.verification.drop_kept(&mut self.life, id);
            self.machines
                .note_end(&mut self.life, id, view.state.phase.is);
            let part_of = view.state.spread.as_ref().and_then(|s| s.part_of);
            let end = view.end();
            let why = end.and_then(|e| e.who.as_deref().or(e.reason.as_deref()));
            let holder =
                self.machines
                    .ranges
                    .ended(&mut self.life, id, part_of, (view.state.phase.is, why));
            self.machines.wait_again(&mut self.life, holder);
            self.forget(id);
            return;
        }
        if view.event(EventKind::Retried).is_some() && self.life.loaded {
            // It begins anew: also what it waits for is looked up again.
            self.forget(id);
            self.machines.prerequisites.wakes(id);
        }
        let Some((stage, device)) = self.life.stage_of(view, writer) else {
            return;
        };
        if !self.take_up(view) {
            return;
        }
        let before = self
            .life
            .cluster()
            .execution(id)
            .map(|e| (e.stage, e.epoch));
        let profile = self.life.cluster().execution(id).map(|e| e.profile);
        let profile = profile.and_then(|ix| self.life.cluster().profiles.get(ix));
        let claim = Claim::of(profile, device);
        let since = if self.life.loaded {
            now.mono
        } else {
            now.moment_of(view.state.at())
        };
        let keeps_since = before.is_some_and(|(b, epoch)| b == stage && epoch == view.state.epoch);
        if keeps_since && let Some(e) = self.life.cluster().execution(id) {
            let since = e.since;
            self.life.set_stage(id, stage, claim, since);
        } else {
            self.life.set_stage(id, stage, claim, since);
        }
        let moved = before.is_none_or(|(_, epoch)| epoch != view.state.epoch);
        let had_a_place = before.is_some_and(|(_, epoch)| epoch > 0);
        if moved && had_a_place && !self.life.waiting.is_empty() {
            // Its old slot is free for another execution.
            self.life.changed().places = true;
        }
        if moved || !matches!(stage, Stage::Started(..)) {
            self.life.clear_order(id);
        }
        self.life.note_starts(view, (writer, arrived));
        self.life.note_facts(view, stage, before.map(|(b, _)| b));
        self.life.note_suspect(id);
        self.machines.ranges.hear(&mut self.life, view);
        let is_spread = self.machines.ranges.contains(id);
        self.machines
            .verification
            .hear(&mut self.life, view, is_spread);
        self.life.note_pace(view);
        let yielded = view.event(EventKind::Yielded).and_then(|y| y.cause());
        if let Some(Cause::Preempted { rule, by, .. }) = yielded {
            if rule == Rule::Quota {
                self.machines.quotas.left(&mut self.life, id);
            }
            if let Some(by) = by {
                self.machines.gave_way(&mut self.life, by);
            }
        }
        self.machines.sharing.note_deadline(&self.life, id);
        self.schedule(id, stage, view);
        if let Some(parked) = parking::hear(&mut self.life, view) {
            self.machines.wait(&mut self.life, id);
            if let Some(by) = parked.by {
                self.machines.gave_way(&mut self.life, by);
            }
        }
        if view.state.is_adjusted() {
            self.life.look_after_change(id);
        }
    }

    /// Inserts the execution with its profile. Returns false if the message is unusable.
    fn take_up(&mut self, view: &LedgerView<'_>) -> bool {
        let now = self.life.now;
        let id = view.state.execution;
        let known = self.life.cluster().execution(id).map(|e| e.profile);
        if let Some(profile) = known.filter(|profile| *profile != ProfileIx::UNKNOWN) {
            if view.state.is_adjusted() && self.life.is_changed(id, view) {
                self.adjust(id, profile, view);
            }
            return true;
        }
        let adjusted = view.state.adjusted();
        let Some(tenant) = view.state.tenant() else {
            return false;
        };
        let profile = match view.state.spec().map(serde_json::from_str::<Profile>) {
            Some(Ok(mut profile)) => {
                if let Some(change) = &adjusted {
                    profile.adjust(change);
                }
                self.life.acquire(profile)
            }
            Some(Err(_)) => return false,
            None => {
                self.life.out.push(Action::FetchSpec {
                    execution: id,
                    seq: view.seq,
                    tenant: tenant.clone(),
                });
                ProfileIx::UNKNOWN
            }
        };
        if self.life.set_profile(id, profile).is_some() {
            return true;
        }
        let since = now.moment_of(view.state.at());
        self.life.insert(
            id,
            Execution {
                tenant,
                seq: view.seq,
                epoch: view.state.epoch,
                profile,
                in_flight: None,
                long: false,
                is_part: false,
                // `set_stage`, which follows, updates the counts.
                stage: Stage::Pending,
                claim: Claim::Host,
                since,
                arrived: since,
                due: Millis(0),
                submitted_at: view.state.submitted_at(),
                state_bytes: 0,
                state_seq: 0,
                attained: Attained::default(),
                extra: None,
            },
        );
        if let Some(tenant) = self.life.tenant(id) {
            let hold = view.state.spec().and_then(BondSpec::read);
            self.machines
                .note_bonds(&mut self.life, id, &tenant, hold, view.state.epoch > 0);
        }
        true
    }

    /// Applies an operator's change: the execution gets a new profile.
    fn adjust(&mut self, id: ExecutionId, old: ProfileIx, view: &LedgerView<'_>) {
        let (Some(change), Some(profile)) =
            (view.state.adjusted(), self.life.cluster().profiles.get(old))
        else {
            return;
        };
        let mut profile = profile.clone();
        profile.adjust(&change);
        self.life.stop_waiting(id);
        let (new, fresh) = self.life.acquire_profile(profile);
        if fresh {
            self.life.watch_overrides(new);
            self.life.inherit_watches(old, new);
        }
        let who = view
            .event(EventKind::Adjusted)
            .and_then(|a| a.who.as_deref());
        self.life.set_profile(id, new);
        self.life.note_change(id, who);
        self.life.release_profile(old);
        self.life.claim_anew(id);
    }

    fn schedule(&mut self, id: ExecutionId, stage: Stage, view: &LedgerView<'_>) {
        let now = self.life.now;
        match stage {
            Stage::Pending => {
                self.life.set_due(id, self.life.next_chance(id));
                let alone = self.machines.gangs.hear(&mut self.life, id);
                self.machines.wait_again(&mut self.life, alone);
                self.machines.wait(&mut self.life, id);
            }
            Stage::Paused | Stage::Held | Stage::Verifying => {
                self.life.stop_waiting(id);
                self.life.set_due(id, Millis(0));
            }
            Stage::Bound(..) => {
                self.life.stop_waiting(id);
                let alone = self.machines.gangs.hear(&mut self.life, id);
                self.machines.wait_again(&mut self.life, alone);
                // After a change, the capsule that was sent follows an outdated message.
                let changed = view.event(EventKind::Adjusted).is_some();
                let handover = view.event(EventKind::Yielded).is_some()
                    && view.event(EventKind::Bound).is_some();
                if (handover || changed) && self.life.loaded && self.life.is_mine(id) {
                    self.life.send_capsule(id);
                }
                let grace = if self.life.is_mine(id) {
                    0
                } else {
                    self.life.config.grace_ms
                };
                self.life.set_due(
                    id,
                    now.mono
                        .plus(self.life.balance_check().saturating_add(grace)),
                );
            }
            Stage::Started(..) => {
                self.life.stop_waiting(id);
                let alone = self.machines.gangs.hear(&mut self.life, id);
                self.machines.wait_again(&mut self.life, alone);
                let Some(e) = self.life.cluster().execution(id) else {
                    return;
                };
                if e.order().is_none() && !e.long {
                    let due = e.since.plus(self.life.config.horizon_ms).max(now.mono);
                    self.life.set_due(id, due);
                }
            }
        }
    }

    /// Handles the arrival of a large submission.
    pub(crate) fn learn_spec(&mut self, id: ExecutionId, spec: &Submission) {
        if self
            .life
            .cluster()
            .execution(id)
            .is_none_or(|e| e.profile != ProfileIx::UNKNOWN)
        {
            return;
        }
        let adjusted = self.life.cluster().execution(id);
        let adjusted = adjusted.and_then(|e| e.extra.as_ref()?.adjusted.clone());
        if let Some((tenant, bound)) = self
            .life
            .cluster()
            .execution(id)
            .map(|e| (e.tenant.clone(), e.epoch > 0))
        {
            // Its holds and its priority were unknown when it was queued, so it is queued again.
            self.machines.quotas.dequeue(&tenant, id);
            self.machines
                .note_bonds(&mut self.life, id, &tenant, BondSpec::of(spec), bound);
        }
        let mut profile = Profile::from(spec);
        if let Some(change) = adjusted {
            profile.adjust(&change);
        }
        let profile = self.life.acquire(profile);
        if self.life.set_profile(id, profile) == Some((Stage::Pending, false)) {
            self.machines.wait(&mut self.life, id);
        }
        self.machines.sharing.note_deadline(&self.life, id);
        self.life.claim_anew(id);
    }

    /// Removes an execution that has ended, or whose ledger never existed.
    pub(crate) fn forget(&mut self, id: ExecutionId) {
        self.machines.verification.forget(id);
        self.life.forget_suspect(id);
        self.life.stop_waiting(id);
        self.machines.forget_bonds(&mut self.life, id);
        self.machines.sharing.forget(id);
        self.life.forget_pace(id);
        self.machines.ranges.forget(&self.life, id);
        if self.life.remove(id).is_some() && !self.life.waiting.is_empty() {
            self.life.changed().places = true;
        }
    }
}
