//! Submissions that are too large for their ledger messages, copied to `executions.spec` while their
//! executions live. Without the copy, the broker alone has them, and `fiec repair` could not begin
//! their ledgers anew after a loss of its store.
//!
//! A copied row leaves the index `executions_large`, which is the queue. A row that could not be
//! copied stays in it: the cursor passes it, and goes back to the beginning a minute later.

use std::time::{Duration, Instant};

use fiec_broker::{Broker, store};
use fiec_schemas::{Digest, ExecutionId, Submission};
use sqlx::{PgPool, Row};

use crate::copy::{json_without_nul, without_nul};
use crate::ledger::{Shared, again, pause};
use crate::metrics::Part;
use crate::time::PgTime;

/// Interval of looking for submissions to copy.
const TICK: Duration = Duration::from_millis(500);
/// Most submissions that are copied in a tick.
const AT_ONCE: usize = 64;
/// A tick ends once it has copied this many bytes, so that a large array leaves PostgreSQL and the
/// broker to others.
const TICK_BYTES: usize = 4 << 20;
/// Longest time for one submission.
const WITHIN: Duration = Duration::from_secs(20);
/// Least time between two tries of a submission that cannot be copied.
const AGAIN: Duration = Duration::from_secs(60);

/// An execution without its submission. The first two fields are its place in the queue.
#[derive(Debug, Clone, Copy)]
struct Due {
    submitted_at: PgTime,
    execution: ExecutionId,
    submission: Digest,
}

/// Copies submissions until the recorder stops.
pub(crate) async fn run(broker: Broker, shared: Shared) {
    let mut passed: Option<Due> = None;
    let mut began = Instant::now();
    while !shared.stop.is_cancelled() {
        let found = again(&shared, Part::Housekeeping, || due(&shared.pool, passed)).await;
        let Some(found) = found else { return };
        let mut is_at_end = found.len() < AT_ONCE;
        let mut bytes = 0;
        for row in found {
            if bytes >= TICK_BYTES {
                is_at_end = false;
                break;
            }
            let copied = tokio::select! {
                copied = copy(&broker, &shared, row) => copied,
                () = shared.stop.cancelled() => return,
            };
            match copied {
                None => return,
                Some(Ok(more)) => bytes += more,
                Some(Err(reason)) => {
                    tracing::warn!(execution = %row.execution, reason,
                        "a submission was not copied to PostgreSQL; it is tried again");
                    passed = Some(row);
                }
            }
        }
        if is_at_end && began.elapsed() >= AGAIN {
            passed = None;
            began = Instant::now();
        }
        pause(&shared.stop, TICK).await;
    }
}

/// Copies one submission and gives its size in bytes; none when the recorder stops.
async fn copy(broker: &Broker, shared: &Shared, row: Due) -> Option<Result<usize, String>> {
    let text = store::get_data(broker, row.submission, 0);
    let text = match tokio::time::timeout(WITHIN, text).await {
        Ok(Ok(text)) => text,
        Ok(Err(error)) => return Some(Err(error.to_string())),
        Err(_) => return Some(Err(format!("it did not come within {WITHIN:?}"))),
    };
    let spec: Submission = match serde_json::from_slice(&text) {
        Ok(spec) => spec,
        Err(error) => return Some(Err(format!("it cannot be read: {error}"))),
    };
    let json = String::from_utf8_lossy(&text);
    let json = json_without_nul(&json);
    let stored = again(shared, Part::Housekeeping, || async {
        match store(&shared.pool, row.execution, &spec, &json).await {
            // PostgreSQL refuses this one. That must not hold back the others.
            Err(sqlx::Error::Database(error)) => Ok(Err(error.to_string())),
            stored => stored.map(Ok),
        }
    });
    Some(stored.await?.map(|()| text.len()))
}

/// The first executions in the queue behind the one that was passed.
async fn due(pool: &PgPool, passed: Option<Due>) -> sqlx::Result<Vec<Due>> {
    let rows = sqlx::query(
        "SELECT submitted_at, id, submission FROM executions \
         WHERE spec IS NULL AND finished_at IS NULL AND octet_length(submission) = 32 \
         AND (submitted_at, id) > \
         (coalesce($1, '-infinity'), coalesce($2, '00000000-0000-0000-0000-000000000000')) \
         ORDER BY submitted_at, id LIMIT $3",
    )
    .bind(passed.map(|row| row.submitted_at))
    .bind(passed.map(|row| row.execution.0))
    .bind(i64::try_from(AT_ONCE).unwrap_or(i64::MAX))
    .fetch_all(pool)
    .await?;
    let read = |row: &sqlx::postgres::PgRow| {
        let digest: Vec<u8> = row.try_get("submission")?;
        let submission = <[u8; 32]>::try_from(digest)
            .map_err(|_| sqlx::Error::Decode("executions.submission is no digest".into()))?;
        Ok(Due {
            submitted_at: row.try_get("submitted_at")?,
            execution: ExecutionId(row.try_get("id")?),
            submission: Digest(submission),
        })
    };
    rows.iter().map(read).collect()
}

async fn store(pool: &PgPool, id: ExecutionId, spec: &Submission, json: &str) -> sqlx::Result<()> {
    sqlx::query(
        "UPDATE executions SET spec = $2::jsonb, program = coalesce(program, $3), \
         client_id = coalesce(client_id, $4) \
         WHERE id = $1 AND spec IS NULL AND finished_at IS NULL",
    )
    .bind(id.0)
    .bind(json)
    .bind(without_nul(&spec.program))
    .bind(spec.id.as_ref().map(|id| id.as_str()))
    .execute(pool)
    .await?;
    Ok(())
}
