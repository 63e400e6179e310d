//! Nodes whose names come once are forgotten after long silence. What refers to them keeps them.

#![allow(clippy::unwrap_used, reason = "a test may end so")]

mod world;

use fiec_policy::{Config, Input};
use fiec_schemas::trust::{Quarantine, Quarantined};
use fiec_schemas::{Contract, InstanceId, NodeFlags, NodeId};
use world::{World, descriptor};

const FORGET_MS: u64 = 120_000;

fn world(nodes: usize) -> World {
    let config = Config {
        forget_ms: FORGET_MS,
        ..Config::default()
    };
    let nodes = (0..nodes).map(|i| descriptor(i, 100 + i as u128));
    World::with(config, nodes.collect())
}

/// Time passes, and no probe is answered. The broker does what it is asked to forget.
fn pass(w: &mut World, ms: u64) -> Vec<(NodeId, Option<InstanceId>)> {
    let mut all = Vec::new();
    for _ in 0..ms / 500 {
        w.pass(500);
        for (node, instance) in std::mem::take(&mut w.forgotten) {
            if instance.is_some() {
                w.step(Input::Gone { node: node.clone() });
            }
            all.push((node, instance));
        }
        for probed in w.take_probes() {
            let node: NodeId = probed.parse().unwrap();
            w.step(Input::Probe {
                node: node.clone(),
                answered: None,
            });
        }
    }
    all
}

#[test]
fn a_thousand_nodes_that_came_once_leave_nothing_behind() {
    let mut w = world(1);
    for n in 0..1_000 {
        w.step(Input::Descriptor {
            descriptor: Box::new(descriptor(n + 1, 10_000 + n as u128)),
        });
    }
    let by_half = pass(&mut w, FORGET_MS / 2);
    assert_eq!((by_half, w.policy.known_nodes()), (vec![], 1_001));
    let forgotten = pass(&mut w, 5 * FORGET_MS);
    assert_eq!(w.policy.known_nodes(), 1, "the one that speaks");
    for n in 0..1_000 {
        let asked = descriptor(n + 1, 10_000 + n as u128);
        let asked = (asked.node, Some(asked.instance));
        let times = forgotten.iter().filter(|f| **f == asked).count();
        assert_eq!(times, 1, "{asked:?}");
    }
}

#[test]
fn a_node_that_comes_back_gets_work_again() {
    let mut w = world(1);
    w.silence(0);
    pass(&mut w, 3 * FORGET_MS);
    assert_eq!(w.policy.known_nodes(), 0);
    w.submit_and_store(1);
    w.carry_out();
    w.speak(0);
    w.restart_node(0);
    pass(&mut w, 5_000);
    assert_eq!((w.policy.known_nodes(), w.node_of(1)), (1, 0));
}

#[test]
fn work_and_the_word_of_an_operator_keep_a_node() {
    let mut w = world(5);
    w.submit_and_store(1);
    w.carry_out();
    let holder = w.node_of(1);
    w.start(1);
    let others: Vec<usize> = (0..5).filter(|i| *i != holder).collect();
    let [cordoned, drained, quarantined, revoked] = others[..] else {
        panic!("five nodes");
    };
    // The other nodes cannot take what the holder has: it stays there for good.
    w.cordon(cordoned, true);
    w.flag(drained, false, true);
    let (name, at) = (w.node(quarantined), w.wall());
    let lost = Quarantined {
        contract: Contract::Bitwise,
        substrate: None,
        reason: "a test".to_owned(),
        who: "ann".to_owned(),
        at,
    };
    let quarantine = Quarantine {
        entries: vec![lost],
        released: None,
    };
    w.step(Input::Quarantine {
        node: name.clone(),
        quarantine,
    });
    let flags = NodeFlags {
        revoked_at: Some(at),
        revoked: Some(w.instance(revoked)),
        ..NodeFlags::default()
    };
    let name = w.node(revoked);
    w.step(Input::Flags {
        node: name.clone(),
        flags,
    });
    for node in &others {
        w.silence(*node);
    }
    let forgotten = pass(&mut w, 3 * FORGET_MS);
    let names: Vec<_> = forgotten.into_iter().map(|(node, _)| node).collect();
    assert!(
        names.iter().all(|name| *name == w.node(revoked)),
        "{names:?}"
    );
    assert_eq!(w.policy.known_nodes(), 4);
    // Once the cordon is lifted, nothing keeps the node.
    w.cordon(cordoned, false);
    let forgotten = pass(&mut w, 2 * FORGET_MS);
    assert!(forgotten.iter().any(|(node, _)| *node == w.node(cordoned)));
    assert_eq!(w.policy.known_nodes(), 3);
}

#[test]
fn of_several_services_one_has_a_node_forgotten_and_all_forget_it() {
    let mut w = world(20);
    w.rival();
    for node in 0..20 {
        w.silence(node);
    }
    let mut asked = 0;
    for _ in 0..6 * FORGET_MS / 1_000 {
        asked += pass(&mut w, 1_000)
            .iter()
            .filter(|(_, i)| i.is_some())
            .count();
        w.rival();
    }
    assert!((1..20).contains(&asked), "{asked}");
    assert_eq!(w.policy.known_nodes(), 20 - u32::try_from(asked).unwrap());
    for node in 0..20 {
        let node = w.node(node);
        w.step(Input::Gone { node: node.clone() });
    }
    pass(&mut w, FORGET_MS);
    assert_eq!(w.policy.known_nodes(), 0);
    // The marks of the deletions arrive late, and bring no name back.
    let name = w.node(0);
    w.step(Input::Flags {
        node: name.clone(),
        flags: NodeFlags::default(),
    });
    w.step(Input::Quarantine {
        node: name.clone(),
        quarantine: Quarantine::default(),
    });
    w.step(Input::Gone { node: name.clone() });
    assert_eq!(w.policy.known_nodes(), 0);
}
