//! `fiec retry`: what has failed, is held or was cancelled starts again from its last commit.

use clap::Args;
use fiec_schemas::BoundaryIndex;
use fiec_schemas::messages::{BatchVerb, ExecutionRequest, ExecutionVerb};

use super::adjust::ChangeArgs;
use super::{batch, group};
use crate::client;
use crate::context::{Global, TenantArg, who};
use crate::exit::Outcome;

/// Start executions again that failed, are held or were cancelled, from their last commit
///
/// They can continue with other settings, for example more memory or a later deadline.
#[derive(Debug, Args)]
pub struct RetryArgs {
    /// Execution ids, or the ids that the client gave; also an array by its id, and `seed-*`
    #[arg(required_unless_present = "batch", conflicts_with = "batch")]
    id: Vec<String>,
    /// All of a batch: its name, or its UUID
    #[arg(long)]
    batch: Option<String>,
    /// Of a batch or an array, leave out cancelled executions
    #[arg(long)]
    failed: bool,
    /// Go back to this boundary; 0 is the beginning
    #[arg(long, conflicts_with = "batch", value_name = "N")]
    from_boundary: Option<BoundaryIndex>,
    #[command(flatten)]
    changes: ChangeArgs,
    #[command(flatten)]
    tenant: TenantArg,
}

/// Runs the command.
///
/// # Errors
/// If no policy service answers.
pub async fn run(args: RetryArgs, global: &Global) -> anyhow::Result<Outcome> {
    let broker = global.broker("retry").await?;
    let tenant = &args.tenant.tenant;
    let change = args.changes.change();
    if let Some(name) = &args.batch {
        if change.is_some() {
            eprintln!("--batch: changes are made of single executions; name their ids");
            return Ok(Outcome::BadInput);
        }
        let about = batch::About {
            verb: BatchVerb::Retry,
            tenant,
            of: &group::of_batch(name),
            failed: args.failed,
        };
        return batch::change(&broker, about, global).await;
    }
    let mut outcome = Outcome::Done;
    for id in args.id {
        if let Some(of) = group::named(&broker, tenant, &id).await? {
            if change.is_some() || args.from_boundary.is_some() {
                eprintln!("{id} is several executions: changes and boundaries are of single ones");
                outcome = outcome.worse(Outcome::BadInput);
                continue;
            }
            let about = batch::About {
                verb: BatchVerb::Retry,
                tenant,
                of: &of,
                failed: args.failed,
            };
            outcome = outcome.worse(batch::change(&broker, about, global).await?);
            continue;
        }
        let request = ExecutionRequest {
            id,
            who: who(),
            from_boundary: args.from_boundary,
            change: change.clone(),
            ..ExecutionRequest::default()
        };
        let reply = client::me(&broker)
            .ask(ExecutionVerb::Retry, tenant, &request)
            .await?;
        if global.json {
            println!("{}", serde_json::to_string(&reply)?);
        }
        match &reply.error {
            Some(error) => {
                outcome = outcome.worse(Outcome::Failed);
                if !global.json {
                    eprintln!("{error}");
                }
            }
            None if !global.json => println!("{}", reply.message),
            None => {}
        }
    }
    Ok(outcome)
}
