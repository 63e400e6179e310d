//! Reads the records of a span of time.

use std::collections::BTreeMap;

use anyhow::{Context as _, ensure};
use fiec_schemas::messages::NodeEventKind;
use fiec_schemas::{NodeId, Signal, Submission, Threshold, Timestamp};
use fiec_simulator::history::{EventRow, ExecutionRow, History, NodeRow, QuotaRow, VectorRow};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::postgres::PgRow;
use sqlx::{PgPool, Row as _};

/// Most executions in one replay; each is its own workload.
const EXECUTIONS_LIMIT: i64 = 200_000;

/// Figures of the span in the history itself. Parts of ranges count with their roots.
#[derive(Debug, Serialize)]
pub(super) struct Found {
    /// Number of played executions.
    pub executions: i64,
    /// Number of those that completed.
    pub completed: i64,
    /// Number of executions that were submitted in the span but never started: their computing time
    /// is unknown.
    pub never_begun: i64,
    /// Number of played ones that had not ended; their computing time so far counts.
    pub unfinished: i64,
    /// Number of played ones that lived at the start of the span.
    pub carried: i64,
    /// Number of played ones that started in a gang.
    pub in_gangs: usize,
    /// Number of played ones in a batch with a limit.
    pub at_once: usize,
    /// Number of played ones with dependencies.
    pub after: usize,
    /// Number of played ones whose range could be spread, and of their parts.
    pub spread: usize,
    /// See `spread`.
    pub parts: usize,
    /// Number of played ones that requested a device; devices are not played.
    pub on_devices: usize,
    /// Quotas at the start, and changes in the span.
    pub quotas: usize,
    /// Number of nodes.
    pub nodes: usize,
    /// Number of vectors.
    pub vectors: usize,
    /// Time from the first submission to the last end, in ms.
    pub makespan_ms: f64,
    /// Share of the slots that computed in that time.
    pub utilization: f64,
    /// Mean time from submission, or the start of the span, to the first capsule, in ms.
    pub waited_mean_ms: f64,
    /// Number of rebindings by cause.
    pub rebindings: BTreeMap<String, i64>,
    /// Size of the σ that moved with them, in bytes.
    pub moved_bytes: i64,
}

impl Found {
    /// The facts that concern several executions, for people.
    pub fn in_words(&self) -> Option<String> {
        let carried = usize::try_from(self.carried).unwrap_or(0);
        let all = [
            (carried, "lived when the span began"),
            (self.in_gangs, "started in gangs"),
            (
                self.at_once,
                "are of batches of which only some run at once",
            ),
            (self.after, "waited for others"),
            (self.spread, "might be spread"),
            (self.on_devices, "asked for a device, which is not played"),
        ];
        let said = all.iter().filter(|(count, _)| *count > 0);
        let mut words: Vec<String> = said.map(|(n, what)| format!("{n} {what}")).collect();
        if self.quotas > 0 {
            let quotas = self.quotas;
            words.push(format!(
                "{quotas} quotas, or changes of one, hold them back"
            ));
        }
        (!words.is_empty()).then(|| words.join("; "))
    }
}

/// The records of the span, and their figures.
///
/// # Errors
/// If PostgreSQL does not answer, or has no data of that time.
pub(super) async fn read(
    pool: &PgPool,
    since: Timestamp,
    until: Timestamp,
) -> anyhow::Result<(History, Found)> {
    let (from, to) = (since.micros(), until.micros());
    let executions = executions(pool, from, to).await?;
    ensure!(
        !executions.is_empty(),
        "no execution was submitted from {since} to {until} that began to compute: \
         is the recorder running, is --since right?"
    );
    let nodes = nodes(pool, from, to).await?;
    ensure!(
        !nodes.is_empty(),
        "no node told anything from {since} to {until}"
    );
    let vectors = vectors(pool, from, to).await?;
    let history = History {
        since,
        until,
        events: events(pool, from, to).await?,
        nodes,
        vectors,
        quotas: quotas(pool, from, to).await?,
        executions,
    };
    let found = found(pool, &history, from, to).await?;
    Ok((history, found))
}

fn json<T: DeserializeOwned>(what: &str, text: Option<String>) -> anyhow::Result<Option<T>> {
    text.map(|text| serde_json::from_str(&text))
        .transpose()
        .with_context(|| {
            format!("{what} in the history is of another form than this version reads")
        })
}

/// The span's times in SQL: `$1` and `$2` are microseconds.
const SPAN: &str = ">= to_timestamp($1 / 1e6) AND {} < to_timestamp($2 / 1e6)";

fn span(column: &str) -> String {
    format!("{column} {}", SPAN.replace("{}", column))
}

/// True for played executions `e`: they were submitted in the span or lived at its start, and have
/// started.
const PLAYED: &str = "e.first_started_at IS NOT NULL AND e.submitted_at < to_timestamp($2 / 1e6) \
     AND (e.submitted_at >= to_timestamp($1 / 1e6) \
          OR coalesce(e.finished_at, 'infinity') > to_timestamp($1 / 1e6))";

/// The execution at the root of `e`'s range, as `m.whole`.
const WHOLE: &str = "LEFT JOIN spread_members m ON m.execution = e.id AND m.depth > 0";

async fn rows(pool: &PgPool, sql: String, from: i64, to: i64) -> anyhow::Result<Vec<PgRow>> {
    sqlx::query(sqlx::AssertSqlSafe(sql))
        .bind(from)
        .bind(to)
        .fetch_all(pool)
        .await
        .context(
            "PostgreSQL refused a query of the replay; `fiec setup` brings its tables up to date",
        )
}

async fn executions(pool: &PgPool, from: i64, to: i64) -> anyhow::Result<Vec<ExecutionRow>> {
    let sql = format!(
        "SELECT e.id::text AS id, e.tenant AS tenant,
                (extract(epoch FROM e.submitted_at) * 1e6)::bigint AS at, e.spec::text AS spec,
                greatest(e.compute_us, coalesce(p.computed_us, 0), 1)::bigint AS computed_us,
                coalesce(p.before_us, 0)::bigint AS before_us,
                coalesce(e.capsules, greatest(e.boundary_index, 1))::bigint AS capsules,
                coalesce(e.last_state_bytes, 0)::bigint AS state_bytes,
                e.phase = 'failed' AND e.author LIKE 'worker/%' AS failed,
                m.whole::text AS whole
         FROM executions e
         {WHOLE}
         LEFT JOIN LATERAL (
             SELECT (sum(extract(epoch FROM computed_until - computing_since) * 1e6)
                         FILTER (WHERE computed_until IS NOT NULL))::bigint AS computed_us,
                    (sum(extract(epoch FROM least(computed_until, to_timestamp($1 / 1e6)) - computing_since) * 1e6)
                         FILTER (WHERE computing_since < to_timestamp($1 / 1e6)))::bigint AS before_us
             FROM placements WHERE execution = e.id AND computing_since IS NOT NULL
         ) p ON true
         WHERE {PLAYED}
         ORDER BY e.submitted_at, e.id LIMIT {}",
        EXECUTIONS_LIMIT + 1
    );
    let found = rows(pool, sql, from, to).await?;
    ensure!(
        i64::try_from(found.len())? <= EXECUTIONS_LIMIT,
        "more than {EXECUTIONS_LIMIT} executions: choose a shorter span with --since and --until"
    );
    found.iter().map(execution).collect()
}

fn execution(row: &PgRow) -> anyhow::Result<ExecutionRow> {
    let number = |n: i64| u64::try_from(n).unwrap_or(0);
    let spec: Option<Submission> = json("a submission", row.try_get("spec")?)?;
    let (id, tenant): (String, String) = (row.try_get("id")?, row.try_get("tenant")?);
    let whole: Option<String> = row.try_get("whole")?;
    let all_us = number(row.try_get("computed_us")?);
    let before_us = number(row.try_get("before_us")?);
    let (computed_us, capsules) = since(all_us, before_us, number(row.try_get("capsules")?));
    Ok(ExecutionRow {
        execution: id.parse().context("the id of an execution")?,
        tenant: tenant.parse().context("the tenant of an execution")?,
        submitted_at: Timestamp::from_micros(row.try_get("at")?),
        spec,
        computed_us,
        capsules,
        state_bytes: number(row.try_get("state_bytes")?),
        failed: row.try_get("failed")?,
        part_of: whole
            .map(|whole| whole.parse())
            .transpose()
            .context("the id of an execution")?,
    })
}

/// The rest of a computing time and of its capsules, without the part before the span.
fn since(all_us: u64, before_us: u64, capsules: u64) -> (u64, u64) {
    let left_us = all_us.saturating_sub(before_us).max(1);
    let share = u128::from(capsules) * u128::from(left_us) / u128::from(all_us.max(1));
    (left_us, u64::try_from(share).unwrap_or(capsules).max(1))
}

async fn nodes(pool: &PgPool, from: i64, to: i64) -> anyhow::Result<Vec<NodeRow>> {
    let sql = format!(
        "SELECT node, coalesce(slots, 1) AS slots, coalesce(memory_limit_bytes, 0) AS memory,
                coalesce((descriptor ->> 'parks')::integer, 0) AS parks,
                coalesce(cpus, 1) AS cpus, labels::text AS labels, thresholds::text AS thresholds
         FROM nodes n WHERE descriptor IS NOT NULL
           AND EXISTS (SELECT FROM hardware_vectors v WHERE v.node = n.node AND {})
         ORDER BY node",
        span("v.at")
    );
    let found = rows(pool, sql, from, to).await?;
    found
        .iter()
        .map(|row| {
            let labels: Option<BTreeMap<String, String>> = json("labels", row.try_get("labels")?)?;
            let thresholds: Option<BTreeMap<Signal, Threshold>> =
                json("thresholds", row.try_get("thresholds")?)?;
            Ok(NodeRow {
                node: NodeId::new(row.try_get::<String, _>("node")?)?,
                slots: u32::try_from(row.try_get::<i32, _>("slots")?)?,
                parks: u32::try_from(row.try_get::<i32, _>("parks")?)?,
                memory_bytes: u64::try_from(row.try_get::<i64, _>("memory")?)?,
                cpus: u32::try_from(row.try_get::<i32, _>("cpus")?)?,
                labels: labels.unwrap_or_default(),
                thresholds: thresholds.unwrap_or_default(),
            })
        })
        .collect()
}

async fn vectors(pool: &PgPool, from: i64, to: i64) -> anyhow::Result<Vec<VectorRow>> {
    let sql = format!(
        "SELECT node, (extract(epoch FROM at) * 1e6)::bigint AS at, readings::text AS readings
         FROM hardware_vectors WHERE {} ORDER BY node, at",
        span("at")
    );
    let found = rows(pool, sql, from, to).await?;
    found
        .iter()
        .map(|row| {
            Ok(VectorRow {
                node: NodeId::new(row.try_get::<String, _>("node")?)?,
                at: Timestamp::from_micros(row.try_get("at")?),
                readings: json("readings", row.try_get("readings")?)?.unwrap_or_default(),
            })
        })
        .collect()
}

async fn events(pool: &PgPool, from: i64, to: i64) -> anyhow::Result<Vec<EventRow>> {
    let sql = format!(
        "SELECT node, (extract(epoch FROM at) * 1e6)::bigint AS at, what
         FROM node_events WHERE {} AND what <> '{}' ORDER BY node, at, seq",
        span("at"),
        NodeEventKind::Viability
    );
    let found = rows(pool, sql, from, to).await?;
    found
        .iter()
        .map(|row| {
            Ok(EventRow {
                node: NodeId::new(row.try_get::<String, _>("node")?)?,
                at: Timestamp::from_micros(row.try_get("at")?),
                what: row.try_get::<String, _>("what")?.parse()?,
            })
        })
        .collect()
}

/// The quotas at the start of the span, and the changes in it.
async fn quotas(pool: &PgPool, from: i64, to: i64) -> anyhow::Result<Vec<QuotaRow>> {
    let sql = "SELECT tenant, (extract(epoch FROM at) * 1e6)::bigint AS at, running, memory_bytes,
                      nullif(weight, 1) AS weight
               FROM quota_history
               WHERE at < to_timestamp($2 / 1e6)
                 AND coalesce(until, 'infinity') > to_timestamp($1 / 1e6)
               ORDER BY tenant, at";
    let found = rows(pool, sql.to_owned(), from, to).await?;
    found
        .iter()
        .map(|row| {
            let (tenant, running): (String, Option<i64>) =
                (row.try_get("tenant")?, row.try_get("running")?);
            let weight: Option<i32> = row.try_get("weight")?;
            let memory: Option<i64> = row.try_get("memory_bytes")?;
            Ok(QuotaRow {
                tenant: tenant.parse().context("the tenant of a quota")?,
                at: Timestamp::from_micros(row.try_get("at")?),
                running: running.map(u32::try_from).transpose()?,
                memory_bytes: memory.map(u64::try_from).transpose()?,
                weight: weight.map(u32::try_from).transpose()?,
            })
        })
        .collect()
}

async fn found(pool: &PgPool, history: &History, from: i64, to: i64) -> anyhow::Result<Found> {
    let sql = format!(
        "SELECT count(*) AS executions,
                count(*) FILTER (WHERE e.phase = 'completed') AS completed,
                count(*) FILTER (WHERE e.finished_at IS NULL) AS unfinished,
                count(*) FILTER (WHERE e.submitted_at < to_timestamp($1 / 1e6)) AS carried,
                coalesce(extract(epoch FROM max(e.finished_at)
                    - min(greatest(e.submitted_at, to_timestamp($1 / 1e6)))) * 1e3, 0)::float8 AS makespan,
                coalesce(avg(greatest(extract(epoch FROM e.first_started_at
                    - greatest(e.submitted_at, to_timestamp($1 / 1e6))), 0)) * 1e3, 0)::float8 AS waited
         FROM executions e {WHOLE} WHERE m.execution IS NULL AND {PLAYED}"
    );
    let row = rows(pool, sql, from, to).await?;
    let row = row.first().context("a count has one row")?;
    let makespan_ms: f64 = row.try_get("makespan")?;
    let sql = format!(
        "SELECT count(*) AS never_begun FROM executions e {WHOLE}
         WHERE m.execution IS NULL AND e.first_started_at IS NULL AND {}",
        span("e.submitted_at")
    );
    let never = rows(pool, sql, from, to).await?;
    let never = never.first().context("a count has one row")?;
    let sql = format!(
        "SELECT r.cause, count(*) AS moves, coalesce(sum(r.state_bytes), 0)::bigint AS bytes
         FROM rebindings r JOIN executions e ON e.id = r.execution
         WHERE r.at >= to_timestamp($1 / 1e6) AND {PLAYED} GROUP BY r.cause"
    );
    let mut rebindings = BTreeMap::new();
    let mut moved_bytes = 0;
    for row in rows(pool, sql, from, to).await? {
        rebindings.insert(row.try_get("cause")?, row.try_get("moves")?);
        moved_bytes += row.try_get::<i64, _>("bytes")?;
    }
    let computed: u64 = history.executions.iter().map(|e| e.computed_us).sum();
    let slots: u64 = history.nodes.iter().map(|n| u64::from(n.slots)).sum();
    let offered = slots as f64 * makespan_ms * 1e3;
    let wholes = || history.executions.iter().filter(|e| e.part_of.is_none());
    let count = |is: fn(&Submission) -> bool| {
        let specs = wholes().filter_map(|e| e.spec.as_ref());
        specs.filter(|spec| is(spec)).count()
    };
    Ok(Found {
        executions: row.try_get("executions")?,
        completed: row.try_get("completed")?,
        never_begun: never.try_get("never_begun")?,
        unfinished: row.try_get("unfinished")?,
        carried: row.try_get("carried")?,
        in_gangs: count(|spec| spec.gang.is_some()),
        at_once: count(|spec| spec.at_once.is_some()),
        after: count(|spec| !spec.after.is_empty()),
        spread: count(|spec| spec.spread.is_some()),
        parts: history.executions.len() - wholes().count(),
        on_devices: count(|spec| spec.requires.device.is_some()),
        quotas: history.quotas.len(),
        nodes: history.nodes.len(),
        vectors: history.vectors.len(),
        makespan_ms,
        utilization: if offered > 0.0 {
            computed as f64 / offered
        } else {
            0.0
        },
        waited_mean_ms: row.try_get("waited")?,
        rebindings,
        moved_bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_what_lived_when_the_span_began_only_the_rest_counts() {
        assert_eq!(since(10_000, 0, 20), (10_000, 20));
        assert_eq!(since(10_000, 7_500, 20), (2_500, 5));
        // The committed time may lag behind the computed time.
        assert_eq!(since(10_000, 12_000, 20), (1, 1));
        assert_eq!(since(0, 0, 0), (1, 1));
    }
}
