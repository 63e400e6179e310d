//! `fiec replay`: what was recorded, played again under the policy as it was and under another.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use fiec_schemas::{NodeId, Signal, Submission, Threshold, Timestamp};
use fiec_simulator::history::{
    EventRow, ExecutionRow, History, MODELLED, NodeRow, RECORDED, VectorRow,
};
use fiec_simulator::{Scenario, Summary};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::{PgPool, Row as _};

use super::simulate;
use crate::context::Global;
use crate::exit::Outcome;
use crate::ui;

/// Executions that one replay takes; each is a workload of its own.
const EXECUTIONS_LIMIT: i64 = 200_000;

/// Play recorded vectors and submissions again, under the policy as it was and under another
#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// PostgreSQL with the history [default: --database, or that of the `fiec up` running here]
    #[arg(long, value_name = "URL", hide_env_values = true)]
    pub from_sql: Option<String>,
    /// From when: RFC 3339, or so long ago, e.g. `24h`, `90m`
    #[arg(long, default_value = "24h", value_parser = moment)]
    pub since: Timestamp,
    /// Until when
    #[arg(long, default_value = "0s", value_parser = moment)]
    pub until: Timestamp,
    /// The other policy, e.g. `dwell_ms=30000`, `high.memory=0.8`; may be repeated
    #[arg(long, value_name = "NAME=VALUE", required_unless_present = "save")]
    pub set: Vec<String>,
    /// Write the scenario that was recorded, for `fiec simulate`
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,
}

fn moment(text: &str) -> Result<Timestamp, String> {
    if let Ok(at) = text.parse() {
        return Ok(at);
    }
    let bad =
        || format!("{text:?} is neither a time (2026-05-01T12:00:00Z) nor a span (24h, 90m, 30s)");
    let unit = text.chars().last().ok_or_else(bad)?;
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3_600,
        'd' => 86_400,
        _ => return Err(bad()),
    };
    let number: i64 = text[..text.len() - 1].parse().map_err(|_| bad())?;
    let ago = number.checked_mul(seconds * 1_000_000).ok_or_else(bad)?;
    Ok(Timestamp::from_micros(
        Timestamp::now().micros().saturating_sub(ago),
    ))
}

/// What the history itself says of the span.
#[derive(Debug, Serialize)]
struct Found {
    executions: usize,
    completed: i64,
    /// Submitted in the span, but never begun: how long they compute is not known.
    never_begun: i64,
    /// Of those that are played, the ones that had not ended: what they had computed so far counts.
    unfinished: i64,
    nodes: usize,
    vectors: usize,
    makespan_ms: f64,
    utilization: f64,
    waited_mean_ms: f64,
    rebindings: BTreeMap<String, i64>,
    moved_bytes: i64,
}

/// Plays it again.
///
/// # Errors
/// When PostgreSQL cannot be reached or has nothing of that time.
pub async fn run(args: ReplayArgs, global: &Global) -> anyhow::Result<Outcome> {
    let mut global = global.clone();
    global.database = args.from_sql.clone().or(global.database);
    if args.until.micros() <= args.since.micros() {
        bail!("--until must be later than --since");
    }
    let pool = global.database().await?;
    let (history, found) = read(&pool, args.since, args.until).await?;
    let scenario = history.scenario();
    scenario
        .check()
        .map_err(|error| anyhow::anyhow!("what was recorded is no scenario: {error}"))?;
    if let Some(path) = &args.save {
        std::fs::write(path, scenario.to_json())
            .with_context(|| format!("cannot write {}", path.display()))?;
        eprintln!("{}", path.display());
        if args.set.is_empty() {
            return Ok(Outcome::Done);
        }
    }
    let mut other = scenario.clone();
    for change in &args.set {
        if let Err(error) = fiec_simulator::settings::set(&mut other, change) {
            eprintln!("fiec: --set {error}");
            return Ok(Outcome::BadInput);
        }
    }
    if let Err(error) = other.check() {
        eprintln!("fiec: with --set {}: {error}", args.set.join(" --set "));
        return Ok(Outcome::BadInput);
    }
    let before = played(&scenario, &global)?;
    let after = played(&other, &global)?;
    tell(&args, &found, &before, &after, global.json);
    Ok(Outcome::Done)
}

fn played(scenario: &Scenario, global: &Global) -> anyhow::Result<Summary> {
    let outcome = simulate::with_bar(scenario, global.json).map_err(|e| anyhow::anyhow!("{e}"))?;
    if let Some(violation) = outcome.violation {
        bail!("the replay broke a promise of the policy:\n{violation}");
    }
    Ok(outcome.summary)
}

fn tell(args: &ReplayArgs, found: &Found, before: &Summary, after: &Summary, json: bool) {
    let all = |s: &Summary| s.rebindings.values().sum::<u64>();
    let difference = serde_json::json!({
        "rebindings": all(after).cast_signed() - all(before).cast_signed(),
        "lost_ms": after.lost_ms - before.lost_ms,
        "makespan_ms": after.makespan_ms - before.makespan_ms,
        "utilization": after.utilization - before.utilization,
        "waited_mean_ms": after.waited.mean_ms - before.waited.mean_ms,
        "moved_bytes": after.moved_bytes.cast_signed() - before.moved_bytes.cast_signed(),
    });
    if json {
        let line = serde_json::json!({
            "since": args.since, "until": args.until, "set": args.set,
            "found": found, "as_it_was": before, "changed": after, "difference": difference,
            "recorded": RECORDED, "modelled": MODELLED,
        });
        println!("{line}");
        return;
    }
    println!(
        "Recorded from {} to {}: {} nodes, {} vectors, {} executions ({} completed, {} never begun and left out)",
        args.since,
        args.until,
        found.nodes,
        found.vectors,
        found.executions,
        found.completed,
        found.never_begun
    );
    let moves: i64 = found.rebindings.values().sum();
    let ms = |ms: f64| ui::micros((ms * 1e3) as i64);
    println!(
        "It really took {}, at a utilization of {:.1} %, with {moves} rebindings, {} of σ moved, and \
         {} of waiting in the mean.\n",
        ms(found.makespan_ms),
        found.utilization * 100.0,
        ui::bytes(u64::try_from(found.moved_bytes).unwrap_or(0)),
        ms(found.waited_mean_ms)
    );
    let changed = args.set.join(" ");
    println!(
        "{}",
        simulate::table(&[("as it was", before), (&changed, after)])
    );
    println!("\nWith {changed}, in the model:");
    println!("  rebindings   {:+}", difference["rebindings"]);
    println!(
        "  work lost    {:+.3} s",
        (after.lost_ms - before.lost_ms) / 1e3
    );
    println!(
        "  makespan     {:+.3} s",
        (after.makespan_ms - before.makespan_ms) / 1e3
    );
    let points = (after.utilization - before.utilization) * 100.0;
    println!("  utilization  {points:+.2} points");
    println!("\nRecorded, and taken as it is:");
    RECORDED.iter().for_each(|line| println!("  {line}"));
    println!("Modelled:");
    MODELLED.iter().for_each(|line| println!("  {line}"));
}

fn json<T: DeserializeOwned>(what: &str, text: Option<String>) -> anyhow::Result<Option<T>> {
    text.map(|text| serde_json::from_str(&text))
        .transpose()
        .with_context(|| {
            format!("{what} in the history is of another form than this version reads")
        })
}

async fn read(
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
        executions,
    };
    let found = found(pool, &history, from, to).await?;
    Ok((history, found))
}

/// Times of the span in SQL: `$1` and `$2` are microseconds.
const SPAN: &str = ">= to_timestamp($1 / 1e6) AND {} < to_timestamp($2 / 1e6)";

fn span(column: &str) -> String {
    format!("{column} {}", SPAN.replace("{}", column))
}

async fn rows(
    pool: &PgPool,
    sql: String,
    from: i64,
    to: i64,
) -> anyhow::Result<Vec<sqlx::postgres::PgRow>> {
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
                coalesce(e.capsules, greatest(e.boundary_index, 1))::bigint AS capsules,
                coalesce(e.last_state_bytes, 0)::bigint AS state_bytes
         FROM executions e
         LEFT JOIN LATERAL (
             SELECT sum(extract(epoch FROM computed_until - computing_since) * 1e6)::bigint AS computed_us
             FROM placements WHERE execution = e.id
               AND computed_until IS NOT NULL AND computing_since IS NOT NULL
         ) p ON true
         WHERE {} AND e.first_started_at IS NOT NULL
         ORDER BY e.submitted_at, e.id LIMIT {}",
        span("e.submitted_at"),
        EXECUTIONS_LIMIT + 1
    );
    let found = rows(pool, sql, from, to).await?;
    ensure!(
        i64::try_from(found.len())? <= EXECUTIONS_LIMIT,
        "more than {EXECUTIONS_LIMIT} executions: choose a shorter span with --since and --until"
    );
    let number = |n: i64| u64::try_from(n).unwrap_or(0);
    found
        .iter()
        .map(|row| {
            let spec: Option<Submission> = json("a submission", row.try_get("spec")?)?;
            let (id, tenant): (String, String) = (row.try_get("id")?, row.try_get("tenant")?);
            Ok(ExecutionRow {
                execution: id.parse().context("the id of an execution")?,
                tenant: tenant.parse().context("the tenant of an execution")?,
                submitted_at: Timestamp::from_micros(row.try_get("at")?),
                spec,
                computed_us: number(row.try_get("computed_us")?),
                capsules: number(row.try_get("capsules")?),
                state_bytes: number(row.try_get("state_bytes")?),
            })
        })
        .collect()
}

async fn nodes(pool: &PgPool, from: i64, to: i64) -> anyhow::Result<Vec<NodeRow>> {
    let sql = format!(
        "SELECT node, coalesce(slots, 1) AS slots, coalesce(memory_limit_bytes, 0) AS memory,
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
         FROM node_events WHERE {} AND what <> 'viability' ORDER BY node, at, seq",
        span("at")
    );
    let found = rows(pool, sql, from, to).await?;
    found
        .iter()
        .map(|row| {
            Ok(EventRow {
                node: NodeId::new(row.try_get::<String, _>("node")?)?,
                at: Timestamp::from_micros(row.try_get("at")?),
                what: row.try_get("what")?,
            })
        })
        .collect()
}

async fn found(pool: &PgPool, history: &History, from: i64, to: i64) -> anyhow::Result<Found> {
    let sql = format!(
        "SELECT count(*) FILTER (WHERE phase = 'completed') AS completed,
                count(*) FILTER (WHERE first_started_at IS NULL) AS never_begun,
                count(*) FILTER (WHERE finished_at IS NULL AND first_started_at IS NOT NULL) AS unfinished,
                coalesce(extract(epoch FROM max(finished_at) - min(submitted_at)) * 1e3, 0)::float8 AS makespan,
                coalesce(avg(extract(epoch FROM first_started_at - submitted_at)) * 1e3, 0)::float8 AS waited
         FROM executions WHERE {}",
        span("submitted_at")
    );
    let row = rows(pool, sql, from, to).await?;
    let row = row.first().context("a count has one row")?;
    let makespan_ms: f64 = row.try_get("makespan")?;
    let sql = format!(
        "SELECT r.cause, count(*) AS moves, coalesce(sum(r.state_bytes), 0)::bigint AS bytes
         FROM rebindings r JOIN executions e ON e.id = r.execution WHERE {} GROUP BY r.cause",
        span("e.submitted_at")
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
    Ok(Found {
        executions: history.executions.len(),
        completed: row.try_get("completed")?,
        never_begun: row.try_get("never_begun")?,
        unfinished: row.try_get("unfinished")?,
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
    fn a_moment_is_a_time_or_a_span_ago() {
        let now = Timestamp::now().micros();
        let hour = moment("1h").unwrap().micros();
        assert!((now - hour - 3_600_000_000).abs() < 5_000_000);
        assert_eq!(
            moment("2026-05-01T12:00:00Z").unwrap().to_string(),
            "2026-05-01T12:00:00.000000Z"
        );
        for bad in ["", "h", "yesterday", "1w", "é"] {
            assert!(moment(bad).is_err(), "{bad}");
        }
    }
}
