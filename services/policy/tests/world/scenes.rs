//! What several tests begin with: small nodes, quotas, failures, and the first scene of their plays.

use fiec_schemas::quota::Quota;

use super::lab::{Lab, for_ever};
use super::spread::{Tiled, tiled};
use super::*;

/// So many executions of a tenant may run at once.
pub fn quota(running: impl Into<Option<u32>>) -> Quota {
    Quota {
        v: 1,
        running: running.into(),
        devices: None,
        memory_bytes: None,
        weight: None,
        who: "ann".into(),
        at: Timestamp::default(),
    }
}

/// A node with one slot that keeps so many parked.
pub fn single(i: usize, parks: u32) -> NodeDescriptor {
    NodeDescriptor {
        slots: 1,
        parks,
        ..descriptor(i, 100 + i as u128)
    }
}

/// The same submission with a higher priority than most.
pub fn urgent(fields: &str) -> String {
    format!(r#""priority":10,{fields}"#)
}

/// What may be on this node alone.
pub fn on(node: &str) -> String {
    format!(r#""requires":{{"nodes":["{node}"]}}"#)
}

impl World {
    /// Its program fails for this reason; `told`: the policy hears of it.
    pub fn fail(&mut self, id: ExecutionId, reason: &str, told: bool) {
        let author = self.author_of(id);
        let failed = Event::Failed {
            reason: reason.into(),
            stderr: String::new(),
        };
        self.append(id, vec![failed], &author, told);
    }

    /// All that has happened to it.
    pub fn events_of(&self, id: ExecutionId) -> Vec<Event> {
        let history = self.ledgers[&id].history.iter();
        history.map(|(_, e)| e.clone()).collect()
    }

    /// Why it has failed, if it has.
    pub fn failure_of(&self, id: ExecutionId) -> Option<String> {
        self.events_of(id).into_iter().rev().find_map(|e| match e {
            Event::Failed { reason, .. } => Some(reason),
            _ => None,
        })
    }

    /// No node takes anything new, or all do again.
    pub fn cordon_all(&mut self, on: bool) {
        (0..self.node_count()).for_each(|node| self.cordon(node, on));
    }
}

/// One that runs by itself on these nodes for so long, and then gives way to an urgent one; it takes
/// `takes_up` to begin on a node.
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

/// A gang of three on so many nodes of two slots.
pub fn gang_of_three(nodes: usize) -> World {
    let mut w = World::new(nodes);
    w.submit_gang();
    w.pass(200);
    w
}

/// The same, of which the first and the third compute, and the second was refused and finds no other
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

/// A range of tiles, each of `each_ms`, that up to so many may compute, on nodes of one slot.
pub fn whole(nodes: usize, each_ms: u64, count: u64, up_to: u32) -> (World, Tiled) {
    let mut world = World::of((0..nodes).map(tiled).collect());
    world.submit_tiles(1, count, up_to, "");
    (world, Tiled::new(each_ms))
}

/// A holder that has done all that it kept and waits for its part, which is slow: with the part and
/// its node.
pub fn holder_at_its_end() -> (World, Tiled, ExecutionId, usize) {
    let (mut world, mut work) = whole(2, 100, 100, 2);
    world.work(&mut work, 3_000);
    let part = world.parts()[0];
    let there = world.node_with(part);
    work.slow.insert(format!("n{there}"), 20);
    world.work(&mut work, 4_000);
    let phase = world.phase(1);
    assert!(matches!(phase, Phase::Pending), "{phase:?}");
    (world, work, part, there)
}
