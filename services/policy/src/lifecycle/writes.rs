//! What others may change of the cluster, one method each.

use fiec_schemas::{ExecutionId, NodeId, Tenant};

use super::Lifecycle;
use super::cluster::changed::Changed;
use super::cluster::places::Claim;
use super::cluster::profile::{Profile, ProfileIx};
use super::cluster::{Cluster, Execution, NodeIx, Order, Stage};
use crate::time::Millis;

impl Lifecycle {
    /// Nodes and executions.
    pub(crate) fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Changes that nobody has acted on yet.
    pub(crate) fn changed(&mut self) -> &mut Changed {
        &mut self.cluster.changed
    }

    /// The node of this name, created if missing.
    pub(crate) fn intern(&mut self, name: &NodeId) -> NodeIx {
        self.cluster.intern(self.now.mono, name)
    }

    /// Forgets a node that holds nothing.
    pub(crate) fn forget_node(&mut self, ix: NodeIx) {
        self.cluster.forget(ix);
    }

    /// Adds an execution.
    pub(crate) fn insert(&mut self, id: ExecutionId, execution: Execution) {
        self.cluster.insert(id, execution);
    }

    /// Removes an execution that has ended.
    pub(crate) fn remove(&mut self, id: ExecutionId) -> Option<Box<Execution>> {
        self.cluster.remove(id)
    }

    /// Sets the stage of an execution, with its claim there and the time since when.
    pub(crate) fn set_stage(&mut self, id: ExecutionId, stage: Stage, claim: Claim, since: Millis) {
        self.cluster.set_stage(id, stage, claim, since);
    }

    /// Takes back a binding whose append was not sent or did not succeed.
    pub(crate) fn take_back(&mut self, id: ExecutionId) {
        self.cluster.take_back(id);
    }

    /// Counts its claim again after its profile has changed.
    pub(crate) fn claim_anew(&mut self, id: ExecutionId) {
        self.cluster.claim_anew(id);
    }

    /// Notes that it computes for longer than a node's queue may wait.
    pub(crate) fn mark_long(&mut self, id: ExecutionId) {
        self.cluster.mark_long(id);
    }

    /// Removes its order and frees the reserved place.
    pub(crate) fn clear_order(&mut self, id: ExecutionId) -> Option<Order> {
        self.cluster.clear_order(id)
    }

    /// Reviews an execution at this time; at 0 never.
    pub(crate) fn set_due(&mut self, id: ExecutionId, due: Millis) {
        self.cluster.set_due(id, due);
    }

    /// The next execution whose review is due.
    pub(crate) fn pop_due(&mut self) -> Option<ExecutionId> {
        self.cluster.pop_due(self.now.mono)
    }

    /// A profile, and true if it is new. Release it.
    pub(crate) fn acquire_profile(&mut self, profile: Profile) -> (ProfileIx, bool) {
        self.cluster.profiles.acquire_profile(profile)
    }

    /// Releases the profile of a submission that was not taken in.
    pub(crate) fn release(&mut self, ix: ProfileIx) {
        self.cluster.profiles.release(ix);
    }

    /// Releases the profile of an execution, and the watches that only it had.
    pub(crate) fn release_profile(&mut self, ix: ProfileIx) {
        self.cluster.release_profile(ix);
    }

    /// A pushed program runs in a container.
    pub(crate) fn runs_in_container(&mut self, program: &str) {
        self.cluster.profiles.runs_in_container(program);
    }

    /// Sets a tenant's share relative to others.
    pub(crate) fn set_weight(&mut self, tenant: &Tenant, weight: f64) {
        self.cluster.tenants.set_weight(tenant, weight);
    }
}
