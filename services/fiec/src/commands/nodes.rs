//! `nodes`, `cordon`, `uncordon`, `drain`, `undrain`, `node revoke`.

use std::time::Duration;

use clap::Args;
use fiec_schemas::messages::{ApiReply, NodeStatus, NodeVerb};
use fiec_schemas::{NodeId, Timestamp};

use super::adjust::parse_span;
use super::node_table;
use crate::client;
use crate::context::Global;
use crate::exit::Outcome;
use crate::table::WideArg;

/// Interval at which a node is checked until it is empty.
const WAIT: Duration = Duration::from_millis(250);

/// A node.
#[derive(Debug, Args)]
pub struct NodeArgs {
    /// The node
    #[arg(value_parser = crate::cli::parse_node)]
    pub node: NodeId,
}

/// A node, and the time until it must be empty.
#[derive(Debug, Args)]
pub struct DrainArgs {
    /// The node
    #[arg(value_parser = crate::cli::parse_node)]
    pub node: NodeId,
    /// Time after which an execution without a boundary stops there, and continues elsewhere from
    /// its last commit, e.g. 10m [default: never]
    #[arg(long, value_name = "SPAN", value_parser = parse_span)]
    pub within: Option<Duration>,
    /// Wait until the node is empty
    #[arg(long)]
    pub wait: bool,
}

/// A node, and the time until it goes away.
#[derive(Debug, Args)]
pub struct RevokeArgs {
    /// The node
    #[arg(value_parser = crate::cli::parse_node)]
    pub node: NodeId,
    /// Time until the node goes away, e.g. 120s
    #[arg(long = "in", value_name = "SPAN", value_parser = parse_span)]
    pub within: Duration,
    /// Wait until the node is empty
    #[arg(long)]
    pub wait: bool,
}

/// Options of `fiec nodes`.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// Show one row for each signal: its reading, place and age, or why it is missing
    #[arg(long)]
    pub signals: bool,
    /// Print the nodes' public keys only, in the form of `fiec policy --node-keys`; compare them
    /// with the machines before you use them
    #[arg(long, conflicts_with = "signals")]
    pub keys: bool,
    #[command(flatten)]
    pub wide: WideArg,
}

/// Lists the nodes.
///
/// # Errors
/// If no policy service answers.
pub async fn list(args: &ListArgs, global: &Global) -> anyhow::Result<Outcome> {
    let broker = global.broker("nodes").await?;
    let reply = client::me(&broker).nodes().await?;
    if global.json {
        for node in &reply.nodes {
            println!("{}", serde_json::to_string(node)?);
        }
        return Ok(Outcome::Done);
    }
    if args.keys {
        for node in reply.nodes.iter().map(|n| &n.descriptor) {
            match &node.identity {
                Some(identity) => println!("{} = {}", node.node, identity.key),
                None => println!("# {}: its claim names no key", node.node),
            }
        }
        return Ok(Outcome::Done);
    }
    let layout = args.wide.layout();
    let text = match args.signals {
        true => node_table::signals(&reply.nodes, layout, Timestamp::now()),
        false => node_table::nodes(&reply.nodes, layout, Timestamp::now()),
    };
    println!("{text}");
    Ok(Outcome::Done)
}

/// Nodes that are set aside because they cannot start programs, with the reason.
pub fn set_aside(nodes: &[NodeStatus]) -> impl Iterator<Item = (&NodeId, String)> {
    nodes.iter().flat_map(|node| {
        node.set_aside.iter().map(|aside| {
            let program = aside.program.as_deref().unwrap_or("all programs");
            let words = format!("set aside for {program}: {}", aside.reason);
            (&node.descriptor.node, words)
        })
    })
}

/// Processes of programs that do not end, with their nodes.
pub fn stuck(nodes: &[NodeStatus]) -> impl Iterator<Item = (&NodeId, String)> {
    nodes.iter().flat_map(|node| {
        let stuck = node.vector.iter().flat_map(|v| &v.stuck);
        stuck.map(|process| (&node.descriptor.node, process.in_words()))
    })
}

/// Nodes whose clock differs from the broker's by too much, with the difference.
pub fn far_clocks(nodes: &[NodeStatus]) -> impl Iterator<Item = (&NodeId, String)> {
    nodes.iter().filter_map(|node| {
        let clock = node.vector.as_ref()?.clock?;
        let words = || (&node.descriptor.node, clock.in_words());
        clock.is_far().then(words)
    })
}

/// Cordons, uncordons or releases a node.
///
/// # Errors
/// If no policy service answers.
pub async fn flag(verb: NodeVerb, args: NodeArgs, global: &Global) -> anyhow::Result<Outcome> {
    let broker = global.broker(verb.as_str()).await?;
    said(
        &client::me(&broker).node(verb, args.node, None).await?,
        global,
    )
}

/// Drains a node. Waits until it is empty if the command asks for that.
///
/// # Errors
/// If no policy service answers.
pub async fn drain(args: DrainArgs, global: &Global) -> anyhow::Result<Outcome> {
    let broker = global.broker("drain").await?;
    let within = args.within.map(seconds);
    let reply = client::me(&broker)
        .node(NodeVerb::Drain, args.node.clone(), within)
        .await?;
    let outcome = said(&reply, global)?;
    if args.wait && reply.error.is_none() {
        wait_until_empty(&broker, &args.node, global).await?;
    }
    Ok(outcome)
}

/// Announces that a node will go away.
///
/// # Errors
/// If no policy service answers.
pub async fn revoke(args: RevokeArgs, global: &Global) -> anyhow::Result<Outcome> {
    let broker = global.broker("revoke").await?;
    let within = Some(seconds(args.within));
    let reply = client::me(&broker)
        .node(NodeVerb::Revoke, args.node.clone(), within)
        .await?;
    let outcome = said(&reply, global)?;
    if args.wait && reply.error.is_none() {
        wait_until_empty(&broker, &args.node, global).await?;
    }
    Ok(outcome)
}

fn seconds(span: Duration) -> u32 {
    u32::try_from(span.as_secs()).unwrap_or(u32::MAX)
}

/// Returns when no execution is bound to the node, or the node has left.
async fn wait_until_empty(
    broker: &fiec_broker::Broker,
    node: &NodeId,
    global: &Global,
) -> anyhow::Result<()> {
    let mut last = None;
    loop {
        let reply = client::me(broker).nodes().await?;
        let status = reply.nodes.iter().find(|n| n.descriptor.node == *node);
        let bound = status.map_or(0, |n| n.bound);
        if bound == 0 {
            if !global.json {
                println!("{node} has no executions left");
            }
            return Ok(());
        }
        if last != Some(bound) {
            last = Some(bound);
            eprintln!("{bound} on {node}");
        }
        tokio::time::sleep(WAIT).await;
    }
}

fn said(reply: &ApiReply, global: &Global) -> anyhow::Result<Outcome> {
    if global.json {
        println!("{}", serde_json::to_string(reply)?);
    }
    match &reply.error {
        Some(error) => {
            eprintln!("{error}");
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
