//! The nodes: each signal with its thresholds, what is missing and why, who computes there.

use std::collections::HashMap;
use std::sync::Arc;

use askama::Template;
use axum::extract::{Query as Given, State};
use axum::response::Response;
use fiec_schemas::messages::{NodeStatus, StandingKind, Viability};
use fiec_schemas::{NodeId, Reading, Signal, Threshold, Timestamp};
use serde::{Deserialize, Serialize};

use super::devices::{self, Device, Holder};
use super::{Form, Frame, answer};
use crate::database::Query;
use crate::hub::FIRST;
use crate::server::Shared;
use crate::words;

const NAMES: &str = "SELECT id::text AS execution, client_id FROM executions \
    WHERE client_id IS NOT NULL AND id = ANY(string_to_array($1, ',')::uuid[])";

#[derive(Debug, Serialize, Deserialize)]
struct Named {
    execution: String,
    client_id: String,
}

/// All nodes, by name.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Nodes(pub Vec<Node>);

/// A node as its page shows it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Node {
    /// Its name.
    pub name: String,
    /// The host's own name.
    pub host: String,
    /// How it stands with its thresholds.
    pub viability: Viability,
    /// Why it takes no work, and who said so.
    pub flags: Vec<String>,
    /// An operator moves everything away from it.
    pub draining: bool,
    /// An operator places nothing new on it.
    pub cordoned: bool,
    /// Slots, and how many of them compute.
    pub slots: u32,
    /// See `slots`.
    pub running: u32,
    /// Bindings that wait for a slot.
    pub queued: u32,
    /// Seconds since it was heard, where that is long.
    pub silent: Option<String>,
    /// Processors and memory, in words.
    pub machine: String,
    /// Its signals.
    pub signals: Vec<Gauge>,
    /// Its devices, each GPU before its slices.
    pub devices: Vec<Device>,
    /// Executions that compute there.
    pub executions: Vec<Runs>,
}

/// A signal of a node or of one of its devices.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Gauge {
    /// Which.
    pub signal: &'static str,
    /// Of which device; none: of the host.
    pub device: Option<String>,
    /// In [0, 1]; none: it was not measured.
    pub value: Option<f64>,
    /// The raw reading with its unit.
    pub raw: String,
    /// It presses at or above this.
    pub high: Option<f64>,
    /// It recovers below this.
    pub low: Option<f64>,
    /// How long either must last, in ms.
    pub dwell_ms: Option<u32>,
    /// Share of the dwell that has passed since it crossed, in percent.
    pub filled: Option<u32>,
    /// Why there is no value.
    pub missing: Option<String>,
    /// Where it comes from.
    pub source: String,
}

impl Node {
    /// Actions that change its state.
    pub fn actions(&self) -> &'static [&'static str] {
        match (self.draining, self.cordoned) {
            (true, _) => &["undrain"],
            (false, true) => &["uncordon", "drain"],
            (false, false) => &["cordon", "drain"],
        }
    }
}

impl Gauge {
    /// Percent of the bar.
    pub fn percent(&self) -> f64 {
        self.value.unwrap_or(0.0).clamp(0.0, 1.0) * 100.0
    }

    /// Percent of a threshold on the bar.
    pub fn at(&self, threshold: &f64) -> f64 {
        threshold.clamp(0.0, 1.0) * 100.0
    }

    /// How it stands: at or above high, between, or below low.
    pub fn class(&self) -> &'static str {
        match (self.value, self.high, self.low) {
            (None, ..) => "missing",
            (Some(value), Some(high), _) if value >= high => "high",
            (Some(value), _, Some(low)) if value >= low => "between",
            _ => "calm",
        }
    }
}

/// An execution that computes on a node.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Runs {
    /// Which.
    pub execution: String,
    /// Boundaries reached.
    pub boundary: u64,
    /// Boundaries in all.
    pub of: Option<u64>,
    /// The program's note.
    pub note: Option<String>,
}

/// When each signal has crossed its high threshold upwards, as vectors show it here.
#[derive(Debug, Default)]
pub struct Crossings(HashMap<(NodeId, Signal, Option<String>), Timestamp>);

impl Crossings {
    /// Percent of the dwell that a signal has been at or above high.
    fn filled(&mut self, node: &NodeId, reading: &Reading, threshold: &Threshold) -> Option<u32> {
        let key = (node.clone(), reading.signal, reading.device.clone());
        if reading.value.is_none_or(|value| value < threshold.high) {
            self.0.remove(&key);
            return None;
        }
        let since = *self.0.entry(key).or_insert(reading.at);
        let passed = reading.at.millis().saturating_sub(since.millis()).max(0);
        let dwell = i64::from(threshold.dwell_ms.max(1));
        u32::try_from((passed.saturating_mul(100) / dwell).min(100)).ok()
    }

    fn keep(&mut self, nodes: &[NodeStatus]) {
        self.0
            .retain(|(node, ..), _| nodes.iter().any(|n| n.descriptor.node == *node));
    }
}

impl Nodes {
    /// Makes the pages' view of what a policy service says.
    pub fn of(mut statuses: Vec<NodeStatus>, crossings: &mut Crossings) -> Self {
        crossings.keep(&statuses);
        statuses.sort_by(|a, b| a.descriptor.node.cmp(&b.descriptor.node));
        Self(
            statuses
                .into_iter()
                .map(|status| node(status, crossings))
                .collect(),
        )
    }

    /// Slots of all, and how many compute.
    pub fn slots(&self) -> (u32, u32) {
        let all = self.0.iter();
        all.fold((0, 0), |(running, slots), node| {
            (running + node.running, slots + node.slots)
        })
    }

    /// How many take work.
    pub fn viable(&self) -> usize {
        let is = |node: &&Node| node.viability == Viability::Viable && node.flags.is_empty();
        self.0.iter().filter(is).count()
    }
}

fn node(status: NodeStatus, crossings: &mut Crossings) -> Node {
    let NodeStatus {
        descriptor,
        flags,
        viability,
        pressing,
        set_aside,
        vector,
        silent_ms,
        contracts,
        ..
    } = status;
    let mut why = Vec::new();
    let by = |what: &str| match flags.who.is_empty() {
        true => what.to_owned(),
        false => format!("{what} by {}", flags.who),
    };
    if flags.draining {
        why.push(by("drained"));
    } else if flags.cordoned {
        why.push(by("cordoned"));
    }
    if let Some(at) = flags.revoked_at {
        why.push(format!("{} at {at}", by("revoked")));
    }
    why.extend(pressing);
    why.extend(set_aside.into_iter().map(|aside| aside.reason));
    let lost = contracts
        .iter()
        .filter(|c| c.standing == StandingKind::Quarantined);
    why.extend(lost.map(|c| format!("quarantined for {}: {}", c.contract.as_str(), c.detail)));
    let readings = vector.iter().flat_map(|vector| &vector.readings);
    let signals = readings
        .filter(|reading| !reading.is_part())
        .map(|reading| {
            let threshold = descriptor.thresholds.get(&reading.signal);
            Gauge {
                signal: reading.signal.as_str(),
                device: reading.device.clone(),
                value: reading.value,
                raw: raw(reading),
                high: threshold.map(|t| t.high),
                low: threshold.map(|t| t.low),
                dwell_ms: threshold.map(|t| t.dwell_ms),
                filled: threshold.and_then(|t| crossings.filled(&descriptor.node, reading, t)),
                missing: reading.missing.clone(),
                source: reading.source.clone(),
            }
        });
    let mut signals: Vec<Gauge> = signals.collect();
    let devices = devices::of(&descriptor.substrates, &mut signals);
    let running = vector.iter().flat_map(|vector| &vector.running);
    let executions = running.map(|run| Runs {
        execution: run.execution.to_string(),
        boundary: run.boundary,
        of: run.of,
        note: run.note.clone(),
    });
    let memory = i64::try_from(descriptor.memory_limit_bytes).unwrap_or(i64::MAX);
    Node {
        name: descriptor.node.to_string(),
        host: descriptor.host,
        viability,
        flags: why,
        draining: flags.draining,
        cordoned: flags.cordoned,
        slots: vector.as_ref().map_or(descriptor.slots, |v| v.slots),
        running: vector.as_ref().map_or(0, |v| v.running_count),
        queued: vector.as_ref().map_or(0, |v| v.queued_count),
        silent: silent_ms
            .filter(|ms| *ms > 5_000)
            .map(|ms| words::span_ms(i64::try_from(ms).unwrap_or(i64::MAX))),
        machine: format!(
            "{} cores, {}, {}",
            descriptor.cpus,
            words::bytes(&memory),
            descriptor.isa
        ),
        signals,
        devices,
        executions: executions.collect(),
    }
}

/// The raw reading, and its limit.
fn raw(reading: &Reading) -> String {
    let number = |value: f64| match reading.unit.as_str() {
        "bytes" => words::bytes(&(value as i64)),
        "celsius" => format!("{value:.0} °C"),
        "mW" => format!("{:.1} W", value / 1e3),
        "us" => format!("{:.2} ms", value / 1e3),
        "percent" => format!("{value:.0} %"),
        "ratio" => format!("{value:.3}"),
        "event" => format!("{value:.0} errors"),
        unit => format!("{value:.3} {unit}"),
    };
    match (reading.raw, reading.limit) {
        (Some(raw), Some(limit)) => format!("{} of {}", number(raw), number(limit)),
        (Some(raw), None) => number(raw),
        _ => String::new(),
    }
}

#[derive(Debug, Template, Serialize)]
#[template(path = "nodes.html")]
struct Page {
    frame: Frame,
    nodes: Option<Arc<Nodes>>,
    /// Executions that hold devices.
    holders: Vec<Holder>,
    /// The ids that clients gave to executions that compute.
    names: HashMap<String, String>,
}

impl Page {
    /// What an execution is called.
    fn name_of<'a>(&'a self, run: &'a Runs) -> &'a str {
        self.names.get(&run.execution).unwrap_or(&run.execution)
    }

    /// Those that hold a device of a node.
    fn holders_of(&self, node: &Node, device: &Device) -> Vec<&Holder> {
        let is = |holder: &&Holder| {
            holder.node.as_deref() == Some(node.name.as_str()) && holder.substrate == device.id
        };
        self.holders.iter().filter(is).collect()
    }
}

/// `/nodes`
pub async fn page(State(shared): State<Arc<Shared>>, Given(form): Given<Form>) -> Response {
    let hub = &shared.hub;
    let known = match tokio::time::timeout(FIRST, hub.nodes.first()).await {
        Ok(known) => known,
        Err(_) => hub.nodes.now(),
    };
    let mut frame = Frame::new("Nodes", "nodes", "nodes").command("fiec nodes --wide");
    frame.old("Nodes", &known);
    let nodes = known.value;
    let has_devices = |nodes: &Nodes| nodes.0.iter().any(|node| !node.devices.is_empty());
    let holders = match nodes.as_deref().is_some_and(has_devices) {
        true => {
            frame
                .rows(hub, "Holders of devices", &devices::holders())
                .await
        }
        false => Vec::new(),
    };
    let running = nodes.iter().flat_map(|nodes| &nodes.0);
    let running: Vec<&str> = running
        .flat_map(|node| &node.executions)
        .map(|run| run.execution.as_str())
        .collect();
    let names: Vec<Named> = match running.is_empty() {
        true => Vec::new(),
        false => {
            let names = Query::of(NAMES).with(running.join(","));
            frame.rows(hub, "Names of executions", &names).await
        }
    };
    let names = names.into_iter().map(|n| (n.execution, n.client_id));
    let names = names.collect();
    let page = Page {
        frame,
        nodes,
        holders,
        names,
    };
    answer(&page, &form)
}
