//! A bare policy to measure the cost of a placement: nodes of four slots under different loads, and
//! one submission after another.

use fiec_policy::{Action, Config, Input, Judged, Millis, NewExecution, Now, Policy, Submitted};
use fiec_schemas::trust::{Proof, SignedProof};
use fiec_schemas::{
    Event, ExecutionId, FieldError, HardwareVector, IdError, InstanceId, NodeId, Reading, Signal,
    Submission, Tenant, Timestamp,
};
use uuid::Uuid;

use crate::node::Node;
use crate::scenario::{NodeGroup, Quantity, default_submission};

/// The submissions of a measurement.
#[derive(Debug, Clone)]
pub struct Asks {
    /// The submission, repeated.
    pub spec: Submission,
}

impl Default for Asks {
    fn default() -> Self {
        Self {
            spec: default_submission(),
        }
    }
}

/// A policy with a number of nodes.
pub struct Bench {
    policy: Policy,
    tenant: Tenant,
    spec: Submission,
    placed: u128,
    out: Vec<Action>,
}

const START: Millis = Millis(86_400_000);
const WALL: Timestamp = Timestamp::from_micros(1_767_225_600_000_000);

impl Bench {
    /// Nodes that have joined, proved their contracts and sent one vector each.
    ///
    /// # Errors
    /// Never for numbers of nodes that give valid names.
    pub fn new(nodes: u32, asks: &Asks) -> Result<Self, FieldError> {
        let bad = |error: IdError| FieldError::new("nodes", error.to_string());
        let mut policy = Policy::new(Config::default(), InstanceId(Uuid::from_u128(1)));
        let mut out = Vec::new();
        let now = Now {
            mono: START,
            wall: WALL,
        };
        let group = NodeGroup {
            start_ms: 0,
            parks: 0,
            name: "n".to_owned(),
            count: nodes,
            slots: 4,
            memory_bytes: 64 << 30,
            cpus: 8,
            speed: Quantity::Fixed(1.0),
            labels: [("rack".to_owned(), "1".to_owned())].into(),
            thresholds: None,
            load: Default::default(),
        };
        for number in 0..nodes {
            let name = NodeId::new(format!("n-{number:05}")).map_err(bad)?;
            let node = Node::new(&group, name, number, 1);
            let d = (*node.descriptor).clone();
            let expires = Timestamp::from_micros(WALL.micros() + 86_400_000_000);
            let proof = Proof::passing(&d, 1, WALL, expires);
            let signed = SignedProof {
                v: 1,
                statement: String::new(),
                key: String::new(),
                sig: String::new(),
            };
            policy.step(
                now,
                Input::Descriptor {
                    descriptor: Box::new(d.clone()),
                },
                &mut out,
            );
            let input = Input::Proof {
                node: d.node.clone(),
                signed: Box::new(signed),
                judged: Judged::Counts(proof),
            };
            policy.step(now, input, &mut out);
            let value = 0.2 + 0.5 * f64::from(number % 7) / 7.0;
            let vector = HardwareVector {
                v: 1,
                node: d.node.clone(),
                instance: d.instance,
                count: 1,
                at: WALL,
                clock: None,
                readings: vec![Reading {
                    signal: Signal::Memory,
                    device: None,
                    value: Some(value),
                    raw: Some(value * 64e9),
                    limit: Some(64e9),
                    unit: "bytes".to_owned(),
                    source: "bench".to_owned(),
                    at: WALL,
                    missing: None,
                    envelope: None,
                }],
                draining: false,
                slots: 4,
                running_count: 0,
                queued_count: 0,
                running: Vec::new(),
                arriving: Vec::new(),
                stuck: Vec::new(),
            };
            policy.step(
                now,
                Input::Vector {
                    vector: Box::new(vector),
                    age_ms: 0,
                },
                &mut out,
            );
            out.clear();
        }
        policy.step(now, Input::Loaded, &mut out);
        Ok(Self {
            policy,
            tenant: Tenant::new("bench").map_err(bad)?,
            spec: asks.spec.clone(),
            placed: 0,
            out: Vec::new(),
        })
    }

    /// Places one more execution.
    ///
    /// # Errors
    /// If the policy finds no node for it.
    pub fn place(&mut self) -> Result<(), FieldError> {
        if self.submit() {
            return Ok(());
        }
        Err(FieldError::new(
            "nodes",
            "a node has room, but the policy placed nothing: has a requirement been added that these nodes do not meet?",
        ))
    }

    /// Submits one more execution. Returns true if it was placed, false if it waits.
    pub fn submit(&mut self) -> bool {
        self.placed += 1;
        self.out.clear();
        let id = (7 << 76) | (2 << 62) | self.placed;
        let new = NewExecution {
            execution: ExecutionId(Uuid::from_u128(id)),
            tenant: &self.tenant,
            spec: &self.spec,
            submitted_at: WALL,
        };
        let now = Now {
            mono: START.plus(500),
            wall: WALL,
        };
        match self.policy.submit(now, new, false, &mut self.out) {
            Submitted::Append(events) => events.iter().any(|e| matches!(e, Event::Bound { .. })),
            Submitted::Hold => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_slot_is_placed_and_then_nothing_more() {
        let mut bench = Bench::new(3, &Asks::default()).unwrap();
        for n in 0..12 {
            bench.place().unwrap_or_else(|e| panic!("{n}: {e}"));
        }
        assert!(bench.place().is_err());
    }
}
