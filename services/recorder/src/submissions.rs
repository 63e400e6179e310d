//! Submissions that are too large for their ledger messages, copied to `executions.spec` while their
//! executions live. Without the copy, the broker alone has them, and `fiec repair` could not begin
//! their ledgers anew after a loss of its store.
//!
//! A copied row leaves the index `executions_large`, which is the queue. A row that could not be
//! copied stays in it: the cursor passes it, and goes back to the beginning a minute later.

use std::time::{Duration, Instant};

use fiec_broker::{Broker, store};
use fiec_schemas::{Digest, ExecutionId, Submission, Timestamp};
use serde_json::value::RawValue;
use sqlx::PgPool;
use sqlx::types::Json;

use crate::metrics::Part;
use crate::read;
use crate::table::argument;
use crate::tasks::{Shared, again, pause};

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
    submitted_at: Timestamp,
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
    // As its client wrote it: `fiec repair` compares digests.
    let json: Json<&RawValue> = match serde_json::from_slice(&text) {
        Ok(json) => Json(json),
        Err(error) => return Some(Err(format!("it cannot be read: {error}"))),
    };
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
    .bind(argument(&passed.map(|row| row.submitted_at)))
    .bind(argument(&passed.map(|row| row.execution)))
    .bind(i64::try_from(AT_ONCE).unwrap_or(i64::MAX))
    .fetch_all(pool)
    .await?;
    let mut found = Vec::new();
    for row in &rows {
        let (submitted_at, submission) = (
            read::time(row, "submitted_at")?,
            read::digest(row, "submission")?,
        );
        if let (Some(submitted_at), Some(submission)) = (submitted_at, submission) {
            let execution = read::execution(row, "id")?;
            found.push(Due {
                submitted_at,
                execution,
                submission,
            });
        }
    }
    Ok(found)
}

async fn store(
    pool: &PgPool,
    id: ExecutionId,
    spec: &Submission,
    json: &Json<&RawValue>,
) -> sqlx::Result<()> {
    sqlx::query(
        "UPDATE executions SET spec = $2, program = coalesce(program, $3), \
         client_id = coalesce(client_id, $4) \
         WHERE id = $1 AND spec IS NULL AND finished_at IS NULL",
    )
    .bind(argument(&id))
    .bind(argument(json))
    .bind(argument(&spec.program))
    .bind(argument(&spec.id))
    .execute(pool)
    .await?;
    Ok(())
}
