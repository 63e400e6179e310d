//! Watches the age of the ledger stream, so that live executions do not drop out of it.

use std::time::Duration;

use fiec_broker::{Broker, BrokerError, feed};
use fiec_schemas::{Sequence, Timestamp, subjects};
use tokio::sync::mpsc::Sender;

use crate::events::News;

/// Rounds within the age that the stream allows.
const ROUNDS: u32 = 60;
/// Bounds of the time between two rounds.
const SHORTEST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(60);

/// Reports up to which sequence messages have two thirds of the age at which the stream drops them.
pub async fn watch(broker: Broker, news: Sender<News>) {
    loop {
        let wait = match look(&broker).await {
            Ok((aged, most)) => {
                if aged > 0 && news.send(News::Aged(aged)).await.is_err() {
                    return;
                }
                match most.is_zero() {
                    true => LONGEST,
                    false => (most / ROUNDS).clamp(SHORTEST, LONGEST),
                }
            }
            Err(error) => {
                tracing::warn!(%error, "the age of the ledgers is not known; looking again");
                Duration::from_secs(5)
            }
        };
        tokio::time::sleep(wait).await;
    }
}

/// The last sequence with two thirds of the age, or 0, and the age.
async fn look(broker: &Broker) -> Result<(Sequence, Duration), BrokerError> {
    const WHAT: &str = "look at the age of the ledger stream";
    let stream = broker.js.get_stream(subjects::LEDGER_STREAM).await;
    let stream = stream.map_err(BrokerError::operation(WHAT))?;
    let info = stream.cached_info();
    let (most, last) = (info.config.max_age, info.state.last_sequence);
    let old = i64::try_from((most / 3 * 2).as_micros()).unwrap_or(i64::MAX);
    let cutoff = broker.now().micros().saturating_sub(old);
    // Without a limit, and while the whole stream is younger, nothing ages.
    let first = info.state.first_timestamp.unix_timestamp_nanos() / 1_000;
    if most.is_zero() || info.state.messages == 0 || first >= i128::from(cutoff) {
        return Ok((0, most));
    }
    let since = Timestamp::from_micros(cutoff);
    let found = feed::first_since(broker, subjects::LEDGER_STREAM, since).await?;
    // Nothing was stored since: all that the stream had before is old.
    Ok((found.map_or(last, |seq| seq.saturating_sub(1)), most))
}
