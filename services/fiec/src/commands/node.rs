//! `fiec node …`: commands about one node.

use clap::{Args, Subcommand};
use fiec_schemas::messages::NodeVerb;

use super::{envelope, nodes, profile, record};
use crate::context::Global;
use crate::exit::Outcome;

/// Look at one node, and limit what it offers
#[derive(Debug, Args)]
pub struct NodeArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Profile(profile::ProfileArgs),
    Envelope(envelope::EnvelopeArgs),
    /// Release a node from quarantine; its canaries run again and decide
    Release(nodes::NodeArgs),
    /// Announce that a node will go away; its executions leave before
    Revoke(nodes::RevokeArgs),
    Record(record::RecordArgs),
}

/// Runs the command.
///
/// # Errors
/// The errors of the sub-command.
pub async fn run(args: NodeArgs, global: &Global) -> anyhow::Result<Outcome> {
    match args.command {
        Command::Profile(args) => profile::run(args, global).await,
        Command::Release(args) => nodes::flag(NodeVerb::Release, args, global).await,
        Command::Revoke(args) => nodes::revoke(args, global).await,
        Command::Envelope(args) => envelope::run(args, global).await,
        Command::Record(args) => record::run(&args, global),
    }
}
