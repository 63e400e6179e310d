//! `fiec history` and `fiec report`: what PostgreSQL knows of an execution.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use fiec_schemas::{ClientId, ExecutionId, Tenant};
use sqlx::PgPool;

use crate::context::{Global, TenantArg};
use crate::exit::Outcome;
use crate::sql;

/// Whose history to show.
#[derive(Debug, Args)]
pub struct HistoryArgs {
    /// Execution id, or the id that the client gave [default: the last 20 executions]
    pub id: Option<String>,
    #[command(flatten)]
    pub tenant: TenantArg,
}

/// Whose report to write.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Execution id, or the id that the client gave
    pub id: String,
    #[command(flatten)]
    pub tenant: TenantArg,
    /// Where to write the page
    #[arg(long, short, default_value = "report.html")]
    pub output: PathBuf,
}

/// An execution's id from its text: a UUID, or a client's id.
///
/// # Errors
/// When it is neither.
pub fn resolve(tenant: &Tenant, id: &str) -> anyhow::Result<ExecutionId> {
    if let Ok(execution) = id.parse() {
        return Ok(execution);
    }
    let client = ClientId::new(id).context("give the execution's UUID or the client's id")?;
    Ok(ExecutionId::from_client(tenant, &client))
}

/// Prints summaries, placements, rebindings, and what people asked for.
///
/// # Errors
/// When PostgreSQL cannot be reached.
pub async fn run(args: HistoryArgs, global: &Global) -> anyhow::Result<Outcome> {
    let pool = global.database().await?;
    let Some(id) = args.id else {
        // A script gets every column, a person those that fit a page.
        let columns = match global.json {
            true => "e.*, x.capsules",
            false => {
                "coalesce(e.client_id, execution::text) AS id, e.program, e.phase, e.node, \
                 coalesce(x.capsules, boundary) AS boundary, \
                 boundaries_in_all AS of, e.submitted_at::timestamp(0), \
                 date_trunc('milliseconds', age) AS age, e.rebindings AS moves, e.crashes, \
                 left(e.failure, 80) AS failure"
            }
        };
        let rows = sql::query(
            &pool,
            format!(
                "SELECT {columns} FROM execution_summary AS e \
                 JOIN executions AS x ON x.id = e.execution WHERE e.tenant = '{}' \
                 ORDER BY e.submitted_at DESC LIMIT 20",
                args.tenant.tenant
            ),
        )
        .await?;
        rows.print(global.json);
        return Ok(Outcome::Done);
    };
    let execution = resolve(&args.tenant.tenant, &id)?;
    show(&pool, execution, global.json).await
}

/// The summary, a line for each value. The last committed boundary of an execution that has computed
/// to its end says less than the capsules that it took.
fn facts(summary: &sql::Rows) -> Vec<String> {
    let ended = summary.get(0, "capsules").is_some();
    let facts = summary.columns.iter().zip(summary.rows.iter().flatten());
    facts
        .filter(|(column, _)| {
            !(ended && ["boundary", "boundaries_in_all"].contains(&column.as_str()))
        })
        .filter_map(|(column, value)| Some(format!("{column:<22} {}", value.as_ref()?)))
        .collect()
}

/// Prints everything that the history says of one execution.
///
/// # Errors
/// When PostgreSQL refuses a query.
pub async fn show(pool: &PgPool, execution: ExecutionId, json: bool) -> anyhow::Result<Outcome> {
    let summary = sql::query(
        pool,
        format!(
            "SELECT e.*, x.capsules FROM execution_summary AS e \
             JOIN executions AS x ON x.id = e.execution WHERE e.execution = '{execution}'"
        ),
    )
    .await?;
    if summary.rows.is_empty() {
        eprintln!(
            "{execution} is not in the history (yet): is the recorder running, is the tenant right?"
        );
        return Ok(Outcome::Failed);
    }
    if json {
        print!("{}", summary.json_lines());
    } else {
        for line in facts(&summary) {
            println!("{line}");
        }
    }
    for (title, view, columns) in [
        (
            "Placements",
            "placement_timeline",
            "epoch, node, cause, bound_at::timestamp(3), computing_since::time(3), \
             computed_until::time(3), end_reason, gap_ms",
        ),
        (
            "Rebindings",
            "rebinding_history",
            "epoch, from_node, to_node, cause, why, boundary, state_bytes, gap_ms",
        ),
    ] {
        // A script gets every column, a person those that fit a page.
        let columns = if json { "*" } else { columns };
        let rows = sql::query(
            pool,
            format!("SELECT {columns} FROM {view} WHERE execution = '{execution}' ORDER BY epoch"),
        )
        .await?;
        if !json && !rows.rows.is_empty() {
            println!("\n{title} (all columns: SELECT * FROM {view})");
        }
        if !rows.rows.is_empty() {
            rows.print(json);
        }
    }
    let columns = match json {
        true => "*",
        false => {
            "part, from_tile, to_tile, phase, node, tiles_done AS done, split_at::time(3), \
             finished_at::time(3), merged_at::time(3)"
        }
    };
    let parts = format!(
        "SELECT {columns} FROM spread_parts WHERE '{execution}' IN (whole, holder, part) \
         ORDER BY from_tile, to_tile DESC"
    );
    let parts = sql::query(pool, parts).await?;
    if !parts.rows.is_empty() {
        if !json {
            println!("\nParts (all columns: SELECT * FROM spread_parts)");
        }
        parts.print(json);
    }
    let columns = match json {
        true => "*",
        false => "at::timestamp(3), kind, who, node, detail",
    };
    let asked = format!(
        "SELECT {columns} FROM execution_events \
         WHERE execution = '{execution}' AND who IS NOT NULL ORDER BY ordinal"
    );
    let asked = sql::query(pool, asked).await?;
    if !asked.rows.is_empty() {
        if !json {
            println!("\nAsked for (all that happened: SELECT * FROM execution_events)");
        }
        asked.print(json);
    }
    Ok(Outcome::Done)
}

/// Writes the page.
///
/// # Errors
/// When PostgreSQL cannot be reached or the file not be written.
pub async fn report(args: ReportArgs, global: &Global) -> anyhow::Result<Outcome> {
    let pool = global.database().await?;
    let execution = resolve(&args.tenant.tenant, &args.id)?;
    let page = fiec_recorder::report::render(&pool, execution).await?;
    std::fs::write(&args.output, page)
        .with_context(|| format!("cannot write {}", args.output.display()))?;
    println!("{}", args.output.display());
    Ok(Outcome::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(capsules: Option<&str>) -> String {
        let columns = ["phase", "boundary", "boundaries_in_all", "capsules"];
        let values = [Some("x"), Some("0"), Some("475"), capsules];
        let summary = sql::Rows {
            columns: columns.map(str::to_owned).to_vec(),
            rows: vec![values.map(|value| value.map(str::to_owned)).to_vec()],
        };
        facts(&summary).join("\n")
    }

    #[test]
    fn a_completed_execution_shows_its_capsules_and_no_earlier_boundary() {
        let text = summary(Some("475"));
        assert!(text.contains("capsules               475"), "{text}");
        assert!(!text.contains("boundary"), "{text}");
    }

    #[test]
    fn a_live_execution_shows_its_last_committed_boundary() {
        let text = summary(None);
        assert!(text.contains("boundary               0"), "{text}");
        assert!(!text.contains("capsules"), "{text}");
    }
}
