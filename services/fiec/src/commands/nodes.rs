//! `nodes`, `cordon`, `uncordon`, `drain`, `undrain`, `node revoke`.

use std::time::Duration;

use clap::Args;
use fiec_schemas::messages::{ApiReply, NodeStatus, NodeVerb, StandingKind};
use fiec_schemas::substrate::HOST;
use fiec_schemas::{NodeId, Timestamp};

use super::adjust::parse_span;
use crate::client;
use crate::context::Global;
use crate::exit::Outcome;
use crate::ui;

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
}

/// Lists the nodes.
///
/// # Errors
/// If no policy service answers.
pub async fn list(args: &ListArgs, global: &Global) -> anyhow::Result<Outcome> {
    let broker = global.broker("nodes").await?;
    let reply = client::nodes(&broker).await?;
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
    if args.signals {
        let head = [
            "node", "signal", "place", "value", "read", "of", "source", "age",
        ];
        let now = Timestamp::now();
        let rows = reply.nodes.iter().flat_map(|n| signal_rows(n, now));
        println!("{}", ui::table(head, rows));
        return Ok(Outcome::Done);
    }
    let head = [
        "node",
        "viability",
        "contracts",
        "slots",
        "bound",
        "memory",
        "limit",
        "signals",
        "silent",
    ];
    println!("{}", ui::table(head, reply.nodes.iter().map(row)));
    for (node, words) in set_aside(&reply.nodes) {
        println!("{node}: {words}");
    }
    for (node, words) in stuck(&reply.nodes) {
        println!("{node}: {words}");
    }
    for (node, words) in far_clocks(&reply.nodes) {
        println!("{node}: its clock is {words}: set it (NTP)");
    }
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

fn row(node: &NodeStatus) -> Vec<String> {
    let d = &node.descriptor;
    let mut viability = node.viability.to_string();
    let revoked = node.flags.revocation_of(d.instance);
    if let Some(at) = revoked {
        viability.push_str(&format!(", gone at {at}"));
    } else if node.flags.draining {
        viability.push_str(", draining");
        if let Some(by) = node.flags.drain_by {
            viability.push_str(&format!(" until {by}"));
        }
    } else if node.flags.cordoned {
        viability.push_str(", cordoned");
    }
    let vector = node.vector.as_ref();
    let memory = vector
        .and_then(|v| v.host(fiec_schemas::Signal::Memory))
        .and_then(|r| Some((r.value?, r.envelope.as_ref())))
        .map_or("not measured".to_owned(), |(value, envelope)| {
            let percent = format!("{:.1} %", value * 100.0);
            match envelope {
                Some(e) => format!("{percent} of {} offered", ui::bytes(e.cap as u64)),
                None => percent,
            }
        });
    let signals = vector.map_or(String::new(), |v| {
        v.readings
            .iter()
            .filter(|r| r.signal != fiec_schemas::Signal::Memory && !r.is_part())
            .map(|r| match r.value {
                Some(value) => format!("{} {:.0} %", r.signal, value * 100.0),
                None => format!("{} missing", r.signal),
            })
            .collect::<Vec<_>>()
            .join(", ")
    });
    let slots = vector.map_or(d.slots.to_string(), |v| {
        format!("{}/{} busy", v.running_count, v.slots)
    });
    vec![
        d.node.to_string(),
        viability,
        contracts(node),
        slots,
        node.bound.to_string(),
        memory,
        format!(
            "{} ({})",
            ui::bytes(d.memory_limit_bytes),
            d.memory_limit_source
        ),
        if node.pressing.is_empty() {
            signals
        } else {
            node.pressing.join("; ")
        },
        node.silent_ms
            .map_or("never heard".to_owned(), |ms| format!("{ms} ms")),
    ]
}

/// All signals of a node, missing readings with the reason.
fn signal_rows(node: &NodeStatus, now: Timestamp) -> Vec<Vec<String>> {
    let readings = node.vector.as_ref().map(|v| v.readings.as_slice());
    readings
        .unwrap_or_default()
        .iter()
        .map(|r| {
            let quantity = |q: Option<f64>| match (q, r.unit.as_str()) {
                (None, _) => String::new(),
                (Some(q), "bytes") => ui::bytes(q as u64),
                (Some(q), "mW") => format!("{:.1} W", q / 1e3),
                (Some(q), "celsius") => format!("{q:.1} °C"),
                (Some(q), "percent") => format!("{q:.1} %"),
                (Some(q), "us") => format!("{q:.0} µs"),
                (Some(q), _) => format!("{q:.2}"),
            };
            let age = (now.micros() - r.at.micros()).max(0) / 1_000;
            vec![
                node.descriptor.node.to_string(),
                r.signal.to_string(),
                r.device.clone().unwrap_or_else(|| "node".to_owned()),
                match (&r.value, &r.missing) {
                    (Some(value), _) => format!("{:.1} %", value * 100.0),
                    (None, Some(why)) => format!("missing: {why}"),
                    (None, None) => "missing".to_owned(),
                },
                quantity(r.raw),
                match &r.envelope {
                    Some(e) => format!(
                        "{}, offered of {}",
                        quantity(Some(e.cap)),
                        quantity(r.limit)
                    ),
                    None => quantity(r.limit),
                },
                r.source.clone(),
                format!("{age} ms"),
            ]
        })
        .collect()
}

/// The contracts that a node has proved, and the reason for each that it has not.
fn contracts(node: &NodeStatus) -> String {
    let words = node.contracts.iter().map(|c| {
        let place = match c.substrate.as_str() {
            HOST => String::new(),
            device => format!(" on {device}"),
        };
        let contract = c.contract.as_str();
        match c.standing {
            StandingKind::Proved => format!("{contract}{place}"),
            standing @ (StandingKind::Unproved | StandingKind::Outdated) => {
                format!("{contract}{place}: {standing}")
            }
            standing => format!("{contract}{place}: {standing}, {}", c.detail),
        }
    });
    words.collect::<Vec<_>>().join("; ")
}

/// Cordons, uncordons or releases a node.
///
/// # Errors
/// If no policy service answers.
pub async fn flag(verb: NodeVerb, args: NodeArgs, global: &Global) -> anyhow::Result<Outcome> {
    let broker = global.broker(verb.as_str()).await?;
    said(&client::node(&broker, verb, args.node, None).await?, global)
}

/// Drains a node. Waits until it is empty if the command asks for that.
///
/// # Errors
/// If no policy service answers.
pub async fn drain(args: DrainArgs, global: &Global) -> anyhow::Result<Outcome> {
    let broker = global.broker("drain").await?;
    let within = args.within.map(seconds);
    let reply = client::node(&broker, NodeVerb::Drain, args.node.clone(), within).await?;
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
    let reply = client::node(&broker, NodeVerb::Revoke, args.node.clone(), within).await?;
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
        let reply = client::nodes(broker).await?;
        let status = reply.nodes.iter().find(|n| n.descriptor.node == *node);
        let bound = status.map_or(0, |n| n.bound);
        if bound == 0 {
            if !global.json {
                println!("nothing is on {node} any more");
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
