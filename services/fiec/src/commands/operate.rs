//! `status`, `cancel`, `pause`, `resume`, `yield`: requests about one execution.

use clap::Args;
use fiec_broker::Broker;
use fiec_schemas::messages::{ApiReply, BatchVerb, ExecutionVerb, RefusalCode};
use fiec_schemas::{ClientId, ExecutionState, NodeId, Phase, PhaseKind};

use super::{batch, group};
use crate::client;
use crate::context::{Global, TenantArg};
use crate::exit::Outcome;
use crate::ui;

/// An execution.
#[derive(Debug, Args)]
pub struct ExecutionArgs {
    /// Execution id, or the id that the client gave
    pub id: String,
    #[command(flatten)]
    pub tenant: TenantArg,
}

/// One or more executions.
#[derive(Debug, Args)]
pub struct ExecutionsArgs {
    /// Execution ids, or the ids that the client gave; also an array by its id, and `seed-*`
    #[arg(required = true)]
    pub id: Vec<String>,
    #[command(flatten)]
    pub tenant: TenantArg,
}

/// An execution and an optional node.
#[derive(Debug, Args)]
pub struct YieldArgs {
    #[command(flatten)]
    pub execution: ExecutionArgs,
    /// Node to move to [default: the best other node]
    #[arg(long, value_parser = crate::cli::parse_node)]
    pub to: Option<NodeId>,
}

/// An execution and a node.
#[derive(Debug, Args)]
pub struct MoveArgs {
    #[command(flatten)]
    pub execution: ExecutionArgs,
    /// Node to move to
    #[arg(long, value_parser = crate::cli::parse_node)]
    pub to: NodeId,
}

/// Sends a request about each execution and prints the answers. Returns the worst outcome.
///
/// # Errors
/// If no policy service answers.
pub async fn each(
    verb: ExecutionVerb,
    args: ExecutionsArgs,
    global: &Global,
) -> anyhow::Result<Outcome> {
    let mut worst = Outcome::Done;
    let broker = global.broker(verb.as_str()).await?;
    for (place, id) in args.id.into_iter().enumerate() {
        if place > 0 && verb == ExecutionVerb::Status && !global.json {
            println!("");
        }
        let tenant = args.tenant.clone();
        if let Some(verb) = of_batch(verb)
            && let Some(of) = group::named(&broker, &tenant.tenant, &id).await?
        {
            let about = batch::About {
                verb,
                tenant: &tenant.tenant,
                of: &of,
                failed: false,
            };
            worst = worst.worse(batch::change(&broker, about, global).await?);
            continue;
        }
        let one = ExecutionArgs { id, tenant };
        worst = worst.worse(ask(&broker, verb, &one, None, global).await?);
    }
    Ok(worst)
}

/// The same request about all of a group, if there is one.
fn of_batch(verb: ExecutionVerb) -> Option<BatchVerb> {
    match verb {
        ExecutionVerb::Status => Some(BatchVerb::Status),
        ExecutionVerb::Cancel => Some(BatchVerb::Cancel),
        ExecutionVerb::Pause => Some(BatchVerb::Pause),
        ExecutionVerb::Resume => Some(BatchVerb::Resume),
        ExecutionVerb::Retry => Some(BatchVerb::Retry),
        ExecutionVerb::Yield
        | ExecutionVerb::Reconfigure
        | ExecutionVerb::Adjust
        | ExecutionVerb::Why => None,
    }
}

/// Sends a request and prints the answer.
///
/// # Errors
/// If no policy service answers.
pub async fn run(
    verb: ExecutionVerb,
    args: &ExecutionArgs,
    to: Option<NodeId>,
    global: &Global,
) -> anyhow::Result<Outcome> {
    let broker = global.broker(verb.as_str()).await?;
    ask(&broker, verb, args, to, global).await
}

async fn ask(
    broker: &Broker,
    verb: ExecutionVerb,
    args: &ExecutionArgs,
    to: Option<NodeId>,
    global: &Global,
) -> anyhow::Result<Outcome> {
    let reply = client::me(broker)
        .execution(verb, &args.tenant.tenant, &args.id, to)
        .await?;
    let parts = match &reply.state {
        Some(state) if verb == ExecutionVerb::Status => super::parts::of(broker, state).await,
        _ => Vec::new(),
    };
    if global.json {
        let mut value = serde_json::to_value(&reply)?;
        if let (Some(fields), false) = (value.as_object_mut(), parts.is_empty()) {
            let parts = parts.iter().map(super::parts::Standing::to_json);
            fields.insert("parts".to_owned(), parts.collect());
        }
        println!("{value}");
    }
    if let Some(error) = &reply.error {
        if !global.json {
            eprintln!("{error}");
            let unknown = reply.refusal == Some(RefusalCode::UnknownExecution);
            if verb == ExecutionVerb::Status && unknown {
                for line in refused(args, global).await {
                    eprintln!("{line}");
                }
            }
        }
        return Ok(Outcome::Failed);
    }
    if !global.json {
        let ended = match &reply.state {
            Some(state) if verb == ExecutionVerb::Status && state.phase.is_terminal() => {
                super::watch::ending(broker, state).await
            }
            _ => None,
        };
        print_reply(verb, &reply, ended);
        if !parts.is_empty() {
            println!("{}", super::parts::table(&parts));
        }
    }
    Ok(Outcome::Done)
}

/// The refused lines with this client's id. Empty if PostgreSQL does not answer: the command then
/// prints the service's answer only.
async fn refused(args: &ExecutionArgs, global: &Global) -> Vec<String> {
    let (Ok(_), Ok(client)) = (global.database_url(), ClientId::new(&*args.id)) else {
        return Vec::new();
    };
    let Ok(pool) = global.database().await else {
        return Vec::new();
    };
    super::rejections::of_client(&pool, &args.tenant.tenant, &client)
        .await
        .unwrap_or_default()
}

fn print_reply(verb: ExecutionVerb, reply: &ApiReply, ended: Option<String>) {
    if !reply.message.is_empty() {
        println!("{}", reply.message);
    }
    if verb == ExecutionVerb::Status
        && let Some(state) = &reply.state
    {
        print_state(state, reply, ended);
    }
}

/// Prints an execution's state. `ended`: how it ended, if it did.
fn print_state(state: &ExecutionState, reply: &ApiReply, ended: Option<String>) {
    let mut rows: Vec<(&str, String)> = vec![
        ("execution", state.execution.to_string()),
        ("phase", state.phase.as_str().to_owned()),
    ];
    if state.phase.kind() == PhaseKind::Pending {
        rows.push(("reason", "`fiec why` says what it waits for".to_owned()));
    }
    if let Some(id) = &state.client_id {
        rows.insert(0, ("id", id.to_string()));
    }
    if let Some(b) = state.phase.binding() {
        rows.push((
            "node",
            format!("{} ({}), epoch {}", b.node, b.substrate, state.epoch),
        ));
    }
    if let Phase::Held { reason, .. } = &state.phase {
        rows.push(("held", format!("{reason}; run `fiec retry` to continue")));
    }
    if let Some(spec) = &state.spec {
        rows.push(("program", spec.program.clone()));
        rows.push(("params", shorten(&spec.params.to_string())));
        if let Some(limit) = spec.limit {
            let (us, all) = (state.limited_us(), limit.computed_s);
            rows.push((
                "computed",
                format!("{:.1} s of {all} s (limit)", us as f64 / 1e6),
            ));
        }
    }
    if let Some(batch) = &state.batch {
        let name = state.spec.as_ref().and_then(|spec| spec.batch.as_ref());
        let name = name.map_or_else(|| batch.id.to_string(), ToString::to_string);
        rows.push(("batch", name));
    }
    if let Some(holder) = state.part_of() {
        rows.push(("part of", holder.to_string()));
    }
    if let Some(change) = &state.adjusted {
        rows.push(("changed to", change.in_words()));
    }
    rows.push(("submitted", state.submitted_at.to_string()));
    if state.phase.is_terminal() {
        rows.push(("ended at", state.at.to_string()));
        if state.spec.is_none() {
            let name = match &state.client_id {
                Some(id) => id.to_string(),
                None => state.execution.to_string(),
            };
            let more = format!("`fiec history {name}` has program, nodes and times");
            rows.push(("history", more));
        }
    }
    if let Some(place) = &state.boundary {
        rows.push((
            "committed",
            format!(
                "boundary {}, state of {}",
                place.index,
                ui::bytes(place.bytes)
            ),
        ));
    }
    if let Some(arriving) = &reply.arriving {
        rows.push(("now", arriving.in_words()));
    }
    if let Some(p) = &reply.progress {
        let of = p.of.map_or(String::new(), |of| format!(" of {of}"));
        // The last report of progress may be older than the last commit.
        let reached = p.boundary.max(state.boundary_index());
        rows.push(("reached", format!("boundary {reached}{of}")));
        if let Some(note) = &p.note {
            rows.push(("says", note.clone()));
        }
    }
    rows.push((
        "totals",
        format!(
            "commits: {}, rebindings: {} ({} for pressure)",
            state.totals.commits, state.totals.rebindings, state.totals.pressure,
        ),
    ));
    rows.push((
        "faults",
        format!(
            "{} crashes of the program ({} since the last commit), {} faults of nodes, {} of the \
             infrastructure",
            state.totals.crashes,
            state.crashes_since_commit,
            state.totals.node_faults,
            state.totals.infrastructure_faults
        ),
    ));
    rows.extend(energy(state).map(|words| ("energy", words)));
    rows.extend(ended.map(|words| ("ended", words)));
    for (name, value) in rows {
        println!("{name:<10} {value}");
    }
}

/// Most characters of parameters that are shown.
const PARAMS: usize = 300;

/// The beginning of a text that may be long.
fn shorten(text: &str) -> String {
    match text.char_indices().nth(PARAMS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// The measured energy. `None` if there is no measurement.
fn energy(state: &ExecutionState) -> Option<String> {
    let energy = state.totals.energy?;
    let part = |name: &str, measured: Option<fiec_schemas::energy::Measured>| {
        measured.map(|m| {
            let (joules, intervals) = (m.uj as f64 / 1e6, m.intervals);
            format!("{joules:.3} J of {name} in {intervals} intervals")
        })
    };
    let parts = [part("hosts", energy.host), part("devices", energy.device)];
    Some(parts.into_iter().flatten().collect::<Vec<_>>().join(", "))
}
