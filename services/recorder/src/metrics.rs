//! What a recorder counts, and what it says of its health.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fiec_broker::Upkeep;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

/// Counters and gauges, shared by the recorder's tasks.
#[derive(Debug, Clone)]
pub(crate) struct Metrics {
    pub messages: Counter,
    pub rows: Counter,
    pub batches: Counter,
    pub batch_seconds: Histogram,
    pub gaps: Counter,
    pub unreadable: Counter,
    /// Times that the ledger stream was found to have lost messages that are recorded.
    pub losses: Counter,
    pub database_errors: Counter,
    pub checkpoint: Gauge,
    pub lag: Gauge,
    pub tracked: Gauge,
    pub states: Counter,
    pub states_failed: Counter,
    pub vectors: Counter,
    pub vectors_dropped: Counter,
    pub vectors_restamped: Counter,
    pub records: Counter,
    pub sweeps: Counter,
    pub collected: Counter,
    pub collected_bytes: Counter,
    pub collectable: Gauge,
}

impl Metrics {
    pub fn new(registry: &mut Registry) -> Self {
        let metrics = Self {
            messages: Counter::default(),
            rows: Counter::default(),
            batches: Counter::default(),
            batch_seconds: Histogram::new(exponential_buckets(0.000_5, 2.0, 14)),
            gaps: Counter::default(),
            unreadable: Counter::default(),
            losses: Counter::default(),
            database_errors: Counter::default(),
            checkpoint: Gauge::default(),
            lag: Gauge::default(),
            tracked: Gauge::default(),
            states: Counter::default(),
            states_failed: Counter::default(),
            vectors: Counter::default(),
            vectors_dropped: Counter::default(),
            vectors_restamped: Counter::default(),
            records: Counter::default(),
            sweeps: Counter::default(),
            collected: Counter::default(),
            collected_bytes: Counter::default(),
            collectable: Gauge::default(),
        };
        let registry = registry.sub_registry_with_prefix("fiec_recorder");
        registry.register(
            "messages",
            "Ledger messages recorded",
            metrics.messages.clone(),
        );
        registry.register("rows", "New rows from the ledger", metrics.rows.clone());
        registry.register(
            "batches",
            "Transactions of ledger messages",
            metrics.batches.clone(),
        );
        registry.register(
            "batch_seconds",
            "Time to write one batch",
            metrics.batch_seconds.clone(),
        );
        registry.register("gaps", "Gaps found in ledgers", metrics.gaps.clone());
        registry.register(
            "unreadable",
            "Messages that could not be read",
            metrics.unreadable.clone(),
        );
        registry.register(
            "losses",
            "Times that the ledger stream had lost messages that are recorded",
            metrics.losses.clone(),
        );
        registry.register(
            "database_errors",
            "Statements that failed and were tried again",
            metrics.database_errors.clone(),
        );
        registry.register(
            "checkpoint",
            "Last sequence recorded",
            metrics.checkpoint.clone(),
        );
        registry.register("lag", "Messages not yet recorded", metrics.lag.clone());
        registry.register(
            "tracked",
            "Live executions in memory",
            metrics.tracked.clone(),
        );
        registry.register(
            "states",
            "States copied to PostgreSQL",
            metrics.states.clone(),
        );
        registry.register(
            "states_failed",
            "States that could not be copied",
            metrics.states_failed.clone(),
        );
        registry.register(
            "vectors",
            "Hardware vectors recorded",
            metrics.vectors.clone(),
        );
        registry.register(
            "vectors_dropped",
            "Hardware vectors dropped because a bound was reached",
            metrics.vectors_dropped.clone(),
        );
        registry.register(
            "vectors_restamped",
            "Hardware vectors whose node's clock is more than an hour off",
            metrics.vectors_restamped.clone(),
        );
        registry.register(
            "records",
            "Rejections and node events recorded",
            metrics.records.clone(),
        );
        registry.register(
            "sweeps",
            "Sweeps for objects, kept states and chunks that nothing refers to",
            metrics.sweeps.clone(),
        );
        registry.register(
            "collected",
            "Objects, kept states and executions' chunks removed",
            metrics.collected.clone(),
        );
        registry.register(
            "collected_bytes",
            "Bytes of the objects and kept states removed",
            metrics.collected_bytes.clone(),
        );
        registry.register(
            "collectable",
            "What the last sweep of a dry run would have removed",
            metrics.collectable.clone(),
        );
        metrics
    }
}

/// Parts of the recorder that can be unwell on their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Ledger,
    Records,
    Telemetry,
    Housekeeping,
    /// Whether messages that wait in the streams are read and written.
    Reading,
}

impl Part {
    const ALL: [Part; 5] = [
        Part::Ledger,
        Part::Records,
        Part::Telemetry,
        Part::Housekeeping,
        Part::Reading,
    ];

    fn name(self) -> &'static str {
        match self {
            Part::Ledger => "ledger",
            Part::Records => "records",
            Part::Telemetry => "telemetry",
            Part::Housekeeping => "housekeeping",
            Part::Reading => "reading",
        }
    }
}

/// What is wrong, if anything, and how far the ledger is recorded. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Health {
    shared: Arc<HealthShared>,
}

#[derive(Debug, Default)]
struct HealthShared {
    troubles: Mutex<[Option<String>; Part::ALL.len()]>,
    checkpoint: AtomicU64,
    /// Last sequences that were read, by part.
    read: [AtomicU64; Part::ALL.len()],
    to_write: AtomicU64,
    broker: Upkeep,
}

impl Health {
    /// Fails with the reason, in words.
    ///
    /// # Errors
    /// What is wrong at the moment.
    pub fn check(&self) -> Result<(), String> {
        let troubles = self.troubles();
        let words: Vec<String> = Part::ALL
            .iter()
            .zip(troubles.iter())
            .filter_map(|(part, trouble)| Some(format!("{}: {}", part.name(), trouble.as_ref()?)))
            .chain(self.broker().check().err())
            .collect();
        if words.is_empty() {
            Ok(())
        } else {
            Err(words.join("; "))
        }
    }

    /// Last ledger sequence in PostgreSQL, as this process knows.
    pub fn checkpoint(&self) -> u64 {
        self.shared.checkpoint.load(Ordering::Relaxed)
    }

    /// The broker's health.
    pub(crate) fn broker(&self) -> &Upkeep {
        &self.shared.broker
    }

    /// The last sequence that this part has read of its stream.
    pub(crate) fn read_up_to(&self, part: Part) -> u64 {
        self.shared.read[part as usize].load(Ordering::Relaxed)
    }

    pub(crate) fn read(&self, part: Part, seq: u64) {
        self.shared.read[part as usize].store(seq, Ordering::Relaxed);
    }

    /// The last ledger message that was read and can be written; what is passed over is not.
    pub(crate) fn to_write(&self) -> u64 {
        self.shared.to_write.load(Ordering::Relaxed)
    }

    pub(crate) fn writes_up_to(&self, seq: u64) {
        self.shared.to_write.store(seq, Ordering::Relaxed);
    }

    pub(crate) fn recorded(&self, seq: u64) {
        self.shared.checkpoint.store(seq, Ordering::Relaxed);
    }

    pub(crate) fn well(&self, part: Part) {
        self.troubles()[part as usize] = None;
    }

    pub(crate) fn unwell(&self, part: Part, reason: String) {
        self.troubles()[part as usize] = Some(reason);
    }

    fn troubles(&self) -> MutexGuard<'_, [Option<String>; Part::ALL.len()]> {
        // The text is whole even where a holder panicked.
        self.shared
            .troubles
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
