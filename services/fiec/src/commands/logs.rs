//! `fiec logs ID [-f]`: the output of an execution's program, from all nodes where it ran.

use std::time::Duration;

use anyhow::Context as _;
use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, pull};
use clap::Args;
use fiec_schemas::messages::{ExecutionVerb, LogLine};
use fiec_schemas::subjects;
use futures_util::StreamExt as _;

use crate::client;
use crate::context::{Global, TenantArg};
use crate::exit::Outcome;

/// Options of `fiec logs`.
#[derive(Debug, Args)]
pub struct LogsArgs {
    /// Execution id, or the id that the client gave
    pub id: String,
    #[command(flatten)]
    pub tenant: TenantArg,
    /// Follow the output until the execution ends
    #[arg(long, short)]
    pub follow: bool,
}

/// Interval at which a follower checks whether the execution has ended.
const LOOK: Duration = Duration::from_millis(500);

/// Prints the stored lines, and with `-f` the new ones.
///
/// # Errors
/// If the servers cannot be reached.
pub async fn run(args: LogsArgs, global: &Global) -> anyhow::Result<Outcome> {
    let broker = global.broker("logs").await?;
    let tenant = &args.tenant.tenant;
    let reply = client::execution(&broker, ExecutionVerb::Status, tenant, &args.id, None).await?;
    let Some(state) = reply.state else {
        eprintln!(
            "{}",
            reply
                .error
                .unwrap_or_else(|| format!("{} is not known", args.id))
        );
        return Ok(Outcome::Failed);
    };
    let consumer = broker
        .js
        .create_consumer_on_stream(
            pull::Config {
                ack_policy: AckPolicy::None,
                deliver_policy: DeliverPolicy::All,
                filter_subject: subjects::log(tenant, state.execution),
                inactive_threshold: Duration::from_secs(60),
                ..Default::default()
            },
            subjects::LOG_STREAM,
        )
        .await
        .context("cannot read the log stream")?;
    let mut left = consumer.cached_info().num_pending;
    let mut messages = consumer
        .stream()
        .max_messages_per_batch(500)
        .heartbeat(Duration::from_secs(10))
        .expires(Duration::from_secs(30))
        .messages()
        .await
        .context("cannot read the log stream")?;
    let mut ended = state.phase.is_terminal();
    loop {
        if left == 0 && (!args.follow || ended) {
            return Ok(Outcome::Done);
        }
        let next = tokio::select! {
            next = tokio::time::timeout(LOOK, messages.next()) => next,
            _ = tokio::signal::ctrl_c() => return Ok(Outcome::Done),
        };
        match next {
            Ok(Some(Ok(message))) => {
                left = message
                    .info()
                    .map_or(left.saturating_sub(1), |info| info.pending);
                show(&message.payload, global.json);
            }
            Ok(Some(Err(error))) => tracing::debug!(%error, "log stream"),
            Ok(None) => return Ok(Outcome::Done),
            Err(_) => {
                left = 0;
                if args.follow && !ended {
                    let status =
                        client::execution(&broker, ExecutionVerb::Status, tenant, &args.id, None)
                            .await?;
                    ended = status.state.is_none_or(|s| s.phase.is_terminal());
                }
            }
        }
    }
}

fn show(payload: &[u8], json: bool) {
    if json {
        println!("{}", String::from_utf8_lossy(payload));
        return;
    }
    match serde_json::from_slice::<LogLine>(payload) {
        Ok(line) => {
            println!(
                "{} {} e{} {}: {}",
                line.at, line.node, line.epoch, line.stream, line.line
            );
        }
        Err(error) => tracing::warn!(%error, "a log line is not of the expected form"),
    }
}
