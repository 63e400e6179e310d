//! `fiec result ID`: the result of an execution and its outputs.

use std::path::PathBuf;

use clap::Args;
use fiec_broker::{Broker, Ledger, results};
use fiec_schemas::{Event, ExecutionId, Phase, PhaseKind, Tenant};
use serde_json::Value;

use super::{group, output, wait};
use crate::context::{Global, TenantArg};
use crate::exit::Outcome;
use crate::sql;

/// Print the result of a completed execution as JSON; with --output also fetch its outputs
///
/// Of a batch, of an array (by its id), and of all ids that begin alike (`seed-*`), it prints the
/// results of all executions as one JSON array, or as CSV.
#[derive(Debug, Args)]
pub struct ResultArgs {
    /// Execution id, or the id that the client gave
    #[arg(required_unless_present = "batch", conflicts_with = "batch")]
    pub id: Option<String>,
    /// All of a batch: its name, or its UUID
    #[arg(long)]
    pub batch: Option<String>,
    /// As CSV: a row for each execution, a column for each field
    #[arg(long)]
    pub csv: bool,
    /// Folder for all outputs, each under its name; of several executions, in a folder for each
    #[arg(long, short, value_name = "DIR")]
    pub output: Option<PathBuf>,
    #[command(flatten)]
    pub tenant: TenantArg,
}

/// How an execution ended.
struct End {
    phase: PhaseKind,
    result: Option<Value>,
    /// The reason, if it did not complete.
    words: Option<String>,
}

/// Runs the command.
///
/// # Errors
/// If the servers cannot be reached, or an output cannot be written.
pub async fn run(args: ResultArgs, global: &Global) -> anyhow::Result<Outcome> {
    let tenant = &args.tenant.tenant;
    let broker = global.broker("result").await?;
    let named = match (&args.id, &args.batch) {
        (_, Some(batch)) => Some(group::of_batch(batch)),
        (Some(id), None) => group::named(&broker, tenant, id).await?,
        (None, None) => None,
    };
    if let Some(of) = named {
        let format = match args.csv {
            true => group::Format::Csv,
            false => group::Format::Json,
        };
        return group::results((tenant, &of), format, args.output.as_deref(), global).await;
    }
    let id = args.id.as_deref().unwrap_or_default();
    let execution = super::history::resolve(tenant, id)?;
    let mut end = of_ledger(&broker, tenant, execution).await?;
    if end
        .as_ref()
        .is_none_or(|end| end.phase == PhaseKind::Completed && end.result.is_none())
    {
        end = of_history(global, tenant, execution).await?.or(end);
    }
    let Some(end) = end else {
        eprintln!("tenant {tenant} has no execution {id}");
        return Ok(Outcome::Failed);
    };
    if end.phase != PhaseKind::Completed {
        let outcome = wait::outcome_of(end.phase);
        match outcome {
            Some(_) => eprintln!("{id} {}", end.words.unwrap_or(end.phase.to_string())),
            None => eprintln!("{id} is {}; `fiec wait {id}` waits for its end", end.phase),
        }
        return Ok(outcome.unwrap_or(Outcome::Failed));
    }
    let result = end.result.unwrap_or(Value::Null);
    match args.csv {
        true => print!("{}", group::one_as_csv(id, execution, result)?),
        false => println!("{result}"),
    }
    match &args.output {
        Some(folder) => output::fetch_all(tenant, id, folder, global).await,
        None => Ok(Outcome::Done),
    }
}

async fn of_ledger(
    broker: &Broker,
    tenant: &Tenant,
    execution: ExecutionId,
) -> anyhow::Result<Option<End>> {
    let Some(entry) = Ledger::new(broker).last(tenant, execution).await? else {
        return Ok(None);
    };
    let mut message = entry.message;
    if message.state.phase == Phase::Completed {
        results::resolve(broker, &mut message).await?;
    }
    let words = super::watch::in_words(&message).pop();
    let result = message.events.into_iter().find_map(|event| match event {
        Event::Completed { result, .. } => Some(result),
        _ => None,
    });
    Ok(Some(End {
        phase: message.state.phase.kind(),
        result,
        words,
    }))
}

/// The end of an execution from PostgreSQL, if PostgreSQL can be reached.
async fn of_history(
    global: &Global,
    tenant: &Tenant,
    execution: ExecutionId,
) -> anyhow::Result<Option<End>> {
    if global.database_url().is_err() {
        return Ok(None);
    }
    let pool = global.database().await?;
    let query = format!(
        "SELECT phase, result::text AS result, failure FROM executions \
         WHERE id = '{execution}' AND tenant = '{tenant}'"
    );
    let rows = sql::query(&pool, query).await?;
    let Some(phase) = rows.get(0, "phase") else {
        return Ok(None);
    };
    let phase = sql::parse_phase(execution, phase)?;
    let result = rows
        .get(0, "result")
        .map(serde_json::from_str)
        .transpose()?;
    let failure = rows
        .get(0, "failure")
        .map(|words| format!("{phase}: {words}"));
    Ok(Some(End {
        phase,
        result,
        words: failure,
    }))
}
