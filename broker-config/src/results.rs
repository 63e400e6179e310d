//! Results of programs that are too large for their ledger messages: JSON in `FIEC_DATA`.

use std::time::Duration;

use fiec_schemas::limits::RESULT_LIMIT;
use fiec_schemas::{Event, LedgerMessage, ResultObject};
use serde_json::Value;

use crate::{Broker, BrokerError, store};

/// Time limit for one result.
const WITHIN: Duration = Duration::from_secs(20);

/// Fetches a result and checks its digest.
///
/// # Errors
/// When it is missing, damaged, or does not arrive within 20 s.
pub async fn get(broker: &Broker, object: &ResultObject) -> Result<Value, BrokerError> {
    let what = || format!("result {}", object.digest.short());
    let malformed = |reason: String| BrokerError::Malformed {
        what: what(),
        reason,
    };
    let size = usize::try_from(object.bytes).unwrap_or(usize::MAX);
    if size > RESULT_LIMIT {
        return Err(malformed(format!(
            "the result has {size} bytes; at most {RESULT_LIMIT} are allowed"
        )));
    }
    let mut bytes = Vec::with_capacity(size);
    let limit = u64::from(object.bytes);
    let fetched = store::get_data_to(broker, object.digest, limit, &mut bytes, |_| {});
    match tokio::time::timeout(WITHIN, fetched).await {
        Ok(fetched) => fetched?,
        Err(_) => {
            return Err(BrokerError::Missing {
                what: what(),
                hint: format!(": the object store did not answer within {WITHIN:?}"),
            });
        }
    };
    serde_json::from_slice(&bytes).map_err(|error| malformed(error.to_string()))
}

/// Replaces references to results by the results, so that the reader need not fetch them.
///
/// # Errors
/// As [`get`]; the message is then as it was.
pub async fn resolve(broker: &Broker, message: &mut LedgerMessage) -> Result<(), BrokerError> {
    for event in &mut message.events {
        if let Event::Completed {
            result,
            object: Some(object),
            ..
        }
        | Event::Computed {
            result,
            object: Some(object),
            ..
        } = event
        {
            *result = get(broker, object).await?;
        }
    }
    Ok(())
}
