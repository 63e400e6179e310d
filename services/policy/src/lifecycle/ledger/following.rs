//! Follows ledgers: messages of the feed, and messages that are read after a failed append.

use fiec_schemas::{EventKind, ExecutionId, Submission};

use crate::Action;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::bonds::BondSpec;
use crate::lifecycle::cluster::places::Claim;
use crate::lifecycle::cluster::profile::{Profile, ProfileIx};
use crate::lifecycle::cluster::{Execution, Presence, Stage};
use crate::lifecycle::gate::Gate;
use crate::time::Millis;
use crate::view::LedgerView;

impl Lifecycle {
    /// Processes a message. `reread`: it was read after a failed append and replaces the policy's
    /// view.
    pub(crate) fn follow_ledger(
        &mut self,
        gate: &mut impl Gate,
        view: &LedgerView<'_>,
        reread: bool,
    ) {
        let now = self.now;
        let id = view.state.execution;
        if reread {
            gate.reread(id);
        }
        let writer = self.writer(view);
        self.hear_writer(writer);
        let known = self.cluster.execution(id);
        let arrived = known.map_or(Millis(0), |e| e.arrived);
        let known = known.map_or(0, |e| e.seq);
        let is_old = view.seq < known && !(reread && self.doubt(id));
        if is_old || (view.seq == known && !reread) {
            return;
        }
        let lost = |ix| matches!(self.cluster.node(ix).presence, Presence::Lost { .. });
        if !reread && writer.is_some_and(lost) {
            self.writes_again(view);
        }
        if view.is_terminal() {
            self.note_starts(view, (writer, arrived));
            self.learn(view);
            gate.ended(self, view);
            self.forget(gate, id);
            return;
        }
        if view.event(EventKind::Retried).is_some() && self.loaded {
            // It begins anew: also what it waits for is looked up again.
            self.forget(gate, id);
            gate.begins_again(id);
        }
        let Some((stage, device)) = self.stage_of(view, writer) else {
            return;
        };
        if !self.know(gate, view) {
            return;
        }
        let before = self.cluster.execution(id).map(|e| (e.stage, e.epoch));
        let profile = self.cluster.execution(id).map(|e| e.profile);
        let profile = profile.and_then(|ix| self.cluster.profiles.get(ix));
        let claim = Claim::of(profile, device);
        let since = if self.loaded {
            now.mono
        } else {
            now.moment_of(view.state.at())
        };
        let keeps_since = before.is_some_and(|(b, epoch)| b == stage && epoch == view.state.epoch);
        if keeps_since && let Some(e) = self.cluster.execution(id) {
            let since = e.since;
            self.set_stage(id, stage, claim, since);
        } else {
            self.set_stage(id, stage, claim, since);
        }
        let moved = before.is_none_or(|(_, epoch)| epoch != view.state.epoch);
        let had_a_place = before.is_some_and(|(_, epoch)| epoch > 0);
        if moved && had_a_place && !self.waiting.is_empty() {
            // Its old slot is free for another execution.
            self.changed().places = true;
        }
        if moved || !matches!(stage, Stage::Started(..)) {
            self.clear_order(id);
        }
        self.note_starts(view, (writer, arrived));
        self.note_facts(view, stage, before.map(|(b, _)| b));
        self.note_suspect(id);
        gate.heard(self, view);
        self.schedule(gate, id, stage, view);
        gate.parked(self, view);
        if view.state.is_adjusted() {
            self.look_after_change(id);
        }
    }

    /// Inserts the execution with its profile. Returns false if the message is unusable.
    fn know(&mut self, gate: &mut impl Gate, view: &LedgerView<'_>) -> bool {
        let now = self.now;
        let id = view.state.execution;
        let known = self.cluster.execution(id).map(|e| e.profile);
        if let Some(profile) = known.filter(|profile| *profile != ProfileIx::UNKNOWN) {
            if view.state.is_adjusted() && self.is_changed(id, view) {
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
                self.acquire(profile)
            }
            Some(Err(_)) => return false,
            None => {
                self.out.push(Action::FetchSpec {
                    execution: id,
                    seq: view.seq,
                    tenant: tenant.clone(),
                });
                ProfileIx::UNKNOWN
            }
        };
        if self.set_profile(id, profile).is_some() {
            return true;
        }
        let since = now.moment_of(view.state.at());
        // Its stage follows, which updates the counts.
        let new = Execution::new(tenant, profile, view.state.submitted_at(), since);
        let (seq, epoch) = (view.seq, view.state.epoch);
        self.insert(id, Execution { seq, epoch, ..new });
        if let Some(tenant) = self.tenant(id) {
            let hold = view.state.spec().and_then(BondSpec::read);
            gate.took_in(self, id, &tenant, hold, view.state.epoch > 0);
        }
        true
    }

    /// Applies an operator's change: the execution gets a new profile.
    fn adjust(&mut self, id: ExecutionId, old: ProfileIx, view: &LedgerView<'_>) {
        let (Some(change), Some(profile)) = (view.state.adjusted(), self.cluster.profiles.get(old))
        else {
            return;
        };
        let mut profile = profile.clone();
        profile.adjust(&change);
        self.stop_waiting(id);
        let (new, fresh) = self.acquire_profile(profile);
        if fresh {
            self.watch_overrides(new);
            self.inherit_watches(old, new);
        }
        let who = view
            .event(EventKind::Adjusted)
            .and_then(|a| a.who.as_deref());
        self.set_profile(id, new);
        self.note_change(id, who);
        self.release_profile(old);
        self.claim_anew(id);
    }

    fn schedule(
        &mut self,
        gate: &mut impl Gate,
        id: ExecutionId,
        stage: Stage,
        view: &LedgerView<'_>,
    ) {
        let now = self.now;
        match stage {
            Stage::Pending => {
                self.set_due(id, self.next_chance(id));
                gate.moved(self, id);
                self.wait(gate, id);
            }
            Stage::Paused | Stage::Held | Stage::Verifying => {
                self.stop_waiting(id);
                self.set_due(id, Millis(0));
            }
            Stage::Bound(..) => {
                self.stop_waiting(id);
                gate.moved(self, id);
                // After a change, the capsule that was sent follows an outdated message.
                let changed = view.event(EventKind::Adjusted).is_some();
                let handover = view.event(EventKind::Yielded).is_some()
                    && view.event(EventKind::Bound).is_some();
                if (handover || changed) && self.loaded && self.is_mine(id) {
                    self.send_capsule(id);
                }
                let grace = if self.is_mine(id) {
                    0
                } else {
                    self.config.grace_ms
                };
                self.set_due(
                    id,
                    now.mono.plus(self.balance_check().saturating_add(grace)),
                );
            }
            Stage::Started(..) => {
                self.stop_waiting(id);
                gate.moved(self, id);
                let Some(e) = self.cluster.execution(id) else {
                    return;
                };
                if e.order().is_none() && !e.long {
                    let due = e.since.plus(self.config.horizon_ms).max(now.mono);
                    self.set_due(id, due);
                }
            }
        }
    }

    /// Handles the arrival of a large submission.
    pub(crate) fn learn_spec(&mut self, gate: &mut impl Gate, id: ExecutionId, spec: &Submission) {
        if self
            .cluster
            .execution(id)
            .is_none_or(|e| e.profile != ProfileIx::UNKNOWN)
        {
            return;
        }
        let adjusted = self.cluster.execution(id);
        let adjusted = adjusted.and_then(|e| e.extra.as_ref()?.adjusted.clone());
        if let Some((tenant, bound)) = self
            .cluster
            .execution(id)
            .map(|e| (e.tenant.clone(), e.epoch > 0))
        {
            // Its holds and its priority were unknown when it was queued, so it is queued again.
            gate.took_in(self, id, &tenant, BondSpec::of(spec), bound);
        }
        let mut profile = Profile::from(spec);
        if let Some(change) = adjusted {
            profile.adjust(&change);
        }
        let profile = self.acquire(profile);
        if self.set_profile(id, profile) == Some((Stage::Pending, false)) {
            self.wait(gate, id);
        }
        gate.changed(self, id);
        self.claim_anew(id);
    }

    /// Removes an execution that has ended, or whose ledger never existed.
    pub(crate) fn forget(&mut self, gate: &mut impl Gate, id: ExecutionId) {
        gate.forgotten(self, id);
        self.forget_suspect(id);
        self.stop_waiting(id);
        self.forget_pace(id);
        if self.remove(id).is_some() && !self.waiting.is_empty() {
            self.changed().places = true;
        }
    }
}
