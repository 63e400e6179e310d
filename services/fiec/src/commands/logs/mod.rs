//! `fiec logs ID [-f]`: the output of an execution's program, from all nodes where it ran.

mod tail;

use std::io::{IsTerminal as _, Write};

use clap::Args;
use fiec_broker::Broker;
use fiec_broker::logs::{Feed, Shown};
use fiec_schemas::messages::ExecutionVerb;
use fiec_schemas::subjects;

use crate::client;
use crate::context::{Global, TenantArg};
use crate::exit::Outcome;
use crate::terminal::safe;
use tail::Tail;

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
    /// Write the bytes exactly as the program has written them, and what is missing to stderr
    #[arg(long)]
    pub raw: bool,
    /// Only the last N lines, and with -f the later ones
    #[arg(long, short = 'n', value_name = "N")]
    pub tail: Option<usize>,
}

/// Prints the stored lines, and with `-f` the new ones.
///
/// # Errors
/// If the servers cannot be reached.
pub async fn run(args: LogsArgs, global: &Global) -> anyhow::Result<Outcome> {
    if args.raw && (global.json || std::io::stdout().is_terminal()) {
        eprintln!(
            "fiec: --raw writes bytes that a terminal may obey, and no JSON: leave --json out, and \
             send them to a file or a pipe"
        );
        return Ok(Outcome::BadInput);
    }
    let broker = global.broker("logs").await?;
    let tenant = &args.tenant.tenant;
    let reply = client::me(&broker)
        .execution(ExecutionVerb::Status, tenant, &args.id, None)
        .await?;
    let Some(state) = reply.state else {
        eprintln!(
            "{}",
            reply
                .error
                .unwrap_or_else(|| format!("{} is not known", args.id))
        );
        return Ok(Outcome::Failed);
    };
    let subject = subjects::log(tenant, state.execution);
    let mut feed = Feed::new(&broker, subject, args.follow);
    let mut shown = Shown::default();
    let mut out = Tail::new(std::io::stdout(), args.tail);
    let mut stored = match args.tail {
        Some(_) => Some(feed.last().await?),
        None => None,
    };
    // Everything up to this sequence is shown, then the command ends.
    let mut end = match args.follow && !state.phase.is_terminal() {
        true => None,
        false => Some(feed.last().await?),
    };
    while end.is_none_or(|end| feed.next <= end) {
        if stored.take_if(|stored| feed.next > *stored).is_some() {
            out.release()?;
        }
        let message = tokio::select! {
            message = feed.message() => message?,
            _ = tokio::signal::ctrl_c() => break,
        };
        if let Some(message) = message {
            show(&mut shown, &message.payload, &args, &mut out, global.json)?;
        } else if end.is_some() || has_ended(&broker, &args).await {
            // Read after the end is known: the last words are stored before it. Or the stream has
            // dropped what was last before.
            end = match feed.last().await {
                Ok(last) => Some(last),
                Err(error) if args.follow => {
                    tracing::debug!(%error, "the end of the log is not known yet");
                    end
                }
                Err(error) => return Err(error.into()),
            };
        }
    }
    write!(out, "{}", safe(shown.finish()))?;
    out.release()?;
    Ok(Outcome::Done)
}

/// Whether the execution has ended. A follower asks again if nobody answers.
async fn has_ended(broker: &Broker, args: &LogsArgs) -> bool {
    let tenant = &args.tenant.tenant;
    match client::me(broker)
        .execution(ExecutionVerb::Status, tenant, &args.id, None)
        .await
    {
        Ok(reply) => reply.state.is_none_or(|state| state.phase.is_terminal()),
        Err(error) => {
            tracing::warn!(%error, "cannot ask whether the execution has ended; trying again");
            false
        }
    }
}

fn show(
    shown: &mut Shown,
    payload: &[u8],
    args: &LogsArgs,
    out: &mut impl Write,
    json: bool,
) -> anyhow::Result<()> {
    if json {
        writeln!(out, "{}", safe(&String::from_utf8_lossy(payload)))?;
        return Ok(());
    }
    let Some(text) = shown.take(payload) else {
        return Ok(());
    };
    match text {
        Err(error) => tracing::warn!(%error, "a log line is not of the expected form"),
        Ok(text) if args.raw => {
            for notice in &text.notices {
                eprintln!("fiec: {notice}");
            }
            out.write_all(&text.bytes)?;
        }
        Ok(text) => write!(out, "{}", safe(&shown.human(&text)))?,
    }
    out.flush()?;
    Ok(())
}
