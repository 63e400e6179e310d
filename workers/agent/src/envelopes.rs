//! The node's envelopes, from their key in `FIEC_NODES`: loaded before the first vector, and
//! updated later. An unreadable value changes nothing.

use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::kv::{Entry, Operation};
use fiec_broker::{Broker, BrokerError};
use fiec_probes::envelope::Envelopes;
use fiec_schemas::envelope::NodeEnvelopes;
use fiec_schemas::{NodeId, subjects};
use futures_util::StreamExt;
use tokio_util::sync::CancellationToken;

use crate::shared::Shared;

const BACK_OFF: Duration = Duration::from_secs(1);
/// Time limit for loading the envelopes at start.
const LOAD_WITHIN: Duration = Duration::from_secs(5);

fn take(envelopes: &Envelopes, entry: &Entry) {
    if entry.operation != Operation::Put {
        if !envelopes.get().envelopes.is_empty() {
            tracing::info!("no envelope is in force any more");
        }
        envelopes.set(NodeEnvelopes::default());
        return;
    }
    let read = serde_json::from_slice::<NodeEnvelopes>(&entry.value)
        .map_err(|error| error.to_string())
        .and_then(|set| set.check().map(|()| set).map_err(|e| e.to_string()));
    match read {
        Ok(set) if set == *envelopes.get() => {}
        Ok(set) => {
            let count = set.envelopes.len();
            tracing::info!(count, who = %set.who, "envelopes are in force");
            envelopes.set(set);
        }
        Err(error) => {
            let key = &entry.key;
            tracing::error!(%key, error, "envelopes cannot be read; those before stay in force");
        }
    }
}

/// Loads the envelopes in force, so that the first vector respects them.
///
/// # Errors
/// When the broker does not answer in time. [`follow`] reads them later.
pub async fn load(
    broker: &Broker,
    node: &NodeId,
    envelopes: &Envelopes,
) -> Result<(), BrokerError> {
    const WHAT: &str = "read the node's envelopes";
    let read = async {
        let bucket = broker
            .js
            .get_key_value(subjects::NODES_BUCKET)
            .await
            .map_err(BrokerError::operation(WHAT))?;
        let key = subjects::envelopes_key(node);
        let entry = bucket.entry(&key).await;
        if let Some(entry) = entry.map_err(BrokerError::operation(WHAT))? {
            take(envelopes, &entry);
        }
        Ok(())
    };
    tokio::time::timeout(LOAD_WITHIN, read)
        .await
        .map_err(BrokerError::operation(WHAT))?
}

/// Applies changes until `stop`, and has a vector published at once.
pub async fn follow(shared: Arc<Shared>, envelopes: Envelopes, stop: CancellationToken) {
    let key = subjects::envelopes_key(shared.node());
    while !stop.is_cancelled() {
        let watch = async {
            let bucket = shared.broker.js.get_key_value(subjects::NODES_BUCKET).await;
            bucket.ok()?.watch_with_history(&key).await.ok()
        };
        let watch = tokio::select! {
            () = stop.cancelled() => return,
            watch = watch => watch,
        };
        if let Some(mut watch) = watch {
            loop {
                let entry = tokio::select! {
                    () = stop.cancelled() => return,
                    entry = watch.next() => entry,
                };
                match entry {
                    Some(Ok(entry)) => {
                        take(&envelopes, &entry);
                        shared.news.notify_one();
                    }
                    Some(Err(error)) => tracing::debug!(%error, "watch of the node's envelopes"),
                    None => break,
                }
            }
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(BACK_OFF) => {}
        }
    }
}
