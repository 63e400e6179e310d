//! At the end of every integration test nobody is overdue: the last message of each live ledger
//! names who must act next and by when ([`fiec_schemas::duty`]).

use std::time::Duration;

use fiec_broker::Broker;
use fiec_schemas::Timestamp;
use fiec_schemas::duty::{self, Actor};
use tokio::time::{Instant, sleep};

use super::oracles::ledgers::last_of_each;

/// How long an overdue party has to act before a test fails: a machine may be busy.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Who is overdue, each in words; those that the test has killed on purpose are not named.
///
/// # Errors
/// When the ledgers cannot be read.
pub async fn overdue(broker: &Broker, killed: &[Actor]) -> Result<Vec<String>, String> {
    let last = last_of_each(broker).await?;
    let now = Timestamp::now();
    let live = last.values().map(|last| &last.state);
    let late = live.filter_map(|state| {
        if state.phase.is_terminal() {
            return None;
        }
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
