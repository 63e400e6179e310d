//! `fiec submit FILE [--wait]`: hands over a file of JSON lines and speaks of every line.

use std::collections::BTreeMap;
use std::io::{IsTerminal as _, Read as _};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;
use clap::Args;
use fiec_broker::Broker;
use fiec_schemas::submission::{LINE_LIMIT, LINES_LIMIT, lines};
use fiec_schemas::{ClientId, ExecutionId, LineError, Phase, Tenant};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use crate::client;
use crate::context::{Global, TenantArg};
use crate::exit::Outcome;

/// Most bytes in one request; the broker's own limit is 1 MiB.
const REQUEST_BYTES: usize = 640 * 1024;
/// Most lines in one request.
const REQUEST_LINES: usize = 2_000;

/// Submit a file of JSON lines, one submission a line ("-" is standard input)
#[derive(Debug, Args)]
pub struct SubmitArgs {
    /// JSON or JSONL file
    pub file: PathBuf,
    #[command(flatten)]
    pub tenant: TenantArg,
    /// Wait until every execution has ended; the exit code is the worst outcome
    #[arg(long, short)]
    pub wait: bool,
    /// Take all lines or none: one bad line refuses the whole file
    #[arg(long)]
    pub all_or_nothing: bool,
}

/// A line that was taken.
struct Taken {
    line: u32,
    id: ExecutionId,
    client_id: Option<ClientId>,
    existing: bool,
}

impl Taken {
    /// The name that its owner gave it, or its line.
    fn name(&self) -> String {
        match &self.client_id {
            Some(id) => id.to_string(),
            None => format!("line {}", self.line),
        }
    }
}

/// Runs the command.
///
/// # Errors
/// When the file cannot be read or nobody answers.
pub async fn run(args: SubmitArgs, global: &Global) -> anyhow::Result<Outcome> {
    let text = match read(&args.file) {
        Ok(text) => text,
        Err(error) => {
            eprintln!("{error:#}");
            return Ok(Outcome::BadInput);
        }
    };
    let broker = global.broker("submit").await?;
    let (taken, errors) = match submit_all(&broker, &args, &text).await? {
        Ok(answer) => answer,
        Err(reason) => {
            eprintln!("{}: {reason}", args.file.display());
            return Ok(Outcome::BadInput);
        }
    };
    for taken in &taken {
        if global.json {
            println!(
                "{}",
                json!({"line": taken.line, "id": taken.id, "client_id": taken.client_id,
                       "existing": taken.existing})
            );
        } else if taken.existing {
            println!(
                "{}  (line {}: the same submission was there before)",
                taken.id, taken.line
            );
        } else {
            println!("{}", taken.id);
        }
    }
    for error in &errors {
        if global.json {
            println!("{}", json!({"line": error.line, "error": error}));
        }
        eprintln!("{}: {error}", args.file.display());
    }
    let mut outcome = if errors.is_empty() {
        Outcome::Done
    } else {
        Outcome::BadInput
    };
    if taken.is_empty() && errors.is_empty() {
        eprintln!("{}: there is no submission in it", args.file.display());
        return Ok(Outcome::BadInput);
    }
    if args.wait && !taken.is_empty() {
        outcome = outcome.worse(wait_all(&broker, &args.tenant.tenant, taken, global.json).await?);
    }
    Ok(outcome)
}

fn read(file: &PathBuf) -> anyhow::Result<Vec<u8>> {
    if file.as_os_str() == "-" {
        let mut text = Vec::new();
        std::io::stdin()
            .read_to_end(&mut text)
            .context("cannot read standard input")?;
        return Ok(text);
    }
    std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))
}

/// A file that holds one object over several lines is one submission; otherwise a line is one.
fn as_lines(text: &[u8]) -> Vec<(u32, Vec<u8>)> {
    let single: Result<serde_json::Map<String, serde_json::Value>, _> =
        serde_json::from_slice(text);
    if let Ok(object) = single
        && lines(text).count() > 1
    {
        return vec![(1, serde_json::to_vec(&object).unwrap_or_default())];
    }
    lines(text)
        .map(|(number, line)| (number, line.to_vec()))
        .collect()
}

/// What was taken and what was not; or why the file as a whole cannot be handed over.
type Submitted = Result<(Vec<Taken>, Vec<LineError>), String>;

async fn submit_all(broker: &Broker, args: &SubmitArgs, text: &[u8]) -> anyhow::Result<Submitted> {
    let tenant = &args.tenant.tenant;
    let atomic = args.all_or_nothing;
    let mut taken = Vec::new();
    let mut errors = Vec::new();
    let mut request: Vec<u8> = Vec::new();
    let mut numbers: Vec<u32> = Vec::new();
    let all = as_lines(text);
    // What is taken as a whole goes in one request, and so does what waits for lines of its file.
    let ordered = all.iter().any(|(_, line)| names_order(line));
    let most = if atomic || ordered {
        LINES_LIMIT
    } else {
        REQUEST_LINES
    };
    let bytes: usize = all.iter().map(|(_, line)| line.len() + 1).sum();
    if (atomic || ordered) && (all.len() > most || bytes > REQUEST_BYTES) {
        return Ok(Err(format!(
            "it has {} lines and {bytes} bytes; what is taken as a whole, or has lines that wait \
             for others, may have {most} lines and {REQUEST_BYTES} bytes: use arrays, or cut it \
             where nothing waits for what comes later",
            all.len()
        )));
    }
    let mut made = 0;
    let mut rest = all.iter().peekable();
    while let Some((number, line)) = rest.next() {
        if line.len() > LINE_LIMIT {
            errors.push(LineError {
                line: *number,
                field: String::new(),
                reason: format!(
                    "the line has {} bytes; at most {LINE_LIMIT} are allowed: put bulk data into \
                     a file that the program reads",
                    line.len()
                ),
            });
        } else {
            request.extend_from_slice(line);
            request.push(b'\n');
            numbers.push(*number);
            made += count_of(line);
        }
        let full = numbers.len() >= most
            || rest.peek().is_none_or(|(_, next)| {
                request.len() + next.len() > REQUEST_BYTES || made + count_of(next) > LINES_LIMIT
            });
        if full && !numbers.is_empty() {
            let body = Bytes::from(std::mem::take(&mut request));
            let reply = client::submit(broker, tenant, body, atomic).await?;
            if let Some(error) = reply.error {
                anyhow::bail!("the submission was refused: {error}");
            }
            let place = |line: u32| {
                let index = usize::try_from(line).unwrap_or(0).wrapping_sub(1);
                numbers.get(index).copied().unwrap_or(line)
            };
            for accepted in reply.accepted {
                let ids = match accepted.elements {
                    ids if ids.is_empty() => vec![accepted.id],
                    ids => ids,
                };
                taken.extend(ids.into_iter().map(|id| Taken {
                    line: place(accepted.line),
                    id,
                    client_id: accepted.client_id.clone(),
                    existing: accepted.existing,
                }));
            }
            errors.extend(reply.errors.into_iter().map(|e| LineError {
                line: place(e.line),
                ..e
            }));
            numbers.clear();
            made = 0;
        }
    }
    errors.sort_by_key(|e| e.line);
    Ok(Ok((taken, errors)))
}

/// How many executions a line becomes.
fn count_of(line: &[u8]) -> usize {
    if !line.windows(7).any(|part| part == b"\"array\"") {
        return 1;
    }
    let line: Option<serde_json::Value> = serde_json::from_slice(line).ok();
    let count = line.and_then(|line| line["array"]["count"].as_u64());
    usize::try_from(count.unwrap_or(1)).unwrap_or(1)
}

/// True for a line that waits for others.
fn names_order(line: &[u8]) -> bool {
    line.windows(7).any(|part| part == b"\"after\"")
}

/// How an ended execution counts.
pub fn outcome_of(phase: &Phase) -> Option<Outcome> {
    match phase {
        Phase::Completed => Some(Outcome::Done),
        Phase::Failed => Some(Outcome::Failed),
        // What a part leaves is its holder's: nothing is lost, and nothing else is to come.
        Phase::Returned => Some(Outcome::Done),
        Phase::Cancelled => Some(Outcome::Cancelled),
        Phase::Pending
        | Phase::Bound(_)
        | Phase::Started(_)
        | Phase::Verifying { .. }
        | Phase::Paused { .. } => None,
    }
}

async fn wait_all(
    broker: &Broker,
    tenant: &Tenant,
    taken: Vec<Taken>,
    quiet: bool,
) -> anyhow::Result<Outcome> {
    let bar = if quiet || !std::io::stderr().is_terminal() {
        ProgressBar::hidden()
    } else {
        ProgressBar::new(taken.len() as u64)
    };
    if let Ok(style) = ProgressStyle::with_template("{bar:40.cyan} {pos}/{len} {msg} {elapsed}") {
        bar.set_style(style);
    }
    let mut live: BTreeMap<ExecutionId, Taken> = taken.into_iter().map(|t| (t.id, t)).collect();
    let mut worst = Outcome::Done;
    let mut pause = Duration::from_millis(20);
    while !live.is_empty() {
        // One after the other, a thousand a round: waiting must not load the cluster it waits for.
        let round: Vec<ExecutionId> = live.keys().copied().take(1_000).collect();
        let before = live.len();
        for id in round {
            let reply = client::execution(broker, "status", tenant, &id.to_string(), None).await?;
            let Some(state) = reply.state else { continue };
            if let Some(progress) = &reply.progress {
                bar.set_message(match (progress.of, &progress.note) {
                    (_, Some(note)) => note.clone(),
                    (Some(of), None) => format!("capsule {}/{of}", progress.boundary),
                    (None, None) => format!("capsule {}", progress.boundary),
                });
            }
            if let Some(outcome) = outcome_of(&state.phase) {
                let taken = live.remove(&id);
                bar.inc(1);
                worst = worst.worse(outcome);
                if outcome != Outcome::Done && !quiet {
                    let words = super::watch::ending(broker, &state).await;
                    let words = words.unwrap_or_else(|| state.phase.as_str().to_owned());
                    let name = taken.map_or_else(String::new, |taken| taken.name());
                    bar.suspend(|| eprintln!("{name} {words}; see `fiec history {id}`"));
                }
            }
        }
        if live.len() == before {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(500));
        } else {
            pause = Duration::from_millis(20);
        }
    }
    bar.finish_and_clear();
    Ok(worst)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_object_over_several_lines_is_one_submission() {
        let found = as_lines(b"{\n  \"program\": \"synthetic@1\"\n}\n");
        assert_eq!(found, [(1, br#"{"program":"synthetic@1"}"#.to_vec())]);
    }

    #[test]
    fn lines_keep_their_numbers() {
        let found = as_lines(b"{\"a\":1}\n\n{\"b\":2}\n");
        assert_eq!(found.iter().map(|(n, _)| *n).collect::<Vec<_>>(), [1, 3]);
    }
}
