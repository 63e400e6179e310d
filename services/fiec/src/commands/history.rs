//! `fiec history` and `fiec report`: the history of an execution in PostgreSQL.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use clap::Args;
use fiec_broker::{Broker, feed};
use fiec_recorder::RecorderError;
use fiec_recorder::missing::{self, Compared, LedgerEnd, Missing};
use fiec_schemas::{ClientId, ExecutionId, Tenant, Timestamp, subjects};
use serde_json::{Value, json};
use sqlx::PgPool;

use super::history_table;
use crate::client::Unreachable;
use crate::context::{Global, TenantArg};
use crate::exit::Outcome;
use crate::sql;
use crate::table::{Layout, WideArg};

/// Time limit of PostgreSQL for the whole command.
const ANSWER: Duration = Duration::from_secs(30);
/// Time limit of the broker for the position of a ledger.
const ASK: Duration = Duration::from_secs(3);
/// Longest wait for a recorder that is about to write.
const CATCH_UP: Duration = Duration::from_secs(1);

/// Options of `fiec history`.
#[derive(Debug, Args)]
pub struct HistoryArgs {
    /// Execution id, or the id that the client gave [default: the last executions]
    pub id: Option<String>,
    /// List at most N
    #[arg(
        long,
        short = 'n',
        value_name = "N",
        default_value_t = 20,
        conflicts_with = "id"
    )]
    pub limit: u32,
    #[command(flatten)]
    pub tenant: TenantArg,
    #[command(flatten)]
    pub wide: WideArg,
}

/// Options of `fiec report`.
#[derive(Debug, Args)]
#[command(override_usage = "fiec report [OPTIONS] <ID>")]
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

fn not_recorded(id: &str) -> String {
    format!(
        "{id} is not in the history (yet): is the recorder running, is the tenant right? An element \
         of an array is named {id}-0"
    )
}

/// Prints summaries, placements, rebindings, requests of people, and gaps.
///
/// # Errors
/// If PostgreSQL cannot be reached or does not answer in time.
pub async fn run(args: HistoryArgs, global: &Global) -> anyhow::Result<Outcome> {
    let pool = global.database().await?;
    let layout = args.wide.layout();
    within(async {
        match &args.id {
            Some(id) => {
                let execution = resolve(&args.tenant.tenant, id)?;
                let known = show(&pool, &args.tenant.tenant, execution, layout, global).await?;
                if !known {
                    eprintln!("{}", not_recorded(id));
                }
                Ok(if known {
                    Outcome::Done
                } else {
                    Outcome::Failed
                })
            }
            None => list(&pool, &args, global).await,
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

/// The last executions.
async fn list(pool: &PgPool, args: &HistoryArgs, global: &Global) -> anyhow::Result<Outcome> {
    let (tenant, limit, layout) = (&args.tenant.tenant, args.limit, args.wide.layout());
    let behind = behind(pool, global).await?;
    let columns = match global.json {
        true => "e.*, x.capsules".to_owned(),
        false => history_table::selected(layout),
    };
    let rows = sql::query(
        pool,
        format!(
            "SELECT {columns} FROM execution_summary AS e \
             JOIN executions AS x ON x.id = e.execution WHERE e.tenant = '{tenant}' \
             ORDER BY e.submitted_at DESC LIMIT {limit}"
        ),
    )
    .await?;
    rows.print(&history_table::LIST, layout, global.json);
    let of = format!("executions WHERE tenant = '{tenant}'");
    if let Some(words) = sql::left_out(pool, &rows, limit, &of).await? {
        eprintln!("{words}");
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
    layout: Layout,
    global: &Global,
) -> anyhow::Result<bool> {
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
        missing
            .in_words()
            .iter()
            .for_each(|words| eprintln!("{words}"));
        return Ok(false);
    }
    if json {
        for mut object in summary.objects() {
            object.insert("missing".to_owned(), serde_json::to_value(&missing)?);
            println!("{}", Value::Object(object));
        }
    } else {
        println!(
            "{}",
            history_table::facts(&summary, layout, Timestamp::now())
        );
    }
    for section in &history_table::SECTIONS {
        let columns = if json { "*" } else { section.selected };
        let (view, of) = (section.view, section.condition(execution));
        let query = format!("SELECT {columns} FROM {view} WHERE {of}");
        let rows = sql::query(pool, query).await?;
        if rows.rows.is_empty() {
            continue;
        }
        if !json {
            println!("\n{} (all columns: SELECT * FROM {view})", section.title);
        }
        rows.print(section.columns, layout, json);
    }
    let missing = missing.in_words();
    if !json && !missing.is_empty() {
        println!("\nMissing");
        missing.iter().for_each(|words| println!("{words}"));
    }
    Ok(true)
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
        let page = fiec_recorder::report::render(&pool, execution, &missing).await;
        let page = page.map_err(|error| match error {
            RecorderError::NotFound(_) => anyhow!(not_recorded(&args.id)),
            error => error.into(),
        })?;
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
