//! Follows ledgers: messages of the feed, and messages that are read after a failed append.

use fiec_schemas::substrate::HOST;
use fiec_schemas::{Cause, EventKind, ExecutionId, PhaseKind, Submission};

use super::{Action, Policy};
use crate::holds::HoldSpec;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::places::{Claim, DeviceIx};
use crate::lifecycle::cluster::profile::{Profile, ProfileIx};
use crate::lifecycle::cluster::watch::Watch;
use crate::lifecycle::cluster::{Attained, Execution, NodeIx, Presence, Stage};
use crate::time::Millis;
use crate::view::LedgerView;

impl Lifecycle {
    /// The node whose worker wrote a message.
    fn writer(&self, view: &LedgerView<'_>) -> Option<NodeIx> {
        self.cluster.find(&view.worker()?.parse().ok()?)
    }

    /// A message from a worker is a sign of life of its node.
    fn hear_writer(&mut self, writer: Option<NodeIx>) {
        let now = self.now;
        if let Some(ix) = writer.filter(|_| self.loaded) {
            let node = self.cluster.node_quietly(ix);
            node.heard = node.heard.max(now.mono);
        }
    }

    fn stage_of(
        &mut self,
        view: &LedgerView<'_>,
        writer: Option<NodeIx>,
    ) -> Option<(Stage, Option<DeviceIx>)> {
        let now = self.now;
        let phase = &view.state.phase;
        let (node, instance) = match (phase.is, phase.node, phase.instance) {
            (PhaseKind::Pending, ..) => return Some((Stage::Pending, None)),
            (PhaseKind::Paused, ..) => return Some((Stage::Paused, None)),
            (PhaseKind::Held, ..) => return Some((Stage::Held, None)),
            (PhaseKind::Verifying, ..) => return Some((Stage::Verifying, None)),
            (_, Some(node), Some(instance)) => (node, instance),
            _ => return None,
        };
        let ix = match writer.filter(|_| view.worker() == Some(node)) {
            Some(ix) => ix,
            None => self.cluster.intern(now.mono, &node.parse().ok()?),
        };
        let substrate = phase.substrate.as_deref().unwrap_or(HOST);
        let device = self.cluster.device(ix, substrate);
        match phase.is {
            PhaseKind::Bound => Some((Stage::Bound(ix, instance), device)),
            PhaseKind::Started => Some((Stage::Started(ix, instance), device)),
            _ => None,
        }
    }

    fn is_changed(&self, id: ExecutionId, view: &LedgerView<'_>) -> bool {
        let extra = self.cluster.execution(id).and_then(|e| e.extra.as_ref());
        let known = extra.and_then(|x| x.adjusted.as_deref());
        view.state.adjusted().as_deref() != known
    }

    /// Counts a user of a profile. A new profile with its own thresholds is watched on every node.
    pub(crate) fn acquire(&mut self, profile: Profile) -> ProfileIx {
        let (ix, new) = self.cluster.profiles.acquire_profile(profile);
        if new {
            self.watch_overrides(ix);
        }
        ix
    }

    pub(crate) fn acquire_spec(&mut self, spec: &Submission) -> ProfileIx {
        let (ix, new) = self.cluster.profiles.acquire_spec(spec);
        if new {
            self.watch_overrides(ix);
        }
        ix
    }

    /// Carries the watches' history over to a changed profile.
    fn inherit_watches(&mut self, old: ProfileIx, new: ProfileIx) {
        let now = self.now;
        for ix in self.cluster.keys() {
            let node = self.cluster.node(ix);
            let Some(before) = node.watch(old).cloned() else {
                continue;
            };
            if let Some(watch) = self.cluster.node_mut(ix).overrides.get_mut(&new) {
                watch.inherit(&before, now.mono);
            }
        }
    }

    fn watch_overrides(&mut self, ix: ProfileIx) {
        for node in self.cluster.keys() {
            self.watch_override(node, ix);
        }
    }

    /// Watches a node under a profile's thresholds, merged over the node's own.
    pub(crate) fn watch_override(&mut self, node: NodeIx, ix: ProfileIx) {
        let now = self.now;
        let Some(profile) = self.cluster.profiles.get(ix) else {
            return;
        };
        if profile.viability.is_empty() {
            return;
        }
        let Some(base) = &self.cluster.node(node).base else {
            return;
        };
        let mut thresholds = base.thresholds().clone();
        thresholds.extend(profile.viability.iter().map(|(s, t)| (*s, *t)));
        let mut watch = Watch::new(thresholds, now.mono);
        let fresh = self.cluster.node(node).is_fresh(now.mono, &self.config);
        let vector = self.cluster.node(node).vector.clone().filter(|_| fresh);
        watch.observe(now.mono, vector.as_deref());
        self.cluster.node_mut(node).overrides.insert(ix, watch);
    }

    fn note_facts(&mut self, view: &LedgerView<'_>, stage: Stage, before: Option<Stage>) {
        let now = self.now;
        let id = view.state.execution;
        let left: Vec<_> = view
            .state
            .left
            .iter()
            .filter_map(|l| Some((self.cluster.intern(now.mono, &l.node.parse().ok()?), l.at())))
            .collect();
        let avoid_ms = self.config.avoid_ms;
        let Some(e) = self.cluster.execution_mut(id) else {
            return;
        };
        e.seq = view.seq;
        e.epoch = view.state.epoch;
        e.end_append();
        if let Some(extra) = &mut e.extra {
            extra.old_rereads = 0;
        }
        e.state_bytes = view.state.boundary.as_ref().map_or(0, |b| b.bytes);
        e.state_seq = view.place().and_then(|place| place.seq).unwrap_or(0);
        e.arrived = view
            .state
            .moved_at()
            .map_or(e.since, |at| now.moment_of(at));
        if !left.is_empty() || e.extra.is_some() {
            e.extra().left = left;
        }
        let request = view.state.request();
        if request.is_some() || e.extra.is_some() {
            e.extra().request = request;
        }
        let deaths = &view.state.deaths;
        if !deaths.is_empty() || e.extra.is_some() {
            e.extra().deaths = deaths.iter().map(|node| (**node).into()).collect();
        }
        let adjusted = view.state.adjusted();
        if adjusted.is_some() || e.extra.is_some() {
            e.extra().adjusted = adjusted;
        }
        if stage == Stage::Pending {
            let refused = view.event(EventKind::Refused).map(|r| Cause::NotTaken {
                reason: r.reason.as_deref().unwrap_or("refused").to_owned(),
                fault: None,
            });
            let mut yielded = view.event(EventKind::Yielded).and_then(|y| y.cause());
            // The next binding repeats the words alone.
            let fault = match &mut yielded {
                Some(Cause::NotTaken { fault, .. }) => fault.take(),
                _ => None,
            };
            // A change that is known before its message arrives has no events.
            let resumed = [EventKind::Resumed, EventKind::Retried]
                .iter()
                .any(|kind| view.event(*kind).is_some())
                || matches!(before, Some(Stage::Paused | Stage::Held));
            let resumed = resumed.then_some(Cause::Resumed);
            let from = before.and_then(Stage::node);
            if let Some(node) = from.filter(|_| refused.is_some() || fault.is_some()) {
                e.extra().refused(node, now.mono, avoid_ms);
            }
            let back = view.event(EventKind::SteppedBack).and_then(|b| b.cause());
            if let Some(cause) = refused.or(back).or(yielded).or(resumed) {
                e.extra().cause = Some(cause);
            }
        } else if let Some(extra) = &mut e.extra {
            extra.cause = None;
            extra.note = None;
            extra.resent = 0;
            extra.deferred = None;
            extra.missing = None;
            // A node that cannot go on with it may say so only after the start.
            if view.event(EventKind::Boundary).is_some() {
                extra.avoid.clear();
            }
        }
    }

    pub(crate) fn send_capsule(&mut self, id: ExecutionId) {
        if let Some(e) = self.cluster.execution(id) {
            self.out.push(Action::SendCapsule {
                execution: id,
                tenant: e.tenant.clone(),
                seq: e.seq,
            });
        }
    }

    /// Learns a node's speed from a completion.
    fn learn(&mut self, view: &LedgerView<'_>) {
        let now = self.now;
        self.completions += 1;
        let Some(completed) = view.event(EventKind::Completed) else {
            return;
        };
        let Some(e) = self.cluster.execution(view.state.execution) else {
            return;
        };
        let Some(ix) = e.stage.node() else { return };
        let since = view
            .event(EventKind::Started)
            .and_then(|s| s.computing_since());
        let service_us = match (since, completed.computed_until()) {
            (Some(since), Some(until)) => {
                u64::try_from(until.micros() - since.micros()).unwrap_or(0)
            }
            _ => now.mono.since(e.since) * 1_000,
        };
        self.cluster
            .node_mut(ix)
            .speed
            .completed(now.mono, service_us);
    }
}

impl Policy {
    /// Processes a message. `reread`: it was read after a failed append and replaces the policy's
    /// view.
    pub(super) fn follow_ledger(&mut self, view: &LedgerView<'_>, reread: bool) {
        let now = self.life.now;
        let id = view.state.execution;
        if reread {
            self.stepping.remove(&id);
        }
        let writer = self.life.writer(view);
        self.life.hear_writer(writer);
        let known = self.life.cluster.execution(id);
        let arrived = known.map_or(Millis(0), |e| e.arrived);
        let known = known.map_or(0, |e| e.seq);
        let is_old = view.seq < known && !(reread && self.life.doubt(id));
        if is_old || (view.seq == known && !reread) {
            return;
        }
        let lost = |ix| matches!(self.life.cluster.node(ix).presence, Presence::Lost { .. });
        if !reread && writer.is_some_and(lost) {
            self.life.writes_again(view);
        }
        if view.is_terminal() {
            self.life.note_starts(view, (writer, arrived));
            self.life.learn(view);
            self.drop_kept(id);
            self.note_end(id, view.state.phase.is);
            let part_of = view.state.spread.as_ref().and_then(|s| s.part_of);
            let end = view.end();
            let why = end.and_then(|e| e.who.as_deref().or(e.reason.as_deref()));
            self.note_part_end(id, part_of, (view.state.phase.is, why));
            self.forget(id);
            return;
        }
        if view.event(EventKind::Retried).is_some() && self.life.loaded {
            // It begins anew: also what it waits for is looked up again.
            self.forget(id);
            self.wakes(id);
        }
        let Some((stage, device)) = self.life.stage_of(view, writer) else {
            return;
        };
        if !self.take_up(view) {
            return;
        }
        let before = self.life.cluster.execution(id).map(|e| (e.stage, e.epoch));
        let profile = self.life.cluster.execution(id).map(|e| e.profile);
        let profile = profile.and_then(|ix| self.life.cluster.profiles.get(ix));
        let claim = Claim::of(profile, device);
        let since = if self.life.loaded {
            now.mono
        } else {
            now.moment_of(view.state.at())
        };
        let keeps_since = before.is_some_and(|(b, epoch)| b == stage && epoch == view.state.epoch);
        if keeps_since && let Some(e) = self.life.cluster.execution(id) {
            let since = e.since;
            self.life.cluster.set_stage(id, stage, claim, since);
        } else {
            self.life.cluster.set_stage(id, stage, claim, since);
        }
        let moved = before.is_none_or(|(_, epoch)| epoch != view.state.epoch);
        let had_a_place = before.is_some_and(|(_, epoch)| epoch > 0);
        if moved && had_a_place && !self.life.waiting.is_empty() {
            // Its old slot is free for another execution.
            self.life.cluster.changed.places = true;
        }
        if moved || !matches!(stage, Stage::Started(..)) {
            self.life.cluster.clear_order(id);
        }
        self.life.note_starts(view, (writer, arrived));
        self.life.note_facts(view, stage, before.map(|(b, _)| b));
        self.note_suspect(id);
        self.note_spread(view);
        self.note_claims(view);
        self.note_sharing(view);
        self.schedule(id, stage, view);
        self.note_parking(view);
        if view.state.is_adjusted() {
            self.life.look_after_change(id);
        }
    }

    /// Inserts the execution with its profile. Returns false if the message is unusable.
    fn take_up(&mut self, view: &LedgerView<'_>) -> bool {
        let now = self.life.now;
        let id = view.state.execution;
        let known = self.life.cluster.execution(id).map(|e| e.profile);
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
        if let Some(e) = self.life.cluster.execution_mut(id) {
            e.profile = profile;
            return true;
        }
        let since = now.moment_of(view.state.at());
        self.life.cluster.insert(
            id,
            Execution {
                tenant,
                seq: view.seq,
                epoch: view.state.epoch,
                profile,
                in_flight: None,
                long: false,
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
            let hold = view.state.spec().and_then(HoldSpec::read);
            self.take_holds(id, &tenant, hold, view.state.epoch > 0);
        }
        true
    }

    /// Applies an operator's change: the execution gets a new profile.
    fn adjust(&mut self, id: ExecutionId, old: ProfileIx, view: &LedgerView<'_>) {
        let (Some(change), Some(profile)) =
            (view.state.adjusted(), self.life.cluster.profiles.get(old))
        else {
            return;
        };
        let mut profile = profile.clone();
        profile.adjust(&change);
        self.stop_waiting(id);
        let (new, fresh) = self.life.cluster.profiles.acquire_profile(profile);
        if fresh {
            self.life.watch_overrides(new);
            self.life.inherit_watches(old, new);
        }
        let who = view
            .event(EventKind::Adjusted)
            .and_then(|a| a.who.as_deref());
        if let Some(e) = self.life.cluster.execution_mut(id) {
            e.profile = new;
            e.extra().changed_by = who.map(Into::into);
        }
        self.life.cluster.release_profile(old);
        self.life.cluster.claim_anew(id);
    }

    fn schedule(&mut self, id: ExecutionId, stage: Stage, view: &LedgerView<'_>) {
        let now = self.life.now;
        match stage {
            Stage::Pending => {
                self.life.cluster.set_due(id, self.life.next_chance(id));
                self.note_gang(id);
                self.wait(id);
            }
            Stage::Paused | Stage::Held | Stage::Verifying => {
                self.stop_waiting(id);
                self.life.cluster.set_due(id, Millis(0));
            }
            Stage::Bound(..) => {
                self.stop_waiting(id);
                self.note_gang(id);
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
                self.life.cluster.set_due(
                    id,
                    now.mono
                        .plus(self.life.balance_check().saturating_add(grace)),
                );
            }
            Stage::Started(..) => {
                self.stop_waiting(id);
                self.note_gang(id);
                let Some(e) = self.life.cluster.execution(id) else {
                    return;
                };
                if e.order().is_none() && !e.long {
                    let due = e.since.plus(self.life.config.horizon_ms).max(now.mono);
                    self.life.cluster.set_due(id, due);
                }
            }
        }
    }

    /// Handles the arrival of a large submission.
    pub(super) fn learn_spec(&mut self, id: ExecutionId, spec: &Submission) {
        if self
            .life
            .cluster
            .execution(id)
            .is_none_or(|e| e.profile != ProfileIx::UNKNOWN)
        {
            return;
        }
        let adjusted = self.life.cluster.execution(id);
        let adjusted = adjusted.and_then(|e| e.extra.as_ref()?.adjusted.clone());
        if let Some((tenant, bound)) = self
            .life
            .cluster
            .execution(id)
            .map(|e| (e.tenant.clone(), e.epoch > 0))
        {
            // Its holds and its priority were unknown when it was queued, so it is queued again.
            self.holds.dequeue(&tenant, id);
            self.take_holds(id, &tenant, HoldSpec::of(spec), bound);
        }
        let mut profile = Profile::from(spec);
        if let Some(change) = adjusted {
            profile.adjust(&change);
        }
        let profile = self.life.acquire(profile);
        if let Some(e) = self.life.cluster.execution_mut(id) {
            e.profile = profile;
            if e.stage == Stage::Pending && !e.is_appending() {
                self.wait(id);
            }
        }
        self.note_deadline(id);
        self.life.cluster.claim_anew(id);
    }

    /// Removes an execution that has ended, or whose ledger never existed.
    pub(super) fn forget(&mut self, id: ExecutionId) {
        self.checks.remove(&id);
        self.stepping.remove(&id);
        self.to_verify.remove(&id);
        self.suspects.remove(&id);
        self.stop_waiting(id);
        self.forget_holds(id);
        self.forget_sharing(id);
        self.forget_spread(id);
        if self.life.cluster.remove(id).is_some() && !self.life.waiting.is_empty() {
            self.life.cluster.changed.places = true;
        }
    }
}
