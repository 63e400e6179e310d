//! The age of the ledger stream. The stream drops messages by their age, so what live executions
//! need is appended again before that: by the holder of a started execution, and by a policy
//! service while nobody holds it.

use std::time::Duration;

use fiec_schemas::{Sequence, Timestamp, subjects};

use crate::{Broker, BrokerError, feed};

/// Looks within the age that the stream allows.
const LOOKS: u32 = 60;
/// Bounds of the time between two looks.
const SHORTEST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(60);
/// Time until the next look after one without an answer.
const RETRY: Duration = Duration::from_secs(5);

/// Looks at the age of the ledger stream again and again.
pub struct LedgerAge {
    broker: Broker,
    /// The time until the next look.
    wait: Duration,
}

impl LedgerAge {
    /// The first look is taken at once.
    pub fn new(broker: &Broker) -> Self {
        Self {
            broker: broker.clone(),
            wait: Duration::ZERO,
        }
    }

    /// Waits until messages have two thirds of the age at which the stream drops them. Returns the
    /// last sequence that is so old. Call it again for the next look.
    pub async fn aged(&mut self) -> Sequence {
        loop {
            tokio::time::sleep(self.wait).await;
            match look(&self.broker).await {
                Ok((aged, most)) => {
                    self.wait = match most.is_zero() {
                        true => LONGEST,
                        false => (most / LOOKS).clamp(SHORTEST, LONGEST),
                    };
                    if aged > 0 {
                        return aged;
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "the age of the ledgers is not known; looking again");
                    self.wait = RETRY;
                }
            }
        }
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
