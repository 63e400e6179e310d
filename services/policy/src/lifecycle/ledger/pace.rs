//! Learns from ledgers the pace of executions and the cost of their moves.

use fiec_schemas::{Cause, EventKind, ExecutionId};

use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::{Execution, Stage};
use crate::lifecycle::queue::regret;
use crate::view::LedgerView;

impl Lifecycle {
    /// Forgets the pace of an execution that has ended, and what was promised to it.
    pub(crate) fn forget_pace(&mut self, id: ExecutionId) {
        self.rhythms.remove(&id);
        self.promised.remove(&id);
    }

    /// Reads from a message how much an execution has computed, its rhythm and the cost of its start.
    pub(crate) fn note_pace(&mut self, view: &LedgerView<'_>) {
        let now = self.now;
        let id = view.state.execution;
        let Some(e) = self.cluster.execution_mut(id) else {
            return;
        };
        let boundary = view.event(EventKind::Boundary);
        if !self.loaded && e.attained == Default::default() {
            // Credits the service from before this process started.
            let (ms, at) = (view.state.compute_us() / 1_000, view.state.at());
            let tenant = e.tenant.clone();
            self.cluster.tenants.credit(&tenant, ms, now.moment_of(at));
        }
        let Some(e) = self.cluster.execution_mut(id) else {
            return;
        };
        if boundary.is_some() || e.attained == Default::default() {
            e.attained.ms = view.state.compute_us() / 1_000;
            e.attained.at = now.moment_of(view.state.at());
        }
        let started = matches!(e.stage, Stage::Started(..));
        if let Some(boundary) = boundary.filter(|_| started)
            && let (Some(index), Some(us)) = (boundary.index, boundary.compute_us)
        {
            let rhythm = self.rhythms.entry(id).or_default();
            if rhythm.last.is_none() && view.state.commits() > 1 {
                // Earlier boundaries were not seen here, so their number is unknown.
                rhythm.last = Some((index, now.mono));
            } else {
                rhythm.committed(now.mono, index, us);
            }
        }
        if let Some(since) = view
            .event(EventKind::Started)
            .and_then(|s| s.computing_since())
            && let Some(bound) = view.state.moved_at()
        {
            #[expect(clippy::cast_precision_loss, reason = "a short time")]
            let took_ms = (since.micros() - bound.micros()) as f64 / 1_000.0;
            let bytes = self.cluster.execution(id).map_or(0, |e| e.state_bytes);
            self.take_up.began(took_ms, bytes);
            if view.state.epoch > 1 {
                self.rhythms.entry(id).or_default().moved(took_ms);
            }
        }
        let parked = view.event(EventKind::Parked).and_then(|p| p.cause());
        let stood = self
            .cluster
            .execution(id)
            .is_some_and(|e| e.parked().is_some());
        if matches!(parked, Some(Cause::Preempted { .. })) && !stood {
            self.rhythms.entry(id).or_default().parks += 1;
        }
    }

    /// Cost of one move of an execution, in ms.
    pub(crate) fn move_ms(&self, id: ExecutionId, e: &Execution) -> f64 {
        regret::move_ms(e, self.rhythms.get(&id), &self.take_up)
    }
}
