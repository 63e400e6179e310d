//! Gives workers PostgreSQL's copy of a state that the broker has lost, or that of an earlier boundary
//! from which the execution can continue.

use fiec_broker::{Broker, store};
use fiec_schemas::messages::{RestoreReply, RestoreRequest};
use fiec_schemas::{Digest, StatePlace, subjects};
use sqlx::{PgPool, Row as _};

use crate::read;
use crate::requests;
use crate::table::argument;
use crate::tasks::Shared;

/// Most restores at once; each holds a whole state in memory.
const AT_ONCE: usize = 2;

/// Answers until the recorder stops.
pub(crate) async fn run(broker: Broker, shared: Shared) {
    let asked = (subjects::RECORDER_RESTORE, AT_ONCE);
    let (broker, shared) = (&broker, &shared);
    requests::answer(broker, shared, asked, |payload| async move {
        let reply = restore(broker, &shared.pool, &payload).await;
        let reply = reply.unwrap_or_else(|error| RestoreReply {
            error: Some(error),
            earlier: None,
        });
        if let Some(error) = &reply.error {
            let earlier = reply.earlier.as_ref().map(|place| place.index);
            tracing::warn!(error, earlier, "a state was not restored");
        }
        reply
    })
    .await;
}

async fn restore(broker: &Broker, pool: &PgPool, payload: &[u8]) -> Result<RestoreReply, String> {
    let request: RestoreRequest = serde_json::from_slice(payload).map_err(|e| e.to_string())?;
    let place = match copy_of(pool, &request).await? {
        Found::Asked(state) => {
            keep(broker, &request, request.digest, &state).await?;
            return Ok(RestoreReply::default());
        }
        Found::Earlier(place, state) => {
            keep(broker, &request, place.digest, &state).await?;
            place
        }
    };
    Ok(RestoreReply {
        error: Some(format!(
            "PostgreSQL has no copy of it, but one of boundary {}",
            place.index
        )),
        earlier: Some(place),
    })
}

/// A state in PostgreSQL.
enum Found {
    /// The requested one.
    Asked(Vec<u8>),
    /// One of an earlier boundary.
    Earlier(StatePlace, Vec<u8>),
}

/// Reads the execution's copy. A copy of another boundary counts only if PostgreSQL has the history
/// up to the requested boundary, and the copy's boundary in it: no boundary from which the execution
/// stepped back, and none of a history that the broker has lost.
async fn copy_of(pool: &PgPool, request: &RestoreRequest) -> Result<Found, String> {
    let row = sqlx::query(
        "SELECT s.index, s.digest, s.bytes, s.state, (SELECT b.ordinal FROM boundaries b \
         WHERE b.execution = s.execution AND b.index = s.index AND b.digest = s.digest \
         AND b.withdrawn_at IS NULL AND e.boundary_index = $2 AND e.state_digest = $3 \
         LIMIT 1) AS ordinal \
         FROM boundary_state s JOIN executions e ON e.id = s.execution WHERE s.execution = $1",
    )
    .bind(argument(&request.execution))
    .bind(argument(&request.index))
    .bind(argument(&request.digest))
    .fetch_optional(pool)
    .await
    .map_err(|error| format!("PostgreSQL cannot be asked: {error}"))?;
    let Some(row) = row else {
        return Err("PostgreSQL has no copy of it".into());
    };
    let read = || -> sqlx::Result<_> {
        let place = read::digest(&row, "digest")?.map(|digest| -> sqlx::Result<_> {
            Ok(StatePlace {
                index: read::count(&row, "index")?,
                digest,
                bytes: read::count(&row, "bytes")?,
                seq: None,
                ordinal: 0,
            })
        });
        let ordinal = read::optional_count(&row, "ordinal")?;
        let state: Option<Vec<u8>> = row.try_get("state")?;
        Ok((place.transpose()?, ordinal, state))
    };
    let (place, ordinal, state) =
        read().map_err(|error| format!("PostgreSQL's copy cannot be read: {error}"))?;
    let Some(place) = place else {
        return Err("the copy in PostgreSQL is damaged".into());
    };
    let is_asked = (place.index, place.digest) == (request.index, request.digest);
    let ordinal = ordinal.filter(|_| place.index < request.index);
    if !is_asked && ordinal.is_none() {
        return Err(format!(
            "PostgreSQL has no copy of it: its copy is of boundary {}, which the ledger does not have",
            place.index
        ));
    }
    let Some(state) = state else {
        return Err("PostgreSQL has its digest alone: it is over --state-limit".into());
    };
    if Digest::of(&state) != place.digest {
        return Err("the copy in PostgreSQL is damaged".into());
    }
    Ok(match ordinal {
        Some(ordinal) if !is_asked => Found::Earlier(StatePlace { ordinal, ..place }, state),
        _ => Found::Asked(state),
    })
}

/// Stores a state beside the ledger.
async fn keep(
    broker: &Broker,
    request: &RestoreRequest,
    digest: Digest,
    state: &[u8],
) -> Result<(), String> {
    let kept = store::keep_state(broker, request.execution, digest, state).await;
    kept.map_err(|error| error.to_string())
}
