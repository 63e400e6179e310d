//! Executions: one row each, which every message of a ledger brings up to date.

use std::sync::Arc;

use fiec_schemas::{
    BatchId, BoundaryIndex, ClientId, Contract, Digest, Epoch, ExecutionId, ExecutionState, NodeId,
    Ordinal, Output, Phase, Sequence, StatePlace, Submission, Tenant, Timestamp,
};
use serde_json::Value;
use sqlx::types::Json;

use crate::known::Tracked;
use crate::table::Merge::{Fill, Key, Take};
use crate::table::table;

table! {
    /// A row of `executions`.
    struct ExecutionRow in "executions" where "executions.ordinal < excluded.ordinal" {
        /// Its id.
        id: ExecutionId = Key,
        /// Whose.
        tenant: Tenant,
        /// The client's own id, if it gave one.
        client_id: Option<ClientId>,
        /// Its batch.
        batch_id: Option<BatchId>,
        /// Line in the batch, from 1.
        batch_line: Option<u32>,
        /// The program, with its version.
        program: Option<String>,
        /// Under which contract it moves.
        contract: Contract,
        /// Digest of the canonical submission.
        submission: Digest,
        /// The submission, where the ledger has it and the table does not yet.
        spec: Option<Json<Arc<Submission>>>,
        /// When it was submitted.
        submitted_at: Timestamp,
        /// Name of the phase.
        phase: &'static str = Take,
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
        /// An order that is not yet carried out.
        requested: Option<String> = Take,
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
    }
    beside {
        /// True if the table cannot hold it yet.
        is_new: bool,
        /// The last boundary.
        boundary: Option<StatePlace>,
        /// True if that boundary is of this batch.
        has_new_boundary: bool,
    }
}

impl ExecutionRow {
    /// The row of an execution's first message in a batch; [`ExecutionRow::update`] fills in the
    /// rest. `is_recorded`: the table has the execution already.
    pub(crate) fn new(state: &ExecutionState, is_recorded: bool) -> Self {
        // Every message of a live execution has the submission; the table needs it once.
        let spec = state.spec.clone().filter(|_| !is_recorded);
        Self {
            id: state.execution,
            tenant: state.tenant.clone(),
            client_id: spec.as_ref().and_then(|spec| spec.id.clone()),
            batch_id: state.batch.map(|batch| batch.id),
            batch_line: state.batch.map(|batch| batch.line),
            program: spec.as_ref().map(|spec| spec.program.clone()),
            contract: state.contract,
            submission: state.submission,
            spec: spec.map(Json),
            submitted_at: state.submitted_at,
            phase: state.phase.as_str(),
            node: None,
            substrate: None,
            epoch: 0,
            bound_at: None,
            first_started_at: None,
            yielded_at: None,
            computed_until: None,
            boundary_index: 0,
            boundary_of: None,
            progress_note: None,
            state_digest: None,
            last_state_bytes: None,
            state_seq: None,
            state_ordinal: None,
            commits: 0,
            state_bytes: 0,
            rebindings: 0,
            pressure_rebindings: 0,
            crashes: 0,
            compute_us: 0,
            finished_at: None,
            capsules: None,
            result: None,
            outputs: None,
            failure: None,
            stderr_tail: None,
            requested: None,
            paused_by: None,
            ordinal: 0,
            seq: 0,
            author: String::new(),
            recorded_at: state.at,
            host_uj: None,
            host_intervals: None,
            device_uj: None,
            device_intervals: None,
            digest: None,
            is_new: !is_recorded && state.ordinal == 1,
            boundary: None,
            has_new_boundary: false,
        }
    }

    /// Takes over the cumulative state after a message. The message's events have set the rest.
    pub(crate) fn update(&mut self, tracked: &Tracked, state: ExecutionState) {
        self.phase = state.phase.as_str();
        self.node.clone_from(&tracked.node);
        self.epoch = state.epoch;
        self.bound_at = state.moved_at;
        self.yielded_at = tracked.yielded_at;
        self.computed_until = tracked.computed_until;
        let place = state.boundary.as_ref();
        self.boundary_index = place.map_or(0, |place| place.index);
        self.state_digest = place.map(|place| place.digest);
        self.last_state_bytes = place.map(|place| place.bytes);
        self.state_seq = place.and_then(|place| place.seq);
        self.state_ordinal = place.map(|place| place.ordinal);
        self.boundary = state.boundary;
        let totals = state.totals;
        self.commits = totals.commits;
        self.state_bytes = totals.state_bytes;
        self.rebindings = totals.rebindings;
        self.pressure_rebindings = totals.pressure;
        self.crashes = totals.crashes;
        self.compute_us = totals.compute_us;
        let energy = totals.energy.unwrap_or_default();
        self.host_uj = energy.host.map(|host| host.uj);
        self.host_intervals = energy.host.map(|host| host.intervals);
        self.device_uj = energy.device.map(|device| device.uj);
        self.device_intervals = energy.device.map(|device| device.intervals);
        self.finished_at = state.phase.is_terminal().then_some(state.at);
        self.requested = state.requested.map(|r| format!("{} by {}", r.what, r.who));
        self.paused_by = match state.phase {
            Phase::Paused { who } => Some(who),
            _ => None,
        };
        self.ordinal = state.ordinal;
        self.seq = tracked.seq;
        self.digest = tracked.digest;
        self.author = state.author;
        self.recorded_at = tracked.stored_at;
    }
}
