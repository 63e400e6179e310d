//! A simulated node: its instances, its loads, its running executions and its queue.

use std::collections::VecDeque;
use std::sync::Arc;

use fiec_schemas::messages::Destination;
use fiec_schemas::scheduling::Keep;
use fiec_schemas::substrate::{Substrate, SubstrateKind};
use fiec_schemas::trust::NodeIdentity;
use fiec_schemas::{
    Cause, Decision, Digest, Fault, InstanceId, NodeDescriptor, NodeId, Requirements, Signal,
    Timestamp, author, package,
};
use uuid::Uuid;

use crate::draw::{Draw, Purpose};
use crate::load::Playing;
use crate::scenario::{Load, NodeGroup};
use crate::world::exec::Exec;

/// An order that a node has received for an execution.
#[derive(Debug, Clone, PartialEq)]
pub enum Order {
    /// Yield at the next boundary.
    Yield {
        /// The cause.
        cause: Cause,
        /// The destination. None: the execution becomes pending.
        to: Option<Destination>,
        /// The choice of the destination.
        decision: Option<Decision>,
    },
    /// Park at the next boundary.
    Park {
        /// The cause.
        cause: Cause,
        /// The memory to keep.
        keep: Keep,
    },
    /// Give the execution up at once.
    GiveUp {
        /// The cause.
        cause: Cause,
    },
    /// Cancel the execution at once.
    Cancel {
        /// The author of the order.
        who: String,
    },
}

/// The message that a worker is writing.
#[derive(Debug, Clone, PartialEq)]
pub enum Write {
    /// `started`.
    Start,
    /// A boundary with this index.
    Commit(u64),
    /// A boundary with this index, unless it is committed, and the result of an order there.
    Order(u64, Box<Order>),
    /// A resume after a park.
    Unpark(String),
    /// The end, whether it completed or failed.
    Finish,
    /// A refusal of the execution, with the fault of the node if it has one.
    Refuse(String, Option<Box<Fault>>),
    /// A boundary with this index, at which the last half of the remaining range becomes a part.
    Split(u64),
    /// The last part is taken back.
    Merge,
    /// The execution waits on for its last part, which has not ended.
    Rest,
}

/// An execution on its node.
#[derive(Debug)]
pub struct Run {
    /// Its number.
    pub exec: u32,
    /// Its epoch.
    pub epoch: u64,
    /// Sequence of the message that its next one must follow.
    pub seq: u64,
    /// The boundary from which it started here.
    pub from: u64,
    /// Time of that boundary, in microseconds; a stall shifts it.
    pub base: u64,
    /// The last boundary that it knows to be committed.
    pub committed: u64,
    /// Time of that commit.
    pub committed_at: u64,
    /// The message in flight.
    pub writing: Option<Write>,
    /// True once its `started` is stored.
    pub started: bool,
    /// True while it is parked and has no slot.
    pub parked: bool,
    /// Its pending order.
    pub order: Option<Box<Order>>,
    /// For a range: the first tile after `from`, and the tile after its last one.
    pub tile: u64,
    /// See `tile`.
    pub end: u64,
    /// True if it was ordered to give a part of its range away.
    pub split: bool,
    /// The earliest scheduled look at it.
    pub look: u64,
}

impl Run {
    /// For a range: the first unfinished tile at a boundary.
    pub fn tile_at(&self, boundary: u64) -> u64 {
        self.tile + boundary.saturating_sub(self.from)
    }

    /// Its last boundary, which is its end.
    pub fn last_boundary(&self, exec: &Exec) -> u64 {
        match exec.tiles {
            None => exec.boundaries(),
            Some(_) => self.from + self.end - self.tile,
        }
    }

    /// Restarts from its last commit, now.
    pub fn rebase(&mut self, now: u64) {
        self.tile = self.tile_at(self.committed);
        (self.from, self.base) = (self.committed, now);
    }
}

/// A simulated node.
#[derive(Debug)]
pub struct Node {
    /// Its descriptor.
    pub descriptor: Arc<NodeDescriptor>,
    /// Copies of often used fields of the descriptor.
    pub name: NodeId,
    /// Number of executions that it runs at once.
    pub slots: u32,
    /// Memory limit, in bytes.
    pub limit: u64,
    /// Its author name in messages.
    pub author: Arc<str>,
    /// Its speed; 1 is the reference speed of workloads.
    pub speed: f64,
    /// Time to start an execution here, in microseconds.
    pub start_us: u64,
    /// Its only load if it is constant.
    pub steady: Option<f64>,
    /// Its loads.
    pub loads: Vec<(Signal, Playing)>,
    /// Its stream of random numbers.
    pub draw: Box<Draw>,
    /// False while it is dead.
    pub up: bool,
    /// Number of its current instance.
    pub life: u32,
    /// Start of the current instance, in microseconds.
    pub up_since: u64,
    /// Total time up, in microseconds.
    pub up_us: u64,
    /// It is partitioned until this moment.
    pub silent_until: u64,
    /// It is stalled until this moment.
    pub stalled_until: u64,
    /// True while an operator cordons it.
    pub cordoned: bool,
    /// True while an operator drains it.
    pub draining: bool,
    /// Deadline by which it must be empty, in microseconds: of a drain, or its end.
    pub leave_by: Option<u64>,
    /// Time of that announcement.
    pub noticed_at: u64,
    /// True if it disappears at the deadline.
    pub revoked: bool,
    /// End of its last fault.
    pub troubled_until: u64,
    /// Running and parked executions.
    pub runs: Vec<Run>,
    /// Number of parked executions.
    pub parked: u32,
    /// Accepted executions in its queue, with the message to follow.
    pub queue: VecDeque<(u32, u64)>,
    /// Bytes of memory that its executions use.
    pub used_bytes: u64,
    /// Number of vectors of this instance.
    pub count: u64,
    /// The last reported load if there is one load.
    pub told_one: f32,
    /// The last reported loads if there are several.
    pub told: Vec<f32>,
    /// Time of that vector.
    pub told_at: u64,
    /// Number of executions that ledgers bind here.
    pub bound: u32,
    /// Number of those that are parked.
    pub standing: u32,
    /// Time since which it has had room without a fault; `u64::MAX` otherwise.
    pub room_since: u64,
    /// The same with no execution bound here.
    pub empty_since: u64,
    /// True while every load is well below every threshold in force.
    pub calm: bool,
}

impl Node {
    /// A node of a group, with its number among all nodes.
    pub fn new(group: &NodeGroup, name: NodeId, number: u32, seed: u64) -> Self {
        let mut draw = Draw::new(seed, Purpose::Node(number));
        let speed = draw.quantity(&group.speed);
        let mut plan = group.load.clone();
        plan.entry(Signal::Memory).or_insert(Load::Constant(0.2));
        let loads: Vec<_> = plan
            .into_iter()
            .map(|(signal, load)| (signal, Playing::new(load, &mut draw)))
            .collect();
        let steady = match &loads[..] {
            [(_, playing)] => playing.steady(),
            _ => None,
        };
        Self {
            author: author(&name, number, 0),
            descriptor: Arc::new(descriptor(group, name.clone(), number)),
            name,
            slots: group.slots,
            limit: group.memory_bytes,
            steady,
            speed,
            start_us: group.start_ms * 1_000,
            told_one: -1.0,
            told: vec![-1.0; loads.len()],
            loads,
            draw: Box::new(draw),
            up: true,
            life: 0,
            up_since: 0,
            up_us: 0,
            silent_until: 0,
            stalled_until: 0,
            cordoned: false,
            draining: false,
            leave_by: None,
            noticed_at: 0,
            revoked: false,
            troubled_until: 0,
            runs: Vec::new(),
            parked: 0,
            queue: VecDeque::new(),
            used_bytes: 0,
            count: 0,
            told_at: 0,
            bound: 0,
            standing: 0,
            room_since: u64::MAX,
            empty_since: u64::MAX,
            calm: false,
        }
    }

    /// Starts a new instance.
    pub fn reborn(&mut self, now: u64, number: u32) {
        self.life += 1;
        let mut descriptor = (*self.descriptor).clone();
        descriptor.instance = instance(number, self.life);
        self.descriptor = Arc::new(descriptor);
        self.up = true;
        self.up_since = now;
        self.count = 0;
        self.author = author(&self.name, number, self.life);
        self.told_one = -1.0;
        self.told.fill(-1.0);
        self.stalled_until = 0;
        if std::mem::take(&mut self.revoked) {
            self.leave_by = None;
        }
    }

    /// True if messages can pass in both directions.
    pub fn is_reachable(&self, now: u64) -> bool {
        self.up && now >= self.silent_until
    }

    /// Number of executions that are parked or about to be.
    pub fn parks_taken(&self) -> u32 {
        let parks = |o: &Order| matches!(o, Order::Park { .. });
        let taken = |r: &&Run| {
            let on_its_way = match &r.writing {
                Some(Write::Order(_, order)) => parks(order),
                _ => r.order.as_deref().is_some_and(parks),
            };
            r.parked || on_its_way
        };
        u32::try_from(self.runs.iter().filter(taken).count()).unwrap_or(u32::MAX)
    }

    /// The run of this execution in this epoch.
    pub fn run(&mut self, exec: u32, epoch: u64) -> Option<&mut Run> {
        self.runs
            .iter_mut()
            .find(|r| r.exec == exec && r.epoch == epoch)
    }

    /// True if it already has a fault.
    pub fn is_ailing(&self, now: u64) -> bool {
        let away = !self.is_reachable(now) || now < self.stalled_until;
        away || self.draining || self.revoked
    }

    /// Number of used slots.
    pub fn computing(&self) -> usize {
        self.runs.len() - self.parked as usize
    }

    /// The share of its memory that its executions use.
    #[expect(clippy::cast_precision_loss, reason = "a share of bytes")]
    pub fn used_share(&self) -> f64 {
        if self.used_bytes == 0 {
            return 0.0;
        }
        self.used_bytes as f64 / self.limit as f64
    }

    /// Updates the times since which it has had room.
    pub fn note_room(&mut self, now: u64) {
        let well = self.calm
            && self.is_reachable(now)
            && now >= self.stalled_until
            && !self.cordoned
            && !self.draining
            && !self.revoked;
        let note = |since: &mut u64, holds: bool| {
            *since = match holds {
                true => (*since).min(now),
                false => u64::MAX,
            };
        };
        note(
            &mut self.room_since,
            well && self.bound - self.standing < self.slots,
        );
        note(&mut self.empty_since, well && self.bound == 0);
    }

    /// Checks the requirements that never change during a run.
    pub fn meets(&self, requires: &Requirements, program: &str) -> Result<(), &'static str> {
        let d = &self.descriptor;
        let all = [
            (
                requires.nodes.is_empty() || requires.nodes.contains(&d.node),
                "requires.nodes",
            ),
            (!requires.exclude.contains(&d.node), "requires.exclude"),
            (
                requires
                    .memory_bytes
                    .is_none_or(|n| d.memory_limit_bytes >= n),
                "requires.memory_bytes",
            ),
            (requires.cores.is_none_or(|n| d.cpus >= n), "requires.cores"),
            (
                requires
                    .labels
                    .iter()
                    .all(|(k, v)| d.labels.get(k) == Some(v)),
                "requires.labels",
            ),
            (
                requires.bandwidth_bytes_s.is_none() && requires.device.is_none(),
                "requires.device",
            ),
            (
                d.programs.iter().any(|p| package::matches(p, program)),
                "program",
            ),
        ];
        match all.iter().find(|(met, _)| !met) {
            None => Ok(()),
            Some((_, what)) => Err(what),
        }
    }
}

/// The id of a node's instance.
pub fn instance(number: u32, life: u32) -> InstanceId {
    InstanceId(Uuid::from_u128(
        (0x5e << 120) | (u128::from(number) << 32) | u128::from(life) | (7 << 76) | (2 << 62),
    ))
}

fn author(name: &NodeId, number: u32, life: u32) -> Arc<str> {
    author::of_worker(name, instance(number, life)).into()
}

fn descriptor(group: &NodeGroup, node: NodeId, number: u32) -> NodeDescriptor {
    NodeDescriptor {
        v: 1,
        instance: instance(number, 0),
        host: node.to_string(),
        pid: 1,
        version: "simulated".to_owned(),
        started_at: Timestamp::default(),
        shard: 0,
        slots: group.slots,
        cpus: group.cpus,
        isa: "x86_64+avx2+fma".to_owned(),
        memory_limit_bytes: group.memory_bytes,
        memory_limit_source: "declared".to_owned(),
        substrates: vec![Substrate {
            id: "host".to_owned(),
            kind: SubstrateKind::Cpu,
            name: "host".to_owned(),
            memory_bytes: None,
            device: None,
        }],
        profile: Default::default(),
        programs: vec!["*".to_owned()],
        labels: group.labels.clone(),
        thresholds: group
            .thresholds
            .clone()
            .unwrap_or_else(fiec_schemas::hardware::default_thresholds),
        http: None,
        parks: group.parks,
        identity: Some(NodeIdentity {
            key: "simulated".to_owned(),
            environment: Digest::of(b"simulated"),
        }),
        node,
    }
}
