//! The rows that a batch of ledger messages becomes, and their form on the wire.

use std::collections::BTreeSet;
use std::sync::Arc;

use indexmap::IndexMap;

use fiec_schemas::energy::Measured;
use fiec_schemas::event::{Evidence, Totals};
use fiec_schemas::{
    BatchId, BatchPlace, BoundaryIndex, Candidate, Contract, Digest, Epoch, ExecutionId,
    ExecutionState, InstanceId, NodeId, Ordinal, Sequence, StatePlace, Submission, Tenant,
    Timestamp,
};
use serde::Serialize;

use crate::changes::ChangeRow;
use crate::columns::{BOUNDARIES, DECISIONS, EVENTS, EXECUTIONS, PLACEMENTS};
use crate::copy::CopyBuffer;
use crate::parts::{DropRow, MergeRow, SplitRow};
use crate::results::ResultRow;

/// Microseconds of a day.
pub(crate) const DAY_MICROS: i64 = 86_400_000_000;

/// Everything that one transaction writes.
#[derive(Debug, Default, Clone)]
pub struct Rows {
    /// Messages that were read, duplicates included.
    pub messages: usize,
    /// Their last sequence: the new checkpoint.
    pub last_seq: Sequence,
    /// Digest of that message's header, and when the broker stored it.
    pub last: Option<(Digest, Timestamp)>,
    /// One row an execution, however many of its messages are in the batch.
    pub executions: IndexMap<ExecutionId, ExecutionRow>,
    /// One row a placement that began or changed.
    pub placements: IndexMap<(ExecutionId, Epoch), PlacementRow>,
    /// Choices of nodes.
    pub decisions: Vec<DecisionRow>,
    /// Committed boundaries.
    pub boundaries: Vec<BoundaryRow>,
    /// What else happened.
    pub events: Vec<EventRow>,
    /// Bindings after the first.
    pub rebindings: IndexMap<(ExecutionId, Epoch), RebindingRow>,
    /// Rebindings of earlier batches that have now started: their gap.
    pub gaps_closed: Vec<(ExecutionId, Epoch, i64)>,
    /// Batches that executions belong to.
    pub batches: IndexMap<BatchId, BatchRow>,
    /// Rows of messages that the ledger has lost, in whose place others stand.
    pub rewinds: Vec<Rewind>,
    /// Messages that were never seen.
    pub missing: Vec<MissingRow>,
    /// Executions that went back to an earlier boundary.
    pub steps_back: Vec<StepBackRow>,
    /// Holders that began anew, with fewer parts.
    pub drops: Vec<DropRow>,
    /// Parts that were split off.
    pub splits: Vec<SplitRow>,
    /// Parts that were taken back.
    pub merges: Vec<MergeRow>,
    /// What was changed about live executions.
    pub changes: Vec<ChangeRow>,
    /// Results that are still to be copied.
    pub results: Vec<ResultRow>,
    /// Live executions whose last boundary changed.
    pub states: Vec<(ExecutionId, StatePlace)>,
    /// Executions with committed state that are finished.
    pub finished: Vec<ExecutionId>,
    /// Days since 1970 (UTC) for which partitions must exist.
    pub days: BTreeSet<i32>,
}

/// The day of a time, since 1970, in UTC.
pub(crate) fn day_of(at: Timestamp) -> i32 {
    i32::try_from(at.micros().div_euclid(DAY_MICROS)).unwrap_or(0)
}

/// A row of `executions`.
#[derive(Debug, Clone)]
pub struct ExecutionRow {
    /// True where the table cannot hold it yet.
    pub fresh: bool,
    /// Its id.
    pub id: ExecutionId,
    /// Whose.
    pub tenant: Tenant,
    /// Its batch.
    pub batch: Option<BatchPlace>,
    /// Its submission, where it is not in the table yet.
    pub spec: Option<Arc<Submission>>,
    /// Under which contract it moves.
    pub contract: Contract,
    /// Digest of the submission.
    pub submission: Digest,
    /// When it was submitted.
    pub submitted_at: Timestamp,
    /// Name of the phase.
    pub phase: &'static str,
    /// Node of the last binding.
    pub node: Option<NodeId>,
    /// Place on it.
    pub substrate: Option<String>,
    /// Epoch of the last binding.
    pub epoch: Epoch,
    /// When it was last bound.
    pub bound_at: Option<Timestamp>,
    /// When it first started, if that is in this batch.
    pub first_started_at: Option<Timestamp>,
    /// When it last left a node on order.
    pub yielded_at: Option<Timestamp>,
    /// When its last capsule ended.
    pub computed_until: Option<Timestamp>,
    /// Its last boundary.
    pub boundary: Option<StatePlace>,
    /// True where the boundary is of this batch.
    pub state_changed: bool,
    /// Boundaries in all.
    pub boundary_of: Option<BoundaryIndex>,
    /// The program's word on its progress.
    pub note: Option<String>,
    /// Counters.
    pub totals: Totals,
    /// When it ended.
    pub finished_at: Option<Timestamp>,
    /// Capsules in all.
    pub capsules: Option<BoundaryIndex>,
    /// JSON text of the result.
    pub result: Option<String>,
    /// JSON text of the outputs that completion made visible.
    pub outputs: Option<String>,
    /// Why it failed.
    pub failure: Option<String>,
    /// End of stderr.
    pub stderr_tail: Option<String>,
    /// An order not yet carried out.
    pub requested: Option<String>,
    /// Who paused it.
    pub paused_by: Option<String>,
    /// Ordinal of the last message.
    pub ordinal: Ordinal,
    /// Its sequence.
    pub seq: Sequence,
    /// Digest of its header.
    pub digest: Option<Digest>,
    /// Its author.
    pub author: String,
    /// When the broker stored it.
    pub recorded_at: Timestamp,
}

/// What was recorded of an execution from a message on does not count: the ledger has lost it, and
/// another message has its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rewind {
    /// Which.
    pub execution: ExecutionId,
    /// Ordinal of the first message that does not count.
    pub from: Ordinal,
    /// The last epoch that counts.
    pub epoch: Epoch,
    /// When the broker stored the message that took its place.
    pub at: Timestamp,
}

/// A row of `placements`.
#[derive(Debug, Clone)]
pub struct PlacementRow {
    /// True where the table cannot hold it yet.
    pub fresh: bool,
    /// Which execution.
    pub execution: ExecutionId,
    /// Which binding.
    pub epoch: Epoch,
    /// Where.
    pub node: Option<NodeId>,
    /// Which life of the agent.
    pub instance: Option<InstanceId>,
    /// Which place.
    pub substrate: Option<String>,
    /// Why.
    pub cause: Option<&'static str>,
    /// When it was bound.
    pub bound_at: Option<Timestamp>,
    /// When `started` was written.
    pub started_at: Option<Timestamp>,
    /// When its first capsule began.
    pub computing_since: Option<Timestamp>,
    /// When its last capsule ended.
    pub computed_until: Option<Timestamp>,
    /// When it ended.
    pub ended_at: Option<Timestamp>,
    /// Why it ended.
    pub end_reason: Option<&'static str>,
    /// Microseconds between the capsules before and after.
    pub gap_us: Option<i64>,
    /// Microjoules of the host's that this batch adds, where any were measured.
    pub host_uj: Option<u64>,
    /// The same of the device's.
    pub device_uj: Option<u64>,
}

/// A row of `decisions`.
#[derive(Debug, Clone)]
pub struct DecisionRow {
    /// Which execution.
    pub execution: ExecutionId,
    /// The binding that it led to.
    pub epoch: Epoch,
    /// Its message.
    pub ordinal: Ordinal,
    /// When the broker stored it.
    pub at: Timestamp,
    /// Why a node was chosen.
    pub cause: &'static str,
    /// The node.
    pub chosen: NodeId,
    /// Everybody considered.
    pub candidates: Vec<Candidate>,
    /// And how many more.
    pub omitted: u32,
}

/// A row of `boundaries`.
#[derive(Debug, Clone)]
pub struct BoundaryRow {
    /// Which execution.
    pub execution: ExecutionId,
    /// Under which binding.
    pub epoch: Epoch,
    /// Where.
    pub node: Option<NodeId>,
    /// The boundary.
    pub event: fiec_schemas::BoundaryEvent,
    /// When the broker stored it.
    pub committed_at: Timestamp,
    /// Its message's sequence.
    pub seq: Sequence,
    /// Its message's ordinal.
    pub ordinal: Ordinal,
}

/// A row of `execution_events`.
#[derive(Debug, Clone)]
pub struct EventRow {
    /// Which execution.
    pub execution: ExecutionId,
    /// Its message.
    pub ordinal: Ordinal,
    /// When the broker stored it.
    pub at: Timestamp,
    /// What.
    pub kind: &'static str,
    /// Under which binding.
    pub epoch: Epoch,
    /// Where.
    pub node: Option<NodeId>,
    /// Who asked.
    pub who: Option<String>,
    /// In one sentence.
    pub detail: String,
}

/// A row of `rebindings`.
#[derive(Debug, Clone)]
pub struct RebindingRow {
    /// Which execution.
    pub execution: ExecutionId,
    /// The new binding.
    pub epoch: Epoch,
    /// When it was made.
    pub at: Timestamp,
    /// From where.
    pub from_node: Option<NodeId>,
    /// To where.
    pub to_node: NodeId,
    /// Why.
    pub cause: &'static str,
    /// Why, in a sentence.
    pub cause_detail: String,
    /// The pressure, if that was the cause.
    pub evidence: Option<Box<Evidence>>,
    /// From which boundary it goes on.
    pub state: Option<StatePlace>,
    /// When the node yielded it.
    pub yielded_at: Option<Timestamp>,
    /// The gap, where the first capsule is in the same batch.
    pub gap_us: Option<i64>,
}

/// A step back: the boundaries beyond it do not count any more.
#[derive(Debug, Clone)]
pub struct StepBackRow {
    /// Which execution.
    pub execution: ExecutionId,
    /// The boundary from which it goes on; 0: the beginning.
    pub to: BoundaryIndex,
    /// Ordinal of the message.
    pub ordinal: Ordinal,
    /// When the broker stored it.
    pub at: Timestamp,
}

/// A row of `batches`.
#[derive(Debug, Clone)]
pub struct BatchRow {
    /// Its id.
    pub id: BatchId,
    /// Whose.
    pub tenant: Tenant,
    /// The client's name for it.
    pub name: Option<String>,
    /// When the broker stored its first execution.
    pub first_seen_at: Timestamp,
}

/// A row of `ledger_gaps`.
#[derive(Debug, Clone)]
pub struct MissingRow {
    /// Which execution.
    pub execution: ExecutionId,
    /// First ordinal missing.
    pub first: Ordinal,
    /// Last ordinal missing.
    pub last: Ordinal,
    /// Sequence of the message that showed it.
    pub seq: Sequence,
    /// Why.
    pub reason: &'static str,
    /// When the broker stored that message.
    pub at: Timestamp,
}

/// A change of a placement that the table has: everything else stays as it is.
pub(crate) fn no_placement(execution: ExecutionId, epoch: Epoch) -> PlacementRow {
    PlacementRow {
        fresh: false,
        execution,
        epoch,
        node: None,
        instance: None,
        substrate: None,
        cause: None,
        bound_at: None,
        started_at: None,
        computing_since: None,
        computed_until: None,
        ended_at: None,
        end_reason: None,
        gap_us: None,
        host_uj: None,
        device_uj: None,
    }
}

/// A row of an execution's first message in a batch; the rest comes with its state.
pub(crate) fn blank(state: &ExecutionState, in_table: bool) -> ExecutionRow {
    ExecutionRow {
        fresh: !in_table && state.ordinal == 1,
        id: state.execution,
        tenant: state.tenant.clone(),
        batch: state.batch,
        // Every message of a live execution has it; the table needs it once.
        spec: state.spec.clone().filter(|_| !in_table),
        contract: state.contract,
        submission: state.submission,
        submitted_at: state.submitted_at,
        phase: "pending",
        node: None,
        substrate: None,
        epoch: 0,
        bound_at: None,
        first_started_at: None,
        yielded_at: None,
        computed_until: None,
        boundary: None,
        state_changed: false,
        boundary_of: None,
        note: None,
        totals: state.totals,
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
        digest: None,
        author: String::new(),
        recorded_at: state.at,
    }
}

/// JSON text; writing to memory fails for nothing that is in these rows.
pub(crate) fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_else(|_| "null".to_owned())
}

/// The name of a contract in SQL.
pub(crate) fn contract(contract: Contract) -> &'static str {
    match contract {
        Contract::Bitwise => "bitwise",
        Contract::Bounded => "bounded",
        Contract::Statistical => "statistical",
    }
}

/// The energy of hosts and of devices.
pub(crate) fn measured(totals: &Totals) -> (Option<Measured>, Option<Measured>) {
    let energy = totals.energy.unwrap_or_default();
    (energy.host, energy.device)
}

impl ExecutionRow {
    pub(crate) fn copy(&self, to: &mut CopyBuffer) {
        const N: i16 = EXECUTIONS.len() as i16;
        let spec = self.spec.as_deref();
        let state = self.boundary.as_ref();
        let (host, device) = measured(&self.totals);
        to.row(N)
            .uuid(self.id.0)
            .text(self.tenant.as_str())
            .opt(
                spec.and_then(|s| s.id.as_ref()).map(AsRef::as_ref),
                CopyBuffer::text,
            )
            .opt(self.batch.map(|b| b.id.0), CopyBuffer::uuid)
            .opt(self.batch.map(|b| line(b.line)), CopyBuffer::i32)
            .opt(spec.map(|s| s.program.as_str()), CopyBuffer::text)
            .text(contract(self.contract))
            .digest(self.submission)
            .opt(spec.map(json).as_deref(), CopyBuffer::jsonb)
            .time(self.submitted_at)
            .text(self.phase)
            .opt(self.node.as_ref().map(NodeId::as_str), CopyBuffer::text)
            .opt(self.substrate.as_deref(), CopyBuffer::text)
            .count(self.epoch)
            .opt(self.bound_at, CopyBuffer::time)
            .opt(self.first_started_at, CopyBuffer::time)
            .opt(self.yielded_at, CopyBuffer::time)
            .opt(self.computed_until, CopyBuffer::time)
            .count(state.map_or(0, |s| s.index))
            .opt(self.boundary_of, CopyBuffer::count)
            .opt(self.note.as_deref(), CopyBuffer::text)
            .opt(state.map(|s| s.digest), CopyBuffer::digest)
            .opt(state.map(|s| s.bytes), CopyBuffer::count)
            .opt(state.and_then(|s| s.seq), CopyBuffer::count)
            .opt(state.map(|s| s.ordinal), CopyBuffer::count)
            .count(self.totals.commits)
            .count(self.totals.state_bytes)
            .count(self.totals.rebindings)
            .count(self.totals.pressure)
            .count(self.totals.crashes)
            .count(self.totals.compute_us)
            .opt(self.finished_at, CopyBuffer::time)
            .opt(self.capsules, CopyBuffer::count)
            .opt(self.result.as_deref(), CopyBuffer::jsonb)
            .opt(self.outputs.as_deref(), CopyBuffer::jsonb)
            .opt(self.failure.as_deref(), CopyBuffer::text)
            .opt(self.stderr_tail.as_deref(), CopyBuffer::text)
            .opt(self.requested.as_deref(), CopyBuffer::text)
            .opt(self.paused_by.as_deref(), CopyBuffer::text)
            .count(self.ordinal)
            .count(self.seq)
            .text(&self.author)
            .time(self.recorded_at)
            .opt(host.map(|m| m.uj), CopyBuffer::count)
            .opt(host.map(|m| m.intervals), CopyBuffer::count)
            .opt(device.map(|m| m.uj), CopyBuffer::count)
            .opt(device.map(|m| m.intervals), CopyBuffer::count)
            .opt(self.digest, CopyBuffer::digest);
    }
}

/// A line's number as an integer.
pub(crate) fn line(line: u32) -> i32 {
    i32::try_from(line).unwrap_or(i32::MAX)
}

impl PlacementRow {
    pub(crate) fn copy(&self, to: &mut CopyBuffer) {
        const N: i16 = PLACEMENTS.len() as i16;
        to.row(N)
            .uuid(self.execution.0)
            .count(self.epoch)
            .opt(self.node.as_ref().map(NodeId::as_str), CopyBuffer::text)
            .opt(self.instance.map(|i| i.0), CopyBuffer::uuid)
            .opt(self.substrate.as_deref(), CopyBuffer::text)
            .opt(self.cause, CopyBuffer::text)
            .opt(self.bound_at, CopyBuffer::time)
            .opt(self.started_at, CopyBuffer::time)
            .opt(self.computing_since, CopyBuffer::time)
            .opt(self.computed_until, CopyBuffer::time)
            .opt(self.ended_at, CopyBuffer::time)
            .opt(self.end_reason, CopyBuffer::text)
            .opt(self.gap_us, CopyBuffer::i64)
            .opt(self.host_uj, CopyBuffer::count)
            .opt(self.device_uj, CopyBuffer::count);
    }
}

impl DecisionRow {
    pub(crate) fn copy(&self, to: &mut CopyBuffer) {
        const N: i16 = DECISIONS.len() as i16;
        to.row(N)
            .uuid(self.execution.0)
            .count(self.epoch)
            .count(self.ordinal)
            .time(self.at)
            .text(self.cause)
            .text(self.chosen.as_str())
            .jsonb(&json(&self.candidates))
            .i32(line(self.omitted));
    }
}

impl BoundaryRow {
    pub(crate) fn copy(&self, to: &mut CopyBuffer) {
        const N: i16 = BOUNDARIES.len() as i16;
        let event = &self.event;
        let outputs = (!event.outputs.is_empty()).then(|| json(&event.outputs));
        to.row(N)
            .uuid(self.execution.0)
            .count(event.index)
            .count(self.epoch)
            .opt(self.node.as_ref().map(NodeId::as_str), CopyBuffer::text)
            .digest(event.digest)
            .count(event.bytes)
            .time(event.computed_at)
            .time(self.committed_at)
            .count(event.compute_us)
            .count(self.seq)
            .count(self.ordinal)
            .opt(event.note.as_deref(), CopyBuffer::text)
            .opt(outputs.as_deref(), CopyBuffer::jsonb)
            .opt(event.energy.and_then(|e| e.host_uj), CopyBuffer::count)
            .opt(event.energy.and_then(|e| e.device_uj), CopyBuffer::count);
    }
}

impl EventRow {
    pub(crate) fn copy(&self, to: &mut CopyBuffer) {
        const N: i16 = EVENTS.len() as i16;
        to.row(N)
            .uuid(self.execution.0)
            .count(self.ordinal)
            .time(self.at)
            .text(self.kind)
            .count(self.epoch)
            .opt(self.node.as_ref().map(NodeId::as_str), CopyBuffer::text)
            .opt(self.who.as_deref(), CopyBuffer::text)
            .text(&self.detail);
    }
}
