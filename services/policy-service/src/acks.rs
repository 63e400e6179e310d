//! The second stage of publishing: acknowledgements are awaited in the order of sending, by tasks
//! of their own, so that hundreds are under way without a task for each.

use fiec_broker::ledger::InFlight;
use fiec_broker::{Ledger, Unacknowledged};
use tokio::sync::mpsc::{Receiver, Sender};

use crate::events::Outcome;
use crate::intake::Line;
use crate::metrics::Metrics;

/// First appends; the core admits no more at once than the channel holds.
pub async fn appends(
    ledger: Ledger,
    mut sent: Receiver<(Box<Line>, InFlight)>,
    outcomes: Sender<Outcome>,
) {
    while let Some((line, in_flight)) = sent.recv().await {
        let settled = ledger.settle(in_flight).await.map(Box::new);
        let outcome = Outcome::First(line, settled);
        if outcomes.send(outcome).await.is_err() {
            return;
        }
    }
}

/// Capsule messages and records. A lost one is repaired by the policy's sweep.
pub async fn publishes(mut sent: Receiver<Unacknowledged>, metrics: Metrics) {
    while let Some(ack) = sent.recv().await {
        if let Err(error) = ack.settled().await {
            metrics.publish_failures.inc();
            tracing::warn!(%error, "a capsule message or a record was not acknowledged");
        }
    }
}
