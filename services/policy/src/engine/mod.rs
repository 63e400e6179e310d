//! The engine: one input, one moment, the actions that follow.
//!
//! * [`input`] and [`action`]: the words of a step; [`refusal`]: why a wish is not carried out.
//! * [`ledger`] follows the feed and our own appends.
//! * [`bind`] places what must be bound: new, pending, refused, lost, queued behind long work.
//! * [`fill`] serves what waits in order, [`preempt`] makes what runs give way, [`victims`] says
//!   which, [`late`] looks after deadlines.
//! * [`orders`] moves what runs: pressure, drains, operators.
//! * [`leaving`] has things away by a time.
//! * [`aside`] parks what gives way, where that is best.
//! * [`holds`], [`reserve`], [`adopt`] and [`gang`] hold back what must wait for others, [`first`]
//!   keeps room for a gang, [`room`] finds it, [`over`] has what runs beyond a quota give way.
//! * [`spread`] follows ranges that several compute, [`grow`] has more compute them.
//! * [`nodes`] follows nodes: vectors, silence, probes, joining and leaving.
//! * [`reconcile`] compares what ledgers say with what nodes hold.
//! * [`trust`] follows what nodes prove and lose.
//! * [`verify`] has parts of executions computed once more, [`judge`] judges.
//! * [`why`] tells people, [`tell`] the history, [`offers`] programs, [`duties`] counts who must
//!   act next.

mod action;
mod adopt;
mod aside;
mod bind;
mod duties;
mod fill;
mod first;
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
mod reserve;
mod resize;
mod room;
mod spread;
mod tell;
mod trust;
mod verify;
mod victims;
mod why;

use std::collections::BTreeMap;
use std::collections::BTreeSet;

use fiec_schemas::{ClockReading, Digest, ExecutionId, InstanceId, NodeId, Tenant};

use crate::cluster::{Cluster, NodeIx};
use crate::config::Config;
use crate::holds::Holds;
use crate::placement::Rankings;
use crate::replicas::Replicas;
use crate::share::{self, queue::Waiting};
use crate::strangers::Strangers;
use crate::time::{Millis, Now};
use crate::verify::Check;

pub use action::{Action, Good};
pub use bind::{NewExecution, Submitted};
pub use duties::Duties;
pub use input::{ControlOutcome, Input, ProbeOutcome, Ticket};
pub use refusal::{UnknownNode, YieldRefusal};

/// The policy's whole memory.
#[derive(Debug)]
pub struct Policy {
    config: Config,
    /// What is known.
    pub(crate) cluster: Cluster,
    /// Its places in order.
    pub(crate) rankings: Rankings,
    replicas: Replicas,
    /// Executions that must be bound, in order.
    waiting: Waiting,
    /// What sharing remembers beside that.
    share: share::Memory,
    /// What reallocation remembers.
    realloc: crate::realloc::Memory,
    /// Ranges that several compute.
    spread: crate::spread::Memory,
    /// Something changed that may give a waiting execution its place.
    dirty: bool,
    connected: bool,
    loaded: bool,
    /// Nothing is bound before: holders of bindings append what the broker has lost.
    heal_until: Millis,
    last_tick: Option<Millis>,
    completions: u64,
    /// Executions of which something is compared.
    checks: BTreeMap<ExecutionId, Box<Check>>,
    /// Of those, the ones with something to do.
    to_verify: BTreeSet<ExecutionId>,
    /// Executions that are being taken back, since when; what their holders still commit does not
    /// end that.
    stepping: BTreeMap<ExecutionId, Millis>,
    /// What was told of what waits.
    told: tell::Told,
    /// Questions asked so far.
    questions: u64,
    /// What holds executions back although there may be room.
    pub(crate) holds: Holds,
    /// Vectors of names that have not joined.
    strangers: Strangers,
    /// Draws the boundaries that are compared.
    seed: InstanceId,
}

impl Policy {
    /// Knows nothing yet; `own` is this replica's name among others.
    pub fn new(config: Config, own: InstanceId) -> Self {
        let mut cluster = Cluster::default();
        cluster.tenants.set_half_life(config.half_life_ms);
        Self {
            config,
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
            completions: 0,
            checks: BTreeMap::new(),
            to_verify: BTreeSet::new(),
            stepping: BTreeMap::new(),
            told: tell::Told::default(),
            questions: 0,
            holds: Holds::default(),
            strangers: Strangers::default(),
            seed: own,
        }
    }

    /// Takes one input and pushes what follows from it.
    pub fn step(&mut self, now: Now, input: Input<'_>, out: &mut Vec<Action>) {
        self.begin_step(now);
        match input {
            Input::Submission {
                execution,
                tenant,
                spec,
                submitted_at,
            } => {
                let new = NewExecution {
                    execution,
                    tenant,
                    spec,
                    submitted_at,
                };
                if let Submitted::Append(events) = self.take_submission(now, new, false, out) {
                    out.push(Action::Append {
                        execution,
                        tenant: tenant.clone(),
                        expected: 0,
                        events,
                        ticket: None,
                    });
                }
            }
            Input::Ledger(view) => self.follow(now, view, false, out),
            Input::Reread(view) => self.follow(now, view, true, out),
            Input::Spec { execution, spec } => self.learn_spec(now, execution, spec),
            Input::Appended {
                execution,
                seq,
                epoch,
                phase,
            } => {
                self.appended(now, execution, seq, epoch, phase);
            }
            Input::Vanished { execution } => self.forget(execution),
            Input::Container(program) => self.cluster.profiles.runs_in_container(program),
            Input::Descriptor(descriptor) => self.descriptor(now, *descriptor, out),
            Input::Gone(node) => self.gone(now, node, out),
            Input::Flags(node, flags) => self.flags(now, node, flags, out),
            Input::Proof {
                node,
                signed,
                judged,
            } => self.proof(now, node, signed, judged, out),
            Input::Quarantine(node, quarantine) => self.quarantine(now, node, quarantine, out),
            Input::Verdict(verdict) => self.verdict(now, verdict, out),
            Input::Recalled {
                execution,
                up_to,
                named,
            } => self.recalled(now, execution, (up_to, &named)),
            Input::Vector(vector, age_ms) => self.vector(now, vector, age_ms, out),
            Input::Probe(node, outcome) => self.probed(now, node, outcome, out),
            Input::Holdings {
                node,
                instance,
                held,
            } => self.reconcile(now, node, instance, held, out),
            Input::Ordered {
                execution,
                epoch,
                outcome,
            } => {
                self.ordered(now, execution, epoch, outcome);
            }
            Input::SplitAnswered {
                execution,
                epoch,
                outcome,
            } => self.split_answered(execution, epoch, outcome),
            Input::Ended { execution, seen } => {
                self.orphan_seen(now, execution, seen);
                self.looked_up(now, execution, seen);
                self.spread_seen(now, execution, seen);
            }
            Input::Quota(tenant, quota) => self.quota(tenant, quota),
            Input::Reserved {
                tenant,
                table,
                answer,
            } => self.reserved(now, tenant, table, answer),
            Input::Replica { id, leaving } => self.replicas.heard(now.mono, id, leaving),
            Input::Yield {
                ticket,
                execution,
                to,
                who,
            } => {
                self.operator_yield(now, ticket, execution, to, who, out);
            }
            Input::Tenant { tenant, weight } => {
                self.cluster.tenants.set_weight(tenant, weight);
                self.dirty = true;
            }
            Input::Connected(connected) => {
                self.connected = connected;
                self.start_clocks_anew(now.mono);
            }
            Input::Lost => self.heal_until = now.mono.plus(self.config.heal_ms),
            Input::Loaded => self.begin(now),
            Input::Tick => self.tick(now, out),
        }
    }

    /// Binds what waits, as far as there is room; the shell calls it after each round of inputs.
    pub fn act(&mut self, now: Now, out: &mut Vec<Action>) {
        self.pass(now);
        if !self.loaded || !self.connected || now.mono < self.heal_until {
            return;
        }
        self.act_on_holds(now, out);
        self.dirty |= std::mem::take(&mut self.cluster.freed);
        if self.dirty || self.share.fresh {
            self.fill(now, out);
        }
    }

    fn begin_step(&mut self, now: Now) {
        self.pass(now);
        // Whatever comes first after a stall of the observer must not be judged by its clock.
        if self
            .last_tick
            .is_some_and(|last| now.mono.since(last) > self.config.stall_ms)
        {
            self.last_tick = Some(now.mono);
            self.start_clocks_anew(now.mono);
        }
    }

    /// Time passes for what counts by it.
    fn pass(&mut self, now: Now) {
        self.share.now = now;
        self.cluster.tenants.pass(now.mono);
    }

    fn tick(&mut self, now: Now, out: &mut Vec<Action>) {
        self.last_tick = Some(now.mono);
        self.replicas.expire(now.mono, self.config.replica_ms);
        let silent = now.mono.0.saturating_sub(self.config.liveness_ms);
        self.strangers.forget_before(Millis(silent));
        if !self.loaded {
            return;
        }
        for ix in 0..self.cluster.node_count() {
            self.look_at_node(now, NodeIx(ix), out);
            self.look_at_trust(now, NodeIx(ix), out);
        }
        if !self.connected || now.mono < self.heal_until {
            return;
        }
        // What is looked at may want to be looked at again at once; one round a tick is enough.
        let mut due = Vec::new();
        while let Some(id) = self.cluster.pop_due(now.mono) {
            due.push(id);
        }
        for id in due {
            self.look_at_execution(now, id, out);
        }
        self.look_at_deadlines(now, out);
        self.look_at_spread(now, out);
        self.act(now, out);
        self.look_at_quotas(now, out);
        self.preempt(now, out);
        if self.cluster.parked() > 0 {
            self.look_at_parked(now, out);
        }
        self.reallocate(now, out);
        self.verify_round(now, out);
        self.tell_waiting(now, out);
    }

    /// After a stall or a cut of the observer nobody's silence counts.
    fn start_clocks_anew(&mut self, now: Millis) {
        self.holds.distrust();
        for ix in 0..self.cluster.node_count() {
            let node = self.cluster.node_mut(NodeIx(ix));
            node.heard = node.heard.max(now);
            if matches!(node.presence, crate::cluster::Presence::Probing { .. }) {
                node.presence = crate::cluster::Presence::Up;
            }
        }
    }

    /// The load is complete: clocks start, bindings get their deadlines.
    fn begin(&mut self, now: Now) {
        self.loaded = true;
        self.dirty = true;
        self.holds.began = now.mono;
        self.last_tick = Some(now.mono);
        self.start_clocks_anew(now.mono);
    }

    /// True when this replica acts first for the execution.
    fn is_mine(&self, id: ExecutionId) -> bool {
        self.replicas.prefers_self(id.0.as_bytes())
    }

    /// True for an execution that is known and lives.
    pub fn knows(&self, id: ExecutionId) -> bool {
        self.cluster.execution(id).is_some()
    }

    /// Whose a live execution is.
    pub fn tenant(&self, id: ExecutionId) -> Option<Tenant> {
        self.cluster.execution(id).map(|e| e.tenant.clone())
    }

    /// Names that have sent vectors and not joined, as far as they are remembered.
    pub fn strangers(&self) -> usize {
        self.strangers.count()
    }

    /// Names of nodes that are known.
    pub fn known_nodes(&self) -> u32 {
        self.cluster.node_count()
    }

    /// The clock of each node that has joined and says how far it is off.
    pub fn node_clocks(&self) -> impl Iterator<Item = (&NodeId, ClockReading)> {
        self.cluster.nodes().filter_map(|(_, node)| {
            let (descriptor, vector) = (node.descriptor.as_ref()?, node.vector.as_ref()?);
            Some((&descriptor.node, vector.clock?))
        })
    }

    /// How many executions live.
    pub fn live(&self) -> usize {
        self.cluster.live()
    }

    /// How many wait to be bound.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Completions seen since the start; a change means that there may be room again.
    pub fn completions(&self) -> u64 {
        self.completions
    }

    /// Policy services present, this one included.
    pub fn replicas(&self) -> usize {
        self.replicas.count()
    }

    /// The shard from which a node pulls its capsules.
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

    /// A digest over all that is known of the cluster; for tests of determinism.
    #[doc(hidden)]
    pub fn fingerprint(&self) -> Digest {
        Digest::of(format!("{:?}", self.cluster).as_bytes())
    }
}
