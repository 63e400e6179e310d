//! The agent's figures for `/metrics`.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::hardware_metrics::Hardware;

/// Figures of one agent.
#[derive(Debug, Default, Clone)]
pub struct Metrics {
    /// Executions completed here.
    pub completed: Counter,
    /// Executions failed here.
    pub failed: Counter,
    /// Crashes of programs.
    pub crashes: Counter,
    /// Runners that panicked.
    pub panics: Counter,
    /// Boundaries committed.
    pub commits: Counter,
    /// Bytes of σ committed.
    pub commit_bytes: Counter,
    /// Messages that programs emitted and that were published.
    pub emitted: Counter,
    /// Bytes of σ that were committed in chunks.
    pub chunked_bytes: Counter,
    /// Bytes of chunks that were stored for those.
    pub chunk_bytes: Counter,
    /// Bytes of chunks that were fetched.
    pub chunk_bytes_fetched: Counter,
    /// Bytes sent to nodes that executions were handed to.
    pub handover_bytes: Counter,
    /// Executions handed to another node at a boundary.
    pub handovers_out: Counter,
    /// Executions taken over ahead of their durable capsule.
    pub handovers_in: Counter,
    /// Executions given up because somebody else holds them.
    pub fenced: Counter,
    /// Ledgers whose lost messages were appended again.
    pub healed: Counter,
    /// First bindings left to this node that the policy service appended.
    pub overtaken: Counter,
    /// Bindings refused.
    pub refused: Counter,
    /// Runs that children were given before the one that they computed had ended.
    pub given_ahead: Counter,
    /// Of those, the ones taken back since it did not end soon.
    pub taken_back: Counter,
    /// Executions that compute.
    pub running: Gauge,
    /// Bindings that wait for a slot.
    pub queued: Gauge,
    /// Times that an execution was parked.
    pub parked: Counter,
    /// Hardware vectors that left.
    pub vectors: Counter,
    /// Their bytes.
    pub vector_bytes: Counter,
    /// Times that an event of the kernel or of a device woke the publisher.
    pub pressure_events: Counter,
    /// What the last vector said.
    pub hardware: Hardware,
}

impl Metrics {
    /// Makes them known under `fiec_worker_*`.
    pub fn register(&self, registry: &mut Registry) {
        let r = registry.sub_registry_with_prefix("fiec_worker");
        r.register(
            "completed",
            "Executions completed here",
            self.completed.clone(),
        );
        r.register("failed", "Executions failed here", self.failed.clone());
        r.register("crashes", "Crashes of programs", self.crashes.clone());
        r.register("commits", "Boundaries committed", self.commits.clone());
        r.register(
            "commit_bytes",
            "Bytes of state committed",
            self.commit_bytes.clone(),
        );
        r.register(
            "emitted",
            "Messages that programs emitted and that were published",
            self.emitted.clone(),
        );
        r.register(
            "chunked_state_bytes",
            "Bytes of states that were committed in chunks",
            self.chunked_bytes.clone(),
        );
        r.register(
            "chunk_bytes_stored",
            "Bytes of chunks that were stored for them",
            self.chunk_bytes.clone(),
        );
        r.register(
            "chunk_bytes_fetched",
            "Bytes of chunks that were fetched",
            self.chunk_bytes_fetched.clone(),
        );
        r.register(
            "handover_bytes",
            "Bytes of states sent to other nodes",
            self.handover_bytes.clone(),
        );
        r.register(
            "handovers_out",
            "Executions handed over",
            self.handovers_out.clone(),
        );
        r.register(
            "handovers_in",
            "Executions taken over ahead of their capsule",
            self.handovers_in.clone(),
        );
        r.register(
            "fenced",
            "Executions given up because another holds them",
            self.fenced.clone(),
        );
        r.register(
            "healed",
            "Ledgers of which the broker had lost messages, and that were appended again",
            self.healed.clone(),
        );
        r.register(
            "overtaken",
            "Bindings left to this node and appended by the policy service after all",
            self.overtaken.clone(),
        );
        r.register("refused", "Bindings refused", self.refused.clone());
        r.register(
            "panics",
            "Panics of the worker itself, each of which gave one execution up",
            self.panics.clone(),
        );
        r.register(
            "given_ahead",
            "Runs given to children before the one before had ended",
            self.given_ahead.clone(),
        );
        r.register(
            "taken_back",
            "Runs given ahead and taken back",
            self.taken_back.clone(),
        );
        r.register(
            "parked",
            "Times that an execution was parked",
            self.parked.clone(),
        );
        r.register("running", "Executions that compute", self.running.clone());
        r.register(
            "queued",
            "Bindings that wait for a slot",
            self.queued.clone(),
        );
        r.register(
            "vectors",
            "Hardware vectors published",
            self.vectors.clone(),
        );
        r.register(
            "vector_bytes",
            "Bytes of hardware vectors published",
            self.vector_bytes.clone(),
        );
        r.register(
            "pressure_events",
            "Wakes by the kernel's pressure events and by faults of devices",
            self.pressure_events.clone(),
        );
        registry.register_collector(Box::new(self.hardware.clone()));
    }
}
