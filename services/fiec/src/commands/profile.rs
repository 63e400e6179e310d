//! `node profile`: the hardware of a node and its measurements.

use clap::Args;
use fiec_probes::MemoryLimit;
use fiec_probes::descriptor::MachineFacts;
use fiec_probes::profile::ProfileOptions;
use fiec_schemas::hardware::{MemoryNode, MemoryTier, NodeProfile, Substrate};
use fiec_schemas::{NodeDescriptor, NodeId};
use serde::Serialize;

use crate::client;
use crate::context::Global;
use crate::exit::Outcome;
use crate::ui;

/// Show the hardware of a node: processors, memory tiers, devices, with their measurements
///
/// Without a name, shows this machine and needs no server.
#[derive(Debug, Args)]
pub struct ProfileArgs {
    /// The node [default: this machine]
    #[arg(value_parser = crate::cli::parse_node)]
    pub node: Option<NodeId>,
    /// Measure this machine again; workers use the new measurement after their next start
    #[arg(long, conflicts_with = "node")]
    pub anew: bool,
}

/// Profile of a node or of this machine.
#[derive(Debug, Serialize)]
struct Shown {
    #[serde(skip_serializing_if = "Option::is_none")]
    node: Option<NodeId>,
    host: String,
    cpus: u32,
    isa: String,
    memory_limit_bytes: u64,
    memory_limit_source: String,
    substrates: Vec<Substrate>,
    profile: NodeProfile,
}

impl From<NodeDescriptor> for Shown {
    fn from(d: NodeDescriptor) -> Self {
        Self {
            node: Some(d.node),
            host: d.host,
            cpus: d.cpus,
            isa: d.isa,
            memory_limit_bytes: d.memory_limit_bytes,
            memory_limit_source: d.memory_limit_source,
            substrates: d.substrates,
            profile: d.profile,
        }
    }
}

impl From<MachineFacts> for Shown {
    fn from(f: MachineFacts) -> Self {
        Self {
            node: None,
            host: f.host,
            cpus: f.cpus,
            isa: f.isa,
            memory_limit_bytes: f.memory_limit_bytes,
            memory_limit_source: f.memory_limit_source,
            substrates: f.substrates,
            profile: f.profile,
        }
    }
}

/// Shows a node's profile, or this machine's.
///
/// # Errors
/// If no policy service answers, or this machine's memory cannot be read.
pub async fn run(args: ProfileArgs, global: &Global) -> anyhow::Result<Outcome> {
    let shown: Shown = match args.node {
        Some(node) => {
            let broker = global.broker("node profile").await?;
            let reply = client::me(&broker).nodes().await?;
            let found = reply.nodes.into_iter().find(|n| n.descriptor.node == node);
            let Some(status) = found else {
                eprintln!("there is no node {node}; `fiec nodes` lists the nodes that have joined");
                return Ok(Outcome::Failed);
            };
            status.descriptor.into()
        }
        None => {
            let options = ProfileOptions {
                anew: args.anew,
                ..ProfileOptions::default()
            };
            MachineFacts::gather(&MemoryLimit::detect(), &options, None)?.into()
        }
    };
    if global.json {
        println!("{}", serde_json::to_string(&shown)?);
    } else {
        print(&shown);
    }
    Ok(Outcome::Done)
}

fn print(shown: &Shown) {
    let profile = &shown.profile;
    let name = shown.node.as_ref().map(|n| format!("{n} on "));
    println!(
        "{}{}: {}",
        name.unwrap_or_default(),
        shown.host,
        shown
            .substrates
            .first()
            .map_or("", |host| host.name.as_str())
    );
    let words = |list: Vec<&str>| list.join(", ");
    let contracts = profile.contracts.iter().map(|c| c.as_str()).collect();
    let offers = profile.confinement.iter().map(|c| c.as_str()).collect();
    let libraries: Vec<_> = profile
        .libraries
        .iter()
        .map(|(name, version)| format!("{name} {version}"))
        .collect();
    let measured = profile.measured.as_ref().map_or_else(
        || "never".to_owned(),
        |m| format!("{} in {} ms ({})", m.at, m.took_ms, m.machine.short()),
    );
    let cores = profile
        .cores
        .map_or_else(|| "not told".to_owned(), |n| n.to_string());
    let mut rows = vec![
        (
            "processors",
            format!("{} logical, {cores} cores", shown.cpus),
        ),
        ("instruction set", shown.isa.clone()),
        ("contracts", words(contracts)),
        (
            "memory limit",
            format!(
                "{} ({})",
                ui::bytes(shown.memory_limit_bytes),
                shown.memory_limit_source
            ),
        ),
        ("last cache", size(profile.last_cache_bytes)),
        ("kernel", profile.kernel.clone()),
        ("runs on, offers", words(offers)),
        ("measured", measured),
    ];
    if !libraries.is_empty() {
        rows.push(("libraries", libraries.join(", ")));
    }
    let rows = rows.into_iter().map(|(k, v)| vec![k.to_owned(), v]);
    println!("{}", ui::table(["what", "value"], rows));
    if !profile.memory.is_empty() {
        let head = [
            "memory", "tier", "size", "copy", "latency", "sample", "firmware",
        ];
        println!("{}", ui::table(head, profile.memory.iter().map(memory_row)));
    }
    let devices: Vec<_> = shown.substrates.iter().filter(|s| s.is_device()).collect();
    if devices.is_empty() {
        println!("no device");
        return;
    }
    let head = [
        "device", "name", "memory", "cc", "units", "bus", "to", "from",
    ];
    println!("{}", ui::table(head, devices.iter().map(|d| device_row(d))));
}

fn size(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "not told".to_owned(), ui::bytes)
}

fn rate(bytes_s: Option<u64>, missing: Option<&str>) -> String {
    match (bytes_s, missing) {
        (Some(rate), _) => format!("{:.1} GB/s", rate as f64 / 1e9),
        (None, Some(why)) => format!("not measured: {why}"),
        (None, None) => "not measured".to_owned(),
    }
}

fn memory_row(node: &MemoryNode) -> Vec<String> {
    let missing = node.missing.as_deref();
    let firmware = match (node.firmware_read_bytes_s, node.firmware_read_ns) {
        (None, None) => "says nothing".to_owned(),
        (bandwidth, latency) => format!(
            "{}, {}",
            rate(bandwidth, None),
            latency.map_or_else(|| "no latency".to_owned(), |ns| format!("{ns} ns"))
        ),
    };
    vec![
        format!("node {}", node.id),
        match node.tier {
            MemoryTier::Local => format!("processors {}", node.cpus),
            MemoryTier::Far => "no processors (CXL or other far memory)".to_owned(),
        },
        size(node.memory_bytes),
        rate(node.copy_bytes_s, missing),
        node.latency_ns
            .map_or_else(|| "not measured".to_owned(), |ns| format!("{ns:.0} ns")),
        size(node.sample_bytes),
        firmware,
    ]
}

fn device_row(substrate: &Substrate) -> Vec<String> {
    let known = substrate.device.clone().unwrap_or_default();
    let or_not = |value: Option<String>| value.unwrap_or_else(|| "not told".to_owned());
    let missing = known.missing.as_deref();
    vec![
        substrate.id.clone(),
        substrate.name.clone(),
        size(substrate.memory_bytes),
        or_not(known.compute_capability.map(|c| c.to_string())),
        or_not(known.multiprocessors.map(|n| n.to_string())),
        or_not(known.bus.clone()),
        rate(known.to_device_bytes_s, missing),
        rate(known.from_device_bytes_s, missing),
    ]
}
