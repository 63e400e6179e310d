//! The tables of `fiec nodes`.

use fiec_schemas::messages::{ContractStanding, NodeStatus, StandingKind};
use fiec_schemas::substrate::HOST;
use fiec_schemas::{Signal, Timestamp};

use super::nodes::{far_clocks, set_aside, stuck};
use crate::table::{Column, Layout, Table, short_time};
use crate::ui;

/// One row for each node.
const NODES: [Column; 11] = [
    Column::left("node", 0),
    Column::left("state", 0),
    Column::right("running", 0),
    Column::left("worst signal", 1),
    Column::left("pressure", 1),
    Column::right("bound", 2),
    Column::right("silent", 3),
    Column::left("memory", 4),
    Column::left("limit", 5),
    Column::left("contracts", 6),
    Column::left("signals", 7),
];

/// One row for each signal.
const SIGNALS: [Column; 8] = [
    Column::left("node", 0),
    Column::left("signal", 0),
    Column::left("place", 1),
    Column::left("value", 0),
    Column::right("read", 2),
    Column::left("of", 3),
    Column::left("source", 5),
    Column::right("age", 4),
];

/// The nodes, and a line for each fact that an operator must act on.
pub fn nodes(nodes: &[NodeStatus], layout: Layout, now: Timestamp) -> String {
    let rows = nodes.iter().map(|node| row(node, layout, now));
    let table = Table::new(&NODES, rows).render(layout);
    let clocks = far_clocks(nodes).map(|(node, words)| {
        let words = format!("its clock is {words}: set it (NTP)");
        (node, words)
    });
    let facts = set_aside(nodes).chain(stuck(nodes)).chain(clocks);
    let facts = facts.map(|(node, words)| format!("{node}: {words}"));
    // In full, the table has all contracts.
    let lost = nodes.iter().filter(|_| !layout.is_full());
    let facts = facts.chain(lost.filter_map(lost_contracts));
    let lines = facts.map(|fact| layout.wrap(&fact, 2));
    let all: Vec<_> = std::iter::once(table).chain(lines).collect();
    all.join("\n")
}

/// All signals of the nodes.
pub fn signals(nodes: &[NodeStatus], layout: Layout, now: Timestamp) -> String {
    let rows = nodes.iter().flat_map(|node| signal_rows(node, now));
    Table::new(&SIGNALS, rows).render(layout)
}

fn row(node: &NodeStatus, layout: Layout, now: Timestamp) -> Vec<String> {
    let d = &node.descriptor;
    let vector = node.vector.as_ref();
    let memory = vector
        .and_then(|v| v.host(Signal::Memory))
        .and_then(|r| Some((r.value?, r.envelope.as_ref())))
        .map_or(
            "not measured".to_owned(),
            |(value, envelope)| match envelope {
                Some(e) => format!("{} of {} offered", percent(value), ui::bytes(e.cap as u64)),
                None => percent(value),
            },
        );
    let readings = vector.map_or(&[][..], |v| &v.readings);
    let signals = readings
        .iter()
        .filter(|r| r.signal != Signal::Memory && !r.is_part())
        .map(|r| match r.value {
            Some(value) => format!("{} {:.0} %", r.signal, value * 100.0),
            None => format!("{} missing", r.signal),
        });
    vec![
        d.node.to_string(),
        state(node, layout, now),
        vector.map_or(format!("-/{}", d.slots), |v| {
            format!("{}/{}", v.running_count, v.slots)
        }),
        worst(node, layout),
        pressure(node, layout),
        node.bound.to_string(),
        node.silent_ms
            .map_or("never heard".to_owned(), |ms| format!("{ms} ms")),
        memory,
        format!(
            "{} ({})",
            ui::bytes(d.memory_limit_bytes),
            d.memory_limit_source
        ),
        contracts(node),
        signals.collect::<Vec<_>>().join(", "),
    ]
}

fn percent(value: f64) -> String {
    format!("{:.1} %", value * 100.0)
}

/// Whether the node may compute, and what its operators have ordered.
fn state(node: &NodeStatus, layout: Layout, now: Timestamp) -> String {
    let time = |at: Timestamp| match layout {
        Layout::Full => at.to_string(),
        Layout::Within(_) => short_time(&at.to_string(), &now.to_string()).into_owned(),
    };
    let flags = &node.flags;
    let order = match flags.revocation_of(node.descriptor.instance) {
        Some(at) => format!(", gone at {}", time(at)),
        None if flags.draining => {
            let until = flags.drain_by.map(|by| format!(" until {}", time(by)));
            format!(", draining{}", until.unwrap_or_default())
        }
        None if flags.cordoned => ", cordoned".to_owned(),
        None => String::new(),
    };
    format!("{}{order}", node.viability)
}

/// The signal that is nearest to its threshold, or the farthest above.
fn worst(node: &NodeStatus, layout: Layout) -> String {
    let readings = node.vector.iter().flat_map(|v| &v.readings);
    let judged = readings.filter(|r| !r.is_part()).filter_map(|r| {
        let high = node.descriptor.thresholds.get(&r.signal)?.high;
        Some((r, r.value?, high))
    });
    let worst =
        judged.max_by(|(_, a, a_high), (_, b, b_high)| (a / a_high).total_cmp(&(b / b_high)));
    let Some((reading, value, high)) = worst else {
        return "not measured".to_owned();
    };
    let place = match (&reading.device, layout) {
        (None, _) => String::new(),
        (Some(device), Layout::Full) => format!(" of {device}"),
        (Some(_), Layout::Within(_)) => " of a device".to_owned(),
    };
    format!(
        "{}{place} {} of {}",
        reading.signal,
        percent(value),
        percent(high)
    )
}

/// The signals that are not viable.
fn pressure(node: &NodeStatus, layout: Layout) -> String {
    if node.pressing.is_empty() {
        return "none".to_owned();
    }
    if layout.is_full() {
        return node.pressing.join("; ");
    }
    // Each is a sentence: `memory is unviable: 93.1 % (high 90.0 %, …)`.
    let short = node.pressing.iter().map(|sentence| {
        let (begin, _) = sentence.split_once(": ").unwrap_or((sentence, ""));
        begin.replacen(" is ", " ", 1)
    });
    short.collect::<Vec<_>>().join(", ")
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
                    (Some(value), _) => percent(*value),
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
    let words = node.contracts.iter().map(contract);
    words.collect::<Vec<_>>().join("; ")
}

/// The contracts that a node has lost, as a line.
fn lost_contracts(node: &NodeStatus) -> Option<String> {
    let is_lost = |c: &&ContractStanding| {
        matches!(c.standing, StandingKind::Failed | StandingKind::Quarantined)
    };
    let lost: Vec<_> = node
        .contracts
        .iter()
        .filter(is_lost)
        .map(contract)
        .collect();
    (!lost.is_empty()).then(|| format!("{}: {}", node.descriptor.node, lost.join("; ")))
}

fn contract(c: &ContractStanding) -> String {
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::tests::is_readable;
    use serde_json::json;

    const NOW: &str = "2026-11-28T12:03:53Z";

    fn node(name: &str, memory: f64) -> NodeStatus {
        let instance = "0192d7a4-1111-7222-8333-123456789abc";
        let reading = |signal: &str, value: f64, unit: &str| {
            json!({"signal": signal, "value": value, "raw": value * 1e9, "limit": 1e9,
                "unit": unit, "source": "/proc/meminfo", "at": NOW})
        };
        let missing = |signal: &str| {
            json!({"signal": signal, "unit": "mW", "source": "NVML", "at": NOW,
                "missing": "no driver: libnvidia-ml.so.1 is not installed on this machine"})
        };
        let node = json!({
            "descriptor": {"v": 1, "node": name, "instance": instance, "host": "h", "pid": 7,
                "version": "0.1.0", "started_at": NOW, "shard": 0, "slots": 4, "cpus": 8,
                "isa": "x86_64+avx2+fma", "memory_limit_bytes": 34_359_738_368_u64,
                "memory_limit_source": "cgroup v2 /sys/fs/cgroup/memory.max",
                "substrates": [], "programs": ["cg@1"],
                "thresholds": fiec_schemas::hardware::default_thresholds()},
            "flags": {}, "viability": "viable", "silent_ms": 340, "bound": 2,
            "vector": {"v": 1, "node": name, "instance": instance, "count": 9, "at": NOW,
                "slots": 4, "running_count": 2, "queued_count": 0,
                "readings": [reading("memory", memory, "bytes"), reading("memory_stall", 0.0, "us"),
                    reading("latency", 0.012, "us"), reading("contention", 0.97, "ratio"),
                    missing("power"), missing("thermal")]},
            "contracts": [{"contract": "bitwise", "substrate": "host", "standing": "proved",
                "detail": ""}],
        });
        serde_json::from_value(node).unwrap()
    }

    /// Three nodes: one is well, one is drained, one is under pressure and has lost a contract.
    fn three() -> Vec<NodeStatus> {
        let well = node("worker-1", 0.106);
        let mut drained = node("worker-2", 0.421);
        drained.flags.draining = true;
        let mut pressed = node("worker-3", 0.931);
        pressed.viability = fiec_schemas::messages::Viability::Unviable;
        pressed.pressing = vec![
            "memory is unviable: 93.1 % (high 90.0 %, low 75.0 %, dwell 10000 ms, pressing for \
             12000 ms)"
                .to_owned(),
        ];
        pressed.contracts[0].standing = StandingKind::Quarantined;
        pressed.contracts[0].detail = "canary gemm-511 had other bits".to_owned();
        vec![well, drained, pressed]
    }

    #[test]
    fn a_node_is_one_line_of_a_terminal() {
        let now = NOW.parse().unwrap();
        let expected = "\
node      state             running  worst signal             pressure
worker-1  viable                2/4  memory 10.6 % of 90.0 %  none
worker-2  viable, draining      2/4  memory 42.1 % of 90.0 %  none
worker-3  unviable              2/4  memory 93.1 % of 90.0 %  memory unviable
left out: bound, silent, memory, limit, contracts, signals (--wide shows all)
worker-3: bitwise: quarantined, canary gemm-511 had other bits";
        assert_eq!(nodes(&three(), Layout::Within(80), now), expected);
        for width in [80, 100, 140] {
            let text = nodes(&three(), Layout::Within(width), now);
            let cells = ["worker-1 worker-2 worker-3 viable, draining unviable 2/4 none"];
            is_readable(&text, width, cells);
            let lines = text.lines().filter(|line| line.starts_with("worker-"));
            assert_eq!(lines.count(), 4, "three nodes and a lost contract: {text}");
            assert!(text.contains("memory 93.1 % of 90.0 %"), "{text}");
        }
    }

    #[test]
    fn in_a_pipe_a_node_has_all_its_columns_in_one_line() {
        let text = nodes(&three()[2..], Layout::Full, NOW.parse().unwrap());
        let line = text.lines().nth(1).unwrap();
        for words in [
            "pressing for 12000 ms",
            "canary gemm-511",
            "memory.max",
            "power missing",
        ] {
            assert!(line.contains(words), "{words}: {text}");
        }
    }

    #[test]
    fn signals_show_why_a_reading_is_missing() {
        for width in [80, 100, 140] {
            let text = signals(&three(), Layout::Within(width), NOW.parse().unwrap());
            let missing = "missing: no driver: libnvidia-ml.so.1 is not installed";
            is_readable(&text, width, ["memory_stall", "97.0 %", missing]);
        }
    }
}
