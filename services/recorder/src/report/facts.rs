//! The facts of a report, read from the tables; bounded, however long the execution is.

use std::collections::BTreeSet;

use fiec_schemas::dependency::Dependency;
use fiec_schemas::{ExecutionId, PhaseKind, Timestamp};
use serde_json::Value;
use sqlx::postgres::PgRow;
use sqlx::{PgPool, Row};

use super::changes::{Change, changes, limits, limits_over_time};
use crate::error::{RecorderError, Result};
use crate::read::time;
use crate::time::PgTime;

/// Most points of a figure's line, and rows of a table.
const POINTS: i64 = 1_500;
/// Most curves that are drawn.
const CURVES: usize = 24;
pub(super) const TABLE_ROWS: i64 = 500;

pub(super) struct Facts {
    /// Names and values, for the head of the page.
    pub summary: Vec<(&'static str, String)>,
    /// Its phase is one that nobody wished: it failed, is held or was cancelled.
    pub ended_badly: bool,
    pub title: String,
    pub submitted_at: Timestamp,
    /// End of the figures.
    pub until: Timestamp,
    pub placements: Vec<Placement>,
    pub boundaries: Vec<(Timestamp, i64)>,
    pub rebindings: Vec<Rebinding>,
    pub decisions: Vec<Decision>,
    pub changes: Vec<Change>,
    pub signals: Vec<Signal>,
    /// Numbers that the program reported.
    pub curves: Vec<Curve>,
    /// Names of further curves, which are not drawn.
    pub more_curves: usize,
    /// The gaps in the history, each a sentence.
    pub missing: Vec<String>,
}

pub(super) struct Placement {
    pub epoch: i64,
    pub node: String,
    pub cause: String,
    pub bound_at: Option<Timestamp>,
    pub started_at: Option<Timestamp>,
    pub ended_at: Option<Timestamp>,
    pub end_reason: String,
    pub gap_us: Option<i64>,
    /// Of the host and of the device, where they were measured.
    pub joules: [Option<String>; 2],
}

pub(super) struct Rebinding {
    pub epoch: i64,
    pub at: Timestamp,
    pub from: String,
    pub to: String,
    pub why: String,
    pub signal: Option<String>,
    pub high: Option<f64>,
    pub low: Option<f64>,
    pub boundary: Option<i64>,
    pub gap_us: Option<i64>,
}

pub(super) struct Decision {
    pub epoch: i64,
    pub at: Timestamp,
    pub cause: String,
    pub chosen: String,
    pub words: String,
}

/// One signal at the nodes concerned.
pub(super) struct Signal {
    pub name: String,
    /// High and low where the execution ran, each from when on; empty if they are not known.
    pub limits: Vec<(Timestamp, (f64, f64))>,
    /// Points of each node.
    pub lines: Vec<(String, Vec<(Timestamp, f64)>)>,
}

/// The numbers of one name, by boundary.
pub(super) struct Curve {
    pub name: String,
    pub points: Vec<CurvePoint>,
}

pub(super) struct CurvePoint {
    pub boundary: i64,
    pub value: f64,
    pub lowest: f64,
    pub highest: f64,
    pub node: String,
}

pub(super) fn text(row: &PgRow, column: &str) -> sqlx::Result<String> {
    Ok(row
        .try_get::<Option<String>, _>(column)?
        .unwrap_or_default())
}

pub(super) async fn load(pool: &PgPool, id: ExecutionId, missing: Vec<String>) -> Result<Facts> {
    read(pool, id, missing).await.map_err(RecorderError::database("read the history"))?.ok_or_else(|| {
        RecorderError::NotFound(format!(
            "execution {id} is not recorded in this database; is the id right, is a recorder running?"
        ))
    })
}

async fn read(pool: &PgPool, id: ExecutionId, missing: Vec<String>) -> sqlx::Result<Option<Facts>> {
    let Some(row) = sqlx::query(
        "SELECT s.*, x.capsules, x.spec ->> 'batch' AS batch_name, x.spec -> 'params' AS params, \
         x.spec -> 'after' AS waits_for, host_joules::text AS host_joules_text, device_joules::text AS \
         device_joules_text, energy_coverage::text AS energy_coverage_text \
         FROM execution_summary s JOIN executions x ON x.id = s.execution WHERE execution = $1",
    )
    .bind(id.0)
    .fetch_optional(pool)
    .await?
    else {
        return Ok(None);
    };
    let submitted_at = time(&row, "submitted_at")?.unwrap_or_default();
    let finished_at = time(&row, "finished_at")?;
    let until = finished_at.unwrap_or_else(Timestamp::now);
    let client = text(&row, "client_id")?;
    let title = if client.is_empty() {
        id.to_string()
    } else {
        client
    };
    let placements = placements(pool, id).await?;
    let rebindings = rebindings(pool, id).await?;
    let changes = changes(pool, id).await?;
    let moves = (&placements[..], &rebindings[..]);
    let signals = signals(pool, id, moves, &changes, (submitted_at, until)).await?;
    let mut curves = curves(pool, id).await?;
    let more_curves = curves.len().saturating_sub(CURVES);
    curves.truncate(CURVES);
    let phase: Option<PhaseKind> = text(&row, "phase")?.parse().ok();
    Ok(Some(Facts {
        ended_badly: phase.is_some_and(PhaseKind::can_be_retried),
        summary: summary(id, &row, submitted_at, finished_at)?,
        title,
        submitted_at,
        until,
        boundaries: boundaries(pool, id, submitted_at).await?,
        decisions: decisions(pool, id, submitted_at).await?,
        placements,
        rebindings,
        changes,
        signals,
        curves,
        more_curves,
        missing,
    }))
}

fn summary(
    id: ExecutionId,
    row: &PgRow,
    submitted_at: Timestamp,
    finished_at: Option<Timestamp>,
) -> sqlx::Result<Vec<(&'static str, String)>> {
    let number = |column| row.try_get::<i64, _>(column);
    let mut facts = vec![
        ("execution", id.to_string()),
        ("tenant", text(row, "tenant")?),
        ("program", text(row, "program")?),
        ("parameters", parameters(row)?),
        ("batch", text(row, "batch_name")?),
        ("waits for", waits_for(row)?),
        ("phase", text(row, "phase")?),
        ("submitted", submitted_at.to_string()),
    ];
    let started = time(row, "first_started_at")?;
    if let Some(started) = started {
        facts.push(("first started", started.to_string()));
    }
    if let Some(finished) = finished_at {
        facts.push(("finished", finished.to_string()));
        facts.push(("took", seconds(finished.micros() - submitted_at.micros())));
    }
    let of: Option<i64> = row.try_get("boundaries_in_all")?;
    let of = of.map(|of| format!(" of {of}")).unwrap_or_default();
    facts.push(match row.try_get::<Option<i64>, _>("capsules")? {
        Some(capsules) => ("computed to its end", format!("{capsules} capsules")),
        None => (
            "last committed boundary",
            format!("{}{of}", number("boundary")?),
        ),
    });
    facts.push(("commits", number("commits")?.to_string()));
    facts.push(("rebindings", number("rebindings")?.to_string()));
    facts.push((
        "of them for pressure",
        number("pressure_rebindings")?.to_string(),
    ));
    facts.push(("crashes", number("crashes")?.to_string()));
    facts.push(("energy", energy(row)?));
    facts.push(("state digest", text(row, "state_digest")?));
    facts.push(("contract", text(row, "contract")?));
    if let Some(Value::Object(labels)) = row.try_get::<Option<Value>, _>("labels")? {
        let words: Vec<String> = labels
            .iter()
            .map(|(k, v)| format!("{k} = {}", plain(v)))
            .collect();
        facts.push(("labels", words.join(", ")));
    }
    match row.try_get::<Option<Value>, _>("result")? {
        Some(Value::Object(result)) => {
            let words: Vec<String> = result
                .iter()
                .map(|(k, v)| format!("{k} = {}", plain(v)))
                .collect();
            facts.push(("result", words.join("\n")));
        }
        Some(other) => facts.push(("result", plain(&other))),
        None => {}
    }
    facts.push(("failure", text(row, "failure")?));
    facts.push(("end of stderr", text(row, "stderr_tail")?));
    facts.retain(|(_, value)| !value.is_empty());
    Ok(facts)
}

/// Most characters of the parameters.
const PARAMETERS: usize = 2_000;

/// One parameter a line.
fn parameters(row: &PgRow) -> sqlx::Result<String> {
    let Some(Value::Object(params)) = row.try_get::<Option<Value>, _>("params")? else {
        return Ok(String::new());
    };
    let words: Vec<String> = params
        .iter()
        .map(|(k, v)| format!("{k} = {}", plain(v)))
        .collect();
    let words = words.join("\n");
    Ok(match words.char_indices().nth(PARAMETERS) {
        Some((end, _)) => format!("{}…", &words[..end]),
        None => words,
    })
}

/// The executions and groups in `after`.
fn waits_for(row: &PgRow) -> sqlx::Result<String> {
    let Some(after) = row.try_get::<Option<Value>, _>("waits_for")? else {
        return Ok(String::new());
    };
    let after: Vec<Dependency> = serde_json::from_value(after).unwrap_or_default();
    let mut words: Vec<String> = after.iter().take(20).map(ToString::to_string).collect();
    if after.len() > words.len() {
        words.push(format!("{} more", after.len() - words.len()));
    }
    Ok(words.join(", "))
}

/// Joules of hosts and devices, where they were measured; else empty.
fn energy(row: &PgRow) -> sqlx::Result<String> {
    let mut words = Vec::new();
    for (name, uj) in [("hosts", "host_joules"), ("devices", "device_joules")] {
        if let Some(joules) = joules(row, uj)? {
            words.push(format!("{joules} J of {name}"));
        }
    }
    let coverage = joules(row, "energy_coverage")?;
    if let (false, Some(share)) = (words.is_empty(), coverage) {
        let percent = share.parse::<f64>().unwrap_or(0.0) * 100.0;
        words.push(format!(
            "measured in {percent:.0} % of the intervals between commits"
        ));
    }
    Ok(words.join(", "))
}

/// A column of joules as the text that PostgreSQL writes.
fn joules(row: &PgRow, column: &str) -> sqlx::Result<Option<String>> {
    row.try_get(&*format!("{column}_text"))
}

fn plain(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}

/// Microseconds for people.
pub(super) fn seconds(us: i64) -> String {
    format!("{:.3} s", us as f64 / 1e6)
}

async fn placements(pool: &PgPool, id: ExecutionId) -> sqlx::Result<Vec<Placement>> {
    let rows = sqlx::query(
        "SELECT *, fiec_joules(host_uj)::text AS host_text, \
         fiec_joules(device_uj)::text AS device_text \
         FROM placements WHERE execution = $1 ORDER BY epoch LIMIT $2",
    )
    .bind(id.0)
    .bind(TABLE_ROWS)
    .fetch_all(pool)
    .await?;
    let read = |row: &PgRow| {
        Ok(Placement {
            epoch: row.try_get("epoch")?,
            node: row
                .try_get::<Option<String>, _>("node")?
                .unwrap_or_else(|| "unknown".to_owned()),
            cause: text(row, "cause")?,
            bound_at: time(row, "bound_at")?,
            started_at: time(row, "started_at")?,
            ended_at: time(row, "ended_at")?,
            end_reason: text(row, "end_reason")?,
            gap_us: row.try_get("gap_us")?,
            joules: [row.try_get("host_text")?, row.try_get("device_text")?],
        })
    };
    rows.iter().map(read).collect()
}

async fn rebindings(pool: &PgPool, id: ExecutionId) -> sqlx::Result<Vec<Rebinding>> {
    let rows = sqlx::query("SELECT * FROM rebindings WHERE execution = $1 ORDER BY epoch LIMIT $2")
        .bind(id.0)
        .bind(TABLE_ROWS)
        .fetch_all(pool)
        .await?;
    let read = |row: &PgRow| {
        Ok(Rebinding {
            epoch: row.try_get("epoch")?,
            at: time(row, "at")?.unwrap_or_default(),
            from: text(row, "from_node")?,
            to: text(row, "to_node")?,
            why: text(row, "cause_detail")?,
            signal: row.try_get("signal")?,
            high: row.try_get("high")?,
            low: row.try_get("low")?,
            boundary: row.try_get("state_index")?,
            gap_us: row.try_get("gap_us")?,
        })
    };
    rows.iter().map(read).collect()
}

async fn boundaries(
    pool: &PgPool,
    id: ExecutionId,
    since: Timestamp,
) -> sqlx::Result<Vec<(Timestamp, i64)>> {
    let rows = sqlx::query(
        "SELECT index, committed_at FROM (SELECT index, committed_at, \
         row_number() OVER (ORDER BY ordinal) AS n, count(*) OVER () AS all_of_them \
         FROM boundaries WHERE execution = $1 AND committed_at >= $2 - interval '1 hour') b \
         WHERE n % greatest(1, all_of_them / $3) = 0 OR n = all_of_them ORDER BY n",
    )
    .bind(id.0)
    .bind(PgTime(since))
    .bind(POINTS)
    .fetch_all(pool)
    .await?;
    rows.iter()
        .map(|row| {
            Ok((
                time(row, "committed_at")?.unwrap_or_default(),
                row.try_get("index")?,
            ))
        })
        .collect()
}

async fn curves(pool: &PgPool, id: ExecutionId) -> sqlx::Result<Vec<Curve>> {
    let rows = sqlx::query(
        "SELECT name, boundary, value, lowest, highest, node FROM (SELECT *, \
         row_number() OVER (PARTITION BY name ORDER BY boundary) AS n, \
         count(*) OVER (PARTITION BY name) AS all_of_them \
         FROM execution_series WHERE execution = $1 AND name IN (SELECT DISTINCT name FROM series_points \
         WHERE execution = $1 ORDER BY name LIMIT 200)) s \
         WHERE n % greatest(1, all_of_them / $2) = 0 OR n IN (1, all_of_them) ORDER BY name, boundary",
    )
    .bind(id.0)
    .bind(POINTS)
    .fetch_all(pool)
    .await?;
    let mut curves: Vec<Curve> = Vec::new();
    for row in &rows {
        let name = text(row, "name")?;
        let point = CurvePoint {
            boundary: row.try_get("boundary")?,
            value: row.try_get("value")?,
            lowest: row.try_get("lowest")?,
            highest: row.try_get("highest")?,
            node: text(row, "node")?,
        };
        match curves.last_mut() {
            Some(curve) if curve.name == name => curve.points.push(point),
            _ => curves.push(Curve {
                name,
                points: vec![point],
            }),
        }
    }
    Ok(curves)
}

async fn decisions(
    pool: &PgPool,
    id: ExecutionId,
    since: Timestamp,
) -> sqlx::Result<Vec<Decision>> {
    let rows = sqlx::query(
        "SELECT epoch, at, cause, chosen, fiec_candidates_in_words(candidates, omitted) AS words \
         FROM decisions WHERE execution = $1 AND at >= $2 - interval '1 hour' \
         ORDER BY ordinal LIMIT $3",
    )
    .bind(id.0)
    .bind(PgTime(since))
    .bind(TABLE_ROWS)
    .fetch_all(pool)
    .await?;
    let read = |row: &PgRow| {
        Ok(Decision {
            epoch: row.try_get("epoch")?,
            at: time(row, "at")?.unwrap_or_default(),
            cause: text(row, "cause")?,
            chosen: text(row, "chosen")?,
            words: text(row, "words")?,
        })
    };
    rows.iter().map(read).collect()
}

/// The signals that moved the execution, or memory if none did.
async fn signals(
    pool: &PgPool,
    id: ExecutionId,
    (placements, rebindings): (&[Placement], &[Rebinding]),
    changes: &[Change],
    (since, until): (Timestamp, Timestamp),
) -> sqlx::Result<Vec<Signal>> {
    let mut names: BTreeSet<&str> = rebindings
        .iter()
        .filter_map(|r| r.signal.as_deref())
        .collect();
    if names.is_empty() {
        names.insert("memory");
    }
    let nodes: BTreeSet<&str> = placements.iter().map(|p| p.node.as_str()).collect();
    let mut signals = Vec::new();
    for name in names {
        // The submission's own threshold, else the node's.
        let declared = sqlx::query(
            "SELECT coalesce(e.spec -> 'viability' -> $2, n.thresholds -> $2) AS threshold \
             FROM executions e LEFT JOIN nodes n ON n.node = e.node WHERE e.id = $1",
        )
        .bind(id.0)
        .bind(name)
        .fetch_optional(pool)
        .await?
        .and_then(|row| row.try_get::<Option<Value>, _>("threshold").ok().flatten())
        .and_then(|threshold| limits(&threshold));
        let mut lines = Vec::new();
        for node in nodes.iter().take(12) {
            let rows = sqlx::query(
                "SELECT at, value FROM (SELECT at, (to_jsonb(v) ->> $2)::float8 AS value, \
                 row_number() OVER (ORDER BY at) AS n, count(*) OVER () AS all_of_them \
                 FROM hardware_vectors v WHERE node = $1 AND at >= $3 - interval '10 seconds' \
                 AND at <= $4 + interval '10 seconds') w \
                 WHERE value IS NOT NULL AND n % greatest(1, all_of_them / $5) = 0 ORDER BY n",
            )
            .bind(*node)
            .bind(name)
            .bind(PgTime(since))
            .bind(PgTime(until))
            .bind(POINTS)
            .fetch_all(pool)
            .await?;
            let points = rows
                .iter()
                .map(|row| Ok((time(row, "at")?.unwrap_or_default(), row.try_get("value")?)))
                .collect::<sqlx::Result<Vec<_>>>()?;
            if !points.is_empty() {
                lines.push(((*node).to_owned(), points));
            }
        }
        signals.push(Signal {
            name: name.to_owned(),
            limits: limits_over_time(name, (since, declared), rebindings, changes),
            lines,
        });
    }
    Ok(signals)
}
