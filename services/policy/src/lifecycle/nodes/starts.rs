//! Learns from ledgers which programs a node can start.

use fiec_schemas::messages::NodeEventKind;
use fiec_schemas::{Cause, EventKind, Fault};

use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::NodeIx;
use crate::time::Millis;
use crate::view::LedgerView;

/// A start that failed: the fault and the worker's words.
fn failed(view: &LedgerView<'_>) -> Option<(Fault, String)> {
    if let Some(refused) = view.event(EventKind::Refused) {
        let reason = refused.reason.as_deref().unwrap_or_default();
        return Some((refused.fault()?, reason.to_owned()));
    }
    match view.event(EventKind::Yielded)?.cause()? {
        Cause::NotTaken { reason, fault } => Some((*fault?, reason)),
        _ => None,
    }
}

impl Lifecycle {
    /// Notes what a message says about the starts of its program on the node of its writer, to which it
    /// was bound at `arrived`.
    pub(crate) fn note_starts(
        &mut self,
        view: &LedgerView<'_>,
        (writer, arrived): (Option<NodeIx>, Millis),
    ) {
        let now = self.now;
        let Some(ix) = writer.filter(|_| self.loaded) else {
            return;
        };
        let computes = |kind| matches!(kind, EventKind::Boundary | EventKind::Completed);
        if view.events.iter().any(|event| computes(event.kind)) {
            if self.cluster.node(ix).starts.are_good() {
                return;
            }
            let Some(program) = self.program_of(view) else {
                return;
            };
            // A binding after its work is the next one.
            let mut kinds = view.events.iter().map(|event| event.kind);
            let first = kinds.find(|kind| computes(*kind) || *kind == EventKind::Bound);
            let bound = match first {
                Some(EventKind::Bound) => now.mono,
                _ => arrived,
            };
            if self.cluster.node_mut(ix).starts.succeeded(&program, bound) {
                self.cluster.changed.places = true;
                let detail = format!("{program} computes there");
                self.record(ix, NodeEventKind::StartsAgain, detail, None);
            }
            return;
        }
        let (command, error, words) = match failed(view) {
            Some((Fault::CannotStart { command, error }, words)) => (command, error, words),
            // A device without a proof gets nothing more.
            Some((Fault::DeviceLost, _)) => return self.ask_for_proof(ix),
            _ => return,
        };
        let Some(program) = self.program_of(view) else {
            return;
        };
        let starts = &mut self.cluster.node_mut(ix).starts;
        let what = (command.as_str(), error);
        if starts.failed(now.mono, &program, what, &words, &self.config) {
            let detail = format!("{program}: {words}");
            self.record(ix, NodeEventKind::CannotStart, detail, None);
        }
    }

    fn program_of(&self, view: &LedgerView<'_>) -> Option<String> {
        let e = self.cluster.execution(view.state.execution)?;
        Some(self.cluster.profiles.get(e.profile)?.program.clone())
    }
}
