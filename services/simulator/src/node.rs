//! A node as it is played: its life, its loads, what runs on it and what waits there.

use std::collections::VecDeque;
use std::sync::Arc;

use fiec_schemas::messages::Destination;
use fiec_schemas::substrate::Substrate;
use fiec_schemas::trust::NodeIdentity;
use fiec_schemas::{
    Cause, Decision, Digest, InstanceId, NodeDescriptor, NodeId, Requirements, Signal, Timestamp,
    package,
};
use uuid::Uuid;

use crate::draw::{Draw, Purpose};
use crate::load::Playing;
use crate::scenario::{Load, NodeGroup};

/// What a node has been told to do with an execution: yield it, to this place.
#[derive(Debug, Clone)]
pub struct Order {
    /// Since when, in microseconds.
    pub at: u64,
    /// Why.
    pub cause: Cause,
    /// Where to; none: it waits as pending.
    pub to: Option<Destination>,
    /// How that was chosen.
    pub decision: Option<Decision>,
}

/// What a worker is writing.
#[derive(Debug, Clone, PartialEq)]
pub enum Write {
    /// That it begins.
    Start,
    /// A boundary of this index.
    Commit(u64),
    /// The same, and that it gives the execution up.
    Yield(u64),
    /// That it is done.
    Finish,
    /// That it cannot take it.
    Refuse(String),
}

/// An execution on its node.
#[derive(Debug)]
pub struct Run {
    /// Which, by number.
    pub exec: u32,
    /// Under which epoch.
    pub epoch: u64,
    /// The message that its next one must follow.
    pub seq: u64,
    /// The boundary from which it began here.
    pub from: u64,
    /// When it was at that boundary, in microseconds; a stall puts it later.
    pub base: u64,
    /// The last boundary that it knows to be committed.
    pub committed: u64,
    /// When that was.
    pub committed_at: u64,
    /// What it is writing.
    pub writing: Option<Write>,
    /// True once its `started` is stored.
    pub started: bool,
    /// What it was told.
    pub order: Option<Box<Order>>,
    /// The earliest look that is planned at it.
    pub look: u64,
}

/// A node.
#[derive(Debug)]
pub struct Node {
    /// What it says of itself.
    pub descriptor: Arc<NodeDescriptor>,
    /// How fast it is; 1 is the speed that workloads are measured at.
    pub speed: f64,
    /// How long it takes to begin an execution here, in microseconds.
    pub start_us: u64,
    /// Its loads.
    pub loads: Vec<(Signal, Playing)>,
    /// Its stream of random numbers.
    pub draw: Draw,
    /// False while it is dead.
    pub up: bool,
    /// Counts its lives.
    pub life: u32,
    /// Since when it lives, in microseconds.
    pub up_since: u64,
    /// How long it has lived in all.
    pub up_us: u64,
    /// Cut off until then.
    pub silent_until: u64,
    /// Standing still until then.
    pub stalled_until: u64,
    /// Cordoned by an operator.
    pub cordoned: bool,
    /// Drained by an operator.
    pub draining: bool,
    /// What runs.
    pub runs: Vec<Run>,
    /// What was taken up and waits: execution, and the message to follow.
    pub queue: VecDeque<(u32, u64)>,
    /// Bytes that what runs takes.
    pub used_bytes: u64,
    /// Vectors told in this life.
    pub count: u64,
    /// What was told last, by load.
    pub told: Vec<f32>,
    /// When that was.
    pub told_at: u64,
    /// Executions that ledgers bind here.
    pub bound: u32,
    /// Since when it has had room and nothing was wrong with it; `u64::MAX` while that is not so.
    pub room_since: u64,
    /// The same with nothing at all bound here.
    pub empty_since: u64,
    /// True while every load is well below every threshold in force.
    pub calm: bool,
}

impl Node {
    /// A node of a group, the `number`-th of all.
    pub fn new(group: &NodeGroup, name: NodeId, number: u32, seed: u64) -> Self {
        let mut draw = Draw::new(seed, Purpose::Node(number));
        let speed = draw.quantity(&group.speed);
        let mut plan = group.load.clone();
        plan.entry(Signal::Memory).or_insert(Load::Constant(0.2));
        let loads: Vec<_> = plan
            .into_iter()
            .map(|(signal, load)| (signal, Playing::new(load, &mut draw)))
            .collect();
        Self {
            descriptor: Arc::new(descriptor(group, name, number)),
            speed,
            start_us: group.start_ms * 1_000,
            told: vec![-1.0; loads.len()],
            loads,
            draw,
            up: true,
            life: 0,
            up_since: 0,
            up_us: 0,
            silent_until: 0,
            stalled_until: 0,
            cordoned: false,
            draining: false,
            runs: Vec::new(),
            queue: VecDeque::new(),
            used_bytes: 0,
            count: 0,
            told_at: 0,
            bound: 0,
            room_since: u64::MAX,
            empty_since: u64::MAX,
            calm: false,
        }
    }

    /// Begins another life.
    pub fn reborn(&mut self, now: u64, number: u32) {
        self.life += 1;
        let mut descriptor = (*self.descriptor).clone();
        descriptor.instance = instance(number, self.life);
        self.descriptor = Arc::new(descriptor);
        self.up = true;
        self.up_since = now;
        self.count = 0;
        self.told.fill(-1.0);
        self.stalled_until = 0;
    }

    /// True where messages go to and fro.
    pub fn is_reachable(&self, now: u64) -> bool {
        self.up && now >= self.silent_until
    }

    /// What runs of this execution under this epoch.
    pub fn run(&mut self, exec: u32, epoch: u64) -> Option<&mut Run> {
        self.runs
            .iter_mut()
            .find(|r| r.exec == exec && r.epoch == epoch)
    }

    /// The share of its memory that what runs takes.
    #[expect(clippy::cast_precision_loss, reason = "a share of bytes")]
    pub fn used_share(&self) -> f64 {
        self.used_bytes as f64 / self.descriptor.memory_limit_bytes as f64
    }

    /// Notes since when it has room.
    pub fn note_room(&mut self, now: u64) {
        let well = self.calm
            && self.is_reachable(now)
            && now >= self.stalled_until
            && !self.cordoned
            && !self.draining;
        let note = |since: &mut u64, holds: bool| {
            *since = match holds {
                true => (*since).min(now),
                false => u64::MAX,
            };
        };
        note(
            &mut self.room_since,
            well && self.bound < self.descriptor.slots,
        );
        note(&mut self.empty_since, well && self.bound == 0);
    }

    /// Whether it has what is required, as far as that never changes.
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

/// The identity of a node's life.
pub fn instance(number: u32, life: u32) -> InstanceId {
    InstanceId(Uuid::from_u128(
        (0x5e << 120) | (u128::from(number) << 32) | u128::from(life) | (7 << 76) | (2 << 62),
    ))
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
            kind: "cpu".to_owned(),
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
        parks: 0,
        identity: Some(NodeIdentity {
            key: "simulated".to_owned(),
            environment: Digest::of(b"simulated"),
        }),
        node,
    }
}
