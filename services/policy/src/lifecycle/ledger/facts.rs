//! Facts of nodes and executions in ledger messages.

use fiec_schemas::substrate::HOST;
use fiec_schemas::{Cause, EventKind, ExecutionId, PhaseKind, Submission};

use crate::Action;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::places::DeviceIx;
use crate::lifecycle::cluster::profile::{Profile, ProfileIx};
use crate::lifecycle::cluster::watch::Watch;
use crate::lifecycle::cluster::{NodeIx, Stage};
use crate::view::LedgerView;

impl Lifecycle {
    /// The node whose worker wrote a message.
    pub(crate) fn writer(&self, view: &LedgerView<'_>) -> Option<NodeIx> {
        self.cluster.find(&view.worker()?.parse().ok()?)
    }

    /// A message from a worker is a sign of life of its node.
    pub(crate) fn hear_writer(&mut self, writer: Option<NodeIx>) {
        let now = self.now;
        if let Some(ix) = writer.filter(|_| self.loaded) {
            let node = self.cluster.node_quietly(ix);
            node.heard = node.heard.max(now.mono);
        }
    }

    pub(crate) fn stage_of(
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

    pub(crate) fn is_changed(&self, id: ExecutionId, view: &LedgerView<'_>) -> bool {
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
    pub(crate) fn inherit_watches(&mut self, old: ProfileIx, new: ProfileIx) {
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

    pub(crate) fn watch_overrides(&mut self, ix: ProfileIx) {
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

    pub(crate) fn note_facts(
        &mut self,
        view: &LedgerView<'_>,
        stage: Stage,
        before: Option<Stage>,
    ) {
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
        let part_of = view.state.spread.as_ref().and_then(|s| s.part_of);
        e.is_part = part_of.is_some();
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
    pub(crate) fn learn(&mut self, view: &LedgerView<'_>) {
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
