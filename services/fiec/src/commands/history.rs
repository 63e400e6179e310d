//! `fiec history` and `fiec report`: the history of an execution in PostgreSQL.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::Args;
use fiec_broker::{Broker, feed};
use fiec_recorder::missing::{self, Compared, LedgerEnd, Missing};
use fiec_schemas::{ClientId, ExecutionId, Tenant, subjects};
use serde_json::{Value, json};
use sqlx::PgPool;

use crate::client::Unreachable;
use crate::context::{Global, TenantArg};
use crate::exit::Outcome;
use crate::sql;

/// Time limit of PostgreSQL for the whole command.
const ANSWER: Duration = Duration::from_secs(30);
/// Time limit of the broker for the position of a ledger.
const ASK: Duration = Duration::from_secs(3);
/// Longest wait for a recorder that is about to write.
const CATCH_UP: Duration = Duration::from_secs(1);

/// Options of `fiec history`.
#[derive(Debug, Args)]
pub struct HistoryArgs {
    /// Execution id, or the id that the client gave [default: the last 20 executions]
    pub id: Option<String>,
    #[command(flatten)]
    pub tenant: TenantArg,
}

/// Options of `fiec report`.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Execution id, or the id that the client gave
    pub id: String,
    #[command(flatten)]
    pub tenant: TenantArg,
    /// File to write
    #[arg(long, short, default_value = "report.html")]
    pub output: PathBuf,
}

/// Parses an execution's id: a UUID, or a client's id.
///
/// # Errors
/// If it is neither.
pub fn resolve(tenant: &Tenant, id: &str) -> anyhow::Result<ExecutionId> {
    if let Ok(execution) = id.parse() {
        return Ok(execution);
    }
    let client = ClientId::new(id).context("give the execution's UUID or the client's id")?;
    Ok(ExecutionId::from_client(tenant, &client))
}

/// Prints summaries, placements, rebindings, requests of people, and gaps.
///
/// # Errors
/// If PostgreSQL cannot be reached or does not answer in time.
pub async fn run(args: HistoryArgs, global: &Global) -> anyhow::Result<Outcome> {
    let pool = global.database().await?;
    within(async {
        match &args.id {
            Some(id) => {
                let execution = resolve(&args.tenant.tenant, id)?;
                show(&pool, &args.tenant.tenant, execution, global).await
            }
            None => list(&pool, &args.tenant.tenant, global).await,
        }
    })
    .await
}

/// Runs `work` with the time limit of PostgreSQL.
async fn within<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    match tokio::time::timeout(ANSWER, work).await {
        Ok(done) => done,
        Err(_) => bail!(Unreachable(format!(
            "PostgreSQL did not answer within {} s: see whether it is stopped or overloaded",
            ANSWER.as_secs()
        ))),
    }
}

/// Executions in the list without an id.
const LISTED: u32 = 20;

/// The last executions.
async fn list(pool: &PgPool, tenant: &Tenant, global: &Global) -> anyhow::Result<Outcome> {
    let behind = behind(pool, global).await?;
    // A script gets every column, a person those that fit on a page.
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
        pool,
        format!(
            "SELECT {columns} FROM execution_summary AS e \
             JOIN executions AS x ON x.id = e.execution WHERE e.tenant = '{tenant}' \
             ORDER BY e.submitted_at DESC LIMIT {LISTED}"
        ),
    )
    .await?;
    rows.print(global.json);
    let of = format!("executions WHERE tenant = '{tenant}'");
    if let Some(words) = sql::left_out(pool, &rows, LISTED, &of).await? {
        eprintln!("{words}; `fiec ls --all` lists more");
    }
    if let Some(words) = behind {
        eprintln!("{words}");
    }
    Ok(Outcome::Done)
}

/// A warning about the recorder's lag over all ledgers, if there is a lag.
async fn behind(pool: &PgPool, global: &Global) -> anyhow::Result<Option<String>> {
    let asked = ask(global, async |broker| Ok(feed::bounds(&broker).await?.1)).await;
    let last = match asked {
        Ok(last) => last,
        Err(why) => {
            return Ok(Some(
                Compared::Unknown { why }.in_words().unwrap_or_default(),
            ));
        }
    };
    let recorded = async || -> anyhow::Result<u64> {
        let all = fiec_recorder::checkpoints(pool).await?;
        Ok(all.get(subjects::LEDGER_STREAM).copied().unwrap_or(0))
    };
    let recorded = caught_up(last, recorded).await?;
    let messages = last.saturating_sub(recorded);
    Ok((messages > 0).then(|| {
        format!(
            "the recorder is {messages} ledger messages behind, so this list may be too; see that \
             `fiec recorder` runs"
        )
    }))
}

/// Asks the broker with a time limit. Returns why there is no answer, in words.
async fn ask<T>(
    global: &Global,
    question: impl AsyncFnOnce(Broker) -> anyhow::Result<T>,
) -> Result<T, String> {
    let asked = async {
        let broker = global.broker("history").await?;
        question(broker).await
    };
    match tokio::time::timeout(ASK, asked).await {
        Ok(answer) => answer.map_err(|error| error.to_string()),
        Err(_) => Err(format!("NATS did not answer within {} s", ASK.as_secs())),
    }
}

/// Returns how far the recorder has come, as soon as it has reached `last`, or after [`CATCH_UP`].
/// A running recorder writes a message within milliseconds of its append.
async fn caught_up(
    last: u64,
    recorded: impl AsyncFn() -> anyhow::Result<u64>,
) -> anyhow::Result<u64> {
    let until = Instant::now() + CATCH_UP;
    loop {
        let reached = recorded().await?;
        if reached >= last || Instant::now() >= until {
            return Ok(reached);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Compares the history of an execution with its ledger.
async fn look_for_missing(
    pool: &PgPool,
    tenant: &Tenant,
    execution: ExecutionId,
    global: &Global,
) -> anyhow::Result<Missing> {
    let ledger_end = async || {
        let asked = ask(global, async |broker| {
            Ok(LedgerEnd::of(&broker, tenant, execution).await?)
        });
        asked.await.unwrap_or_else(LedgerEnd::Unknown)
    };
    let ledger = ledger_end().await;
    if let LedgerEnd::At(end) = &ledger {
        let recorded = async || -> anyhow::Result<u64> {
            let reached = missing::recorded(pool, execution).await?;
            Ok(reached.map_or(0, |reached| reached.message))
        };
        caught_up(end.message, recorded).await?;
    }
    let mut missing = missing::read(pool, execution, &ledger).await?;
    if let Compared::LostByBroker { .. } = missing.ledger {
        missing.ledger = missing.ledger.confirmed(&ledger_end().await);
    }
    Ok(missing)
}

/// The summary, one line per value. For a completed execution, the number of capsules replaces the
/// last committed boundary, which says less.
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

/// The tenant of a recorded execution. The id may belong to another tenant than the asker's.
async fn tenant_of(pool: &PgPool, execution: ExecutionId) -> anyhow::Result<Option<Tenant>> {
    let query = format!("SELECT tenant FROM executions WHERE id = '{execution}'");
    let rows = sql::query(pool, query).await?;
    Ok(rows.get(0, "tenant").map(str::parse).transpose()?)
}

/// Prints the history of one execution, and its gaps.
///
/// # Errors
/// If PostgreSQL refuses a query.
async fn show(
    pool: &PgPool,
    tenant: &Tenant,
    execution: ExecutionId,
    global: &Global,
) -> anyhow::Result<Outcome> {
    let json = global.json;
    let recorded = tenant_of(pool, execution).await?;
    let tenant = recorded.as_ref().unwrap_or(tenant);
    let missing = look_for_missing(pool, tenant, execution, global).await?;
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
        missing
            .in_words()
            .iter()
            .for_each(|words| eprintln!("{words}"));
        return Ok(Outcome::Failed);
    }
    if json {
        for mut object in summary.objects() {
            object.insert("missing".to_owned(), serde_json::to_value(&missing)?);
            println!("{}", Value::Object(object));
        }
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
        // A script gets every column, a person those that fit on a page.
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
    let missing = missing.in_words();
    if !json && !missing.is_empty() {
        println!("\nMissing");
        missing.iter().for_each(|words| println!("{words}"));
    }
    Ok(Outcome::Done)
}

/// Writes the page. Prints its gaps to stderr.
///
/// # Errors
/// If PostgreSQL cannot be reached, or the file cannot be written.
pub async fn report(args: ReportArgs, global: &Global) -> anyhow::Result<Outcome> {
    let pool = global.database().await?;
    let execution = resolve(&args.tenant.tenant, &args.id)?;
    let (page, missing) = within(async {
        let recorded = tenant_of(&pool, execution).await?;
        let tenant = recorded.unwrap_or(args.tenant.tenant);
        let missing = look_for_missing(&pool, &tenant, execution, global).await?;
        let page = fiec_recorder::report::render(&pool, execution, &missing).await?;
        Ok((page, missing))
    })
    .await?;
    std::fs::write(&args.output, page)
        .with_context(|| format!("cannot write {}", args.output.display()))?;
    let words = missing.in_words();
    words.iter().for_each(|words| eprintln!("{words}"));
    if global.json {
        println!("{}", json!({"report": args.output, "missing": missing}));
    } else {
        println!("{}", args.output.display());
    }
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
