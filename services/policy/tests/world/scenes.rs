//! Scenes that several tests share: small nodes, quotas, failures, and common first steps.

use fiec_schemas::quota::Quota;

use super::lab::{Lab, for_ever};
use super::spread::{Tiled, tiled};
use super::*;

/// A quota on the executions of a tenant that run at once.
pub fn quota(running: impl Into<Option<u32>>) -> Quota {
    Quota {
        v: 1,
        running: running.into(),
        devices: None,
        memory_bytes: None,
        waiting: None,
        weight: None,
        who: "ann".into(),
        at: Timestamp::default(),
    }
}

/// A node with one slot that can park `parks` executions.
pub fn single(i: usize, parks: u32) -> NodeDescriptor {
    NodeDescriptor {
        slots: 1,
        parks,
        ..descriptor(i, 100 + i as u128)
    }
}

/// The same submission with a high priority.
pub fn urgent(fields: &str) -> String {
    format!(r#""priority":10,{fields}"#)
}

/// The requirement of one node.
pub fn on(node: &str) -> String {
    format!(r#""requires":{{"nodes":["{node}"]}}"#)
}

impl World {
    /// Fails an execution's program for this reason. `told`: the policy gets the message.
    pub fn fail(&mut self, id: ExecutionId, reason: &str, told: bool) {
        let author = self.author_of(id);
        let failed = Event::Failed {
            reason: reason.into(),
            stderr: String::new(),
            fault: None,
        };
        self.append(id, vec![failed], &author, told);
    }

    /// All events of an execution.
    pub fn events_of(&self, id: ExecutionId) -> Vec<Event> {
        let history = self.ledgers[&id].history.iter();
        history.map(|(_, e)| e.clone()).collect()
    }

    /// The reason of its failure, if it has failed.
    pub fn failure_of(&self, id: ExecutionId) -> Option<String> {
        self.events_of(id).into_iter().rev().find_map(|e| match e {
            Event::Failed { reason, .. } => Some(reason),
            _ => None,
        })
    }

    /// Cordons all nodes, or uncordons them.
    pub fn cordon_all(&mut self, on: bool) {
        (0..self.node_count()).for_each(|node| self.cordon(node, on));
    }
}

/// An execution runs alone on these nodes for `ms`, and is then preempted by an urgent one. It
/// takes `takes_up` ms to start on a node.
pub fn one_gives_way(nodes: Vec<NodeDescriptor>, takes_up: u64, fields: &str, ms: u64) -> Lab {
    let mut lab = Lab::new(World::of(nodes));
    lab.takes_up = takes_up;
    lab.submit(1, 500, fields);
    lab.play(ms, for_ever);
    lab.submit(2, 500, &urgent(fields));
    lab.play(2_000, for_ever);
    lab
}

/// A member of a gang of three.
pub const GANG: &str = r#""gang":{"name":"g","size":3}"#;

/// A gang of three on nodes of two slots.
pub fn gang_of_three(nodes: usize) -> World {
    let mut w = World::new(nodes);
    w.submit_gang();
    w.pass(200);
    w
}

/// The same with the first and third member started. The second was refused and finds no other
/// place.
pub fn gang_without_its_second(nodes: usize) -> World {
    let mut w = gang_of_three(nodes);
    w.start(1);
    w.start(3);
    w.cordon_all(true);
    w.refuse(2);
    w.take_controls();
    w.pass(12_000);
    w
}

impl World {
    /// Submits the gang's three members.
    pub fn submit_gang(&mut self) {
        for n in 1..=3 {
            self.submit_line(n, GANG);
        }
    }
}

/// A range of tiles of `each_ms`, on nodes of one slot, that up to `up_to` nodes may compute.
pub fn whole(nodes: usize, each_ms: u64, count: u64, up_to: u32) -> (World, Tiled) {
    let mut world = World::of((0..nodes).map(tiled).collect());
    world.submit_tiles(1, count, up_to, "");
    (world, Tiled::new(each_ms))
}

/// A holder that has finished its own range and waits for its slow part, with the part and its
/// node.
pub fn holder_at_its_end() -> (World, Tiled, ExecutionId, usize) {
    let (mut world, mut work) = whole(2, 100, 100, 2);
    world.work(&mut work, 3_000);
    let part = world.parts()[0];
    let there = world.node_with(part);
    work.slow.insert(format!("n{there}"), 20);
    world.work(&mut work, 4_000);
    let phase = world.phase(1);
    assert!(matches!(phase, Phase::Pending { .. }), "{phase:?}");
    (world, work, part, there)
}
