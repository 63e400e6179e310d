//! The recorder's figures and its health.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fiec_broker::{Upkeep, figures};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};

figures! {
    /// The recorder's figures, shared by its tasks.
    pub(crate) struct Metrics in "fiec_recorder" {
        /// Ledger messages recorded.
        messages: Counter,
        /// New rows from the ledger.
        rows: Counter,
        /// Transactions of ledger messages.
        batches: Counter,
        /// Time to write one batch.
        batch_seconds: Histogram = Histogram::new(exponential_buckets(0.000_5, 2.0, 14)),
        /// Gaps found in ledgers.
        gaps: Counter,
        /// Messages that could not be read.
        unreadable: Counter,
        /// Ledger messages that are kept because this version cannot read them.
        unread: Gauge,
        /// Times that the ledger stream had lost messages that are recorded.
        losses: Counter,
        /// Statements that failed and were tried again.
        database_errors: Counter,
        /// Last sequence recorded.
        checkpoint: Gauge,
        /// Messages not yet recorded.
        lag: Gauge,
        /// Live executions in memory.
        tracked: Gauge,
        /// States copied to PostgreSQL.
        states: Counter,
        /// States that could not be copied.
        states_failed: Counter,
        /// Hardware vectors recorded.
        vectors: Counter,
        /// Hardware vectors dropped because a bound was reached.
        vectors_dropped: Counter,
        /// Hardware vectors whose node's clock is more than an hour off.
        vectors_restamped: Counter,
        /// Rejections and node events recorded.
        records: Counter,
        /// Sweeps for objects, kept states and chunks that nothing refers to.
        sweeps: Counter,
        /// Objects, kept states and executions' chunks removed.
        collected: Counter,
        /// Bytes of the objects and kept states removed.
        collected_bytes: Counter,
        /// What the last sweep of a dry run would have removed.
        collectable: Gauge,
        /// Objects that the last sweep left because missing history may refer to them.
        held: Gauge,
    }
}

/// Parts of the recorder that can fail on their own.
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

/// The troubles of the recorder's parts, and how far the ledger is recorded. Cheap to clone.
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
    /// # Errors
    /// The present troubles, in words.
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

    /// The last ledger message that was read and can be written; one that is passed over is not.
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
