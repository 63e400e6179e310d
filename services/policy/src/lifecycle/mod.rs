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
    pub(crate) out: Vec<Action>,
    /// Nodes and executions.
    cluster: Cluster,
    /// The nodes in order of score, for each profile.
    pub(crate) rankings: Rankings,
    pub(crate) replicas: Replicas,
    /// Executions that must be bound, in queue order.
    pub(crate) waiting: Waiting,
    /// Failed attempts to bind since the last change.
    pub(crate) sweep: Sweep,
    /// Executions for which another one has yielded, with the time: they are bound first.
    pub(crate) promised: BTreeMap<ExecutionId, Millis>,
    pub(crate) connected: bool,
    pub(crate) loaded: bool,
    /// The policy binds nothing before this moment: holders append what the broker has lost.
    pub(crate) heal_until: Millis,
    pub(crate) last_tick: Option<Millis>,
    /// Time of the last review of absent nodes.
    pub(crate) absent_looked: Millis,
    pub(crate) completions: u64,
    /// Rhythms of executions that have committed a boundary or moved.
    pub(crate) rhythms: BTreeMap<ExecutionId, Rhythm>,
    /// Cost of a start on a node.
    pub(crate) take_up: TakeUp,
    /// The gang for which free places are kept.
    leading: Option<Box<queue::leading::Leading>>,
    /// Live executions under which almost as many workers have ended as are allowed.
    suspects: BTreeSet<ExecutionId>,
    /// What submissions say of other executions.
    bonds: bonds::AllBonds,
    /// Vectors from names that have not joined.
    pub(crate) strangers: Strangers,
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
