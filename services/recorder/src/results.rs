//! Results that are too large for their ledger messages, copied to `executions.result`. The table
//! `results_to_copy` is the queue: its rows come with the transaction that records the completion,
//! so that none is forgotten when a recorder ends.

use std::time::Duration;

use fiec_broker::{Broker, results};
use fiec_schemas::{Digest, ExecutionId, ResultObject, Timestamp};
use serde_json::Value;
use sqlx::PgPool;
use sqlx::types::Json;

use crate::metrics::Part;
use crate::read;
use crate::table::{argument, table};
use crate::tasks::{Shared, again, pause};

/// Interval of looking for results to copy.
const TICK: Duration = Duration::from_millis(500);
/// Most results that are looked up at once; of 256 KiB each at most.
const AT_ONCE: i64 = 16;

table! {
    /// A row of `results_to_copy`.
    #[derive(Copy)]
    struct ResultRow in "results_to_copy" {
        /// Which execution.
        execution: ExecutionId,
        /// Digest of the JSON.
        digest: Digest,
        /// Its bytes.
        bytes: u64,
    }
    later {
        tried_at: Option<Timestamp>,
        failure: Option<String>,
    }
}

impl ResultRow {
    pub(crate) fn new(execution: ExecutionId, object: ResultObject) -> Self {
        Self {
            execution,
            digest: object.digest,
            bytes: object.bytes.into(),
        }
    }

    fn object(&self) -> ResultObject {
        ResultObject {
            digest: self.digest,
            bytes: u32::try_from(self.bytes).unwrap_or(u32::MAX),
        }
    }
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
    match results::get(broker, &row.object()).await {
        Ok(result) => {
            let result = Json(result);
            again(shared, Part::Housekeeping, || {
                store(&shared.pool, id, &result)
            })
            .await
        }
        Err(error) => {
            let failure = error.to_string();
            tracing::warn!(execution = %id, failure, "a result was not copied to PostgreSQL");
            again(shared, Part::Housekeeping, || {
                note(&shared.pool, id, &failure)
            })
            .await
        }
    }
}

/// The results to copy now; after a failure the next try is a minute later.
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
    for row in &rows {
        let Some(digest) = read::digest(row, "digest")? else {
            continue;
        };
        found.push(ResultRow {
            execution: read::execution(row, "execution")?,
            digest,
            bytes: read::count(row, "bytes")?,
        });
    }
    Ok(found)
}

async fn store(pool: &PgPool, id: ExecutionId, result: &Json<Value>) -> sqlx::Result<()> {
    sqlx::query(
        "WITH copied AS (UPDATE executions SET result = $2 WHERE id = $1) \
         DELETE FROM results_to_copy WHERE execution = $1",
    )
    .bind(argument(&id))
    .bind(argument(result))
    .execute(pool)
    .await?;
    Ok(())
}

async fn note(pool: &PgPool, id: ExecutionId, failure: &String) -> sqlx::Result<()> {
    sqlx::query("UPDATE results_to_copy SET tried_at = now(), failure = $2 WHERE execution = $1")
        .bind(argument(&id))
        .bind(argument(failure))
        .execute(pool)
        .await?;
    Ok(())
}
