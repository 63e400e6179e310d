//! A node as it is played: its life, its loads, what runs on it and what waits there.

use std::collections::VecDeque;
use std::sync::Arc;

use fiec_schemas::messages::Destination;
use fiec_schemas::scheduling::Keep;
use fiec_schemas::substrate::Substrate;
use fiec_schemas::trust::NodeIdentity;
use fiec_schemas::{
    Cause, Decision, Digest, InstanceId, NodeDescriptor, NodeId, Requirements, Signal, Timestamp,
    author, package,
};
use uuid::Uuid;

use crate::draw::{Draw, Purpose};
use crate::load::Playing;
use crate::scenario::{Load, NodeGroup};

/// What a node has been told to do with an execution.
#[derive(Debug, Clone, PartialEq)]
pub enum Order {
    /// To yield it at its next boundary.
    Yield {
        /// Why.
        cause: Cause,
        /// Where to; none: it waits as pending.
        to: Option<Destination>,
        /// How that was chosen.
        decision: Option<Decision>,
    },
    /// To park it at its next boundary.
    Park {
        /// Why.
        cause: Cause,
        /// What it keeps.
        keep: Keep,
    },
    /// To give it up wherever it stands.
    GiveUp {
        /// Why.
        cause: Cause,
    },
    /// To end it wherever it stands.
    Cancel {
        /// Who wants that.
        who: String,
    },
}

/// What a worker is writing.
#[derive(Debug, Clone, PartialEq)]
pub enum Write {
    /// That it begins.
    Start,
    /// A boundary of this index.
    Commit(u64),
    /// The same where it has not been committed, and what it was told to do there.
    Leave(u64, Box<Order>),
    /// That it goes on where it was parked.
    Unpark(String),
    /// That it is done, or has failed.
    Finish,
    /// That it cannot take it.
    Refuse(String),
    /// A boundary of this index, at which the last half of what is left becomes a part.
    Split(u64),
    /// That it takes its last part back.
    Merge,
    /// That it goes on waiting for its last part, which has not ended.
    Rest,
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
    /// It waits at its last boundary and has no slot.
    pub parked: bool,
    /// What it was told.
    pub order: Option<Box<Order>>,
    /// Of a range: its first tile from that boundary on, and the one behind its last.
    pub tile: u64,
    /// See `tile`.
    pub end: u64,
    /// It was told to give a part of its range away.
    pub split: bool,
    /// The earliest look that is planned at it.
    pub look: u64,
}

impl Run {
    /// Of a range, the first tile that is not done at a boundary.
    pub fn tile_at(&self, boundary: u64) -> u64 {
        self.tile + boundary.saturating_sub(self.from)
    }

    /// Goes on from its last commit, now.
    pub fn rebase(&mut self, now: u64) {
        self.tile = self.tile_at(self.committed);
        (self.from, self.base) = (self.committed, now);
    }
}

/// A node.
#[derive(Debug)]
pub struct Node {
    /// What it says of itself.
    pub descriptor: Arc<NodeDescriptor>,
    /// Of that, what is looked at all the time.
    pub name: NodeId,
    /// Executions that it runs at once.
    pub slots: u32,
    /// Memory limit in bytes.
    pub limit: u64,
    /// How its messages name their author.
    pub author: Arc<str>,
    /// How fast it is; 1 is the speed that workloads are measured at.
    pub speed: f64,
    /// How long it takes to begin an execution here, in microseconds.
    pub start_us: u64,
    /// Its only load, where that is always the same.
    pub steady: Option<f64>,
    /// Its loads.
    pub loads: Vec<(Signal, Playing)>,
    /// Its stream of random numbers.
    pub draw: Box<Draw>,
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
    /// When it is to be empty, in microseconds: a drain's deadline, or its end.
    pub leave_by: Option<u64>,
    /// When that was said.
    pub noticed_at: u64,
    /// It will be gone then.
    pub revoked: bool,
    /// Until when something was wrong with it.
    pub troubled_until: u64,
    /// What runs, and what is parked.
    pub runs: Vec<Run>,
    /// How many of those are parked.
    pub parked: u32,
    /// What was taken up and waits: execution, and the message to follow.
    pub queue: VecDeque<(u32, u64)>,
    /// Bytes that what runs takes.
    pub used_bytes: u64,
    /// Vectors told in this life.
    pub count: u64,
    /// What was told last, where there is one load.
    pub told_one: f32,
    /// The same by load, where there are several.
    pub told: Vec<f32>,
    /// When that was.
    pub told_at: u64,
    /// Executions that ledgers bind here.
    pub bound: u32,
    /// Of those, the parked ones.
    pub standing: u32,
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

    /// Begins another life.
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

    /// True where messages go to and fro.
    pub fn is_reachable(&self, now: u64) -> bool {
        self.up && now >= self.silent_until
    }

    /// How many are parked, or are about to be.
    pub fn parks_taken(&self) -> u32 {
        let parks = |o: &Order| matches!(o, Order::Park { .. });
        let taken = |r: &&Run| {
            let on_its_way = match &r.writing {
                Some(Write::Leave(_, order)) => parks(order),
                _ => r.order.as_deref().is_some_and(parks),
            };
            r.parked || on_its_way
        };
        u32::try_from(self.runs.iter().filter(taken).count()).unwrap_or(u32::MAX)
    }

    /// What runs of this execution under this epoch.
    pub fn run(&mut self, exec: u32, epoch: u64) -> Option<&mut Run> {
        self.runs
            .iter_mut()
            .find(|r| r.exec == exec && r.epoch == epoch)
    }

    /// True where something is wrong with it already.
    pub fn is_ailing(&self, now: u64) -> bool {
        let away = !self.is_reachable(now) || now < self.stalled_until;
        away || self.draining || self.revoked
    }

    /// How many of its slots are taken.
    pub fn computing(&self) -> usize {
        self.runs.len() - self.parked as usize
    }

    /// The share of its memory that what runs takes.
    #[expect(clippy::cast_precision_loss, reason = "a share of bytes")]
    pub fn used_share(&self) -> f64 {
        if self.used_bytes == 0 {
            return 0.0;
        }
        self.used_bytes as f64 / self.limit as f64
    }

    /// Notes since when it has room.
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
        parks: group.parks,
        identity: Some(NodeIdentity {
            key: "simulated".to_owned(),
            environment: Digest::of(b"simulated"),
        }),
        node,
    }
}
