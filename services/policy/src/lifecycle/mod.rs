//! The life cycle of executions on nodes: the cluster as it is known, and all that changes it. Others
//! have `&Cluster` only: what writes a node or an execution is visible in this folder alone.
//!
//! * [`cluster`]: nodes, executions, their indices, and [`cluster::hysteresis`].
//! * [`placement`]: which place; [`placing`] asks it about the cluster as it is now.
//! * [`nodes`]: what nodes say, their silence, what they hold, and how they leave.
//! * [`ledger`]: what ledgers say, and the results of this service's appends.
//! * [`queue`]: who waits for a place, and in which order.
//! * [`binding`]: bindings, and orders to the holders of executions.
//! * [`transitions`] and [`writes`]: the changes of an execution, and what others may change of the
//!   cluster.
//! * [`bonds`]: what submissions say of other executions.
//! * [`replicas`]: the other policy services, and who acts first.
//! * [`gate`]: what the life cycle asks of the machines, leaves to them, and tells them.

pub(crate) mod binding;
pub(crate) mod bonds;
pub mod cluster;
pub(crate) mod gate;
pub(crate) mod ledger;
mod nodes;
pub mod placement;
mod placing;
pub(crate) mod queue;
pub mod replicas;
pub(crate) mod transitions;
mod writes;

use std::collections::{BTreeMap, BTreeSet};

use fiec_schemas::{ExecutionId, InstanceId, Tenant};

use crate::Action;
use crate::config::Config;
use crate::lifecycle::cluster::strangers::Strangers;
use crate::lifecycle::cluster::{Cluster, Stage};
use crate::lifecycle::ledger::rhythm::{Rhythm, TakeUp};
use crate::lifecycle::placement::Rankings;
use crate::lifecycle::queue::waiting::{Sweep, Waiting};
use crate::lifecycle::replicas::Replicas;
use crate::time::{Millis, Now};

/// The cluster as it is known, and the step that is made now.
#[derive(Debug)]
pub(crate) struct Lifecycle {
    pub(crate) config: Config,
    /// Time of the present step.
    pub(crate) now: Now,
    /// Actions of the present step.
    out: Vec<Action>,
    /// Nodes and executions.
    cluster: Cluster,
    /// The nodes in order of score, for each profile.
    rankings: Rankings,
    replicas: Replicas,
    /// Executions that must be bound, in queue order.
    waiting: Waiting,
    /// Failed attempts to bind since the last change.
    sweep: Sweep,
    /// Executions for which another one has yielded, with the time: they are bound first.
    promised: BTreeMap<ExecutionId, Millis>,
    connected: bool,
    loaded: bool,
    /// The policy binds nothing before this moment: holders append what the broker has lost.
    heal_until: Millis,
    last_tick: Option<Millis>,
    /// Time of the last review of absent nodes.
    absent_looked: Millis,
    completions: u64,
    /// Rhythms of executions that have committed a boundary or moved.
    rhythms: BTreeMap<ExecutionId, Rhythm>,
    /// Cost of a start on a node.
    take_up: TakeUp,
    /// The gang for which free places are kept.
    leading: Option<Box<queue::leading::Leading>>,
    /// Live executions under which almost as many workers have ended as are allowed.
    suspects: BTreeSet<ExecutionId>,
    /// What submissions say of other executions.
    bonds: bonds::AllBonds,
    /// Vectors from names that have not joined.
    strangers: Strangers,
}

impl Lifecycle {
    /// Nothing is known yet. `own` is this replica's id.
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
            sweep: Sweep::default(),
            promised: BTreeMap::new(),
            connected: true,
            loaded: false,
            heal_until: Millis(0),
            last_tick: None,
            absent_looked: Millis(0),
            completions: 0,
            rhythms: BTreeMap::new(),
            take_up: TakeUp::default(),
            leading: None,
            suspects: BTreeSet::new(),
            bonds: bonds::AllBonds::new(),
            strangers: Strangers::default(),
        }
    }

    /// An action of the present step that changes nothing of the cluster.
    pub(crate) fn push(&mut self, action: Action) {
        self.out.push(action);
    }

    /// Moves the actions of the present step to `out`.
    pub(crate) fn take_actions(&mut self, out: &mut Vec<Action>) {
        out.append(&mut self.out);
    }

    /// The executions that wait for a place.
    pub(crate) fn waiting(&self) -> &Waiting {
        &self.waiting
    }

    /// What is known of the pace of an execution.
    pub(crate) fn rhythm(&self, id: ExecutionId) -> Option<&Rhythm> {
        self.rhythms.get(&id)
    }

    /// What starts on nodes have cost.
    pub(crate) fn take_up(&self) -> &TakeUp {
        &self.take_up
    }

    /// The policy services that are present.
    pub(crate) fn replicas(&self) -> &Replicas {
        &self.replicas
    }

    /// Names that have sent vectors without joining.
    pub(crate) fn strangers(&self) -> &Strangers {
        &self.strangers
    }

    /// Completions since the start.
    pub(crate) fn completions(&self) -> u64 {
        self.completions
    }

    /// True once all ledgers have been read.
    pub(crate) fn is_loaded(&self) -> bool {
        self.loaded
    }

    /// True while the connection stands.
    pub(crate) fn is_connected(&self) -> bool {
        self.connected
    }

    /// True if executions may be bound: the ledgers have been read, the connection stands, and no
    /// holder may be appending again what the broker has lost.
    pub(crate) fn may_bind(&self) -> bool {
        self.loaded && self.connected && self.now.mono >= self.heal_until
    }

    /// The ledgers have been read.
    pub(crate) fn begin(&mut self) {
        self.loaded = true;
        self.changed().places = true;
        self.last_tick = Some(self.now.mono);
    }

    /// The connection was lost, or stands again.
    pub(crate) fn set_connected(&mut self, connected: bool) {
        self.connected = connected;
    }

    /// The broker has lost messages. Their holders append these again.
    pub(crate) fn lost_messages(&mut self) {
        self.heal_until = self.now.mono.plus(self.config.heal_ms);
    }

    /// Another policy service announced itself.
    pub(crate) fn hear_replica(&mut self, id: InstanceId, leaving: bool) {
        self.replicas.heard(self.now.mono, id, leaving);
    }

    /// A step begins. Returns true after a stall of this process.
    pub(crate) fn begin_step(&mut self, now: Now) -> bool {
        self.pass(now);
        let stall = self.config.stall_ms;
        let stalled = self
            .last_tick
            .is_some_and(|last| now.mono.since(last) > stall);
        if stalled {
            self.last_tick = Some(now.mono);
        }
        stalled
    }

    /// Time has passed: services and strangers that are silent are forgotten.
    pub(crate) fn begin_tick(&mut self) {
        let now = self.now.mono;
        self.last_tick = Some(now);
        self.replicas.expire(now, self.config.replica_ms);
        let silent = now.0.saturating_sub(self.config.liveness_ms);
        self.strangers.forget_before(Millis(silent));
    }

    /// Advances the state that depends on the time.
    pub(crate) fn pass(&mut self, now: Now) {
        self.now = now;
        self.cluster.tenants.pass(now.mono);
    }

    /// True if this replica is preferred for the execution.
    pub(crate) fn is_mine(&self, id: ExecutionId) -> bool {
        self.replicas.prefers_self(id.0.as_bytes())
    }

    /// True for a known, live execution.
    pub(crate) fn knows(&self, id: ExecutionId) -> bool {
        self.cluster.execution(id).is_some()
    }

    /// The tenant of a live execution.
    pub(crate) fn tenant(&self, id: ExecutionId) -> Option<Tenant> {
        self.cluster.execution(id).map(|e| e.tenant.clone())
    }

    pub(crate) fn stage(&self, id: ExecutionId) -> Option<Stage> {
        self.cluster.execution(id).map(|e| e.stage)
    }
}
