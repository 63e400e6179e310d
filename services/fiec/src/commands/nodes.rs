//! `nodes`, `cordon`, `uncordon`, `drain`.

use clap::Args;
use fiec_schemas::NodeId;
use fiec_schemas::messages::NodeStatus;

use crate::client;
use crate::context::Global;
use crate::exit::Outcome;
use crate::ui;

/// Names a node.
#[derive(Debug, Args)]
pub struct NodeArgs {
    /// The node
    #[arg(value_parser = crate::cli::parse_node)]
    pub node: NodeId,
}

/// Lists the nodes.
///
/// # Errors
/// When nobody answers.
pub async fn list(global: &Global) -> anyhow::Result<Outcome> {
    let broker = global.broker("nodes").await?;
    let reply = client::nodes(&broker).await?;
    if global.json {
        for node in &reply.nodes {
            println!("{}", serde_json::to_string(node)?);
        }
        return Ok(Outcome::Done);
    }
    let head = [
        "node",
        "viability",
        "slots",
        "bound",
        "memory",
        "limit",
        "signals",
        "silent",
    ];
    println!("{}", ui::table(head, reply.nodes.iter().map(row)));
    Ok(Outcome::Done)
}

fn row(node: &NodeStatus) -> Vec<String> {
    let d = &node.descriptor;
    let mut viability = node.viability.clone();
    if node.flags.draining {
        viability.push_str(", draining");
    } else if node.flags.cordoned {
        viability.push_str(", cordoned");
    }
    let vector = node.vector.as_ref();
    let memory = vector
        .and_then(|v| v.host(fiec_schemas::Signal::Memory))
        .and_then(|r| r.value)
        .map_or("not measured".to_owned(), |v| format!("{:.1} %", v * 100.0));
    let signals = vector.map_or(String::new(), |v| {
        v.readings
            .iter()
            .filter(|r| r.signal != fiec_schemas::Signal::Memory)
            .filter_map(|r| {
                r.value
                    .map(|value| format!("{} {:.0} %", r.signal, value * 100.0))
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

/// Cordons, uncordons or drains a node.
///
/// # Errors
/// When nobody answers.
pub async fn flag(verb: &str, args: NodeArgs, global: &Global) -> anyhow::Result<Outcome> {
    let broker = global.broker(verb).await?;
    let reply = client::node(&broker, verb, args.node).await?;
    if global.json {
        println!("{}", serde_json::to_string(&reply)?);
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
