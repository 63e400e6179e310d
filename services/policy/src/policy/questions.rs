//! What others may ask the policy; nothing changes by it.

use fiec_schemas::hardware::{ArrivingState, RunningProgress};
use fiec_schemas::trust::NodeIdentity;
use fiec_schemas::{ClockReading, Digest, ExecutionId, InstanceId, NodeId, Sequence, Tenant};

use super::Policy;
use crate::config::Config;
use crate::lifecycle::cluster::Stage;

impl Policy {
    /// True for a known, live execution.
    pub fn knows(&self, id: ExecutionId) -> bool {
        self.life.knows(id)
    }

    /// The tenant of a live execution.
    pub fn tenant(&self, id: ExecutionId) -> Option<Tenant> {
        self.life.tenant(id)
    }

    /// Sequence of the last known message of a live execution.
    pub fn sequence(&self, id: ExecutionId) -> Option<Sequence> {
        self.life.cluster().execution(id).map(|e| e.seq)
    }

    /// True for a joined node.
    pub fn has_node(&self, node: &NodeId) -> bool {
        self.life.has_node(node)
    }

    /// The fetch of a bound execution's state, as its node's last vector reports it.
    pub fn arriving(&self, id: ExecutionId) -> Option<ArrivingState> {
        let e = self.life.cluster().execution(id)?;
        let Stage::Bound(ix, instance) = e.stage else {
            return None;
        };
        let vector = self.life.cluster().node(ix).vector.as_ref()?;
        let mut all = vector.arriving.iter();
        let found = all.find(|a| a.execution == id && a.epoch == e.epoch)?;
        (vector.instance == instance).then(|| found.clone())
    }

    /// The identity in a node's claim.
    pub fn identity(&self, node: &NodeId) -> Option<NodeIdentity> {
        let ix = self.life.cluster().find(node)?;
        self.life
            .cluster()
            .node(ix)
            .descriptor
            .as_ref()?
            .identity
            .clone()
    }

    /// The instance of a node's descriptor.
    pub fn instance(&self, node: &NodeId) -> Option<InstanceId> {
        self.life
            .cluster()
            .node(self.life.cluster().find(node)?)
            .life
    }

    /// The last progress that a node reported for a running execution.
    pub fn progress(&self, id: ExecutionId) -> Option<RunningProgress> {
        let Stage::Started(ix, _) = self.life.cluster().execution(id)?.stage else {
            return None;
        };
        let vector = self.life.cluster().node(ix).vector.as_ref()?;
        vector.running.iter().find(|r| r.execution == id).cloned()
    }

    /// Number of remembered names that have sent vectors without joining.
    pub fn strangers(&self) -> usize {
        self.life.strangers.count()
    }

    /// Number of known nodes.
    pub fn known_nodes(&self) -> u32 {
        self.life.cluster().node_count()
    }

    /// The clock reading of each joined node that reports one.
    pub fn node_clocks(&self) -> impl Iterator<Item = (&NodeId, ClockReading)> {
        self.life.cluster().nodes().filter_map(|(_, node)| {
            let (descriptor, vector) = (node.descriptor.as_ref()?, node.vector.as_ref()?);
            Some((&descriptor.node, vector.clock?))
        })
    }

    /// Number of live executions.
    pub fn live(&self) -> usize {
        self.life.cluster().live()
    }

    /// Number of executions that wait for a binding.
    pub fn waiting(&self) -> usize {
        self.life.waiting.len()
    }

    /// Number of a tenant's live executions without a node, appends in flight included. A counter,
    /// so it may be read for every line.
    pub fn waiting_of(&self, tenant: &Tenant) -> u32 {
        self.life.cluster().tenants.waiting(tenant)
    }

    /// The limit on that number in the tenant's quota, if it has one.
    pub fn waiting_limit(&self, tenant: &Tenant) -> Option<u32> {
        self.machines.quotas.waiting_limit(tenant)
    }

    /// Completions since the start. A change means that there may be room again.
    pub fn completions(&self) -> u64 {
        self.life.completions
    }

    /// Number of live policy services, including this one.
    pub fn replicas(&self) -> usize {
        self.life.replicas.count()
    }

    /// True if an execution holds, or waits for, something shared: a part of a quota, of a batch's
    /// limit, or a place in a gang.
    pub fn reserves_for(&self, id: ExecutionId) -> bool {
        self.machines.quotas.reserves(&self.life, id)
            || self.machines.gangs.withholds(&self.life, id)
    }

    /// True while the capsule of a binding must wait for the rest of its gang.
    pub fn withholds(&self, id: ExecutionId) -> bool {
        self.machines.gangs.withholds(&self.life, id)
    }

    /// The shard from which a node pulls capsules.
    pub fn shard(&self, node: &NodeId) -> u16 {
        self.life
            .cluster()
            .find(node)
            .and_then(|ix| self.life.cluster().node(ix).descriptor.as_ref())
            .map_or(0, |d| d.shard)
    }

    /// The settings.
    pub fn config(&self) -> &Config {
        &self.life.config
    }

    /// Digest of the whole cluster state, for tests of determinism.
    #[doc(hidden)]
    pub fn fingerprint(&self) -> Digest {
        Digest::of(format!("{:?}", self.life.cluster()).as_bytes())
    }
}
