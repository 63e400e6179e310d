//! `reconfigure`: changes the grant of a running execution.

use anyhow::ensure;
use clap::Args;
use fiec_schemas::package::Grant;

use super::operate::ExecutionArgs;
use super::serve::parse_bytes;
use crate::client;
use crate::context::Global;
use crate::exit::Outcome;

/// Options of `fiec reconfigure`. A resource that is left out keeps its value.
#[derive(Debug, Args)]
pub struct ReconfigureArgs {
    #[command(flatten)]
    pub execution: ExecutionArgs,
    /// Threads that may compute at the same time
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub threads: Option<u32>,
    /// Memory, e.g. 2G or 512MiB
    #[arg(long, value_parser = parse_bytes)]
    pub memory: Option<u64>,
    /// Processors that it may run on, e.g. 0-3,8
    #[arg(long, value_parser = parse_cpus)]
    pub cpus: Option<Cpus>,
}

/// A list of processors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cpus(Vec<u32>);

fn parse_cpus(text: &str) -> Result<Cpus, String> {
    let wrong = || format!("{text:?} is not a list of processors like 0-3,8");
    let mut cpus = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let first: u32 = first.trim().parse().map_err(|_| wrong())?;
        let last: u32 = last.trim().parse().map_err(|_| wrong())?;
        if first > last || last >= 4096 {
            return Err(wrong());
        }
        cpus.extend(first..=last);
    }
    cpus.sort_unstable();
    cpus.dedup();
    Ok(Cpus(cpus))
}

/// Sends the request and prints the answer.
///
/// # Errors
/// If there is no change, or no policy service answers.
pub async fn run(args: ReconfigureArgs, global: &Global) -> anyhow::Result<Outcome> {
    let grant = Grant {
        threads: args.threads,
        memory_bytes: args.memory,
        cpus: args.cpus.map(|cpus| cpus.0).unwrap_or_default(),
        ..Grant::default()
    };
    ensure!(
        grant != Grant::default(),
        "no change named: use --threads, --memory or --cpus"
    );
    let broker = global.broker("reconfigure").await?;
    let who = &args.execution;
    let reply = client::me(&broker)
        .reconfigure(&who.tenant.tenant, &who.id, grant)
        .await?;
    if global.json {
        println!("{}", serde_json::to_string(&reply)?);
    } else if reply.error.is_none() {
        println!("{}", reply.message);
    }
    match &reply.error {
        Some(error) => {
            if !global.json {
                eprintln!("{error}");
            }
            Ok(Outcome::Failed)
        }
        None => Ok(Outcome::Done),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_lists_of_numbers_and_ranges() {
        assert_eq!(parse_cpus("0-2, 8,1"), Ok(Cpus(vec![0, 1, 2, 8])));
        for wrong in ["", "3-1", "a", "1-", "0-5000"] {
            assert!(parse_cpus(wrong).is_err(), "{wrong}");
        }
    }
}
