//! The state of each execution's last boundary, copied to PostgreSQL at most every few seconds. Only
//! the last boundary counts, and an older one is always a safe place to resume.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fiec_broker::{Broker, store};
use fiec_schemas::{ExecutionId, StatePlace};
use futures_util::StreamExt;
use sqlx::PgPool;

use crate::metrics::Part;
use crate::read;
use crate::table::argument;
use crate::tasks::{Shared, again, pause};

/// States that are copied at once.
const CONCURRENT: usize = 4;
/// Bytes of states that are copied at once, unless a single one is larger.
const IN_FLIGHT_BYTES: u64 = 32 << 20;
/// Most executions that wait for their turn. The next boundary brings back one that found no room.
const WAITING_LIMIT: usize = 200_000;
/// Interval of looking for states to copy.
const TICK: Duration = Duration::from_millis(200);
/// Longest time for one state.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The states that are still to be copied. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Mirror {
    waiting: Arc<Mutex<Waiting>>,
}

#[derive(Debug, Default)]
struct Waiting {
    states: HashMap<ExecutionId, StatePlace>,
    copied: HashMap<ExecutionId, Instant>,
}

impl Mirror {
    /// Adds new last boundaries, and removes finished executions.
    pub fn changed(&self, states: &[(ExecutionId, StatePlace)], finished: &[ExecutionId]) {
        if states.is_empty() && finished.is_empty() {
            return;
        }
        let mut waiting = self.lock();
        for (id, place) in states {
            if waiting.states.len() < WAITING_LIMIT || waiting.states.contains_key(id) {
                waiting.states.insert(*id, place.clone());
            }
        }
        for id in finished {
            waiting.states.remove(id);
            waiting.copied.remove(id);
        }
    }

    /// The states to copy now, within the bounds.
    fn due(&self, every: Duration) -> Vec<(ExecutionId, StatePlace)> {
        let mut waiting = self.lock();
        let Waiting { states, copied } = &mut *waiting;
        copied.retain(|_, at| at.elapsed() < every);
        let mut bytes = 0;
        let mut due = Vec::new();
        for (id, place) in states.iter().filter(|(id, _)| !copied.contains_key(id)) {
            if due.len() >= 256 || (bytes + place.bytes > IN_FLIGHT_BYTES && !due.is_empty()) {
                break;
            }
            bytes += place.bytes;
            due.push((*id, place.clone()));
        }
        for (id, _) in &due {
            states.remove(id);
            copied.insert(*id, Instant::now());
        }
        due
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Copies states until the recorder stops.
pub(crate) async fn run(broker: Broker, shared: Shared, every: Duration, limit: u64) {
    // States that an earlier recorder did not copy.
    let left = again(&shared, Part::Housekeeping, || outstanding(&shared.pool));
    let Some(left) = left.await else { return };
    shared.mirror.changed(&left, &[]);
    while !shared.stop.is_cancelled() {
        let due = shared.mirror.due(every);
        if due.is_empty() {
            pause(&shared.stop, TICK).await;
            continue;
        }
        let (broker, shared) = (&broker, &shared);
        let copy_one = |(id, place): (ExecutionId, StatePlace)| async move {
            let copied =
                tokio::time::timeout(TIMEOUT, copy(broker, &shared.pool, id, &place, limit));
            let failure = match copied.await {
                Ok(Ok(())) => {
                    shared.metrics.states.inc();
                    return;
                }
                Ok(Err(reason)) => reason,
                Err(_) => format!("not done within {} s", TIMEOUT.as_secs()),
            };
            // Most often a newer boundary has replaced it; that one is on its way.
            shared.metrics.states_failed.inc();
            tracing::debug!(execution = %id, boundary = place.index, reason = failure,
                "state was not copied to PostgreSQL");
        };
        let copies = futures_util::stream::iter(due).for_each_concurrent(CONCURRENT, copy_one);
        tokio::select! {
            () = copies => {}
            () = shared.stop.cancelled() => return,
        }
    }
}

async fn copy(
    broker: &Broker,
    pool: &PgPool,
    id: ExecutionId,
    place: &StatePlace,
    limit: u64,
) -> Result<(), String> {
    let state = if place.bytes <= limit {
        Some(
            store::get_state(broker, id, place)
                .await
                .map_err(|e| e.to_string())?,
        )
    } else {
        None
    };
    // The lock on the execution's row orders this statement against the transaction that finishes
    // the execution, which changes that row and then deletes the state. Either that transaction
    // waits and deletes this state, or this statement waits and finds the execution finished, or
    // behind this boundary.
    sqlx::query(
        "WITH live AS (SELECT id FROM executions WHERE id = $1 AND finished_at IS NULL \
         AND boundary_index >= $2 FOR SHARE) \
         INSERT INTO boundary_state AS s (execution, index, digest, bytes, state) \
         SELECT id, $2, $3, $4, $5 FROM live \
         ON CONFLICT (execution) DO UPDATE SET index = excluded.index, digest = excluded.digest, \
         bytes = excluded.bytes, state = excluded.state, stored_at = now() \
         WHERE s.index < excluded.index",
    )
    .bind(argument(&id))
    .bind(argument(&place.index))
    .bind(argument(&place.digest))
    .bind(argument(&place.bytes))
    .bind(state.as_deref())
    .execute(pool)
    .await
    .map_err(|e| e.to_string())?;
    Ok(())
}

async fn outstanding(pool: &PgPool) -> sqlx::Result<Vec<(ExecutionId, StatePlace)>> {
    let rows = sqlx::query(
        "SELECT e.id, e.boundary_index, e.state_digest, e.last_state_bytes, e.state_seq, \
         e.state_ordinal FROM executions e LEFT JOIN boundary_state s ON s.execution = e.id \
         WHERE e.finished_at IS NULL AND e.state_digest IS NOT NULL \
         AND (s.index IS NULL OR s.index < e.boundary_index) LIMIT 200000",
    )
    .fetch_all(pool)
    .await?;
    let mut found = Vec::new();
    for row in &rows {
        let Some(digest) = read::digest(row, "state_digest")? else {
            continue;
        };
        let place = StatePlace {
            index: read::count(row, "boundary_index")?,
            digest,
            bytes: read::count(row, "last_state_bytes")?,
            seq: read::optional_count(row, "state_seq")?,
            ordinal: read::count(row, "state_ordinal")?,
        };
        found.push((read::execution(row, "id")?, place));
    }
    Ok(found)
}
