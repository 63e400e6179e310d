//! The last message of each ledger, as the broker has it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use fiec_broker::Broker;
use fiec_broker::feed::{self, Start};
use fiec_schemas::{ExecutionId, ExecutionState, Sequence};
use futures_util::StreamExt as _;
use tokio::time::timeout;

/// How long the broker has for the next ledger. Only a stream whose end no reader understands lasts
/// that long.
const SILENCE: Duration = Duration::from_secs(5);

/// The last message of a ledger.
#[derive(Debug, Clone)]
pub struct Last {
    pub seq: Sequence,
    pub state: Arc<ExecutionState>,
}

/// Reads the last message of each ledger, also of those that have ended.
///
/// # Errors
/// When the broker does not answer.
pub async fn last_of_each(broker: &Broker) -> Result<BTreeMap<ExecutionId, Last>, String> {
    let (first, last) = feed::bounds(broker).await.map_err(|e| e.to_string())?;
    if last < first.max(1) {
        return Ok(BTreeMap::new());
    }
    let feed = feed::ledger(broker, Start::LastOfEach).await;
    let mut feed = feed.map_err(|e| e.to_string())?;
    let mut found = BTreeMap::new();
    while let Ok(Some(item)) = timeout(SILENCE, feed.next()).await {
        // What tests put there is no ledger.
        let Ok(item) = item else { continue };
        if let Ok(message) = item.message() {
            let (seq, state) = (item.seq, message.state);
            found.insert(item.execution, Last { seq, state });
        }
        if item.pending == 0 {
            break;
        }
    }
    Ok(found)
}
