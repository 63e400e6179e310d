//! At the end of every integration test nobody is overdue: the last message of each live ledger
//! names who must act next and by when ([`fiec_schemas::duty`]).

use std::collections::BTreeMap;
use std::time::Duration;

use fiec_broker::Broker;
use fiec_broker::feed::{self, Start};
use fiec_schemas::duty::{self, Actor};
use fiec_schemas::{ExecutionId, ExecutionState, Timestamp};
use futures_util::StreamExt as _;
use tokio::time::{Instant, sleep, timeout};

/// How long an overdue party has to act before a test fails: a machine may be busy.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// How long the broker has for the next ledger. Only a stream whose end no reader understands lasts
/// that long.
const SILENCE: Duration = Duration::from_secs(5);

/// The last state of each execution that lives, or why the broker does not tell.
async fn live(broker: &Broker) -> Result<Vec<ExecutionState>, String> {
    let (first, last) = feed::bounds(broker).await.map_err(|e| e.to_string())?;
    if last < first.max(1) {
        return Ok(Vec::new());
    }
    let feed = feed::ledger(broker, Start::LastOfEach).await;
    let mut feed = feed.map_err(|e| e.to_string())?;
    let mut states: BTreeMap<ExecutionId, ExecutionState> = BTreeMap::new();
    while let Ok(Some(item)) = timeout(SILENCE, feed.next()).await {
        // What tests put there is no ledger.
        let Ok(item) = item else { continue };
        if let Ok(message) = item.message() {
            states.insert(item.execution, message.state);
        }
        if item.pending == 0 {
            break;
        }
    }
    let live = states.into_values();
    Ok(live.filter(|s| !s.phase.is_terminal()).collect())
}

/// Who is overdue, each in words; those that the test has killed on purpose are not named.
async fn overdue(broker: &Broker, killed: &[Actor]) -> Result<Vec<String>, String> {
    let states = live(broker).await?;
    let now = Timestamp::now();
    let late = states.iter().filter_map(|state| {
        let next = duty::of(state, now);
        let by = next.by.filter(|_| next.is_overdue(now))?;
        let late_ms = now.millis() - by.millis();
        let (id, words) = (state.execution, next.in_words());
        let phase = state.phase.as_str();
        (!killed.contains(&next.who)).then(|| format!("{id} ({phase}): {words}: {late_ms} ms late"))
    });
    Ok(late.collect())
}

/// Waits until nobody is overdue.
///
/// # Errors
/// Names everybody who still is when the patience ends.
pub async fn nobody_is_overdue(
    broker: &Broker,
    killed: &[Actor],
    patience: Duration,
) -> Result<(), String> {
    let deadline = Instant::now() + patience;
    loop {
        let found = match overdue(broker, killed).await {
            Ok(late) if late.is_empty() => return Ok(()),
            Ok(late) => format!("overdue:\n{}", late.join("\n")),
            Err(error) => format!("the ledgers cannot be read: {error}"),
        };
        if Instant::now() >= deadline {
            return Err(found);
        }
        sleep(Duration::from_millis(100)).await;
    }
}
