//! Removes objects, kept states and chunks from the broker to which nothing refers any more. The
//! tables know all references: a sweep lists the stored objects, waits until the tables have all that
//! the ledger said until then, and only then asks the tables.
//!
//! These refer to an object: a live execution's submission, its parameters, the outputs that it has
//! named; the outputs of a completed execution; a result that is still to be copied; a program that
//! was pushed. An object that was put within the grace stays in any case, and so does one that is put
//! again during a sweep. No object that a live execution may need is removed by age, and none that
//! missing history may refer to ([`crate::held`]). Chunks of executions that have a ledger are
//! collected by [`crate::unnamed_chunks`].

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use fiec_broker::collect::{self, Store, Stored};
use fiec_broker::{Broker, BrokerError, Ledger, feed, registry, store};
use fiec_schemas::{Digest, ExecutionId, Tenant};
use futures_util::{StreamExt, TryStreamExt, stream};
use sqlx::{PgPool, Row};
use uuid::Uuid;

use crate::error::{RecorderError, Result};
use crate::held::MissingHistory;
use crate::read;
use crate::tasks::{Shared, pause};

/// Longest time that a sweep waits for the tables to have all that the ledger says.
const CAUGHT_UP_WITHIN: Duration = Duration::from_secs(60);
/// No sweep while a submission has waited for longer: the objects that it names are not known yet.
const SUBMISSIONS_WAIT: Duration = Duration::from_secs(600);
/// Executions asked for in one statement.
const BATCH: usize = 10_000;
/// Requests to the broker at once.
const AT_ONCE: usize = 8;

/// Rules of the collection.
#[derive(Debug, Clone)]
pub struct Collection {
    /// Grace: an object that was put longer ago and is not referred to is removed. None: no removal.
    pub after: Option<Duration>,
    /// Time between two sweeps.
    pub every: Duration,
    /// Time for which no ledger may name a chunk before it is removed. Longer than the end of a
    /// ledger that a broker can lose.
    pub chunk_grace: Duration,
    /// Time for which the last σ of an execution that failed or was cancelled is kept for a retry.
    pub keep_failed: Duration,
    /// Only reports the objects that would be removed.
    pub dry_run: bool,
}

impl Default for Collection {
    fn default() -> Self {
        Self {
            after: Some(Duration::from_secs(30 * 86_400)),
            every: Duration::from_secs(6 * 3_600),
            chunk_grace: Duration::from_secs(150),
            keep_failed: Duration::from_secs(7 * 86_400),
            dry_run: false,
        }
    }
}

/// Number and size of the objects that a sweep has removed, or would have, and of those that it has
/// left because missing history may refer to them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Swept {
    objects: u64,
    bytes: u64,
    held: u64,
    held_bytes: u64,
}

/// Sweeps until the recorder stops. A sweep that fails removes nothing more and is tried again.
pub(crate) async fn run(broker: Broker, shared: Shared, options: Collection) {
    let Some(grace) = options.after else { return };
    let mut wait = options.every.min(Duration::from_secs(600));
    loop {
        pause(&shared.stop, wait).await;
        if shared.stop.is_cancelled() {
            return;
        }
        let swept = sweep(&broker, &shared, grace, &options);
        let swept = tokio::select! {
            swept = swept => swept,
            () = shared.stop.cancelled() => return,
        };
        wait = options.every;
        match swept {
            Ok(Some(swept)) => {
                let metrics = &shared.metrics;
                metrics.sweeps.inc();
                let number = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
                let found = if options.dry_run { swept.objects } else { 0 };
                metrics.collectable.set(number(found));
                metrics.held.set(number(swept.held));
                if !options.dry_run {
                    metrics.collected.inc_by(swept.objects);
                    metrics.collected_bytes.inc_by(swept.bytes);
                }
                let Swept {
                    objects,
                    bytes,
                    held,
                    ..
                } = swept;
                let dry_run = options.dry_run;
                tracing::info!(
                    objects,
                    bytes,
                    held,
                    dry_run,
                    "removed objects without a reference"
                );
            }
            Ok(None) => wait = wait.min(Duration::from_secs(600)),
            Err(error) => {
                tracing::warn!(%error, "a sweep ended early; it is tried again");
                wait = wait.min(Duration::from_secs(600));
            }
        }
    }
}

/// One sweep; none if it is too early for one.
async fn sweep(
    broker: &Broker,
    shared: &Shared,
    grace: Duration,
    options: &Collection,
) -> Result<Option<Swept>> {
    let dry = options.dry_run;
    let pool = &shared.pool;
    let data = collect::contents(broker, Store::Data).await?;
    let states = collect::contents(broker, Store::States).await?;
    let holders = collect::chunk_holders(broker).await?;
    let waits = collect::submissions_wait(broker, SUBMISSIONS_WAIT).await?;
    if waits || !is_old_enough(pool, grace).await? || !caught_up(broker, shared).await? {
        tracing::debug!(waits, "too early for a sweep");
        return Ok(None);
    }
    keep_live_outputs(pool).await?;
    let mut swept = Swept::default();
    let missing = MissingHistory::read(pool).await;
    let missing = missing.map_err(RecorderError::database("read the gaps of the history"))?;
    for object in unreferenced(broker, pool, data.objects, grace).await? {
        if missing.may_refer_to(object.stored_at) {
            swept.held += 1;
            swept.held_bytes += object.bytes;
            continue;
        }
        if dry || collect::remove(broker, Store::Data, &object).await? {
            tracing::debug!(
                name = object.name,
                bytes = object.bytes,
                dry,
                "collected an object"
            );
            swept.objects += 1;
            swept.bytes += object.bytes;
        }
    }
    let of_states = states.objects.into_iter().filter(|o| o.age >= grace);
    let of_states: Vec<(ExecutionId, Stored)> = of_states
        .filter_map(|object| {
            let id = object.name.split_once('.')?.0.parse().ok()?;
            Some((ExecutionId(id), object))
        })
        .collect();
    let owners = of_states.iter().map(|(id, _)| *id);
    let owners = owners.chain(holders.iter().map(|(id, _)| *id)).collect();
    let needed = needed(pool, owners, grace).await?;
    for (id, object) in of_states {
        if !needed.contains(&id) && (dry || collect::remove(broker, Store::States, &object).await?)
        {
            swept.objects += 1;
            swept.bytes += object.bytes;
        }
    }
    for (id, subject) in &holders {
        if !needed.contains(id) && collect::remove_chunks(broker, subject, grace, dry).await? {
            swept.objects += 1;
        }
    }
    for (of, orphans) in [(Store::Data, data.orphans), (Store::States, states.orphans)] {
        for orphan in orphans {
            let removed = collect::remove_orphan(broker, of, &orphan, grace, dry).await?;
            swept.objects += u64::from(removed);
        }
    }
    let note = "UPDATE collection SET swept_at = now(), objects = $1, bytes = $2, \
                held = $3, held_bytes = $4";
    let number = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
    let noted = sqlx::query(note)
        .bind(number(swept.objects))
        .bind(number(swept.bytes))
        .bind(number(swept.held))
        .bind(number(swept.held_bytes));
    let noted = noted.execute(pool).await;
    noted.map_err(RecorderError::database("note a sweep"))?;
    Ok(Some(swept))
}

/// True if these tables have recorded for as long as the grace.
async fn is_old_enough(pool: &PgPool, grace: Duration) -> Result<bool> {
    sqlx::query_scalar("SELECT since <= now() - $1 * interval '1 second' FROM collection")
        .bind(grace.as_secs_f64())
        .fetch_one(pool)
        .await
        .map_err(RecorderError::database("look how old the tables are"))
}

/// True once the tables have all that the ledger has said by now.
async fn caught_up(broker: &Broker, shared: &Shared) -> Result<bool> {
    let (_, last) = feed::bounds(broker).await?;
    let caught_up = async {
        while shared.health.checkpoint() < last && !shared.stop.is_cancelled() {
            pause(&shared.stop, Duration::from_millis(100)).await;
        }
    };
    let in_time = tokio::time::timeout(CAUGHT_UP_WITHIN, caught_up).await;
    Ok(in_time.is_ok() && !shared.stop.is_cancelled())
}

/// Keeps the digests that boundaries of live executions name, for longer than the boundaries.
async fn keep_live_outputs(pool: &PgPool) -> Result<()> {
    let failed = RecorderError::database;
    let mut tx = pool.begin().await.map_err(failed("begin"))?;
    // A day of overlap: rows may arrive in another order than the broker's times.
    for statement in [
        "INSERT INTO live_outputs SELECT DISTINCT b.execution, o ->> 'digest' \
         FROM collection c JOIN boundaries b ON b.committed_at > c.outputs_until - interval '1 day' \
         JOIN executions e ON e.id = b.execution AND e.finished_at IS NULL \
         CROSS JOIN LATERAL jsonb_array_elements(b.outputs) o \
         WHERE b.outputs IS NOT NULL AND o ->> 'digest' IS NOT NULL ON CONFLICT DO NOTHING",
        "DELETE FROM live_outputs l USING executions e \
         WHERE e.id = l.execution AND e.finished_at IS NOT NULL",
        "UPDATE collection SET outputs_until = now()",
    ] {
        let done = sqlx::query(statement).execute(&mut *tx).await;
        done.map_err(failed("keep the outputs of live executions"))?;
    }
    tx.commit().await.map_err(failed("commit"))
}

/// The objects that are older than the grace and to which nothing refers.
async fn unreferenced(
    broker: &Broker,
    pool: &PgPool,
    objects: Vec<Stored>,
    grace: Duration,
) -> Result<Vec<Stored>> {
    // An object whose name is no digest is not ours.
    let old = objects.into_iter().filter(|o| o.age >= grace);
    let old = old.filter(|o| o.name.parse::<Digest>().is_ok());
    let mut old: HashMap<String, Stored> = old.map(|o| (o.name.clone(), o)).collect();
    if old.is_empty() {
        return Ok(Vec::new());
    }
    for record in registry::list(broker).await? {
        old.remove(&record.artifact.to_string());
    }
    // Before the tables are asked: meanwhile a submission may be copied to them.
    for text in texts_beside_the_tables(broker, pool).await? {
        for digest in digests_in(&text) {
            old.remove(digest);
        }
    }
    let mut unread =
        sqlx::query_scalar::<_, String>("SELECT header FROM unread_messages").fetch(pool);
    while let Some(header) = unread.next().await {
        let header = header.map_err(RecorderError::database("read unread messages"))?;
        for digest in digests_in(&header) {
            old.remove(digest);
        }
    }
    let queries = [
        "SELECT encode(submission, 'hex') FROM executions WHERE finished_at IS NULL",
        "SELECT m[1] FROM executions, regexp_matches(spec::text, '[0-9a-f]{64}', 'g') m \
         WHERE finished_at IS NULL",
        "SELECT o ->> 'digest' FROM executions, jsonb_array_elements(outputs) o \
         WHERE outputs IS NOT NULL",
        "SELECT o ->> 'digest' FROM boundaries, jsonb_array_elements(outputs) o \
         WHERE outputs IS NOT NULL AND withdrawn_at IS NULL",
        "SELECT digest FROM live_outputs",
        "SELECT encode(digest, 'hex') FROM results_to_copy",
    ];
    for query in queries {
        let mut rows = sqlx::query_scalar::<_, Option<String>>(query).fetch(pool);
        while let Some(digest) = rows.next().await {
            let digest = digest.map_err(RecorderError::database("read references"))?;
            if let Some(digest) = digest {
                old.remove(&digest);
            }
        }
    }
    Ok(old.into_values().collect())
}

/// Texts that refer to objects and are not in the tables: large submissions before they are copied,
/// and the last messages of executions whose outputs wait for their verification.
async fn texts_beside_the_tables(broker: &Broker, pool: &PgPool) -> Result<Vec<String>> {
    let rows = sqlx::query(
        "SELECT id, tenant, submission, spec IS NULL AS large, phase = 'verifying' AS verifying \
         FROM executions WHERE finished_at IS NULL AND (spec IS NULL OR phase = 'verifying')",
    );
    let failed = RecorderError::database;
    let rows = rows
        .fetch_all(pool)
        .await
        .map_err(failed("list live executions"))?;
    let mut submissions = HashSet::new();
    let mut verifying = Vec::new();
    for row in rows {
        let unread = |error| failed("read a live execution")(error);
        if row.try_get("large").map_err(unread)? {
            submissions.extend(read::digest(&row, "submission").map_err(unread)?);
        }
        let tenant: String = row.try_get("tenant").map_err(unread)?;
        if row.try_get("verifying").map_err(unread)?
            && let Ok(tenant) = Tenant::new(tenant)
        {
            verifying.push((tenant, read::execution(&row, "id").map_err(unread)?));
        }
    }
    let ledger = Ledger::new(broker);
    let submissions = stream::iter(submissions)
        .map(|digest| async move {
            match store::get_data(broker, digest, 0).await {
                Ok(json) => Ok(String::from_utf8_lossy(&json).into_owned()),
                // Its execution cannot go on without it, whatever the sweep removes.
                Err(BrokerError::Missing { .. }) => Ok(String::new()),
                Err(error) => Err(RecorderError::from(error)),
            }
        })
        .buffer_unordered(AT_ONCE);
    let mut texts: Vec<String> = submissions.try_collect().await?;
    for (tenant, id) in verifying {
        if let Some(last) = ledger.last(&tenant, id).await? {
            texts.push(serde_json::to_string(&last.message).unwrap_or_default());
        }
    }
    Ok(texts)
}

/// The parts of a text that have the form of a digest.
fn digests_in(text: &str) -> impl Iterator<Item = &str> {
    let is_digit = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
    text.split(move |c| !is_digit(c))
        .filter(|part| part.len() == 64)
}

/// The executions of these that are live, or have ended within the grace, or may be live by a message
/// that was not read.
async fn needed(
    pool: &PgPool,
    of: HashSet<ExecutionId>,
    grace: Duration,
) -> Result<HashSet<ExecutionId>> {
    let ids: Vec<Uuid> = of.into_iter().map(|id| id.0).collect();
    let mut needed = HashSet::new();
    for some in ids.chunks(BATCH) {
        let live: Vec<Uuid> = sqlx::query_scalar(
            "SELECT id FROM executions WHERE id = ANY($1) AND (finished_at IS NULL \
             OR finished_at > now() - $2 * interval '1 second') \
             UNION SELECT execution FROM unread_messages WHERE execution = ANY($1)",
        )
        .bind(some)
        .bind(grace.as_secs_f64())
        .fetch_all(pool)
        .await
        .map_err(RecorderError::database("ask which executions live"))?;
        needed.extend(live.into_iter().map(ExecutionId));
    }
    Ok(needed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_found_wherever_a_text_has_them() {
        let (a, b) = ("ab".repeat(32), "0c".repeat(32));
        let text = format!(r#"{{"object":"{a}","x":["{b}","{a}0"],"y":"beef"}}"#);
        assert_eq!(digests_in(&text).collect::<Vec<_>>(), [&a, &b]);
    }
}
