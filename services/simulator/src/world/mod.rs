//! The world: nodes, workers, a broker and policy services on one virtual clock.
//!
//! * `broker` keeps the ledgers: compare-and-set, the real fold, feeds in order.
//! * `services` carries out what policy services decide, and tells them what happens.
//! * `worker` takes capsules up, computes, commits, leaves, hands over, refuses; `orders` says what
//!   it is told.
//! * `holds` and `quotas` keep what spans executions: dependencies, gangs, batches, reservations.
//! * `spread` makes parts of ranges and holds what becomes of them against their rules, `tiles` is
//!   the worker's part in it.
//! * `nodes` samples loads, sends vectors, answers probes.
//! * `faults` lets things go wrong, `leaving` revokes and drains. `watch` looks for what waits in
//!   vain.
//!
//! Whatever is drawn comes from the scenario's seed; a scenario and a policy give one run.

mod broker;
pub mod exec;
mod faults;
mod holds;
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

use fiec_policy::holds::Seen;
use fiec_policy::quick::QuickMap;
use fiec_policy::{Config, ControlOutcome, Input, Millis, Now, ProbeOutcome};
use fiec_schemas::messages::ControlRequest;
use fiec_schemas::{Event, ExecutionId, ExecutionState, NodeId, Phase, Submission, Tenant};
use fiec_schemas::{NodeFlags, Timestamp};

use crate::broken::{Broken, Violation};
use crate::decide::Decide;
use crate::draw::{Draw, Purpose};
use crate::node::Node;
use crate::queue::Queue;
use crate::scenario::{Scenario, node_names};
use crate::summary::{Summary, Tally};
use exec::Exec;
use services::Replica;

/// The policy's clock begins a day after its origin, so that moments before can be expressed.
const ORIGIN_MS: u64 = 86_400_000;
/// The wall clock's beginning: 2026-01-01T00:00:00Z.
const EPOCH_US: i64 = 1_767_225_600_000_000;
/// How long a writer waits for an acknowledgement before it reads again.
const ACK_TIMEOUT_US: u64 = 1_000_000;
/// How often the world looks for what waits in vain.
const WATCH_US: u64 = 1_000_000;

/// What happens.
#[derive(Debug)]
enum What {
    /// Time passes for a policy service (of this life).
    Tick(u8, u32),
    /// It tells the others that it is there.
    Presence(u8, u32),
    /// The next executions of a workload are submitted.
    Arrive(u32),
    /// A submission reaches a policy service.
    Submit(u8, u32),
    /// A node looks at itself.
    Sample(u32, u32),
    /// A node's vector reaches a policy service.
    Vector(u8, Box<nodes::Told>),
    /// The same where one load is all there is.
    Word(u8, nodes::Word),
    /// A node's descriptor and proof, or its flags, reach a policy service.
    Joined(u8, u32),
    Flags(u8, u32),
    /// A ledger message reaches a policy service.
    Feed(u8, u32, Box<Message>),
    /// An append of a policy service reaches the broker.
    Store(u8, u32, Box<services::Append>),
    /// Its fate reaches the service.
    Fate(u8, u32, u32, Box<services::Fate>),
    /// A capsule or a handover reaches a node.
    Capsule(u32, u32, u64),
    /// A request reaches a node.
    Control(u8, u32, Box<orders::Asked>),
    /// Its fate reaches the service.
    Ordered(u8, u32, u64, Box<ControlOutcome>),
    /// A probe reaches a node; when it was sent.
    Probe(u8, u32, u64),
    /// Its fate reaches the service.
    Probed(u8, u32, ProbeOutcome),
    /// A large submission reaches the service that asked for it.
    Spec(u8, u32),
    /// A look at a ledger reaches the broker, and its answer the service.
    Lookup(u8, u32, u32),
    Looked(u8, u32, u32, Seen),
    /// A part is to be made: it reaches the broker, and what was there the service.
    Part(u8, u32, Box<spread::Birth>),
    Found(u8, u32, u32),
    /// The fate of an order to split reaches the service.
    Split(u8, u32, u64, Box<ControlOutcome>),
    /// A tenant's quota changes, and a service hears of it.
    Limit(u32),
    Quota(u8, u32),
    /// A change of what is reserved reaches the broker, and what is reserved a service.
    Reserve(u8, u32, Box<quotas::Wish>),
    Reserved(u8, u32, Box<quotas::Told>),
    /// The same, long after its service has given up waiting for it.
    Late(u32, Box<quotas::Table>),
    /// What a worker writes reaches the broker: node, life, execution, epoch.
    Written(u32, u32, u32, u64),
    /// Its acknowledgement was lost, and the worker reads again.
    Reread(u32, u32, u32, u64),
    /// A worker looks at what it runs: node, life, execution, epoch.
    Look(u32, u32, u32, u64),
    /// A fault of the list begins, or ends.
    Begin(u32),
    End(u32),
    /// A drawn fault begins.
    Drawn(u32),
    /// A drawn fault of a node ends.
    Over(u32, crate::scenario::Drawn),
    /// A node of this life dies as it had said, and returns then.
    Gone(u32, u32, u64),
    /// A node of this life is to be empty by now.
    Emptied(u32, u32),
    /// The world looks for what waits in vain.
    Watch,
}

/// A ledger message on its way to a reader.
#[derive(Debug)]
struct Message {
    seq: u64,
    /// The node whose worker wrote it.
    by: Option<u32>,
    text: Arc<str>,
}

/// How far a run is.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    /// Microseconds of virtual time.
    pub now_us: u64,
    /// When it ends at the latest.
    pub end_us: u64,
    /// Executions submitted so far.
    pub submitted: u64,
    /// Of those, ended.
    pub ended: u64,
}

/// How a run ended.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// What happened, in numbers.
    pub summary: Summary,
    /// The promise that was broken, which ended the run.
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
    by_name: QuickMap<NodeId, u32>,
    replicas: Vec<Replica<D>>,
    execs: Vec<Exec>,
    /// What workloads submit, where each is like the other.
    specs: Vec<Arc<Submission>>,
    /// Tenants, and those of workloads.
    books: Vec<quotas::Book>,
    tenant_of: Vec<u32>,
    holds: holds::Holds,
    ranges: spread::Ranges,
    last_table: u64,
    arrivals: Vec<faults::Coming>,
    network: Draw,
    drawn: Vec<Draw>,
    last_seq: u64,
    /// What waits, by [`exec::Waits`] and workload, the oldest first.
    waiting: [Vec<BTreeSet<(u64, u32)>>; 4],
    /// Workloads of which something has waited since it was last looked, and whether each is there.
    awake: Vec<u32>,
    is_awake: Vec<bool>,
    /// Until when something was wrong with a policy service.
    disturbed_until: u64,
    /// Below this share of a load nothing presses, by any threshold that is in force.
    calm_below: f64,
    /// The longest dwell and the shortest of what is loaded, in milliseconds.
    longest_dwell: u64,
    shortest_dwell: u64,
    /// Readers read the full encoding, as in production; for the test that it makes no difference.
    pub full_encoding: bool,
    tally: Tally,
}

impl<'a, D: Decide> World<'a, D> {
    /// A world before its beginning; `make` gives a policy service for an identity.
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
        let mut by_name = QuickMap::default();
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
            full_encoding: false,
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

    /// Nodes do not all speak at once, but one after the other.
    fn spread(&self, node: usize) -> u64 {
        let step = self.scenario.telemetry.sample_ms * 1_000;
        node as u64 * step / self.nodes.len().max(1) as u64
    }

    /// When the run ends at the latest.
    fn end(&self) -> u64 {
        (self.scenario.duration_ms + self.scenario.drain_ms) * 1_000
    }

    /// Plays to the end: until everything is done, the time is over or a promise is broken.
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

    /// True when nothing can come any more and everything has ended.
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

    /// When a message that is sent now arrives.
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

    /// True for a message that never arrives.
    fn is_lost(&mut self) -> bool {
        let share = self.scenario.network.loss;
        self.network.chance(share)
    }

    /// True for a message that arrives twice.
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

/// A broken promise, and of which execution.
type Wrong = (Option<u32>, Broken);
