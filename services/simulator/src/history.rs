//! A scenario from what was recorded: nodes with the loads that they told, submissions at the
//! moments at which they came, as long as they computed. What this takes over and what it leaves
//! to the model is said in [`MODELLED`] and [`RECORDED`].

use std::collections::BTreeMap;

use fiec_schemas::{
    ExecutionId, NodeId, Reading, Signal, Submission, Tenant, Threshold, Timestamp,
};

use fiec_schemas::scheduling::AfterOutcome;

use crate::scenario::{
    After, Arrivals, Drain, Fault, Load, Network, NodeFault, NodeGroup, Quantity, Scenario,
    Telemetry, Workload, default_submission,
};
use crate::settings::Settings;

/// What is taken from the history as it is.
pub const RECORDED: [&str; 5] = [
    "submissions: when they came, whose, what they require and wait for, their batches, thresholds \
     and commit policies",
    "how long each computed in all, in how many capsules, and the size of its last state",
    "nodes: slots, memory, cores, labels, thresholds",
    "loads: the nodes' own readings of every signal, with whatever ran there at the time",
    "when nodes joined, were lost, left, returned, were cordoned or drained",
];

/// What is played and not recorded.
pub const MODELLED: [&str; 8] = [
    "workers, broker and network: appends, commits and capsules without losses, 0.3 ms on the way",
    "computing time is the same on every node and under every load: what presses does not slow it",
    "memory that an execution takes is part of the load where it ran, and does not move with it",
    "capsules of one execution are all of one length",
    "crashes, pauses, cancellations and an operator's orders to yield are not played again",
    "tenants have no quotas and equal shares, and the members of a gang start each for itself",
    "a part that was split off arrives when it was made, and nobody waits for it",
    "between two recorded vectors the last one holds",
];

/// A node as it was recorded.
#[derive(Debug, Clone)]
pub struct NodeRow {
    /// Its name.
    pub node: NodeId,
    /// Executions that it runs at once.
    pub slots: u32,
    /// Memory limit in bytes.
    pub memory_bytes: u64,
    /// Logical processors.
    pub cpus: u32,
    /// The operator's labels.
    pub labels: BTreeMap<String, String>,
    /// Thresholds.
    pub thresholds: BTreeMap<Signal, Threshold>,
}

/// What a node told.
#[derive(Debug, Clone)]
pub struct VectorRow {
    /// Which node.
    pub node: NodeId,
    /// When.
    pub at: Timestamp,
    /// Its readings.
    pub readings: Vec<Reading>,
}

/// What happened to a node.
#[derive(Debug, Clone)]
pub struct EventRow {
    /// Which node.
    pub node: NodeId,
    /// When.
    pub at: Timestamp,
    /// `joined`, `left`, `lost`, `returned`, `cordoned`, `draining`, `uncordoned`.
    pub what: String,
}

/// An execution as it was recorded.
#[derive(Debug, Clone)]
pub struct ExecutionRow {
    /// Which it is.
    pub execution: ExecutionId,
    /// Whose.
    pub tenant: Tenant,
    /// When it was submitted.
    pub submitted_at: Timestamp,
    /// Its submission, where the ledger carried it.
    pub spec: Option<Submission>,
    /// Computing time in microseconds, over all its placements.
    pub computed_us: u64,
    /// Capsules in all.
    pub capsules: u64,
    /// Bytes of its last state.
    pub state_bytes: u64,
}

/// Everything of a span of time.
#[derive(Debug, Clone)]
pub struct History {
    /// When it begins.
    pub since: Timestamp,
    /// When it ends.
    pub until: Timestamp,
    /// Nodes.
    pub nodes: Vec<NodeRow>,
    /// What they told, each node's in order of time.
    pub vectors: Vec<VectorRow>,
    /// What happened to them, each node's in order of time.
    pub events: Vec<EventRow>,
    /// Executions submitted in the span that have begun to compute.
    pub executions: Vec<ExecutionRow>,
}

impl History {
    /// The scenario that plays it again under the default policy.
    pub fn scenario(&self) -> Scenario {
        let duration_ms = self.ms(self.until).max(1);
        Scenario {
            about: format!("Recorded from {} to {}.", self.since, self.until),
            seed: 1,
            duration_ms,
            drain_ms: duration_ms.max(3_600_000),
            policies: 1,
            policy: Settings::default(),
            tick_ms: 50,
            telemetry: Telemetry::default(),
            network: Network::default(),
            nodes: self.nodes.iter().map(|n| self.group(n)).collect(),
            workloads: self.workloads(),
            quotas: Vec::new(),
            faults: self.nodes.iter().flat_map(|n| self.faults(n)).collect(),
        }
    }

    /// Milliseconds from the beginning; 0 for what lies before.
    fn ms(&self, at: Timestamp) -> u64 {
        u64::try_from(at.millis() - self.since.millis()).unwrap_or(0)
    }

    fn group(&self, row: &NodeRow) -> NodeGroup {
        let mut steps: BTreeMap<Signal, Vec<(u64, f64)>> = BTreeMap::new();
        for vector in self.vectors.iter().filter(|v| v.node == row.node) {
            let own = vector.readings.iter().filter(|r| r.device.is_none());
            for reading in own {
                if let Some(value) = reading.value {
                    let all = steps.entry(reading.signal).or_default();
                    all.push((self.ms(vector.at), value.clamp(0.0, 1.0)));
                }
            }
        }
        let load = steps
            .into_iter()
            .filter(|(signal, _)| row.thresholds.contains_key(signal) || *signal == Signal::Memory)
            .map(|(signal, mut steps)| {
                steps.dedup_by(|next, last| next.1 == last.1);
                // What was told first held before it too.
                if let Some(first) = steps.first_mut() {
                    first.0 = 0;
                }
                (signal, Load::Steps(steps))
            })
            .collect();
        NodeGroup {
            start_ms: 0,
            parks: 0,
            name: row.node.to_string(),
            count: 1,
            slots: row.slots.max(1),
            memory_bytes: row.memory_bytes.max(1),
            cpus: row.cpus,
            speed: Quantity::Fixed(1.0),
            labels: row.labels.clone(),
            thresholds: Some(row.thresholds.clone()),
            load,
        }
    }

    /// Each execution is a workload; what others wait for comes before them.
    fn workloads(&self) -> Vec<Workload> {
        let rows = &self.executions;
        let known: BTreeMap<ExecutionId, usize> =
            rows.iter().map(|row| row.execution).zip(0..).collect();
        let after = |row: &ExecutionRow| -> Vec<(usize, AfterOutcome)> {
            let after = row.spec.iter().flat_map(|spec| &spec.after);
            let found = after.filter_map(|d| Some((*known.get(&d.execution(&row.tenant)?)?, d.on)));
            found.collect()
        };
        let mut order = Vec::with_capacity(rows.len());
        let mut seen = vec![false; rows.len()];
        for first in 0..rows.len() {
            // Depth first: one is in order once all that it waits for is. A submission with a circle
            // was refused.
            let mut open = vec![(first, false)];
            while let Some((number, ready)) = open.pop() {
                if ready {
                    order.push(number);
                } else if !std::mem::replace(&mut seen[number], true) {
                    open.push((number, true));
                    open.extend(after(&rows[number]).into_iter().map(|(n, _)| (n, false)));
                }
            }
        }
        let of = |number: usize| {
            let mut workload = self.workload(number, &rows[number]);
            let after = after(&rows[number]).into_iter().map(|(other, on)| After {
                workload: name(other),
                all: false,
                on,
            });
            workload.after = after.collect();
            workload
        };
        order.into_iter().map(of).collect()
    }

    fn workload(&self, number: usize, row: &ExecutionRow) -> Workload {
        let mut submission = row.spec.clone().unwrap_or_else(default_submission);
        submission.id = None;
        submission.array = None;
        submission.gang = None;
        submission.spread = None;
        submission.after.clear();
        let work_us = row.computed_us.max(1);
        #[expect(clippy::cast_precision_loss, reason = "times and sizes below 2^52")]
        let (work, state) = (work_us as f64, row.state_bytes as f64);
        #[expect(clippy::cast_precision_loss, reason = "a number of capsules")]
        let capsules = row.capsules.max(1) as f64;
        Workload {
            name: name(number),
            arrivals: Arrivals::Listed(vec![self.ms(row.submitted_at)]),
            work_ms: Quantity::Fixed((work / 1e3).max(0.001)),
            capsule_ms: Quantity::Fixed((work / capsules / 1e3).max(0.001)),
            state_bytes: Quantity::Fixed(state),
            memory_bytes: Quantity::Fixed(0.0),
            tenant: Some(row.tenant.clone()),
            after: Vec::new(),
            gang: None,
            fails: 0.0,
            submission,
        }
    }

    /// When a node was not there, cordoned or draining.
    fn faults(&self, row: &NodeRow) -> Vec<Fault> {
        let events: Vec<&EventRow> = self.events.iter().filter(|e| e.node == row.node).collect();
        let mut faults = Vec::new();
        let mut add = |begins: &[&str], ends: &[&str], make: fn(NodeFault) -> Fault| {
            let mut since: Option<u64> = None;
            // A node whose first event is that it came was not there before.
            if let Some(first) = events.iter().find(|e| {
                let known = |set: &[&str]| set.contains(&e.what.as_str());
                known(begins) || known(ends)
            }) && ends.contains(&first.what.as_str())
                && ends.contains(&"joined")
                && self.ms(first.at) > 0
            {
                since = Some(0);
            }
            for event in &events {
                let at = self.ms(event.at);
                if begins.contains(&event.what.as_str()) {
                    since = since.or(Some(at));
                } else if ends.contains(&event.what.as_str())
                    && let Some(at_ms) = since.take()
                {
                    faults.push(make(NodeFault {
                        node: row.node.clone(),
                        at_ms,
                        for_ms: Some((at - at_ms).max(1)),
                    }));
                }
            }
            if let Some(at_ms) = since {
                faults.push(make(NodeFault {
                    node: row.node.clone(),
                    at_ms,
                    for_ms: None,
                }));
            }
        };
        add(&["lost", "left"], &["joined", "returned"], Fault::Loss);
        add(&["draining"], &["uncordoned"], |f| {
            Fault::Drain(Drain {
                node: f.node,
                at_ms: f.at_ms,
                for_ms: f.for_ms,
                within_ms: None,
            })
        });
        add(&["cordoned"], &["uncordoned"], Fault::Cordon);
        faults
    }
}

fn name(number: usize) -> String {
    format!("execution-{number}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::play;

    const START: i64 = 1_767_225_600_000_000;

    fn at(ms: i64) -> Timestamp {
        Timestamp::from_micros(START + ms * 1_000)
    }

    fn node(name: &str) -> NodeId {
        NodeId::new(name).unwrap()
    }

    fn history() -> History {
        let row = |name: &str| NodeRow {
            node: node(name),
            slots: 1,
            memory_bytes: 1 << 30,
            cpus: 2,
            labels: BTreeMap::new(),
            thresholds: BTreeMap::from([(
                Signal::Memory,
                Threshold {
                    high: 0.9,
                    low: 0.7,
                    dwell_ms: 10_000,
                },
            )]),
        };
        let vector = |name: &str, ms: i64, value: f64| VectorRow {
            node: node(name),
            at: at(ms),
            readings: vec![Reading {
                signal: Signal::Memory,
                device: None,
                value: Some(value),
                raw: None,
                limit: None,
                unit: "ratio".to_owned(),
                source: "test".to_owned(),
                at: at(ms),
                missing: None,
                envelope: None,
            }],
        };
        History {
            since: at(0),
            until: at(60_000),
            nodes: vec![row("a"), row("b")],
            // One node presses for twelve seconds.
            vectors: vec![
                vector("a", 100, 0.2),
                vector("a", 10_000, 0.95),
                vector("a", 22_000, 0.2),
                vector("b", 100, 0.3),
            ],
            events: vec![EventRow {
                node: node("b"),
                at: at(2_000),
                what: "joined".to_owned(),
            }],
            executions: vec![ExecutionRow {
                execution: ExecutionId(uuid::Uuid::from_u128(1)),
                tenant: Tenant::new("lab").unwrap(),
                submitted_at: at(1_500),
                spec: Some(
                    Submission::parse(
                        br#"{"id":"x","program":"synthetic@1","commit":{"every":5}}"#,
                    )
                    .unwrap(),
                ),
                computed_us: 40_000_000,
                capsules: 400,
                state_bytes: 1_000,
            }],
        }
    }

    #[test]
    fn what_was_recorded_is_played_again_and_otherwise() {
        let scenario = history().scenario();
        assert_eq!(
            scenario.faults,
            [Fault::Loss(NodeFault {
                node: node("b"),
                at_ms: 0,
                for_ms: Some(2_000)
            })]
        );
        let as_it_was = play(&scenario, &mut |_| {}).unwrap();
        assert!(as_it_was.violation.is_none(), "{:?}", as_it_was.violation);
        let s = as_it_was.summary;
        assert_eq!((s.completed, s.rebindings.get("pressure")), (1, Some(&1)));
        assert!(
            (41_000.0..43_000.0).contains(&(s.makespan_ms + 1_500.0)),
            "{s:?}"
        );
        let mut chain = history();
        let mut then = chain.executions[0].clone();
        then.execution = ExecutionId(uuid::Uuid::from_u128(2));
        then.spec = Some(
            Submission::parse(
                br#"{"program":"synthetic@1","after":[{"id":"00000000-0000-0000-0000-000000000001"}]}"#,
            )
            .unwrap(),
        );
        // It was recorded first, and submitted in the same moment.
        chain.executions.insert(0, then);
        let s = play(&chain.scenario(), &mut |_| {}).unwrap().summary;
        assert_eq!(s.completed, 2);
        assert!(s.makespan_ms > 80_000.0, "one after the other: {s:?}");
        let mut patient = scenario.clone();
        crate::settings::set(&mut patient, "dwell_ms=20000").unwrap();
        let s = play(&patient, &mut |_| {}).unwrap().summary;
        assert_eq!((s.completed, s.rebindings.get("pressure")), (1, None));
        for (change, word) in [
            ("dwell=1", "is no setting"),
            ("high.gold=1", "is no signal"),
            ("high.memory=much", "a number in [0, 1]"),
            ("dwell_ms", "NAME=VALUE"),
            ("balance_ms=-1", "whole number"),
        ] {
            let error = crate::settings::set(&mut patient, change).unwrap_err();
            assert!(error.to_string().contains(word), "{change}: {error}");
        }
    }
}
