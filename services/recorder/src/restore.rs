//! Gives workers PostgreSQL's copy of a state that the broker has lost.

use fiec_broker::{Broker, store};
use fiec_schemas::Digest;
use fiec_schemas::messages::{RestoreReply, RestoreRequest};
use fiec_schemas::subjects;
use sqlx::PgPool;

use crate::ledger::Shared;
use crate::requests;
use crate::table::argument;

/// Most restores at once; each holds a whole state in memory.
const AT_ONCE: usize = 2;

/// Answers until the recorder stops.
pub(crate) async fn run(broker: Broker, shared: Shared) {
    let asked = (subjects::RECORDER_RESTORE, AT_ONCE);
    let (broker, shared) = (&broker, &shared);
    requests::answer(broker, shared, asked, |payload| async move {
        let error = restore(broker, &shared.pool, &payload).await.err();
        if let Some(error) = &error {
            tracing::warn!(error, "a state was not restored");
        }
        RestoreReply { error }
    })
    .await;
}

async fn restore(broker: &Broker, pool: &PgPool, payload: &[u8]) -> Result<(), String> {
    let request: RestoreRequest = serde_json::from_slice(payload).map_err(|e| e.to_string())?;
    let state: Option<Option<Vec<u8>>> = sqlx::query_scalar(
        "SELECT state FROM boundary_state WHERE execution = $1 AND index = $2 AND digest = $3",
    )
    .bind(argument(&request.execution))
    .bind(argument(&request.index))
    .bind(argument(&request.digest))
    .fetch_optional(pool)
    .await
    .map_err(|error| format!("PostgreSQL cannot be asked: {error}"))?;
    let state = match state {
        Some(Some(state)) => state,
        Some(None) => {
            return Err("PostgreSQL has its digest alone: it is over --state-limit".into());
        }
        None => return Err("PostgreSQL has no copy of it".into()),
    };
    if Digest::of(&state) != request.digest {
        return Err("the copy in PostgreSQL is damaged".into());
    }
    let kept = store::keep_state(broker, request.execution, request.digest, &state).await;
    kept.map_err(|error| error.to_string())
}
