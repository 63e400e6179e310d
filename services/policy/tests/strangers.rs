//! Vectors of names that have not joined cost a bounded amount, for a short time.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test may end so, and measure time"
)]

mod world;

use std::time::Instant;

use fiec_policy::Input;
use fiec_schemas::{HardwareVector, InstanceId, NodeId, Reading, Signal};
use uuid::Uuid;
use world::{World, descriptor};

fn vector(w: &World, name: &str, instance: InstanceId, count: u64) -> HardwareVector {
    let reading = |signal| Reading {
        signal,
        device: None,
        value: Some(0.2),
        raw: None,
        limit: None,
        unit: "ratio".into(),
        source: "test".into(),
        at: w.wall(),
        missing: None,
        envelope: None,
    };
    HardwareVector {
        v: 1,
        node: NodeId::new(name).unwrap(),
        instance,
        count,
        at: w.wall(),
        clock: None,
        readings: Signal::ALL.into_iter().map(reading).collect(),
        draining: false,
        slots: 4,
        running_count: 0,
        queued_count: 0,
        running: vec![],
        arriving: vec![],
        stuck: Vec::new(),
    }
}

fn invent(w: &mut World, from: u32, to: u32) {
    for n in from..to {
        let instance = InstanceId(Uuid::from_u128(n.into()));
        let vector = vector(w, &format!("invented-{n}"), instance, 1);
        w.step(Input::Vector {
            vector: Box::new(vector),
            age_ms: 0,
        });
    }
}

#[test]
fn of_20_000_invented_names_few_are_kept_and_none_after_silence() {
    let mut w = World::new(2);
    w.pass(1_000);
    let nodes = w.policy.known_nodes();
    let began = Instant::now();
    w.tick();
    let alone = began.elapsed();
    invent(&mut w, 0, 20_000);
    assert_eq!(w.policy.known_nodes(), nodes, "an invented name is a node");
    assert!((1..=256).contains(&w.policy.strangers()));
    // A tick costs as much as before; the bound tolerates a pause of the machine.
    let began = Instant::now();
    w.tick();
    let beside = began.elapsed();
    assert!(
        beside < alone * 100 + std::time::Duration::from_secs(2),
        "{beside:?} beside invented names, {alone:?} alone"
    );
    // Executions still go to the existing nodes.
    w.submit_and_store(1);
    assert!(w.node_of(1) < 2);
    w.pass(30_000);
    assert_eq!(w.policy.strangers(), 0, "silent names are kept");
}

#[test]
fn a_vector_that_overtakes_its_descriptor_counts_once_the_node_joins() {
    let mut w = World::new(1);
    w.pass(1_000);
    invent(&mut w, 0, 100);
    let mut joins = descriptor(7, 7);
    joins.slots = 64;
    let early = vector(&w, joins.node.as_str(), joins.instance, 1);
    w.step(Input::Vector {
        vector: Box::new(early),
        age_ms: 0,
    });
    let before = w.policy.known_nodes();
    assert_eq!(w.policy.strangers(), 101);
    w.step(Input::Descriptor {
        descriptor: Box::new(joins.clone()),
    });
    assert_eq!(w.policy.known_nodes(), before + 1);
    assert_eq!(w.policy.strangers(), 100);
}
