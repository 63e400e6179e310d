//! The agent's figures for `/metrics`.

use fiec_broker::figures;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::hardware_metrics::Hardware;

figures! {
    /// Figures of one agent.
    pub struct Metrics in "fiec_worker" {
        /// Executions completed here.
        completed: Counter,
        /// Executions failed here.
        failed: Counter,
        /// Crashes of programs.
        crashes: Counter,
        /// Panics of the worker itself, each of which gave one execution up.
        panics: Counter,
        /// Boundaries committed.
        commits: Counter,
        /// Bytes of state committed.
        commit_bytes: Counter,
        /// Messages that programs emitted and that were published.
        emitted: Counter,
        /// Bytes of states that were committed in chunks.
        chunked_state_bytes: Counter,
        /// Bytes of chunks that were stored for them.
        chunk_bytes_stored: Counter,
        /// Bytes of chunks that were fetched.
        chunk_bytes_fetched: Counter,
        /// Bytes of large states that are being fetched, or kept for the next fetch, in memory.
        fetched_bytes_held: Gauge,
        /// Bytes of states sent to other nodes.
        handover_bytes: Counter,
        /// Executions handed over.
        handovers_out: Counter,
        /// Executions taken over ahead of their capsule.
        handovers_in: Counter,
        /// Executions given up because another holds them.
        fenced: Counter,
        /// Ledgers of which the broker had lost messages, and that were appended again.
        healed: Counter,
        /// Bindings left to this node and appended by the policy service after all.
        overtaken: Counter,
        /// Bindings refused.
        refused: Counter,
        /// Runs given to children before the one before had ended.
        given_ahead: Counter,
        /// Runs given ahead and taken back.
        taken_back: Counter,
        /// Processes that the kernel has ended for want of memory while their programs went on.
        memory_kills: Counter,
        /// Slots that processes take which SIGKILL does not end.
        lost_slots: Gauge,
        /// Executions that compute.
        running: Gauge,
        /// Age in seconds of the oldest work here that no commit holds.
        uncommitted_seconds: Gauge,
        /// Bindings that wait for a slot.
        queued: Gauge,
        /// Times that an execution was parked.
        parked: Counter,
        /// Hardware vectors published.
        vectors: Counter,
        /// Bytes of hardware vectors published.
        vector_bytes: Counter,
        /// Wakes by the kernel's pressure events and by faults of devices.
        pressure_events: Counter,
    }
    beside {
        /// The readings of the last vector.
        hardware: Hardware,
    }
}

impl Metrics {
    /// Makes all of them known: the figures and the readings.
    pub fn register_all(&self, registry: &mut Registry) {
        self.register(registry);
        registry.register_collector(Box::new(self.hardware.clone()));
    }
}
