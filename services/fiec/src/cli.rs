//! The command line: the commands, their parsing, and how a command ends.

use std::process::ExitCode;

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use fiec_schemas::NodeId;
use fiec_schemas::messages::{ExecutionVerb, NodeVerb};
use tracing_subscriber::EnvFilter;

use crate::commands::{
    adjust, batch, check, console, data, device, doctor, health, history, logs, ls, node, nodes,
    operate, output, packaging, program, quota, reconfigure, rejections, repair, result, retry,
    run_local, serve, submit, wait, watch, webhook, why,
};
use crate::context::Global;
use crate::exit::{HELP, Outcome};
use crate::terminal::LogWriter;
use crate::{client, lab};

/// Long computations that outlive their nodes: capsules, semantic boundaries, measured pressure,
/// history in SQL.
#[derive(Debug, Parser)]
#[command(name = "fiec", version, after_help = HELP, max_term_width = 100)]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

/// The commands of the product. `fiec-lab` has them too.
#[derive(Debug, Subcommand)]
pub enum Command {
    Submit(submit::SubmitArgs),
    Run(run_local::RunArgs),
    Check(check::CheckArgs),
    Program(program::ProgramArgs),
    Data(data::DataArgs),
    /// Show the phase of executions
    Status(operate::ExecutionsArgs),
    Ls(ls::LsArgs),
    Wait(wait::WaitArgs),
    Result(result::ResultArgs),
    /// Follow executions as they move, until they end
    Watch(watch::WatchArgs),
    /// Show the output that an execution's program printed
    Logs(logs::LogsArgs),
    Output(output::OutputArgs),
    /// End executions immediately, without waiting for a boundary
    Cancel(operate::ExecutionsArgs),
    /// Pause an execution at its next boundary, until it is resumed
    Pause(operate::ExecutionArgs),
    /// Resume a paused execution
    Resume(operate::ExecutionArgs),
    Retry(retry::RetryArgs),
    /// Move an execution to another node at its next boundary
    Yield(operate::YieldArgs),
    /// Move an execution to a node at its next boundary
    Move(operate::MoveArgs),
    Adjust(adjust::AdjustArgs),
    Pin(adjust::PinArgs),
    Exclude(adjust::ExcludeArgs),
    /// Let an execution run on any node again
    Unpin(operate::ExecutionArgs),
    /// Change the grant of a running execution: threads, memory, processors
    Reconfigure(reconfigure::ReconfigureArgs),
    Batch(batch::BatchArgs),
    Quota(quota::QuotaArgs),
    Rejections(rejections::RejectionsArgs),
    /// Explain why an execution runs where it runs, or waits
    Why(why::WhyArgs),
    /// Show the history of an execution from PostgreSQL, or of the last 20
    History(history::HistoryArgs),
    /// Write an execution's report: one self-contained HTML page
    Report(history::ReportArgs),
    /// List the nodes with their hardware vectors
    Nodes(nodes::ListArgs),
    Node(node::NodeArgs),
    /// Cordon a node: place no new execution on it
    Cordon(nodes::NodeArgs),
    /// Uncordon a node: place new executions on it again
    Uncordon(nodes::NodeArgs),
    /// Cordon a node, and move its executions away at their next boundaries
    Drain(nodes::DrainArgs),
    /// Undrain a node: place new executions on it again, and stop moving executions away
    Undrain(nodes::NodeArgs),
    /// Check this machine and the servers, and print what is missing and what to do
    Doctor,
    /// Create or update streams, buckets and tables on the servers
    Setup(serve::SetupArgs),
    /// Restore ledgers that the broker has lost, from PostgreSQL
    Repair(repair::RepairArgs),
    /// Run a worker agent
    Worker(Box<serve::WorkerArgs>),
    /// Run a policy service; several can run at once
    Policy(serve::PolicyArgs),
    /// Run the recorder, which folds the ledgers into PostgreSQL
    Recorder(serve::RecorderArgs),
    Console(console::ConsoleArgs),
    Webhook(webhook::WebhookArgs),
    Device(device::DeviceArgs),
    Health(health::HealthArgs),
    Completions(packaging::CompletionsArgs),
    Man(packaging::ManArgs),
    /// Run programs for an agent, as its child process
    #[command(hide = true)]
    ProgramChild,
}

/// Parses a node's name.
///
/// # Errors
/// The rule that the text breaks.
pub fn parse_node(text: &str) -> Result<NodeId, String> {
    text.parse()
        .map_err(|error: fiec_schemas::IdError| error.to_string())
}

/// The command line of `fiec`: the product's commands and the names of the lab's.
fn whole() -> clap::Command {
    lab::with_commands(Cli::command())
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    let mut matches = whole().get_matches();
    if let Some(name) = matches.subcommand_name().filter(|name| lab::has(name)) {
        let error = lab::start(name);
        eprintln!("fiec: {error:#}");
        return Outcome::Failed.into();
    }
    match Cli::from_arg_matches_mut(&mut matches) {
        Ok(cli) => start(cli.command, &cli.global),
        Err(error) => error.format(&mut Cli::command()).exit(),
    }
}

/// Runs a command of the product to its end.
pub fn start(command: Command, global: &Global) -> ExitCode {
    // A child speaks frames on a socket and needs no runtime.
    if matches!(command, Command::ProgramChild) {
        let devices = fiec_cuda::CudaDevices::default();
        return fiec_kit::child_main_with(std::sync::Arc::new(devices));
    }
    let is_service = matches!(
        command,
        Command::Worker(_) | Command::Policy(_) | Command::Recorder(_) | Command::Webhook(_)
    );
    complete(global, is_service, run(command, global))
}

/// Runs a command on this thread, with logs on stderr. Returns the exit code.
pub fn complete(
    global: &Global,
    is_service: bool,
    command: impl Future<Output = anyhow::Result<Outcome>>,
) -> ExitCode {
    log_to_stderr(global, is_service);
    end_quietly_with_the_reader();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let outcome = match runtime {
        Ok(runtime) => runtime.block_on(command),
        Err(error) => Err(error.into()),
    };
    match outcome {
        Ok(outcome) => outcome.into(),
        Err(error) => {
            eprintln!("fiec: {error:#}");
            unreachable_or_failed(&error).into()
        }
    }
}

fn unreachable_or_failed(error: &anyhow::Error) -> Outcome {
    let connect =
        |e: &fiec_broker::BrokerError| matches!(e, fiec_broker::BrokerError::Connect { .. });
    if client::is_unreachable(error)
        || error
            .downcast_ref::<fiec_broker::BrokerError>()
            .is_some_and(connect)
        || error.is::<sqlx::Error>()
    {
        Outcome::Unreachable
    } else {
        Outcome::Failed
    }
}

/// Keeps `fiec history | head` from printing a panic when the reader closes the pipe. The panic
/// still unwinds, so what this process has started is ended and removed.
fn end_quietly_with_the_reader() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let text = info.payload().downcast_ref::<String>();
        let gone = |t: &String| t.starts_with("failed printing to") && t.contains("Broken pipe");
        if !text.is_some_and(gone) {
            before(info);
        }
    }));
}

fn log_to_stderr(global: &Global, service: bool) {
    let default = if service {
        "info,async_nats=warn,sqlx=warn"
    } else {
        "warn"
    };
    let text = global.log.as_deref().unwrap_or(default);
    let filter = EnvFilter::try_new(text).unwrap_or_else(|error| {
        eprintln!("fiec: log filter {text:?} is not valid ({error}); using {default:?}");
        EnvFilter::new(default)
    });
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| LogWriter(std::io::stderr()));
    if global.log_json {
        subscriber.json().flatten_event(true).init();
    } else {
        subscriber.with_ansi(false).init();
    }
}

async fn run(command: Command, global: &Global) -> anyhow::Result<Outcome> {
    match command {
        Command::Submit(args) => submit::run(args, global).await,
        Command::Run(args) => run_local::run(&args, global),
        Command::Check(args) => check::run(&args, global),
        Command::Program(args) => program::run(args, global).await,
        Command::Data(args) => data::run(args, global).await,
        Command::Output(args) => output::run(args, global).await,
        Command::Status(args) => operate::each(ExecutionVerb::Status, args, global).await,
        Command::Cancel(args) => operate::each(ExecutionVerb::Cancel, args, global).await,
        Command::Ls(args) => ls::run(args, global).await,
        Command::Wait(args) => wait::run(args, global).await,
        Command::Result(args) => result::run(args, global).await,
        Command::Rejections(args) => rejections::run(args, global).await,
        Command::Pause(args) => operate::run(ExecutionVerb::Pause, &args, None, global).await,
        Command::Resume(args) => operate::run(ExecutionVerb::Resume, &args, None, global).await,
        Command::Retry(args) => retry::run(args, global).await,
        Command::Why(args) => why::run(&args, global).await,
        Command::Batch(args) => batch::run(args, global).await,
        Command::Quota(args) => quota::run(args, global).await,
        Command::Reconfigure(args) => reconfigure::run(args, global).await,
        Command::Yield(args) => {
            operate::run(ExecutionVerb::Yield, &args.execution, args.to, global).await
        }
        Command::Move(args) => {
            operate::run(ExecutionVerb::Yield, &args.execution, Some(args.to), global).await
        }
        Command::Adjust(args) => adjust::adjust(args, global).await,
        Command::Pin(args) => adjust::pin(args, global).await,
        Command::Exclude(args) => adjust::exclude(args, global).await,
        Command::Unpin(args) => adjust::unpin(&args, global).await,
        Command::Watch(args) => watch::run(args, global).await,
        Command::Logs(args) => logs::run(args, global).await,
        Command::History(args) => history::run(args, global).await,
        Command::Report(args) => history::report(args, global).await,
        Command::Nodes(args) => nodes::list(&args, global).await,
        Command::Node(args) => node::run(args, global).await,
        Command::Cordon(args) => nodes::flag(NodeVerb::Cordon, args, global).await,
        Command::Uncordon(args) => nodes::flag(NodeVerb::Uncordon, args, global).await,
        Command::Drain(args) => nodes::drain(args, global).await,
        Command::Undrain(args) => nodes::flag(NodeVerb::Undrain, args, global).await,
        Command::Doctor => doctor::run(global, Vec::new()).await,
        Command::Setup(args) => serve::setup(args, global).await,
        Command::Repair(args) => repair::repair(args, global).await,
        Command::Worker(args) => serve::worker(*args, global).await,
        Command::Policy(args) => serve::policy(args, global).await,
        Command::Recorder(args) => serve::recorder(args, global).await,
        Command::Console(args) => console::run(args, global).await,
        Command::Webhook(args) => webhook::run(args, global).await,
        Command::Device(args) => device::run(&args, global),
        Command::Health(args) => health::run(args).await,
        Command::Completions(args) => packaging::completions(&args, &whole()),
        Command::Man(args) => packaging::man(&args, whole()),
        Command::ProgramChild => Ok(Outcome::BadInput),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        whole().debug_assert();
    }

    #[test]
    fn a_missing_id_is_told_without_options_that_have_a_default() {
        let error = Cli::try_parse_from(["fiec", "report"]).err().unwrap();
        let text = error.to_string();
        assert!(text.contains("Usage: fiec report [OPTIONS] <ID>"), "{text}");
    }
}
