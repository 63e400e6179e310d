//! The engine: one input and one moment go in, actions come out.
//!
//! * [`input`] and [`action`]: the types of a step; [`refusal`]: why a request is refused.
//! * [`ledger`] follows the feed, [`appends`] takes the results of the policy's own appends.
//! * [`bind`] places executions that need a binding: new, pending, refused, lost, or queued behind
//!   long work. [`deadly`] holds those under which workers end.
//! * [`fill`] serves the queue in order, [`preempt`] preempts running executions, [`victims`]
//!   chooses them, [`late`] enforces deadlines.
//! * [`orders`] moves running executions: pressure, drains, operators.
//! * [`leaving`] empties a node before it leaves.
//! * [`aside`] parks preempted executions if a park is cheaper than a move.
//! * [`holds`], [`reserve`], [`free`], [`adopt`] and [`gang`] hold executions back that wait for others;
//!   [`first`] reserves places for a gang, [`room`] finds them, [`over`] preempts beyond a quota.
//! * [`spread`] follows ranges that several nodes compute, [`grow`] adds nodes.
//! * [`aging`] keeps ledgers that would drop out of the stream by their age.
//! * [`nodes`] follows nodes: vectors, silence, probes, joining and leaving. [`arriving`] follows the
//!   states that nodes fetch, [`starts`] the programs that they cannot start, [`absent`] forgets
//!   nodes.
//! * [`reconcile`] compares ledgers with what nodes hold.
//! * [`trust`] follows the contracts that nodes prove and lose.
//! * [`verify`] has parts of executions computed again, [`judge`] compares the results.
//! * [`why`] explains to people, [`tell`] records explanations, [`offers`] lists programs,
//!   [`duties`] counts who must act next.

mod absent;
mod action;
mod adopt;
mod aging;
mod appends;
mod arriving;
mod aside;
mod beliefs;
mod bind;
mod deadly;
mod duties;
mod fill;
mod first;
mod free;
mod gang;
mod grow;
mod holds;
mod input;
mod judge;
mod late;
mod leaving;
mod ledger;
mod nodes;
mod offers;
mod orders;
mod over;
mod preempt;
mod realloc;
mod reconcile;
mod refusal;
mod requests;
mod reserve;
mod resize;
mod room;
mod spread;
mod starts;
mod tell;
mod trust;
mod verify;
mod victims;
mod why;

use std::collections::BTreeMap;
use std::collections::BTreeSet;

use fiec_schemas::{ClockReading, Digest, ExecutionId, InstanceId, NodeId, Sequence, Tenant};

use crate::cluster::Cluster;
use crate::config::Config;
use crate::holds::Holds;
use crate::placement::Rankings;
use crate::replicas::Replicas;
use crate::share::{self, queue::Waiting};
use crate::strangers::Strangers;
use crate::time::{Millis, Now};
use crate::verify::Check;
use crate::view::LedgerView;

pub use action::{Action, Good};
pub use bind::{NewExecution, Submitted};
pub use duties::Duties;
pub use input::{ControlOutcome, Input, Judged, Remembered, Ticket};
pub use refusal::{UnknownNode, YieldRefusal};

/// All state of the policy.
#[derive(Debug)]
pub struct Policy {
    config: Config,
    /// Time of the present step.
    now: Now,
    /// Actions of the present step.
    out: Vec<Action>,
    /// Nodes and executions.
    pub(crate) cluster: Cluster,
    /// The nodes in order of score, for each profile.
    pub(crate) rankings: Rankings,
    replicas: Replicas,
    /// Executions that must be bound, in queue order.
    waiting: Waiting,
    /// Other state of sharing.
    share: share::Memory,
    /// State of reallocation.
    realloc: crate::realloc::Memory,
    /// Ranges that several nodes compute.
    spread: crate::spread::Memory,
    /// A change may have freed a place for a waiting execution.
    dirty: bool,
    connected: bool,
    loaded: bool,
    /// The policy binds nothing before this moment: holders append what the broker has lost.
    heal_until: Millis,
    last_tick: Option<Millis>,
    /// Time of the last review of absent nodes.
    absent_looked: Millis,
    completions: u64,
    /// Executions with a comparison under way.
    checks: BTreeMap<ExecutionId, Box<Check>>,
    /// The subset of `checks` with something to do.
    to_verify: BTreeSet<ExecutionId>,
    /// Executions that are being stepped back, with the start time. A commit of the holder does not
    /// end it.
    stepping: BTreeMap<ExecutionId, Millis>,
    /// Live executions under which almost as many workers have ended as are allowed.
    suspects: BTreeSet<ExecutionId>,
    /// Reports on waiting executions.
    told: tell::Told,
    /// Number of questions so far.
    questions: u64,
    /// Reasons other than room that hold executions back.
    pub(crate) holds: Holds,
    /// Vectors from names that have not joined.
    strangers: Strangers,
    /// Seed for the choice of boundaries to compare, and this replica's name.
    seed: InstanceId,
}

impl Policy {
    /// An empty policy. `own` is this replica's id.
    pub fn new(config: Config, own: InstanceId) -> Self {
        let mut cluster = Cluster::default();
        cluster.tenants.set_half_life(config.half_life_ms);
        Self {
            config,
            now: Now::default(),
            out: Vec::new(),
            cluster,
            rankings: Rankings::default(),
            replicas: Replicas::new(own),
            waiting: Waiting::default(),
            share: share::Memory::default(),
            realloc: crate::realloc::Memory::default(),
            spread: crate::spread::Memory::default(),
            dirty: false,
            connected: true,
            loaded: false,
            heal_until: Millis(0),
            last_tick: None,
            absent_looked: Millis(0),
            completions: 0,
            checks: BTreeMap::new(),
            to_verify: BTreeSet::new(),
            stepping: BTreeMap::new(),
            suspects: BTreeSet::new(),
            told: tell::Told::default(),
            questions: 0,
            holds: Holds::default(),
            strangers: Strangers::default(),
            seed: own,
        }
    }

    /// Follows a message of a ledger, by any author, and pushes the resulting actions. It also reports
    /// an append of ours whose acknowledgement was lost.
    ///
    /// `reread`: it is the last message of a ledger after an append of ours failed. It replaces the
    /// policy's own view of the ledger. If the message is older than the last known one, the policy
    /// returns to what it knew before the append, and decides again after a pause.
    pub fn follow(&mut self, now: Now, view: &LedgerView<'_>, reread: bool, out: &mut Vec<Action>) {
        self.begin_step(now);
        self.follow_ledger(view, reread);
        out.append(&mut self.out);
    }

    /// Processes one input and pushes the resulting actions.
    pub fn step(&mut self, now: Now, input: Input, out: &mut Vec<Action>) {
        self.begin_step(now);
        match input {
            Input::Spec { execution, spec } => self.learn_spec(execution, &spec),
            Input::Appended {
                execution,
                seq,
                epoch,
                phase,
            } => self.appended(execution, seq, epoch, &phase),
            Input::Vanished { execution } => self.forget(execution),
            Input::Container { program } => self.cluster.profiles.runs_in_container(&program),
            Input::Descriptor { descriptor } => self.descriptor(*descriptor),
            Input::Gone { node } => self.gone(&node),
            Input::Flags { node, flags } => self.flags(&node, flags),
            Input::Proof {
                node,
                signed,
                judged,
            } => self.proof(&node, &signed, judged),
            Input::Quarantine { node, quarantine } => self.quarantine(&node, quarantine),
            Input::Verdict { verdict } => self.verdict(*verdict),
            Input::Recalled {
                execution,
                up_to,
                named,
            } => self.recalled(execution, (up_to, &named)),
            Input::Vector { vector, age_ms } => self.vector(*vector, age_ms),
            Input::Probe { node, answered } => self.probed(&node, answered),
            Input::Holdings {
                node,
                instance,
                held,
            } => self.reconcile(&node, instance, &held),
            Input::Ordered {
                execution,
                epoch,
                answer,
            } => self.ordered(execution, epoch, answer),
            Input::SplitAnswered {
                execution,
                epoch,
                answer,
            } => self.split_answered(execution, epoch, answer),
            Input::Ended { execution, seen } => {
                self.orphan_seen(execution, seen);
                self.looked_up(execution, seen);
                self.spread_seen(execution, seen);
            }
            Input::Aged { up_to } => self.keep_aged(up_to),
            Input::Quota { tenant, quota } => self.quota(&tenant, quota),
            Input::Reserved {
                tenant,
                table,
                answer,
            } => {
                let table = table.as_ref().map(|(seq, table)| (*seq, &**table));
                self.reserved(&tenant, table, answer);
            }
            Input::Replica { id, leaving } => self.replicas.heard(now.mono, id, leaving),
            Input::Yield {
                ticket,
                execution,
                to,
                who,
            } => self.operator_yield(ticket, execution, to.as_ref(), &who),
            Input::Tenant { tenant, weight } => {
                self.cluster.tenants.set_weight(&tenant, weight);
                self.dirty = true;
            }
            Input::Connected { connected } => {
                self.connected = connected;
                self.start_clocks_anew(now.mono);
            }
            Input::Lost => self.heal_until = now.mono.plus(self.config.heal_ms),
            Input::Loaded => self.begin(),
            Input::Tick => self.tick(),
        }
        out.append(&mut self.out);
    }

    /// Binds waiting executions as far as there is room. The shell calls it after each round of
    /// inputs.
    pub fn act(&mut self, now: Now, out: &mut Vec<Action>) {
        self.pass(now);
        self.serve_waiting();
        out.append(&mut self.out);
    }

    fn serve_waiting(&mut self) {
        if !self.loaded || !self.connected || self.now.mono < self.heal_until {
            return;
        }
        self.act_on_holds();
        self.dirty |= std::mem::take(&mut self.cluster.freed);
        if self.dirty || self.share.fresh {
            self.fill();
        }
    }

    fn begin_step(&mut self, now: Now) {
        self.pass(now);
        // After a stall of this process, silence of others must not count by its clock.
        if self
            .last_tick
            .is_some_and(|last| now.mono.since(last) > self.config.stall_ms)
        {
            self.last_tick = Some(now.mono);
            self.start_clocks_anew(now.mono);
        }
    }

    /// Advances the state that depends on the time.
    fn pass(&mut self, now: Now) {
        self.now = now;
        self.cluster.tenants.pass(now.mono);
    }

    fn tick(&mut self) {
        let now = self.now;
        self.last_tick = Some(now.mono);
        self.replicas.expire(now.mono, self.config.replica_ms);
        let silent = now.mono.0.saturating_sub(self.config.liveness_ms);
        self.strangers.forget_before(Millis(silent));
        if !self.loaded {
            return;
        }
        for ix in self.cluster.keys() {
            self.look_at_node(ix);
            self.look_at_trust(ix);
        }
        if !self.connected || now.mono < self.heal_until {
            return;
        }
        // A review may schedule the next one at once. One round a tick is enough.
        let mut due = Vec::new();
        while let Some(id) = self.cluster.pop_due(now.mono) {
            due.push(id);
        }
        for id in due {
            self.look_at_execution(id);
        }
        self.look_at_absent();
        self.look_at_deadlines();
        self.look_at_spread();
        self.serve_waiting();
        self.look_at_quotas();
        self.preempt();
        if self.cluster.parked() > 0 {
            self.look_at_parked();
        }
        self.reallocate();
        self.verify_round();
        self.tell_waiting();
    }

    /// After a stall or a lost connection of this process, silence of nodes does not count.
    fn start_clocks_anew(&mut self, now: Millis) {
        self.holds.distrust();
        for ix in self.cluster.keys() {
            let node = self.cluster.node_mut(ix);
            node.heard = node.heard.max(now);
            if matches!(node.presence, crate::cluster::Presence::Probing { .. }) {
                node.presence = crate::cluster::Presence::Up;
            }
        }
    }

    /// The initial load is complete: timers start.
    fn begin(&mut self) {
        let now = self.now;
        self.loaded = true;
        self.dirty = true;
        self.holds.began = now.mono;
        self.last_tick = Some(now.mono);
        self.start_clocks_anew(now.mono);
    }

    /// True if this replica is preferred for the execution.
    fn is_mine(&self, id: ExecutionId) -> bool {
        self.replicas.prefers_self(id.0.as_bytes())
    }

    /// True for a known, live execution.
    pub fn knows(&self, id: ExecutionId) -> bool {
        self.cluster.execution(id).is_some()
    }

    /// The tenant of a live execution.
    pub fn tenant(&self, id: ExecutionId) -> Option<Tenant> {
        self.cluster.execution(id).map(|e| e.tenant.clone())
    }

    /// Sequence of the last known message of a live execution.
    pub fn sequence(&self, id: ExecutionId) -> Option<Sequence> {
        self.cluster.execution(id).map(|e| e.seq)
    }

    /// Number of remembered names that have sent vectors without joining.
    pub fn strangers(&self) -> usize {
        self.strangers.count()
    }

    /// Number of known nodes.
    pub fn known_nodes(&self) -> u32 {
        self.cluster.node_count()
    }

    /// The clock reading of each joined node that reports one.
    pub fn node_clocks(&self) -> impl Iterator<Item = (&NodeId, ClockReading)> {
        self.cluster.nodes().filter_map(|(_, node)| {
            let (descriptor, vector) = (node.descriptor.as_ref()?, node.vector.as_ref()?);
            Some((&descriptor.node, vector.clock?))
        })
    }

    /// Number of live executions.
    pub fn live(&self) -> usize {
        self.cluster.live()
    }

    /// Number of executions that wait for a binding.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Number of a tenant's live executions without a node, appends in flight included. A counter,
    /// so it may be read for every line.
    pub fn waiting_of(&self, tenant: &Tenant) -> u32 {
        self.cluster.tenants.waiting(tenant)
    }

    /// The limit on that number in the tenant's quota, if it has one.
    pub fn waiting_limit(&self, tenant: &Tenant) -> Option<u32> {
        self.holds.quotas.get(tenant)?.waiting
    }

    /// Completions since the start. A change means that there may be room again.
    pub fn completions(&self) -> u64 {
        self.completions
    }

    /// Number of live policy services, including this one.
    pub fn replicas(&self) -> usize {
        self.replicas.count()
    }

    /// The shard from which a node pulls capsules.
    pub fn shard(&self, node: &NodeId) -> u16 {
        self.cluster
            .find(node)
            .and_then(|ix| self.cluster.node(ix).descriptor.as_ref())
            .map_or(0, |d| d.shard)
    }

    /// The settings.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Digest of the whole cluster state, for tests of determinism.
    #[doc(hidden)]
    pub fn fingerprint(&self) -> Digest {
        Digest::of(format!("{:?}", self.cluster).as_bytes())
    }
}
