//! Bindings whose node fetches a large state before it starts the execution. The node's vectors
//! report how many bytes have arrived. While more arrive, the binding is not late.

use fiec_schemas::ExecutionId;
use fiec_schemas::hardware::{ArrivingState, LISTED_LIMIT};

use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::execution::Arrived;
use crate::lifecycle::cluster::{Execution, NodeIx, Stage};
use crate::time::Millis;

impl Lifecycle {
    /// The fetch of a bound execution's state, as its node's last vector reports it.
    pub(crate) fn arriving(&self, id: ExecutionId) -> Option<ArrivingState> {
        let e = self.cluster.execution(id)?;
        let Stage::Bound(ix, instance) = e.stage else {
            return None;
        };
        let vector = self.cluster.node(ix).vector.as_ref()?;
        let mut all = vector.arriving.iter();
        let found = all.find(|a| a.execution == id && a.epoch == e.epoch)?;
        (vector.instance == instance).then(|| found.clone())
    }

    /// Notes the progress of the states that a node's last vector reports. Only a report of the
    /// instance and the epoch of the binding counts, and only bytes beyond all earlier reports, up
    /// to the size of the state: so no fetch lengthens a binding without end.
    pub(crate) fn note_arriving(&mut self, ix: NodeIx) {
        let node = self.cluster.node(ix);
        let at = node.vector_at;
        let Some(vector) = node.vector.clone().filter(|v| !v.arriving.is_empty()) else {
            return;
        };
        let bound_here = Stage::Bound(ix, vector.instance);
        for report in vector.arriving.iter().take(LISTED_LIMIT) {
            let Some(e) = self.cluster.execution_mut(report.execution) else {
                continue;
            };
            if e.stage != bound_here || e.epoch != report.epoch || e.is_appending() {
                continue;
            }
            let bytes = report.bytes.min(e.state_bytes);
            if bytes > e.arrived_of_state().map_or(0, |known| known.bytes) {
                let epoch = e.epoch;
                let extra = e.extra();
                extra.arriving = Some(Arrived { epoch, bytes, at });
                extra.resent = 0;
                extra.deferred = None;
            }
        }
    }
}

impl Execution {
    /// Progress of the fetch of its state under its present binding, if its node reported any.
    pub(crate) fn arrived_of_state(&self) -> Option<Arrived> {
        let arriving = self.extra.as_ref()?.arriving;
        arriving.filter(|arrived| arrived.epoch == self.epoch)
    }

    /// Time since which its node owes the start of a binding that was made at `since`.
    pub(crate) fn owed_since(&self, since: Millis) -> Millis {
        let arrived = self.arrived_of_state().filter(|_| !self.is_appending());
        arrived.map_or(since, |arrived| since.max(arrived.at))
    }
}
