//! The second stage of publishing. Tasks of their own await acknowledgements in the order of
//! sending, so hundreds of publishes are in flight without a task for each.

use fiec_broker::ledger::InFlight;
use fiec_broker::{Ledger, Unacknowledged};
use tokio::sync::mpsc::{Receiver, Sender};

use crate::events::Outcome;
use crate::intake::Line;
use crate::metrics::Metrics;

/// Settles first appends. The core admits no more at once than the channel holds.
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

/// Settles capsule messages and records. The policy's sweep repairs a lost capsule message.
pub async fn publishes(mut sent: Receiver<Unacknowledged>, metrics: Metrics) {
    while let Some(ack) = sent.recv().await {
        if let Err(error) = ack.settled().await {
            metrics.publish_failures.inc();
            tracing::warn!(%error, "a capsule message or a record was not acknowledged");
        }
    }
}
