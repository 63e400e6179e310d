//! What others may ask the policy; nothing changes by it.

use std::collections::{BTreeMap, BTreeSet};

use fiec_schemas::duty::{Actor, Standing};
use fiec_schemas::hardware::{ArrivingState, RunningProgress};
use fiec_schemas::messages::{Believed, NodeStatus, Why};
use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::surroundings::Offers;
use fiec_schemas::trust::NodeIdentity;
use fiec_schemas::{ClockReading, Digest, ExecutionId, InstanceId, NodeId, Sequence, Tenant};

use super::Policy;
use crate::config::Config;
use crate::explanation::{self, Duties};
use crate::lifecycle::cluster::Stage;
use crate::time::Now;

impl Policy {
    /// The fetch of a bound execution's state, as its node's last vector reports it.
    pub fn arriving(&self, id: ExecutionId) -> Option<ArrivingState> {
        self.life.arriving(id)
    }

    /// Explains the place of a live execution.
    pub fn why(&self, now: Now, id: ExecutionId) -> Option<Why> {
        explanation::why(&self.life, &self.machines, now, id)
    }

    /// Predicts the effect of a change before it is made, in words.
    ///
    /// # Errors
    /// The reasons of each node if none can take the execution under the change. The change is
    /// still possible: the execution then waits, or stays, until a node can.
    pub fn foresee(
        &mut self,
        now: Now,
        id: ExecutionId,
        change: &Adjustment,
    ) -> Result<String, String> {
        explanation::foresee(&mut self.life, now, id, change)
    }

    /// Every joined node, ordered by name.
    pub fn node_statuses(&self, now: Now) -> Vec<NodeStatus> {
        explanation::node_statuses(&self.life, now)
    }

    /// The joined nodes that count as lost.
    pub fn lost_nodes(&self) -> BTreeSet<NodeId> {
        explanation::lost_nodes(&self.life)
    }

    /// The current offers, [`fiec_schemas::surroundings::OFFERS_LIMIT`] at most.
    pub fn offers(&self, now: Now) -> Offers {
        explanation::offers(&self.life, now)
    }

    /// The duties of each actor. It reads every live execution, so keep it off the hot path.
    pub fn duties(&self, now: Now) -> BTreeMap<Actor, Duties> {
        explanation::duties(&self.life, &self.machines, now)
    }

    /// The state of a live execution, as far as its next duty depends on it.
    pub fn standing(&self, now: Now, id: ExecutionId) -> Option<Standing> {
        explanation::standing(&self.life, &self.machines, now, id)
    }

    /// At most `most` live executions with ids greater than `after`, ordered by id, and whether more
    /// follow. It reads all live executions, so keep it off the hot path.
    pub fn beliefs(&self, after: Option<ExecutionId>, most: usize) -> (Vec<Believed>, bool) {
        explanation::beliefs(&self.life, after, most)
    }

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
        self.life.strangers().count()
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
        self.life.waiting().len()
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
        self.life.completions()
    }

    /// Number of live policy services, including this one.
    pub fn replicas(&self) -> usize {
        self.life.replicas().count()
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
