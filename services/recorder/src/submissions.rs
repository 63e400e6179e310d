//! Submissions that are too large for their ledger messages, copied to `executions.spec`. Without the
//! copy of a live one, the broker alone has it, and `fiec repair` could not begin its ledger anew after
//! a loss of its store. Without that of an ended one, nobody could read what was submitted.
//!
//! A copied row leaves its queue, which is an index. A row that could not be copied stays in it: the
//! cursor passes it, and goes back to the beginning a minute later. An execution that has ended leaves
//! its queue after a day in any case.

use std::time::{Duration, Instant};

use fiec_broker::{Broker, store};
use fiec_schemas::{Digest, ExecutionId, Submission, Timestamp};
use serde_json::value::RawValue;
use sqlx::types::Json;
use sqlx::{AssertSqlSafe, PgPool};

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

/// The queues, the more urgent one first.
#[derive(Debug, Clone, Copy)]
enum Queue {
    /// Of live executions.
    Live,
    /// Of those that have ended.
    Ended,
}

/// An execution without its submission. The first two fields are its place in the queue.
#[derive(Debug, Clone, Copy)]
struct Due {
    at: Timestamp,
    execution: ExecutionId,
    submission: Digest,
}

/// A queue with the last row that could not be copied.
struct Reading {
    queue: Queue,
    passed: Option<Due>,
    began: Instant,
}

impl Reading {
    fn of(queue: Queue) -> Self {
        Self {
            queue,
            passed: None,
            began: Instant::now(),
        }
    }
}

/// Copies submissions until the recorder stops.
pub(crate) async fn run(broker: Broker, shared: Shared) {
    let mut queues = [Queue::Live, Queue::Ended].map(Reading::of);
    while !shared.stop.is_cancelled() {
        let mut bytes = 0;
        for queue in &mut queues {
            if copy_some(&broker, &shared, queue, &mut bytes)
                .await
                .is_none()
            {
                return;
            }
        }
        pause(&shared.stop, TICK).await;
    }
}

/// Copies the first submissions of a queue; none when the recorder stops.
async fn copy_some(
    broker: &Broker,
    shared: &Shared,
    reading: &mut Reading,
    bytes: &mut usize,
) -> Option<()> {
    let (queue, passed) = (reading.queue, reading.passed);
    let found = again(shared, Part::Housekeeping, || {
        due(&shared.pool, queue, passed)
    });
    let found = found.await?;
    let mut is_at_end = found.len() < AT_ONCE;
    for row in found {
        if *bytes >= TICK_BYTES {
            is_at_end = false;
            break;
        }
        let copied = tokio::select! {
            copied = copy(broker, shared, row) => copied,
            () = shared.stop.cancelled() => return None,
        };
        match copied? {
            Ok(more) => *bytes += more,
            Err(reason) => {
                tracing::warn!(execution = %row.execution, reason,
                    "a submission was not copied to PostgreSQL; it is tried again");
                reading.passed = Some(row);
            }
        }
    }
    if is_at_end && reading.began.elapsed() >= AGAIN {
        *reading = Reading::of(queue);
    }
    Some(())
}

/// Copies one submission and gives its size in bytes; none when the recorder stops.
async fn copy(broker: &Broker, shared: &Shared, row: Due) -> Option<Result<usize, String>> {
    let text = store::get_data(broker, row.submission, 0);
    let text = match tokio::time::timeout(WITHIN, text).await {
        Ok(Ok(text)) => text,
        Ok(Err(error)) => return Some(Err(error.to_string())),
        Err(_) => {
            return Some(Err(format!(
                "the object store did not answer within {WITHIN:?}"
            )));
        }
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

/// The first executions in a queue behind the one that was passed.
async fn due(pool: &PgPool, queue: Queue, passed: Option<Due>) -> sqlx::Result<Vec<Due>> {
    let (at, of_queue) = match queue {
        Queue::Live => ("submitted_at", "finished_at IS NULL"),
        Queue::Ended => ("finished_at", "finished_at > now() - interval '1 day'"),
    };
    let query = format!(
        "SELECT {at} AS at, id, submission FROM executions \
         WHERE spec IS NULL AND {of_queue} AND octet_length(submission) = 32 \
         AND ({at}, id) > \
         (coalesce($1, '-infinity'), coalesce($2, '00000000-0000-0000-0000-000000000000')) \
         ORDER BY {at}, id LIMIT $3"
    );
    let rows = sqlx::query(AssertSqlSafe(query))
        .bind(argument(&passed.map(|row| row.at)))
        .bind(argument(&passed.map(|row| row.execution)))
        .bind(i64::try_from(AT_ONCE).unwrap_or(i64::MAX))
        .fetch_all(pool)
        .await?;
    let mut found = Vec::new();
    for row in &rows {
        let (at, submission) = (read::time(row, "at")?, read::digest(row, "submission")?);
        if let (Some(at), Some(submission)) = (at, submission) {
            let execution = read::execution(row, "id")?;
            found.push(Due {
                at,
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
        "WITH copied AS (UPDATE executions SET spec = $2, program = coalesce(program, $3), \
         client_id = coalesce(client_id, $4) \
         WHERE id = $1 AND spec IS NULL RETURNING batch_id) \
         UPDATE batches SET name = $5 WHERE id = (SELECT batch_id FROM copied) AND name IS NULL",
    )
    .bind(argument(&id))
    .bind(argument(json))
    .bind(argument(&spec.program))
    .bind(argument(&spec.id))
    .bind(spec.batch.as_ref().map(|name| name.as_str()))
    .execute(pool)
    .await?;
    Ok(())
}
