//! Tells policy services which executions PostgreSQL has: their ledgers may have dropped out of the
//! stream.

use std::time::Duration;

use fiec_broker::Broker;
use fiec_schemas::messages::{Recorded, RecordedReply, RecordedRequest};
use fiec_schemas::{PhaseKind, subjects};
use sqlx::{PgPool, Row};

use crate::table::argument;
use crate::tasks::Shared;
use crate::{read, requests};

/// Most requests at once. Each names up to hundreds of executions.
const AT_ONCE: usize = 4;
/// A policy service waits as long.
const WITHIN: Duration = Duration::from_secs(1);

/// Answers until the recorder stops.
pub(crate) async fn run(broker: Broker, shared: Shared) {
    let asked = (subjects::RECORDER_RECORDED, AT_ONCE);
    let pool = &shared.pool;
    requests::answer(&broker, &shared, asked, |payload| async move {
        let looked = tokio::time::timeout(WITHIN, look_up(pool, &payload)).await;
        let looked = looked.unwrap_or_else(|_| Err("PostgreSQL does not answer".to_owned()));
        looked.unwrap_or_else(|error| RecordedReply {
            recorded: Vec::new(),
            error: Some(error),
        })
    })
    .await;
}

async fn look_up(pool: &PgPool, payload: &[u8]) -> Result<RecordedReply, String> {
    let request: RecordedRequest = serde_json::from_slice(payload).map_err(|e| e.to_string())?;
    let (asked, most) = (request.executions.len(), RecordedRequest::MOST);
    if asked > most {
        return Err(format!(
            "{asked} executions; ask about at most {most} at a time"
        ));
    }
    let rows = sqlx::query("SELECT id, phase, submission FROM executions WHERE id = ANY($1)")
        .bind(argument(&request.executions))
        .fetch_all(pool)
        .await
        .map_err(|error| format!("PostgreSQL cannot be asked: {error}"))?;
    let recorded = rows.iter().map(|row| {
        let phase: String = row.try_get("phase").map_err(|e| e.to_string())?;
        Ok::<_, String>(Recorded {
            execution: read::execution(row, "id").map_err(|e| e.to_string())?,
            phase: phase.parse::<PhaseKind>().map_err(|e| e.to_string())?,
            submission: read::digest(row, "submission")
                .map_err(|e| e.to_string())?
                .ok_or("the submission has no digest")?,
        })
    });
    Ok(RecordedReply {
        recorded: recorded.collect::<Result<_, _>>()?,
        error: None,
    })
}
