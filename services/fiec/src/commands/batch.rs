//! `fiec batch status|cancel|pause|resume NAME|ID`: requests about a whole batch.

use std::collections::BTreeMap;
use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use fiec_broker::Broker;
use fiec_schemas::dependency::Dependency;
use fiec_schemas::messages::{BatchReply, BatchVerb, Member};
use fiec_schemas::{PhaseKind, Tenant};
use indicatif::{ProgressBar, ProgressStyle};

use super::group;
use crate::client;
use crate::context::{Global, TenantArg};
use crate::exit::Outcome;

/// Interval of progress lines if there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(2);

/// Show, cancel, pause or resume a whole batch
#[derive(Debug, Args)]
pub struct BatchArgs {
    #[command(subcommand)]
    command: BatchCommand,
}

#[derive(Debug, Subcommand)]
enum BatchCommand {
    /// Show how many of its executions are in each phase
    Status(NameArgs),
    /// Cancel all of its executions that have not ended
    Cancel(NameArgs),
    /// Pause all of its executions, running ones at their next boundaries
    Pause(NameArgs),
    /// Resume all of its paused executions
    Resume(NameArgs),
}

/// A batch.
#[derive(Debug, Args)]
struct NameArgs {
    /// Name of the batch, or its UUID
    batch: String,
    #[command(flatten)]
    tenant: TenantArg,
}

/// Runs the command.
///
/// # Errors
/// If no policy service answers.
pub async fn run(args: BatchArgs, global: &Global) -> anyhow::Result<Outcome> {
    let (verb, args) = match &args.command {
        BatchCommand::Status(args) => (BatchVerb::Status, args),
        BatchCommand::Cancel(args) => (BatchVerb::Cancel, args),
        BatchCommand::Pause(args) => (BatchVerb::Pause, args),
        BatchCommand::Resume(args) => (BatchVerb::Resume, args),
    };
    let broker = global.broker("batch").await?;
    let about = About {
        verb,
        tenant: &args.tenant.tenant,
        of: &group::of_batch(&args.batch),
        failed: false,
    };
    change(&broker, about, global).await
}

/// What a request about a batch is.
#[derive(Debug, Clone, Copy)]
pub struct About<'a> {
    /// Its verb.
    pub verb: BatchVerb,
    /// The tenant.
    pub tenant: &'a Tenant,
    /// The batch, or another group.
    pub of: &'a Dependency,
    /// For `retry`: what was cancelled stays so.
    pub failed: bool,
}

/// Sends the request, shows its progress, and prints the answer.
///
/// # Errors
/// If no policy service answers.
pub async fn change(broker: &Broker, about: About<'_>, global: &Global) -> anyhow::Result<Outcome> {
    let verb = about.verb;
    let mut progress = Progress::new(verb, global.json);
    let (reply, complete) = drive(broker, about, |reply| progress.show(reply)).await?;
    progress.end();
    print(verb, &reply, global.json)?;
    Ok(if complete && reply.error.is_none() && reply.failed == 0 {
        Outcome::Done
    } else {
        Outcome::Failed
    })
}

/// Requests page after page until all is done or there is no progress. Returns the last answer, and
/// true if it is complete.
///
/// # Errors
/// If no policy service answers.
pub async fn drive(
    broker: &Broker,
    about: About<'_>,
    mut show: impl FnMut(&BatchReply),
) -> anyhow::Result<(BatchReply, bool)> {
    let me = client::me(broker);
    let show = |reply: &BatchReply| {
        show(reply);
        true
    };
    let done = me.all_of_batch(about.verb, about.tenant, about.of, about.failed, show);
    Ok(done.await?)
}

/// Progress of a request: a bar on a terminal, otherwise a line from time to time.
struct Progress {
    verb: BatchVerb,
    bar: Option<ProgressBar>,
    /// Time of the last line. `None` if no lines are printed.
    lines: Option<Instant>,
}

impl Progress {
    fn new(verb: BatchVerb, json: bool) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let bar = (terminal && !json).then(|| {
            let bar = ProgressBar::new(0);
            if let Ok(style) =
                ProgressStyle::with_template("{msg} {bar:40.cyan} {pos}/{len} {elapsed}")
            {
                bar.set_style(style);
            }
            bar
        });
        Self {
            verb,
            bar,
            lines: (!terminal && !json).then(Instant::now),
        }
    }

    fn show(&mut self, reply: &BatchReply) {
        let verb = self.verb;
        let reading = reply.unread > 0;
        let of = u64::from(reply.done + reply.left + reply.failed);
        if let Some(bar) = &self.bar {
            let (message, length, position) = match reading {
                true => ("reading ledgers", reply.unread, 0),
                false => (verb.as_str(), of, u64::from(reply.done)),
            };
            bar.set_message(message);
            bar.set_length(length);
            bar.set_position(position);
        }
        if self.lines.is_some_and(|at| at.elapsed() >= LINE_EVERY) {
            self.lines = Some(Instant::now());
            match reading {
                true => eprintln!("{verb}: {} ledgers to read", reply.unread),
                false => eprintln!("{verb}: {} of {of}", reply.done),
            }
        }
    }

    fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn print(verb: BatchVerb, reply: &BatchReply, json: bool) -> anyhow::Result<()> {
    if json {
        println!("{}", serde_json::to_string(reply)?);
        return Ok(());
    }
    if let Some(error) = &reply.error {
        eprintln!("{error}");
        if reply.done + reply.underway == 0 {
            return Ok(());
        }
    }
    if verb != BatchVerb::Status {
        let (done, not) = (reply.done, reply.unconcerned);
        let underway = match (reply.underway, verb) {
            (0, _) => String::new(),
            (some, BatchVerb::Pause) => format!("{some} at their next boundaries, "),
            (some, _) => format!("{some} in a moment, "),
        };
        println!(
            "{verb}: {done} done, {underway}{not} not concerned, {} failed",
            reply.failed
        );
        for reason in &reply.reasons {
            eprintln!("{reason}");
        }
        if reply.left > 0 {
            let left = reply.left;
            match verb {
                BatchVerb::Resume => {
                    eprintln!("{left} have not paused yet, or were not reached; try again")
                }
                _ => eprintln!("{left} were not reached; try again"),
            }
        }
    }
    if let (None, Some(untaken)) = (&reply.error, &reply.untaken) {
        eprintln!(
            "{} submission messages of the tenant have not been taken in; some may be of this batch",
            untaken.messages
        );
    }
    let phases: Vec<String> = reply
        .phases
        .iter()
        .map(|(phase, count)| format!("{count} {phase}"))
        .collect();
    println!("{}", phases.join(", "));
    name_who_ended_badly(&reply.ended_badly, &reply.phases);
    Ok(())
}

/// Names the executions that failed, are held or were cancelled, and says how many others did.
pub fn name_who_ended_badly(named: &[Member], phases: &BTreeMap<PhaseKind, u32>) {
    for member in named {
        let id = match &member.client_id {
            Some(id) => id.to_string(),
            None => member.id.to_string(),
        };
        eprintln!("{} {id}", member.phase);
    }
    let bad = [PhaseKind::Failed, PhaseKind::Held, PhaseKind::Cancelled];
    let all: u32 = bad.iter().filter_map(|phase| phases.get(phase)).sum();
    let others = (all as usize).saturating_sub(named.len());
    if others > 0 && !named.is_empty() {
        eprintln!("and {others} others: `fiec ls --all --phase failed` lists them");
    }
}
