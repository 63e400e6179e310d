//! `adjust`, `pin`, `exclude`, `unpin`: changes of a live execution.

use std::time::Duration;

use clap::Args;
use fiec_schemas::messages::{ApiReply, ExecutionVerb};
use fiec_schemas::scheduling::{Adjustment, Deadline, OnMiss};
use fiec_schemas::{NodeId, Signal, Threshold, Timestamp};

use super::operate::ExecutionArgs;
use super::serve::{parse_bytes, parse_threshold};
use crate::client;
use crate::context::Global;
use crate::exit::Outcome;

/// Change priority, thresholds, deadline or memory of a live execution
///
/// The change applies immediately. Settings that you do not name keep their values. The ledger records
/// the change and who asked for it. The change stays with the execution when it moves. If the
/// execution has split off parts, it applies to all of them, as pin, exclude and unpin do.
#[derive(Debug, Args)]
pub struct AdjustArgs {
    #[command(flatten)]
    pub execution: ExecutionArgs,
    #[command(flatten)]
    pub changes: ChangeArgs,
}

/// Settings of an execution that can be changed.
#[derive(Debug, Args)]
pub struct ChangeArgs {
    /// Priority from -100 to 100; a higher one is served first
    #[arg(long, allow_hyphen_values = true, value_parser = clap::value_parser!(i16).range(-100..=100))]
    pub priority: Option<i16>,
    /// Threshold instead of the node's: signal=high,low,dwell_ms, e.g. memory=0.8,0.7,2000;
    /// repeatable
    #[arg(long, value_parser = parse_threshold)]
    pub threshold: Vec<(Signal, Threshold)>,
    /// Deadline: a time after the submission, e.g. 2h, or a date and time (RFC 3339). It replaces the
    /// old deadline: without --fail-late the execution continues after it
    #[arg(long, value_parser = parse_deadline)]
    pub deadline: Option<Deadline>,
    /// Fail the execution if it misses its deadline
    #[arg(long, requires = "deadline")]
    pub fail_late: bool,
    /// Host memory that it needs, e.g. 2GiB
    #[arg(long, value_parser = parse_bytes)]
    pub memory: Option<u64>,
    /// Device memory that it needs
    #[arg(long, value_parser = parse_bytes)]
    pub device_memory: Option<u64>,
}

impl ChangeArgs {
    /// The change, if there is one.
    pub fn change(self) -> Option<Adjustment> {
        let mut deadline = self.deadline;
        if let Some(deadline) = deadline.as_mut().filter(|_| self.fail_late) {
            deadline.on_miss = OnMiss::Fail;
        }
        let change = Adjustment {
            priority: self.priority,
            deadline,
            viability: self.threshold.into_iter().collect(),
            memory_bytes: self.memory,
            device_memory_bytes: self.device_memory,
            ..Adjustment::default()
        };
        Some(change).filter(|change| !change.is_empty())
    }
}

/// Let an execution and its parts run on these nodes only; it moves if it runs on another one
#[derive(Debug, Args)]
pub struct PinArgs {
    #[command(flatten)]
    pub execution: ExecutionArgs,
    /// The nodes
    #[arg(required = true, value_parser = crate::cli::parse_node)]
    pub node: Vec<NodeId>,
}

/// Keep an execution off these nodes, in addition to nodes that were excluded before
#[derive(Debug, Args)]
pub struct ExcludeArgs {
    #[command(flatten)]
    pub execution: ExecutionArgs,
    /// The nodes
    #[arg(required = true, value_parser = crate::cli::parse_node)]
    pub node: Vec<NodeId>,
}

fn parse_deadline(text: &str) -> Result<Deadline, String> {
    if let Ok(at) = text.parse::<Timestamp>() {
        return Ok(Deadline {
            at: Some(at),
            ..Deadline::default()
        });
    }
    let within = parse_span(text)
        .map_err(|error| format!("{error}, nor a time like 2026-12-31T18:00:00Z"))?;
    let seconds = u32::try_from(within.as_secs()).unwrap_or(u32::MAX);
    if seconds == 0 {
        return Err("a deadline is at least a second away".to_owned());
    }
    Ok(Deadline {
        within_s: Some(seconds),
        ..Deadline::default()
    })
}

/// Parses `90`, `90s`, `10m`, `2h`, `1d`.
///
/// # Errors
/// The valid forms of a duration.
pub(crate) fn parse_span(text: &str) -> Result<Duration, String> {
    let form = || format!("{text:?} is not a span of time like 90s, 10m, 2h or 1d");
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = match unit.trim() {
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3_600.0,
        "d" => 86_400.0,
        _ => return Err(form()),
    };
    let number: f64 = number.parse().map_err(|_| form())?;
    let seconds = number * unit;
    if !(0.0..=3_660.0 * 86_400.0).contains(&seconds) {
        return Err(format!("{text:?} is more than ten years"));
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// Sends the changes of the command line.
///
/// # Errors
/// If there is no change, or no policy service answers.
pub async fn adjust(args: AdjustArgs, global: &Global) -> anyhow::Result<Outcome> {
    let Some(change) = args.changes.change() else {
        eprintln!("no change named: use --priority, --threshold, --deadline or --memory");
        return Ok(Outcome::BadInput);
    };
    send(&args.execution, change, global).await
}

/// Limits an execution to these nodes.
///
/// # Errors
/// If no policy service answers.
pub async fn pin(args: PinArgs, global: &Global) -> anyhow::Result<Outcome> {
    let change = Adjustment {
        nodes: Some(args.node),
        exclude: Some(Vec::new()),
        ..Adjustment::default()
    };
    send(&args.execution, change, global).await
}

/// Excludes further nodes.
///
/// # Errors
/// If no policy service answers.
pub async fn exclude(args: ExcludeArgs, global: &Global) -> anyhow::Result<Outcome> {
    let broker = global.broker("exclude").await?;
    let execution = &args.execution;
    let tenant = &execution.tenant.tenant;
    let status = client::me(&broker)
        .execution(ExecutionVerb::Status, tenant, &execution.id, None)
        .await?;
    if status.error.is_some() {
        return report(&status, global);
    }
    let state = status.state.as_ref();
    let adjusted = state.and_then(|s| s.adjusted.as_ref()?.exclude.clone());
    let submitted = || Some(state?.spec.as_ref()?.requires.exclude.clone());
    let mut exclude = adjusted.or_else(submitted).unwrap_or_default();
    for node in args.node {
        if !exclude.contains(&node) {
            exclude.push(node);
        }
    }
    let change = Adjustment {
        exclude: Some(exclude),
        ..Adjustment::default()
    };
    send(execution, change, global).await
}

/// Lets an execution run on any node again.
///
/// # Errors
/// If no policy service answers.
pub async fn unpin(args: &ExecutionArgs, global: &Global) -> anyhow::Result<Outcome> {
    let change = Adjustment {
        nodes: Some(Vec::new()),
        exclude: Some(Vec::new()),
        ..Adjustment::default()
    };
    send(args, change, global).await
}

async fn send(
    execution: &ExecutionArgs,
    change: Adjustment,
    global: &Global,
) -> anyhow::Result<Outcome> {
    let broker = global.broker("adjust").await?;
    let tenant = &execution.tenant.tenant;
    let reply = client::me(&broker)
        .adjust(tenant, &execution.id, change)
        .await?;
    report(&reply, global)
}

fn report(reply: &ApiReply, global: &Global) -> anyhow::Result<Outcome> {
    if global.json {
        println!("{}", serde_json::to_string(reply)?);
    }
    match &reply.error {
        Some(error) => {
            if !global.json {
                eprintln!("{error}");
            }
            Ok(Outcome::Failed)
        }
        None => {
            if !global.json {
                println!("{}", reply.message);
            }
            Ok(Outcome::Done)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_and_deadlines_are_read_with_their_units() {
        assert_eq!(parse_span("90"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_span("10m"), Ok(Duration::from_secs(600)));
        assert_eq!(parse_span("1.5h"), Ok(Duration::from_secs(5_400)));
        assert!(parse_span("soon").unwrap_err().contains("10m"));
        assert!(parse_span("5000d").is_err());
        assert_eq!(parse_deadline("2h").unwrap().within_s, Some(7_200));
        let at = "2026-11-22T10:00:00Z";
        assert_eq!(parse_deadline(at).unwrap().at, at.parse().ok());
        assert!(parse_deadline("0s").is_err());
        let date = parse_deadline("2026-12-01").unwrap_err();
        assert!(date.contains("2026-12-31T18:00:00Z"), "{date}");
    }
}
