//! Executions: one row each, which every message of a ledger brings up to date.

use std::sync::Arc;

use fiec_schemas::{
    BatchId, BoundaryIndex, ClientId, Contract, Digest, Epoch, ExecutionId, ExecutionState,
    FaultKind, NodeId, Ordinal, Output, Owner, Phase, PhaseKind, RequestKind, Sequence, Submission,
    Tenant, Timestamp, duty,
};
use serde_json::Value;
use sqlx::types::Json;

use crate::known::Tracked;
use crate::table::Merge::{Fill, Key, Take};
use crate::table::table;

table! {
    /// A row of `executions`. A last message that the broker had lost and that was appended again as it
    /// was has its ordinal, and a new place. A rewound row has no digest, and takes the message that is
    /// the last one now.
    struct ExecutionRow in "executions" where "executions.ordinal < excluded.ordinal OR (executions.digest IS NULL AND executions.ordinal = excluded.ordinal) OR (executions.digest = excluded.digest AND executions.recorded_at < excluded.recorded_at)" {
        /// Its id.
        id: ExecutionId = Key,
        /// Whose.
        tenant: Tenant,
        /// The client's own id, if it gave one.
        client_id: Option<ClientId> = Fill,
        /// Its batch.
        batch_id: Option<BatchId> = Take,
        /// Line in the batch, from 1.
        batch_line: Option<u32> = Take,
        /// The program, with its version.
        program: Option<String> = Fill,
        /// Under which contract it moves.
        contract: Contract = Take,
        /// Digest of the canonical submission.
        submission: Digest = Take,
        /// The submission, where the ledger has it and the table does not yet.
        spec: Option<Json<Arc<Submission>>> = Fill,
        /// When it was submitted.
        submitted_at: Timestamp = Take,
        /// Name of the phase.
        phase: PhaseKind = Take,
        /// Node of the last binding.
        node: Option<NodeId> = Fill,
        /// Place on that node.
        substrate: Option<String> = Fill,
        /// Epoch of the last binding.
        epoch: Epoch = Take,
        /// When it was last bound.
        bound_at: Option<Timestamp> = Fill,
        /// When it first started, if that is in this batch.
        first_started_at: Option<Timestamp>,
        /// When it last yielded.
        yielded_at: Option<Timestamp> = Fill,
        /// When its last capsule ended.
        computed_until: Option<Timestamp> = Fill,
        /// The last committed boundary; 0: none.
        boundary_index: BoundaryIndex = Take,
        /// Boundaries in all.
        boundary_of: Option<BoundaryIndex> = Fill,
        /// The program's word on its progress.
        progress_note: Option<String> = Fill,
        /// Digest of the last committed state.
        state_digest: Option<Digest> = Take,
        /// Bytes of it.
        last_state_bytes: Option<u64> = Take,
        /// Ledger sequence that carries it.
        state_seq: Option<Sequence> = Take,
        /// Ordinal of that message.
        state_ordinal: Option<Ordinal> = Take,
        /// Boundaries committed.
        commits: u64 = Take,
        /// Bytes of state committed over its life.
        state_bytes: u64 = Take,
        /// Bindings after the first.
        rebindings: u64 = Take,
        /// Of those, the ones for pressure.
        pressure_rebindings: u64 = Take,
        /// Crashes of the program.
        crashes: u64 = Take,
        /// Microseconds spent computing.
        compute_us: u64 = Take,
        /// When it ended.
        finished_at: Option<Timestamp> = Take,
        /// Capsules in all.
        capsules: Option<BoundaryIndex> = Fill,
        /// The result.
        result: Option<Json<Value>> = Fill,
        /// Outputs that completion made visible.
        outputs: Option<Json<Vec<Output>>> = Fill,
        /// Why it failed.
        failure: Option<String> = Fill,
        /// End of stderr.
        stderr_tail: Option<String> = Fill,
        /// A request that is not yet carried out.
        requested: Option<RequestKind> = Take,
        /// Who asked for it.
        requested_by: Option<String> = Take,
        /// Who paused it.
        paused_by: Option<String> = Take,
        /// Ordinal of the last message.
        ordinal: Ordinal = Take,
        /// Its sequence.
        seq: Sequence = Take,
        /// Its author.
        author: String = Take,
        /// When the broker stored it.
        recorded_at: Timestamp = Take,
        /// Microjoules of hosts.
        host_uj: Option<u64> = Take,
        /// Intervals that they are of.
        host_intervals: Option<u64> = Take,
        /// Microjoules of devices.
        device_uj: Option<u64> = Take,
        /// Intervals that they are of.
        device_intervals: Option<u64> = Take,
        /// Digest of the last message's header.
        digest: Option<Digest> = Take,
        /// Faults of nodes over its life.
        node_faults: u64 = Take,
        /// Faults of the infrastructure over its life.
        infrastructure_faults: u64 = Take,
        /// Why it failed.
        fault: Option<FaultKind> = Fill,
        /// Whose fault that was.
        fault_owner: Option<Owner> = Fill,
        /// By when its worker must act.
        due_at: Option<Timestamp> = Take,
    }
    beside {
        /// True if the table cannot hold it yet.
        is_new: bool,
    }
}

/// The columns of an execution that only events give.
#[derive(Debug, Default)]
pub(crate) struct EventColumns {
    pub substrate: Option<String>,
    pub first_started_at: Option<Timestamp>,
    pub boundary_of: Option<BoundaryIndex>,
    pub progress_note: Option<String>,
    pub capsules: Option<BoundaryIndex>,
    pub result: Option<Json<Value>>,
    pub outputs: Option<Json<Vec<Output>>>,
    pub failure: Option<String>,
    pub stderr_tail: Option<String>,
    /// Why it failed.
    pub fault: Option<FaultKind>,
}

impl EventColumns {
    /// Withdraws how it ended.
    pub(crate) fn withdraw_end(&mut self) {
        (self.capsules, self.result, self.outputs) = (None, None, None);
        (self.failure, self.stderr_tail, self.fault) = (None, None, None);
    }
}

impl ExecutionRow {
    /// The row after a batch. `tracked` and `state`: after the execution's last message in it. `spec`:
    /// the submission, unless the table has the execution already.
    pub(crate) fn new(
        is_new: bool,
        spec: Option<Arc<Submission>>,
        events: EventColumns,
        tracked: &Tracked,
        state: ExecutionState,
    ) -> Self {
        let due = duty::of(&state, state.at);
        let due_at = due.by.filter(|_| due.who == duty::Actor::Worker);
        let place = state.boundary.as_ref();
        let requested = state.requested().cloned();
        let totals = state.totals;
        let energy = totals.energy.unwrap_or_default();
        Self {
            id: state.execution,
            tenant: state.tenant,
            client_id: state.client_id,
            batch_id: state.batch.map(|batch| batch.id),
            batch_line: state.batch.map(|batch| batch.line),
            program: spec.as_ref().map(|spec| spec.program.clone()),
            contract: state.contract,
            submission: state.submission,
            spec: spec.map(Json),
            submitted_at: state.submitted_at,
            phase: state.phase.kind(),
            node: tracked.node.clone(),
            substrate: events.substrate,
            epoch: state.epoch,
            bound_at: state.moved_at,
            first_started_at: events.first_started_at,
            yielded_at: tracked.yielded_at,
            computed_until: tracked.computed_until,
            boundary_index: place.map_or(0, |place| place.index),
            boundary_of: events.boundary_of,
            progress_note: events.progress_note,
            state_digest: place.map(|place| place.digest),
            last_state_bytes: place.map(|place| place.bytes),
            state_seq: place.and_then(|place| place.seq),
            state_ordinal: place.map(|place| place.ordinal),
            commits: totals.commits,
            state_bytes: totals.state_bytes,
            rebindings: totals.rebindings,
            pressure_rebindings: totals.pressure,
            crashes: totals.crashes,
            compute_us: totals.compute_us,
            finished_at: state.phase.is_terminal().then_some(state.at),
            capsules: events.capsules,
            result: events.result,
            outputs: events.outputs,
            failure: events.failure,
            stderr_tail: events.stderr_tail,
            requested: requested.as_ref().map(|r| r.what),
            requested_by: requested.map(|r| r.who),
            paused_by: match state.phase {
                Phase::Paused { who } => Some(who),
                _ => None,
            },
            ordinal: state.ordinal,
            seq: tracked.seq,
            author: state.author,
            recorded_at: tracked.stored_at,
            host_uj: energy.host.map(|host| host.uj),
            host_intervals: energy.host.map(|host| host.intervals),
            device_uj: energy.device.map(|device| device.uj),
            device_intervals: energy.device.map(|device| device.intervals),
            digest: tracked.digest,
            node_faults: totals.node_faults,
            infrastructure_faults: totals.infrastructure_faults,
            fault: events.fault,
            fault_owner: events.fault.map(FaultKind::owner),
            due_at,
            is_new,
        }
    }
}
