//! `fiec node …`: what is asked of one node.

use clap::{Args, Subcommand};
use fiec_schemas::messages::NodeVerb;

use super::{envelope, nodes, profile, record};
use crate::context::Global;
use crate::exit::Outcome;

/// Look at one node, and say what it may offer
#[derive(Debug, Args)]
pub struct NodeArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Profile(profile::ProfileArgs),
    Envelope(envelope::EnvelopeArgs),
    /// Give a quarantined node its contracts back; its canaries run anew and decide
    Release(nodes::NodeArgs),
    /// Say that a node will be gone: its work is away before
    Revoke(nodes::RevokeArgs),
    Record(record::RecordArgs),
}

/// Does what is asked.
///
/// # Errors
/// Those of the sub-command.
pub async fn run(args: NodeArgs, global: &Global) -> anyhow::Result<Outcome> {
    match args.command {
        Command::Profile(args) => profile::run(args, global).await,
        Command::Release(args) => nodes::flag(NodeVerb::Release, args, global).await,
        Command::Revoke(args) => nodes::revoke(args, global).await,
        Command::Envelope(args) => envelope::run(args, global).await,
        Command::Record(args) => record::run(&args, global),
    }
}
