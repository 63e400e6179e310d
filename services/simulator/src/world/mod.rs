//! The world: nodes, workers, a broker and policy services on one virtual clock.
//!
//! * `broker` keeps the ledgers: compare-and-set, the real fold, ordered feeds.
//! * `services` performs the actions of policy services and gives them their inputs.
//! * `worker` starts capsules, computes, commits, leaves, hands over and refuses; `orders` handles
//!   its orders.
//! * `holds` and `quotas` keep dependencies, gangs, batches and reservations.
//! * `spread` makes parts of ranges and checks their rules; `tiles` is the worker's share of it.
//! * `nodes` samples loads, sends vectors and answers probes.
//! * `faults` starts faults, `breakdowns` has failed starts and deaths of workers, `leaving` revokes and drains. `watch` finds executions that wait too
//!   long.
//!
//! Everything random comes from the scenario's seed, so a scenario and a policy give one run.

mod breakdowns;
mod broker;
pub mod exec;
mod faults;
mod holds;
mod intake;
mod joining;
mod leaving;
mod nodes;
mod orders;
mod quotas;
mod services;
mod spread;
mod tiles;
mod watch;
mod worker;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use fiec_policy::Seen;
use fiec_policy::{Config, ControlOutcome, Input, Millis, Now};
use fiec_schemas::messages::ControlRequest;
use fiec_schemas::{
    Event, ExecutionId, ExecutionState, InstanceId, NodeId, Phase, Submission, Tenant,
};
use fiec_schemas::{NodeFlags, Timestamp};
use rustc_hash::FxHashMap;

use crate::broken::{Broken, Violation};
use crate::decide::Decide;
use crate::draw::{Draw, Purpose};
use crate::node::Node;
use crate::queue::Queue;
use crate::scenario::{Fault, Scenario, node_names};
use crate::summary::{Summary, Tally};
use exec::Exec;
use services::Replica;

/// The policy's clock starts a day after its origin, so that earlier moments can be expressed.
const ORIGIN_MS: u64 = 86_400_000;
/// Start of the wall clock: 2026-01-01T00:00:00Z.
const EPOCH_US: i64 = 1_767_225_600_000_000;
/// Time that an author waits for an acknowledgement before it reads again, in microseconds.
const ACK_TIMEOUT_US: u64 = 1_000_000;
/// Interval between two checks for executions that wait too long, in microseconds.
const WATCH_US: u64 = 1_000_000;

/// An event of the world.
#[derive(Debug)]
enum What {
    /// A tick of a policy service (with its instance number).
    Tick(u8, u32),
    /// It sends a sign of life to the others.
    Presence(u8, u32),
    /// The next executions of a workload arrive.
    Arrive(u32),
    /// A submission reaches a policy service.
    Submit(u8, u32),
    /// A policy service has held a submission for as long as it may.
    HoldEnds(u8, u32),
    /// A node samples its loads.
    Sample(u32, u32),
    /// A node's vector reaches a policy service.
    Vector(u8, Box<nodes::Told>),
    /// The same if the node has only one load.
    Word(u8, nodes::Word),
    /// A node's descriptor and proof reach a policy service, or its flags.
    Joined(u8, u32),
    Flags(u8, u32),
    /// A ledger message reaches a policy service.
    Feed(u8, u32, Box<Message>),
    /// An append of a policy service reaches the broker.
    Store(u8, u32, Box<services::Append>),
    /// The result reaches the policy service.
    Fate(u8, u32, u32, Box<services::Fate>),
    /// A capsule message or a handover reaches a node.
    Capsule(u32, u32, u64),
    /// A request reaches a node.
    Control(u8, u32, Box<orders::Asked>),
    /// The result reaches the policy service.
    Ordered(u8, u32, u64, Box<ControlOutcome>),
    /// A probe reaches a node. The last field is the time of sending.
    Probe(u8, u32, u64),
    /// The result reaches the policy service.
    Probed(u8, u32, Option<InstanceId>),
    /// A large submission reaches the policy service that asked for it.
    Spec(u8, u32),
    /// A look at a ledger reaches the broker, and the answer the policy service.
    Lookup(u8, u32, u32),
    Looked(u8, u32, u32, Seen),
    /// A request for a part reaches the broker, and an existing part the policy service.
    Part(u8, u32, Box<spread::Birth>),
    Found(u8, u32, u32),
    /// The result of an order to split reaches the policy service.
    Split(u8, u32, u64, Box<ControlOutcome>),
    /// A tenant's quota changes, and the change reaches a policy service.
    Limit(u32),
    Quota(u8, u32),
    /// A change of reservations reaches the broker, and the table a policy service.
    Reserve(u8, u32, Box<quotas::Wish>),
    Reserved(u8, u32, Box<quotas::Told>),
    /// The same change, long after its policy service has given up waiting.
    Late(u32, Box<quotas::Table>),
    /// A worker's message reaches the broker: node, instance number, execution, epoch.
    Written(u32, u32, u32, u64),
    /// Its acknowledgement was lost, and the worker reads the ledger.
    Reread(u32, u32, u32, u64),
    /// A worker looks at a run: node, instance number, execution, epoch.
    Look(u32, u32, u32, u64),
    /// A listed fault starts, or ends.
    Begin(u32),
    End(u32),
    /// A random fault starts.
    Drawn(u32),
    /// A random fault of a node ends.
    Over(u32, crate::scenario::Drawn),
    /// A node dies as announced. The last field is the time of its return.
    Gone(u32, u32, u64),
    /// A node's deadline: it must be empty.
    Emptied(u32, u32),
    /// The check for executions that wait too long.
    Watch,
}

/// A ledger message in flight to a reader.
#[derive(Debug)]
struct Message {
    seq: u64,
    /// The node of the worker that wrote it.
    by: Option<u32>,
    text: Arc<str>,
}

/// Progress of a run.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    /// Virtual time, in microseconds.
    pub now_us: u64,
    /// Latest end, in microseconds.
    pub end_us: u64,
    /// Number of executions submitted so far.
    pub submitted: u64,
    /// Number of those that have ended.
    pub ended: u64,
}

/// Result of a run.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Its figures.
    pub summary: Summary,
    /// The broken promise that ended the run, if any.
    pub violation: Option<Violation>,
}

/// The world.
pub struct World<'a, D> {
    scenario: &'a Scenario,
    make: &'a mut dyn FnMut(&Config, fiec_schemas::InstanceId) -> D,
    config: Config,
    now: u64,
    queue: Queue<What>,
    nodes: Vec<Node>,
    by_name: FxHashMap<NodeId, u32>,
    replicas: Vec<Replica<D>>,
    execs: Vec<Exec>,
    /// The submissions of workloads whose executions are all equal.
    specs: Vec<Arc<Submission>>,
    /// The tenants, and the tenant of each workload.
    books: Vec<quotas::Book>,
    tenant_of: Vec<u32>,
    holds: holds::Holds,
    ranges: spread::Ranges,
    last_table: u64,
    arrivals: Vec<faults::Coming>,
    network: Draw,
    drawn: Vec<Draw>,
    last_seq: u64,
    /// Waiting executions by [`exec::Waits`] and workload, oldest first.
    waiting: [Vec<BTreeSet<(u64, u32)>>; 4],
    /// Workloads with a waiting execution since the last check, and whether each is in the list.
    awake: Vec<u32>,
    is_awake: Vec<bool>,
    /// End of the last fault of a policy service.
    disturbed_until: u64,
    /// Below this share of a load no threshold in force is reached.
    calm_below: f64,
    /// The longest and the shortest dwell of loaded signals, in ms.
    longest_dwell: u64,
    shortest_dwell: u64,
    tally: Tally,
}

impl<'a, D: Decide> World<'a, D> {
    /// A world before its start. `make` creates a policy service with an id.
    ///
    /// # Errors
    /// The field of the scenario and the rule that it breaks.
    pub fn new(
        scenario: &'a Scenario,
        make: &'a mut dyn FnMut(&Config, fiec_schemas::InstanceId) -> D,
    ) -> Result<Self, fiec_schemas::FieldError> {
        scenario.check()?;
        let bad = |e: fiec_schemas::IdError| fiec_schemas::FieldError::new("nodes", e.to_string());
        let (books, tenant_of) = quotas::books(scenario).map_err(bad)?;
        let mut nodes = Vec::with_capacity(scenario.node_count());
        let mut by_name = FxHashMap::default();
        for group in &scenario.nodes {
            for name in node_names(group) {
                let number = u32::try_from(nodes.len()).unwrap_or(u32::MAX);
                let name = NodeId::new(&name).map_err(bad)?;
                by_name.insert(name.clone(), number);
                nodes.push(Node::new(group, name, number, scenario.seed));
            }
        }
        let config = scenario.policy.config();
        let limits = watch::limits(scenario, &config);
        let workloads = scenario.workloads.len();
        let mut world = Self {
            scenario,
            make,
            now: 0,
            queue: Queue::default(),
            nodes,
            by_name,
            replicas: Vec::new(),
            execs: Vec::new(),
            books,
            tenant_of,
            holds: holds::Holds::new(scenario),
            ranges: spread::Ranges::default(),
            last_table: 0,
            specs: scenario
                .workloads
                .iter()
                .map(|w| Arc::new(w.submission.clone()))
                .collect(),
            arrivals: (0u32..)
                .zip(&scenario.workloads)
                .map(|(n, _)| faults::Coming::new(scenario.seed, n))
                .collect(),
            network: Draw::new(scenario.seed, Purpose::Network),
            drawn: (0u32..)
                .zip(&scenario.faults)
                .map(|(n, _)| Draw::new(scenario.seed, Purpose::Fault(n)))
                .collect(),
            last_seq: 0,
            waiting: std::array::from_fn(|_| vec![BTreeSet::new(); workloads]),
            awake: Vec::new(),
            is_awake: vec![false; workloads],
            disturbed_until: 0,
            calm_below: limits.calm_below,
            longest_dwell: limits.longest_dwell,
            shortest_dwell: limits.shortest_dwell.max(config.residency_floor_ms),
            config,
            tally: Tally::default(),
        };
        world.begin();
        Ok(world)
    }

    fn begin(&mut self) {
        for number in 0..self.scenario.policies {
            let replica = self.new_replica(number, 0);
            self.replicas.push(replica);
        }
        for book in &mut self.books {
            book.note_room(0);
        }
        for p in 0..self.replicas.len() {
            self.introduce(p);
            self.plan_clock(p);
        }
        for workload in 0..self.specs.len() {
            self.plan_arrival(workload);
        }
        for node in 0..self.nodes.len() {
            let first = self.spread(node);
            let (number, life) = (u32::try_from(node).unwrap_or(u32::MAX), 0);
            self.queue.plan(first, What::Sample(number, life));
        }
        self.plan_faults();
        for (n, quota) in (0u32..).zip(&self.scenario.quotas) {
            if quota.at_ms > 0 {
                self.queue.plan(quota.at_ms * 1_000, What::Limit(n));
            }
        }
        self.queue.plan(WATCH_US, What::Watch);
    }

    /// Offset of a node's samples, so that nodes do not all send at once.
    fn spread(&self, node: usize) -> u64 {
        let step = self.scenario.telemetry.sample_ms * 1_000;
        node as u64 * step / self.nodes.len().max(1) as u64
    }

    /// Latest end of the run, in microseconds.
    fn end(&self) -> u64 {
        (self.scenario.duration_ms + self.scenario.drain_ms) * 1_000
    }

    /// Plays until all executions have ended, the time is over, or a promise is broken.
    pub fn run(mut self, watch: &mut dyn FnMut(Progress)) -> Outcome {
        let began = std::time::Instant::now();
        let mut violation = None;
        let mut steps = 0u64;
        while let Some((at, what)) = self.queue.pop() {
            if at > self.end() {
                break;
            }
            self.now = at;
            steps += 1;
            if steps.is_multiple_of(1 << 14) {
                watch(self.progress());
            }
            if let Err((execution, broken)) = self.happen(what) {
                violation = Some(self.explain(execution, broken));
                break;
            }
            if self.is_over() {
                break;
            }
        }
        watch(self.progress());
        let summary = self.summarize(began.elapsed(), steps);
        Outcome { summary, violation }
    }

    fn progress(&self) -> Progress {
        Progress {
            now_us: self.now,
            end_us: self.end(),
            submitted: self.execs.len() as u64 - self.tally.parts,
            ended: self.tally.ended(),
        }
    }

    /// True if nothing more can arrive and every execution has ended.
    fn is_over(&self) -> bool {
        self.tally.ended() + self.tally.parts_ended == self.execs.len() as u64
            && self.arrivals.iter().all(faults::Coming::is_over)
    }

    fn explain(&self, execution: Option<u32>, (rule, detail): Broken) -> Violation {
        let exec = execution.and_then(|e| self.execs.get(e as usize));
        let execution = match (execution, exec) {
            (Some(number), Some(exec)) => {
                let workload = &self.scenario.workloads[exec.workload as usize];
                let phase = exec
                    .phase()
                    .map_or("not in the ledger", |phase| phase.as_str());
                let part = exec.tiles.as_ref().filter(|tiles| tiles.holder.is_some());
                let part = part.map(|tiles| format!(", a part of {}", tiles.whole));
                let part = part.unwrap_or_default();
                format!("execution {number} of {}{part} ({phase})", workload.name)
            }
            _ => "no execution".to_owned(),
        };
        let name = |ix: u32| {
            let node = self.nodes.get(ix as usize);
            node.map(|n| n.descriptor.node.as_str())
        };
        Violation {
            rule,
            seed: self.scenario.seed,
            at_us: self.now,
            execution,
            detail,
            events: exec
                .map(|e| e.trace.iter().map(|past| past.in_words(name)).collect())
                .unwrap_or_default(),
        }
    }

    fn happen(&mut self, what: What) -> Result<(), Wrong> {
        match what {
            What::Tick(p, life) => self.tick(p as usize, life),
            What::Presence(p, life) => self.presence(p as usize, life),
            What::Arrive(workload) => self.arrive(workload as usize),
            What::Submit(p, e) => self.submit(p, e),
            What::HoldEnds(p, life) => self.hold_ends(p, life),
            What::Sample(node, life) => self.sample(node as usize, life),
            What::Vector(p, told) => self.vector(p, *told),
            What::Word(p, word) => self.word(p, word),
            What::Joined(p, node) => self.joined(p, node),
            What::Flags(p, node) => self.flagged(p, node),
            What::Feed(p, life, message) => self.fed(p, life, message),
            What::Store(p, life, append) => self.store(p, life, *append),
            What::Fate(p, life, e, fate) => self.fate(p, life, e, fate),
            What::Capsule(node, e, seq) => self.capsule(node as usize, e, seq),
            What::Control(p, node, asked) => self.control(p, node as usize, asked),
            What::Ordered(p, e, epoch, outcome) => self.ordered(p, e, epoch, outcome),
            What::Probe(p, node, sent) => {
                self.probe(p, node, sent);
                Ok(())
            }
            What::Probed(p, node, outcome) => self.probed(p, node, outcome),
            What::Spec(p, e) => self.spec(p, e),
            What::Lookup(p, life, e) => {
                self.lookup(p, life, e);
                Ok(())
            }
            What::Looked(p, life, e, seen) => self.looked(p, life, e, seen),
            What::Part(p, life, birth) => self.bear(p, life, *birth),
            What::Found(p, life, e) => self.found(p, life, e),
            What::Split(p, e, epoch, outcome) => self.split_answered(p, e, epoch, outcome),
            What::Limit(number) => {
                self.limit(number);
                Ok(())
            }
            What::Quota(p, tenant) => self.quota(p, tenant),
            What::Reserve(p, life, wish) => self.reserve(p, life, *wish),
            What::Reserved(p, life, told) => self.reserved(p, life, told),
            What::Late(tenant, table) => self.stored_late(tenant, *table),
            What::Written(node, life, e, epoch) => self.written(node as usize, life, e, epoch),
            What::Reread(node, life, e, epoch) => self.reread(node as usize, life, e, epoch),
            What::Look(node, life, e, epoch) => self.look(node as usize, life, e, epoch),
            What::Begin(fault) => self.begin_fault(fault as usize),
            What::End(fault) => self.end_fault(fault as usize),
            What::Drawn(fault) => self.draw_fault(fault as usize),
            What::Over(node, what) => self.end_drawn(node, what),
            What::Gone(node, life, until) => self.gone(node, life, until),
            What::Emptied(node, life) => self.emptied(node, life),
            What::Watch => self.watch(),
        }
    }

    fn moment(&self) -> Now {
        Now {
            mono: Millis(ORIGIN_MS + self.now / 1_000),
            wall: self.wall(),
        }
    }

    fn wall(&self) -> Timestamp {
        self.stamp(self.now)
    }

    fn stamp(&self, at: u64) -> Timestamp {
        Timestamp::from_micros(EPOCH_US.saturating_add(i64::try_from(at).unwrap_or(i64::MAX / 4)))
    }

    /// Arrival time of a message that is sent now.
    fn arrival(&mut self) -> u64 {
        let delay = self.scenario.network.delay_us;
        if delay == 0 {
            return self.now;
        }
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a delay below a minute"
        )]
        let extra = self.network.exponential(delay as f64 / 10.0) as u64;
        self.now + delay - delay / 10 + extra
    }

    /// True if a message is lost.
    fn is_lost(&mut self) -> bool {
        let share = self.scenario.network.loss;
        self.network.chance(share)
    }

    /// True if a message arrives twice.
    fn is_doubled(&mut self) -> bool {
        let share = self.scenario.network.duplicate;
        self.network.chance(share)
    }

    fn exec(&self, e: u32) -> &Exec {
        &self.execs[e as usize]
    }

    fn exec_mut(&mut self, e: u32) -> &mut Exec {
        &mut self.execs[e as usize]
    }

    fn id_of(&self, e: u32) -> ExecutionId {
        let exec = self.exec(e);
        let part = exec.tiles.as_ref().and_then(|tiles| tiles.id);
        part.unwrap_or_else(|| exec::id(e, exec.submitted / 1_000))
    }

    fn number_of(&self, id: ExecutionId) -> u32 {
        exec::number(id).unwrap_or_else(|| self.ranges.number(id))
    }
}

/// A broken promise with its execution, if any.
type Wrong = (Option<u32>, Broken);
