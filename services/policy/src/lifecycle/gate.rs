//! What the life cycle asks of the machines beside it, leaves to them, and tells them. It names none
//! of them: the policy knows whose turn it is.

use fiec_schemas::{Cause, ExecutionId, PhaseKind, Tenant};

use super::Lifecycle;
use super::bonds::BondSpec;
use super::cluster::NodeIx;
use crate::lifecycle::binding::bind::Placed;
use crate::view::LedgerView;

/// The machines, as the life cycle sees them.
pub(crate) trait Gate {
    // Questions before a binding.

    /// True if a new execution must not be bound by its first message.
    fn begins_held(&self, tenant: &Tenant, spec: Option<&BondSpec>) -> bool;

    /// True if an execution lacks only a place. If it lacks a reservation, this requests one.
    fn may_wait(&mut self, life: &mut Lifecycle, id: ExecutionId) -> bool;

    /// True if no limit prevents a binding of an execution by this replica.
    fn is_admitted(&self, life: &Lifecycle, id: ExecutionId) -> bool;

    /// For people: why an execution may not be bound now, independent of room.
    fn held_in_words(&self, life: &Lifecycle, id: ExecutionId) -> Option<String>;

    /// True for a bound execution whose capsule waits for other bindings.
    fn awaits_gang(&mut self, life: &mut Lifecycle, id: ExecutionId) -> bool;

    /// True if a judgement depends on a node, so that it must not be forgotten.
    fn is_needed(&self, node: NodeIx) -> bool;

    // What the life cycle cannot go on with.

    /// Fails a waiting execution whose deadline has passed. None if it may be bound.
    fn fail_late(&mut self, life: &mut Lifecycle, id: ExecutionId) -> Option<Placed>;

    /// An execution should leave its place for this cause, and no other can take it.
    fn without_place(&mut self, life: &mut Lifecycle, id: ExecutionId, cause: &Cause) -> Placed;

    /// It is the turn of a parked execution.
    fn resume(&mut self, life: &mut Lifecycle, id: ExecutionId) -> Placed;

    /// Why an execution should leave its node because its program has asked for more.
    fn wish(&self, life: &Lifecycle, id: ExecutionId) -> Option<(NodeIx, Cause)>;

    /// Keeps those of a node's executions that must leave first.
    fn choose_to_leave(&self, life: &Lifecycle, node: NodeIx, ids: &mut Vec<ExecutionId>);

    // Facts.

    /// An execution was taken up, with what its submission says of others. `bound`: it was bound
    /// before.
    fn took_in(
        &mut self,
        life: &mut Lifecycle,
        id: ExecutionId,
        tenant: &Tenant,
        spec: Option<BondSpec>,
        bound: bool,
    );

    /// A ledger was read again after an append of ours failed.
    fn reread(&mut self, id: ExecutionId);

    /// A message of a live execution is followed; its stage in the cluster is that of the message.
    fn heard(&mut self, life: &mut Lifecycle, view: &LedgerView<'_>);

    /// An execution was bound, has started, or waits again.
    fn moved(&mut self, life: &mut Lifecycle, id: ExecutionId);

    /// The same message, after the execution was queued or its next review was scheduled.
    fn parked(&mut self, life: &mut Lifecycle, view: &LedgerView<'_>);

    /// An execution may have another profile, so another deadline.
    fn changed(&mut self, life: &Lifecycle, id: ExecutionId);

    /// The last message of an execution.
    fn ended(&mut self, life: &mut Lifecycle, view: &LedgerView<'_>);

    /// An execution has ended by an append of this service.
    fn ended_by_append(&mut self, life: &mut Lifecycle, id: ExecutionId, phase: PhaseKind);

    /// An execution that had ended begins again.
    fn begins_again(&mut self, id: ExecutionId);

    /// An execution is about to be forgotten.
    fn forgotten(&mut self, life: &mut Lifecycle, id: ExecutionId);
}

impl Lifecycle {
    /// Queues an execution for a binding, if it lacks only a place.
    pub(crate) fn wait(&mut self, gate: &mut impl Gate, id: ExecutionId) {
        if gate.may_wait(self, id) {
            self.queue_up(id);
        }
    }
}
