//! `fiec watch [ID]`: follows executions until they end.

use std::collections::BTreeSet;
use std::time::Duration;

use clap::Args;
use fiec_broker::feed;
use fiec_broker::{Broker, Ledger, results};
use fiec_schemas::messages::ExecutionVerb;
use fiec_schemas::{Cause, Event, ExecutionId, ExecutionState, LedgerMessage, subjects};
use futures_util::StreamExt as _;
use serde_json::Value;

use super::curves::{self, Curves};
use crate::client;
use crate::context::{Global, TenantArg};
use crate::exit::Outcome;
use crate::ui;

/// Time for which the curves before now are waited for.
const HISTORY: Duration = Duration::from_secs(1);

/// Options of `fiec watch`.
#[derive(Debug, Args)]
pub struct WatchArgs {
    /// Execution id, or the id that the client gave [default: every execution of the tenant]
    pub id: Option<String>,
    #[command(flatten)]
    pub tenant: TenantArg,
}

/// Follows the ledgers and prints their events. With an id, ends when that execution ends.
///
/// # Errors
/// If the servers cannot be reached.
pub async fn run(args: WatchArgs, global: &Global) -> anyhow::Result<Outcome> {
    let broker = global.broker("watch").await?;
    let tenant = args.tenant.tenant;
    // Read the position before the state, so that no message between the two is missed.
    let (_, last) = feed::bounds(&broker).await?;
    let mut wanted = None;
    // Parts that it has split off are watched too.
    let mut parts = BTreeSet::new();
    if let Some(id) = &args.id {
        let reply = client::me(&broker)
            .execution(ExecutionVerb::Status, &tenant, id, None)
            .await?;
        if let Some(error) = reply.error {
            eprintln!("{error}");
            return Ok(Outcome::Failed);
        }
        if let Some(state) = reply.state {
            wanted = Some(state.execution);
            let outcome = super::wait::outcome_of(state.phase.kind());
            if !global.json {
                let last = match outcome {
                    Some(_) => ending(&broker, &state).await,
                    None => None,
                };
                let words = last.unwrap_or_else(|| stand(&state));
                println!("{} {} {words}", state.at, state.execution);
            }
            if let Some(outcome) = outcome {
                return Ok(outcome);
            }
            let out = super::parts::of(&broker, &state).await;
            parts.extend(out.into_iter().map(|standing| standing.part.id));
        }
    }
    let filter = |parts: &BTreeSet<ExecutionId>| match wanted {
        Some(id) => [id]
            .iter()
            .chain(parts)
            .map(|id| subjects::ledger(&tenant, *id))
            .collect(),
        None => vec![subjects::ledgers(&tenant)],
    };
    let mut curves = Curves::default();
    if let Some(id) = wanted
        && !global.json
        && let Err(error) = earlier(&mut curves, id, global).await
    {
        tracing::info!(%error, "curves begin now: the history cannot be read");
    }
    let mut feed = feed::live_of(&broker, last + 1, filter(&parts)).await?;
    loop {
        let item = tokio::select! {
            item = feed.next() => item,
            _ = tokio::signal::ctrl_c() => return Ok(Outcome::Done),
        };
        let item = match item {
            Some(Ok(item)) => item,
            Some(Err(error)) => {
                tracing::warn!(%error, "the feed was interrupted");
                continue;
            }
            None => return Ok(Outcome::Done),
        };
        let message = item.message()?;
        if wanted.is_some() {
            let known = parts.len();
            parts.extend(message.state.parts().iter().map(|part| part.id));
            if parts.len() > known {
                feed = feed::live_of(&broker, item.seq + 1, filter(&parts)).await?;
            }
        }
        if global.json {
            println!("{}", item.header);
        } else {
            for event in &message.events {
                if let Event::SteppedBack { to, .. } = event {
                    curves.go_back(item.execution, to.as_ref().map_or(0, |to| to.index));
                }
                let line = match event {
                    Event::Noted { numbers } => curves.note(item.execution, numbers),
                    event => event_in_words(event, &message.state),
                };
                println!("{} {} {line}", message.state.at, item.execution);
            }
            if message.state.phase.is_terminal() {
                curves.forget(item.execution);
            }
        }
        if wanted == Some(item.execution)
            && let Some(outcome) = super::wait::outcome_of(message.state.phase.kind())
        {
            return Ok(outcome);
        }
    }
}

/// Reads the curves that were recorded before now.
async fn earlier(curves: &mut Curves, id: ExecutionId, global: &Global) -> anyhow::Result<()> {
    let read = async {
        let pool = global.database().await?;
        curves.read(&pool, id).await
    };
    tokio::time::timeout(HISTORY, read).await?
}

fn stand(state: &ExecutionState) -> String {
    let phase = state.phase.as_str();
    match state.phase.binding() {
        Some(b) => format!(
            "{phase} on {}, epoch {}, boundary {}",
            b.node,
            state.epoch,
            state.boundary_index()
        ),
        None => phase.to_owned(),
    }
}

/// How an execution has ended, with its result or the reason, from its ledger's last event. `None`
/// if the event cannot be read; the phase says the most important then.
pub async fn ending(broker: &Broker, state: &ExecutionState) -> Option<String> {
    let last = Ledger::new(broker)
        .last(&state.tenant, state.execution)
        .await;
    let mut message = last.ok()??.message;
    if let Err(error) = results::resolve(broker, &mut message).await {
        tracing::warn!(%error, "the result cannot be read");
    }
    in_words(&message).pop()
}

/// The events of a message, each in one line for people.
pub fn in_words(message: &LedgerMessage) -> Vec<String> {
    message
        .events
        .iter()
        .map(|event| event_in_words(event, &message.state))
        .collect()
}

fn event_in_words(event: &Event, state: &ExecutionState) -> String {
    match event {
        Event::Submitted => "submitted".to_owned(),
        Event::Bound {
            epoch, node, cause, ..
        } => match cause {
            Cause::Initial => format!("bound to {node} (epoch {epoch})"),
            cause => format!("bound to {node} (epoch {epoch}): {}", cause.in_words()),
        },
        Event::Started { epoch, .. } => match state.phase.binding() {
            Some(binding) => format!("started on {} (epoch {epoch})", binding.node),
            None => format!("started (epoch {epoch})"),
        },
        Event::Boundary(b) => {
            let of = b.of.map_or(String::new(), |of| format!(" of {of}"));
            let note = b.note.as_ref().map_or(String::new(), |n| format!(", {n}"));
            format!(
                "boundary {}{of} committed, state of {}{note}",
                b.index,
                ui::bytes(b.bytes)
            )
        }
        Event::Noted { numbers } => curves::last_values(numbers),
        Event::Yielded { cause, .. } => format!("yielded: {}", cause.in_words()),
        Event::Refused { reason, .. } => format!("refused by its node: {reason}"),
        Event::Healed { lost, .. } => {
            let how = match state.phase.binding() {
                Some(_) => "its node appended them again",
                None => "it restarts from PostgreSQL",
            };
            format!("the broker had lost {lost} messages; {how}")
        }
        Event::Paused { who } => format!("paused by {who}"),
        Event::Resumed { who } => format!("resumed by {who}"),
        Event::Requested { who, what } => format!("{what} requested by {who}"),
        Event::Reconfigured { who, grant } => format!(
            "given {} by {who}",
            serde_json::to_string(grant).unwrap_or_default()
        ),
        Event::Adjusted { who, change } => format!("changed by {who}: {}", change.in_words()),
        Event::Parked { cause, keep, .. } => format!(
            "waits where it is and keeps its {}: {}",
            keep.as_str(),
            cause.in_words()
        ),
        Event::Unparked { reason, .. } => format!("continues in its parked process: {reason}"),
        Event::Split { part, from, to, .. } => {
            format!("tiles {from} to {to} are a part of their own: {part}")
        }
        Event::Merged { part } => format!("merged part {part}"),
        Event::Returned { to } => {
            format!("ended early; its holder {to} computes the remaining tiles")
        }
        Event::Emitted { outbox } => format!("emitted {} messages", outbox.count),
        Event::Crashed {
            attempt,
            exit,
            backoff_ms,
            ..
        } => {
            let then = match backoff_ms {
                0 => "not tried again".to_owned(),
                ms => format!("again in {ms} ms"),
            };
            format!("program crashed ({exit}), crash {attempt} since its last commit, {then}")
        }
        Event::Completed {
            capsules,
            result: Value::Null,
            object: Some(object),
            ..
        } => format!(
            "completed after {capsules} capsules: result of {} (`fiec status {}` shows it)",
            ui::bytes(object.bytes.into()),
            state.execution
        ),
        Event::Completed {
            capsules, result, ..
        } => {
            format!("completed after {capsules} capsules: {result}")
        }
        Event::Computed { capsules, .. } => {
            format!(
                "computed to its end ({capsules} capsules); others compute it once more before it counts"
            )
        }
        Event::Verified { by, segments } => {
            let by: Vec<_> = by.iter().map(|node| node.as_str()).collect();
            format!(
                "verified: the same bits in {segments} parts by {}",
                by.join(", ")
            )
        }
        Event::SteppedBack { to, cause } => {
            let to = to.as_ref().map_or("the beginning".to_owned(), |to| {
                format!("boundary {}", to.index)
            });
            format!("stepped back to {to}: {}", cause.in_words())
        }
        Event::Failed { reason, .. } => format!("failed: {reason}"),
        Event::Held { reason, .. } => {
            format!("held: {reason}; run `fiec retry` to continue from its last commit")
        }
        Event::Retried { who } => format!("retried by {who}"),
        Event::Cancelled { who } => format!("cancelled by {who}"),
    }
}
