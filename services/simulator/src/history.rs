//! Builds a scenario from a recorded history. Nodes have their recorded loads. Submissions keep
//! their times, computing times, gangs, and the quotas of their tenants. [`RECORDED`] and
//! [`MODELLED`] list what is taken over and what is modelled.

mod rows;
mod together;

use std::collections::BTreeMap;

use fiec_schemas::dependency::{AfterOutcome, Group, Target};
use fiec_schemas::messages::NodeEventKind::{
    self, Cordoned, Draining, Joined, Left, Lost, Returned, Revoked, Uncordoned,
};
use fiec_schemas::scheduling::Deadline;
use fiec_schemas::{BatchId, ClientId, ExecutionId, NodeId, Signal, Timestamp};

pub use rows::{EventRow, ExecutionRow, NodeRow, QuotaRow, VectorRow};

use crate::scenario::{
    After, Arrivals, Drain, Fault, Load, Network, NodeFault, NodeGroup, Quantity, QuotaChange,
    Revocation, Scenario, Telemetry, Workload, default_submission,
};
use crate::settings::Settings;
use together::Whole;

type Kinds = [NodeEventKind];

/// The parts that are taken from the history unchanged.
pub const RECORDED: [&str; 8] = [
    "submissions: time, tenant, requirements, dependencies, batches with their limits, gangs, ranges \
     that may be spread, priorities, deadlines, thresholds and commit policies",
    "executions that lived when the span began: they arrive at its start, with what they computed \
     from then on",
    "for each execution: computing time, number of capsules, size of the last state, and whether its \
     program failed at its end (not for spread executions)",
    "quotas and weights of tenants: those in force at the start, and their changes",
    "nodes: slots, places to park, memory, cores, labels, thresholds",
    "loads: the nodes' own readings of every signal, including the load of their executions",
    "times at which nodes joined, were lost, left, returned, were cordoned or drained, or announced \
     their end",
    "spread ranges: the sum of what their parts computed, in tiles of one length; the splits are \
     decided again",
];

/// The parts that are modelled.
pub const MODELLED: [&str; 12] = [
    "workers, broker and network: no losses, and 0.3 ms for each message; one policy service, with \
     default settings unless --set changes them",
    "computing time is the same on every node and under every load: pressure does not slow programs",
    "memory of an execution is part of the load where it ran, and does not move with it",
    "all capsules of an execution have the same length",
    "a recorded vector holds until the next one",
    "executions that lived when the span began are placed again at its start",
    "executions that have not ended compute as long as they had; executions that never started are \
     left out, and no other waits for them; of a gang, the members that started in the span start \
     together",
    "devices, bandwidth, instruction sets, programs of nodes and limits on devices are ignored: an \
     execution that requested them takes a slot of any node that meets the other requirements",
    "every node keeps every contract, and nothing is verified",
    "crashes, pauses, cancellations, changes of live executions, and operators' orders to yield or \
     move are not played",
    "programs request nothing beyond their grant",
    "a drain has no deadline",
];

/// The records of a span of time.
#[derive(Debug, Clone)]
pub struct History {
    /// Start of the span.
    pub since: Timestamp,
    /// End of the span.
    pub until: Timestamp,
    /// The nodes.
    pub nodes: Vec<NodeRow>,
    /// Their vectors, each node's ordered by time.
    pub vectors: Vec<VectorRow>,
    /// Their events, each node's ordered by time.
    pub events: Vec<EventRow>,
    /// Quotas at the start and their changes, each tenant's ordered by time.
    pub quotas: Vec<QuotaRow>,
    /// Executions that have started, and were submitted in the span or lived at its start.
    pub executions: Vec<ExecutionRow>,
}

impl History {
    /// The scenario that plays the span again under the default policy.
    pub fn scenario(&self) -> Scenario {
        let duration_ms = self.ms(self.until).max(1);
        let mut told: BTreeMap<&NodeId, Vec<&VectorRow>> = BTreeMap::new();
        for vector in &self.vectors {
            told.entry(&vector.node).or_default().push(vector);
        }
        let told = |node: &NodeRow| told.get(&node.node).map_or(&[][..], Vec::as_slice);
        Scenario {
            about: format!("Recorded from {} to {}.", self.since, self.until),
            seed: 1,
            duration_ms,
            drain_ms: duration_ms.max(3_600_000),
            policies: 1,
            policy: Settings::default(),
            tick_ms: 50,
            hold_ms: 0,
            telemetry: Telemetry::default(),
            network: Network::default(),
            nodes: self.nodes.iter().map(|n| self.group(n, told(n))).collect(),
            workloads: self.workloads(),
            quotas: self.quotas.iter().map(|q| self.quota(q)).collect(),
            faults: self.nodes.iter().flat_map(|n| self.faults(n)).collect(),
        }
    }

    /// Milliseconds since the start; 0 for earlier moments.
    fn ms(&self, at: Timestamp) -> u64 {
        u64::try_from(at.millis() - self.since.millis()).unwrap_or(0)
    }

    fn group(&self, row: &NodeRow, vectors: &[&VectorRow]) -> NodeGroup {
        let mut steps: BTreeMap<Signal, Vec<(u64, f64)>> = BTreeMap::new();
        for vector in vectors {
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
                // The first reading also covers the time before it.
                if let Some(first) = steps.first_mut() {
                    first.0 = 0;
                }
                (signal, Load::Steps(steps))
            })
            .collect();
        NodeGroup {
            start_ms: 0,
            parks: row.parks,
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

    fn quota(&self, row: &QuotaRow) -> QuotaChange {
        QuotaChange {
            tenant: row.tenant.clone(),
            at_ms: self.ms(row.at),
            running: row.running,
            memory_bytes: row.memory_bytes,
            weight: row.weight,
        }
    }

    /// One workload for each execution with all its parts. Dependencies come before the workloads
    /// that wait for them.
    fn workloads(&self) -> Vec<Workload> {
        let wholes = together::wholes(&self.executions);
        let gangs = together::gangs(&wholes);
        let known: BTreeMap<ExecutionId, usize> = wholes
            .iter()
            .map(|whole| whole.row.execution)
            .zip(0..)
            .collect();
        let after = |number: usize| -> Vec<(usize, AfterOutcome)> {
            let row = wholes[number].row;
            let after = row.spec.iter().flat_map(|spec| &spec.after);
            let found = after.flat_map(|d| match d.target(&row.tenant) {
                Some(Target::One(id)) => known.get(&id).map(|n| (*n, d.on)).into_iter().collect(),
                Some(Target::All(group)) => members(&wholes, row, &group, d.on),
                None => Vec::new(),
            });
            found.collect()
        };
        let mut order = Vec::with_capacity(wholes.len());
        let mut seen = vec![false; wholes.len()];
        for first in 0..wholes.len() {
            // Depth first: an execution follows all its dependencies. A submission with a cycle was
            // refused.
            let mut open = vec![(first, false)];
            while let Some((number, ready)) = open.pop() {
                if ready {
                    order.push(number);
                } else if !std::mem::replace(&mut seen[number], true) {
                    open.push((number, true));
                    open.extend(after(number).into_iter().map(|(n, _)| (n, false)));
                }
            }
        }
        let mut comes = vec![0; wholes.len()];
        let of = |number: usize| {
            let mut workload = self.workload(number, &wholes[number]);
            // A dependency may arrive later. Then the waiting execution arrives together with it.
            let after = after(number);
            let others = after.iter().map(|(other, _)| comes[*other]);
            let at_ms = others.fold(self.ms(wholes[number].row.submitted_at), u64::max);
            comes[number] = at_ms;
            workload.arrivals = Arrivals::Listed(vec![at_ms]);
            let after = after.into_iter().map(|(other, on)| After {
                workload: name(other),
                all: false,
                on,
            });
            workload.after = after.collect();
            workload.submission.gang = gangs.get(&number).cloned();
            workload
        };
        order.into_iter().map(of).collect()
    }

    fn workload(&self, number: usize, whole: &Whole<'_>) -> Workload {
        let row = whole.row;
        let mut submission = row.spec.clone().unwrap_or_else(default_submission);
        submission.id = None;
        submission.array = None;
        submission.gang = None;
        submission.not_before = None;
        submission.after.clear();
        submission.verify = None;
        let spread = submission.spread.take().map(|spread| spread.up_to);
        // These properties of nodes are not in the history, and no played node has them.
        submission.requires.device = None;
        submission.requires.bandwidth_bytes_s = None;
        submission.requires.machine = None;
        submission.prefers.device = None;
        let began = row.submitted_at.max(self.since);
        if let Some(deadline) = &mut submission.deadline {
            *deadline = played(deadline, row.submitted_at, began);
        }
        let work_us = whole.computed_us.max(1);
        #[expect(clippy::cast_precision_loss, reason = "times and sizes below 2^52")]
        let (work, state) = (work_us as f64, row.state_bytes as f64);
        #[expect(clippy::cast_precision_loss, reason = "a number of capsules")]
        let capsules = whole.capsules.max(1) as f64;
        Workload {
            name: name(number),
            arrivals: Arrivals::Listed(vec![self.ms(began)]),
            work_ms: Quantity::Fixed((work / 1e3).max(0.001)),
            capsule_ms: Quantity::Fixed((work / capsules / 1e3).max(0.001)),
            state_bytes: Quantity::Fixed(state),
            memory_bytes: Quantity::Fixed(0.0),
            tenant: Some(row.tenant.clone()),
            after: Vec::new(),
            gang: None,
            spread,
            // Each part of a spread execution would fail at its own end.
            fails: match row.failed && spread.is_none() {
                true => 1.0,
                false => 0.0,
            },
            submission,
        }
    }

    /// The times when a node was absent, cordoned or draining.
    fn faults(&self, row: &NodeRow) -> Vec<Fault> {
        let events: Vec<&EventRow> = self.events.iter().filter(|e| e.node == row.node).collect();
        let mut faults = Vec::new();
        let mut add = |begins: &Kinds, ends: &Kinds, make: fn(NodeFault) -> Fault| {
            let mut since: Option<u64> = None;
            // A node whose first event is its arrival was absent before.
            if let Some(first) = events.iter().find(|e| {
                let known = |set: &Kinds| set.contains(&e.what);
                known(begins) || known(ends)
            }) && ends.contains(&first.what)
                && ends.contains(&Joined)
                && self.ms(first.at) > 0
            {
                since = Some(0);
            }
            for event in &events {
                let at = self.ms(event.at);
                if begins.contains(&event.what) {
                    since = since.or(Some(at));
                } else if ends.contains(&event.what)
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
        add(&[Lost, Left], &[Joined, Returned], Fault::Loss);
        add(&[Draining], &[Uncordoned], |f| {
            Fault::Drain(Drain {
                node: f.node,
                at_ms: f.at_ms,
                for_ms: f.for_ms,
                within_ms: None,
            })
        });
        add(&[Cordoned], &[Uncordoned], Fault::Cordon);
        faults.extend(self.revocations(row, &events));
        faults
    }

    /// The announcements of a node's end that came true.
    fn revocations(&self, row: &NodeRow, events: &[&EventRow]) -> Vec<Fault> {
        let is = |event: &&EventRow, set: &Kinds| set.contains(&event.what);
        let mut faults = Vec::new();
        for (n, said) in events.iter().enumerate() {
            let next = events[n + 1..].iter().position(|e| is(e, &[Left, Lost]));
            let Some(gone) = next.filter(|_| said.what == Revoked) else {
                continue;
            };
            let (at_ms, gone_ms) = (self.ms(said.at), self.ms(events[n + 1 + gone].at));
            let mut after = events[n + 1 + gone..].iter();
            let back = after.find(|e| is(e, &[Joined, Returned]));
            faults.push(Fault::Revoke(Revocation {
                node: row.node.clone(),
                at_ms,
                notice_ms: gone_ms - at_ms,
                for_ms: back.map(|e| (self.ms(e.at) - gone_ms).max(1)),
            }));
        }
        faults
    }
}

/// A deadline on the clock of the played world: the same time left after the execution arrives.
fn played(deadline: &Deadline, submitted_at: Timestamp, began: Timestamp) -> Deadline {
    let left_us = deadline.moment(submitted_at).micros() - began.micros();
    let left_s = u32::try_from(left_us.max(0).cast_unsigned().div_ceil(1_000_000));
    Deadline {
        within_s: Some(left_s.unwrap_or(u32::MAX).max(1)),
        at: None,
        on_miss: deadline.on_miss,
    }
}

/// The members of a group for which an execution waited, with the outcome that it wanted of each.
fn members(
    wholes: &[Whole<'_>],
    waiter: &ExecutionRow,
    group: &Group,
    on: AfterOutcome,
) -> Vec<(usize, AfterOutcome)> {
    // Which ones a share left out is not known.
    let on = match on {
        AfterOutcome::AtLeast(_) => AfterOutcome::Any,
        on => on,
    };
    let is_member = |other: &ExecutionRow| {
        let spec = other.spec.as_ref();
        let id = spec.and_then(|spec| spec.id.as_ref());
        let batch = spec.and_then(|spec| spec.batch.as_ref());
        let batch = batch.map(|name| BatchId::from_client(&other.tenant, name));
        other.tenant == waiter.tenant
            && other.submitted_at <= waiter.submitted_at
            && other.execution != waiter.execution
            && group.has(id.map(ClientId::as_str), batch)
    };
    let numbered = wholes.iter().enumerate();
    let members = numbered.filter(|(_, whole)| is_member(whole.row));
    members.map(|(number, _)| (number, on)).collect()
}

fn name(number: usize) -> String {
    format!("execution-{number}")
}
