//! The second stage of publishing: acknowledgements are awaited in the order of sending, by tasks
//! of their own, so that hundreds are under way without a task for each.

use async_nats::jetstream::context::PublishAckFuture;
use fiec_broker::Ledger;
use fiec_broker::ledger::InFlight;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};

use crate::events::Outcome;
use crate::intake::Line;
use crate::metrics::Metrics;

/// First appends; their number is bounded by the core.
pub async fn appends(
    ledger: Ledger,
    mut sent: UnboundedReceiver<(Box<Line>, InFlight)>,
    outcomes: UnboundedSender<Outcome>,
) {
    while let Some((line, in_flight)) = sent.recv().await {
        let settled = ledger.settle(in_flight).await.map(Box::new);
        if outcomes.send(Outcome::First(line, settled)).is_err() {
            return;
        }
    }
}

/// Capsule messages and records. A lost one is repaired by the policy's sweep.
pub async fn publishes(mut sent: UnboundedReceiver<PublishAckFuture>, metrics: Metrics) {
    while let Some(ack) = sent.recv().await {
        if let Err(error) = ack.await {
            metrics.publish_failures.inc();
            tracing::warn!(%error, "a capsule message or a record was not acknowledged");
        }
    }
}
