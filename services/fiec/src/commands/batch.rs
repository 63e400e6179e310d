//! `fiec batch status|cancel|pause|resume NAME|ID`: requests about a whole batch.

use std::io::IsTerminal as _;

use clap::{Args, Subcommand};
use fiec_schemas::messages::BatchReply;
use indicatif::{ProgressBar, ProgressStyle};

use crate::client;
use crate::context::{Global, TenantArg};
use crate::exit::Outcome;

/// One answer takes no longer, so that progress is seen.
const WITHIN_MS: u64 = 1_000;
/// Answers in a row that do nothing, after which it is given up.
const IN_VAIN: u32 = 20;

/// Look at a whole batch, cancel, pause or resume it
#[derive(Debug, Args)]
pub struct BatchArgs {
    #[command(subcommand)]
    command: BatchCommand,
}

#[derive(Debug, Subcommand)]
enum BatchCommand {
    /// How many of its executions are in each phase
    Status(NameArgs),
    /// Cancel all of its executions that have not ended
    Cancel(NameArgs),
    /// Pause all of its executions; running ones at their next boundaries
    Pause(NameArgs),
    /// Let all of its paused executions go on
    Resume(NameArgs),
}

/// Names a batch.
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
/// When nobody answers.
pub async fn run(args: BatchArgs, global: &Global) -> anyhow::Result<Outcome> {
    let (verb, args) = match &args.command {
        BatchCommand::Status(args) => ("status", args),
        BatchCommand::Cancel(args) => ("cancel", args),
        BatchCommand::Pause(args) => ("pause", args),
        BatchCommand::Resume(args) => ("resume", args),
    };
    let broker = global.broker("batch").await?;
    let hidden = global.json || !std::io::stderr().is_terminal();
    let bar = if hidden {
        ProgressBar::hidden()
    } else {
        ProgressBar::new(0)
    };
    if let Ok(style) = ProgressStyle::with_template("{bar:40.cyan} {pos}/{len} {elapsed}") {
        bar.set_style(style);
    }
    let (mut done, mut in_vain) = (0, 0);
    let (mut oldest, mut waits_for) = (None, None);
    let (reply, complete) = loop {
        let tenant = &args.tenant.tenant;
        let mut reply =
            client::batch(&broker, verb, tenant, &args.batch, (WITHIN_MS, waits_for)).await?;
        // What was done before is as it should be by now.
        reply.unconcerned = reply.unconcerned.saturating_sub(done);
        let moved = reply.done > 0 || reply.untaken.map(|u| u.oldest) != oldest;
        in_vain = if moved { 0 } else { in_vain + 1 };
        done += reply.done;
        reply.done = done;
        bar.set_length(u64::from(done + reply.left + reply.failed));
        bar.set_position(u64::from(done));
        let untaken = reply.untaken.filter(|_| verb != "status");
        oldest = untaken.map(|u| u.oldest);
        waits_for = untaken.filter(|_| reply.left == 0).map(|u| u.upto);
        let on = reply.left > 0 || untaken.is_some();
        if !on || (reply.error.is_some() && untaken.is_none()) || in_vain >= IN_VAIN {
            break (reply, !on);
        }
    };
    bar.finish_and_clear();
    print(verb, &reply, global.json)?;
    Ok(if complete && reply.error.is_none() && reply.failed == 0 {
        Outcome::Done
    } else {
        Outcome::Failed
    })
}

fn print(verb: &str, reply: &BatchReply, json: bool) -> anyhow::Result<()> {
    if json {
        println!("{}", serde_json::to_string(reply)?);
        return Ok(());
    }
    if let Some(error) = &reply.error {
        eprintln!("{error}");
        if reply.done == 0 {
            return Ok(());
        }
    }
    if verb != "status" {
        let (done, not) = (reply.done, reply.unconcerned);
        println!(
            "{verb}: {done} done, {not} not concerned, {} failed",
            reply.failed
        );
        let computing = reply.phases.contains_key("started");
        if done > 0 && computing && matches!(verb, "pause" | "cancel") {
            let when = if verb == "pause" {
                "pauses at its next boundary"
            } else {
                "ends in a moment"
            };
            println!("what computes {when}");
        }
        for reason in &reply.reasons {
            eprintln!("{reason}");
        }
        if reply.left > 0 {
            let left = reply.left;
            match verb {
                "resume" => eprintln!("{left} have not paused yet, or were not reached; try again"),
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
    Ok(())
}
