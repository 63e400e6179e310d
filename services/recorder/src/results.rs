//! Results that are too large for their ledger messages, copied to `executions.result`. The table
//! `results_to_copy` is the queue: its rows come with the transaction that records the completion,
//! so that none is forgotten when a recorder ends.

use std::time::Duration;

use fiec_broker::{Broker, results};
use fiec_schemas::{Digest, Event, ExecutionId, ResultObject};
use sqlx::{PgConnection, PgPool, Row};

use crate::copy::{json_without_nul, without_nul};
use crate::ledger::{Shared, again, pause};
use crate::metrics::Part;
use crate::rows::json;

/// Interval of looking for results to copy.
const TICK: Duration = Duration::from_millis(500);
/// Most results that are looked up at once; of 256 KiB each at most.
const AT_ONCE: i64 = 16;

/// A row of `results_to_copy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResultRow {
    /// Which execution.
    pub execution: ExecutionId,
    /// Where its result lies.
    pub object: ResultObject,
}

/// The large result that a message tells of, if any. What is still to be verified counts only when
/// `completed` says it again.
pub(crate) fn of(execution: ExecutionId, events: &[Event]) -> Option<ResultRow> {
    events.iter().find_map(|event| match event {
        Event::Completed { object, .. } => object.map(|object| ResultRow { execution, object }),
        _ => None,
    })
}

/// Queues results.
pub(crate) async fn write(tx: &mut PgConnection, rows: &[ResultRow]) -> sqlx::Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let digest = |row: &ResultRow| row.object.digest.0.to_vec();
    sqlx::query(
        "INSERT INTO results_to_copy (execution, digest, bytes) \
         SELECT * FROM UNNEST($1::uuid[], $2::bytea[], $3::bigint[]) ON CONFLICT DO NOTHING",
    )
    .bind(rows.iter().map(|r| r.execution.0).collect::<Vec<_>>())
    .bind(rows.iter().map(digest).collect::<Vec<_>>())
    .bind(
        rows.iter()
            .map(|r| i64::from(r.object.bytes))
            .collect::<Vec<_>>(),
    )
    .execute(tx)
    .await?;
    Ok(())
}

/// Copies results until the recorder stops.
pub(crate) async fn run(broker: Broker, shared: Shared) {
    while !shared.stop.is_cancelled() {
        let due = again(&shared, Part::Housekeeping, || due(&shared.pool)).await;
        for row in due.into_iter().flatten() {
            let copied = tokio::select! {
                copied = copy(&broker, &shared, row) => copied,
                () = shared.stop.cancelled() => return,
            };
            if copied.is_none() {
                return;
            }
        }
        pause(&shared.stop, TICK).await;
    }
}

/// Copies one result, or notes why that failed; none when the recorder stops.
async fn copy(broker: &Broker, shared: &Shared, row: ResultRow) -> Option<()> {
    let id = row.execution;
    match results::get(broker, &row.object).await {
        Ok(result) => {
            let result = json(&result);
            let result = json_without_nul(&result);
            again(shared, Part::Housekeeping, || {
                store(&shared.pool, id, &result)
            })
            .await
        }
        Err(error) => {
            let failure = without_nul(&error.to_string());
            tracing::warn!(execution = %id, failure, "a result was not copied to PostgreSQL");
            again(shared, Part::Housekeeping, || {
                note(&shared.pool, id, &failure)
            })
            .await
        }
    }
}

/// Those whose turn it is; after a failure the next try is a minute later.
async fn due(pool: &PgPool) -> sqlx::Result<Vec<ResultRow>> {
    let rows = sqlx::query(
        "SELECT execution, digest, bytes FROM results_to_copy \
         WHERE tried_at IS NULL OR tried_at < now() - interval '1 minute' \
         ORDER BY tried_at NULLS FIRST LIMIT $1",
    )
    .bind(AT_ONCE)
    .fetch_all(pool)
    .await?;
    let mut found = Vec::new();
    for row in rows {
        let Ok(digest) = <[u8; 32]>::try_from(row.try_get::<Vec<u8>, _>("digest")?) else {
            continue;
        };
        let bytes = row.try_get::<i64, _>("bytes")?;
        found.push(ResultRow {
            execution: ExecutionId(row.try_get("execution")?),
            object: ResultObject {
                digest: Digest(digest),
                bytes: u32::try_from(bytes).unwrap_or(u32::MAX),
            },
        });
    }
    Ok(found)
}

async fn store(pool: &PgPool, id: ExecutionId, result: &str) -> sqlx::Result<()> {
    sqlx::query(
        "WITH copied AS (UPDATE executions SET result = $2::jsonb WHERE id = $1) \
         DELETE FROM results_to_copy WHERE execution = $1",
    )
    .bind(id.0)
    .bind(result)
    .execute(pool)
    .await?;
    Ok(())
}

async fn note(pool: &PgPool, id: ExecutionId, failure: &str) -> sqlx::Result<()> {
    sqlx::query("UPDATE results_to_copy SET tried_at = now(), failure = $2 WHERE execution = $1")
        .bind(id.0)
        .bind(failure)
        .execute(pool)
        .await?;
    Ok(())
}
