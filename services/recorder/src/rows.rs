//! The rows that a batch of ledger messages becomes, and their form on the wire.

use std::collections::BTreeSet;
use std::sync::Arc;

use fiec_schemas::{
    BatchId, BatchPlace, BoundaryIndex, Candidate, Contract, Digest, Epoch, ExecutionId,
    InstanceId, NodeId, Ordinal, Sequence, StatePlace, Submission, Tenant, Timestamp,
};
use fiec_schemas::event::{Evidence, Totals};
use serde::Serialize;

use crate::copy::CopyBuffer;

/// Microseconds of a day.
pub(crate) const DAY_MICROS: i64 = 86_400_000_000;

/// Everything that one transaction writes.
#[derive(Debug, Default, Clone)]
pub struct Rows {
    /// Messages that were read, duplicates included.
    pub messages: usize,
    /// Their last sequence: the new checkpoint.
    pub last_seq: Sequence,
    /// One row an execution, however many of its messages are in the batch.
    pub executions: Vec<ExecutionRow>,
    /// One row a placement that began or changed.
    pub placements: Vec<PlacementRow>,
    /// Choices of nodes.
    pub decisions: Vec<DecisionRow>,
    /// Committed boundaries.
    pub boundaries: Vec<BoundaryRow>,
    /// What else happened.
    pub events: Vec<EventRow>,
    /// Bindings after the first.
    pub rebindings: Vec<RebindingRow>,
    /// Rebindings of earlier batches that have now started: their gap.
    pub gaps_closed: Vec<(ExecutionId, Epoch, i64)>,
    /// Batches that executions belong to.
    pub batches: Vec<BatchRow>,
    /// Messages that were never seen.
    pub missing: Vec<MissingRow>,
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
    /// Its author.
    pub author: String,
    /// When the broker stored it.
    pub recorded_at: Timestamp,
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

/// What an upsert does with a column of a row that is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Merge {
    /// Keeps what is there, if it is not null.
    Keep,
    /// Takes what comes, if it is not null.
    Fill,
    /// Takes what comes.
    Take,
    /// An expression over the table's name and `excluded`.
    By(&'static str),
}
use Merge::{By, Fill, Keep, Take};

/// A table's columns in the order in which they are sent: name, type, merge.
pub(crate) type Columns = [(&'static str, &'static str, Merge)];

/// `executions`
pub(crate) const EXECUTIONS: &Columns = &[
    ("id", "uuid", Keep),
    ("tenant", "text", Keep),
    ("client_id", "text", Keep),
    ("batch_id", "uuid", Keep),
    ("batch_line", "integer", Keep),
    ("program", "text", Keep),
    ("contract", "text", Keep),
    ("submission", "bytea", Keep),
    ("spec", "jsonb", Keep),
    ("submitted_at", "timestamptz", Keep),
    ("phase", "text", Take),
    ("node", "text", Fill),
    ("substrate", "text", Fill),
    ("epoch", "bigint", Take),
    ("bound_at", "timestamptz", Fill),
    ("first_started_at", "timestamptz", Keep),
    ("yielded_at", "timestamptz", Fill),
    ("computed_until", "timestamptz", Fill),
    ("boundary_index", "bigint", Take),
    ("boundary_of", "bigint", Fill),
    ("progress_note", "text", Fill),
    ("state_digest", "bytea", Take),
    ("last_state_bytes", "bigint", Take),
    ("state_seq", "bigint", Take),
    ("state_ordinal", "bigint", Take),
    ("commits", "bigint", Take),
    ("state_bytes", "bigint", Take),
    ("rebindings", "bigint", Take),
    ("pressure_rebindings", "bigint", Take),
    ("crashes", "bigint", Take),
    ("compute_us", "bigint", Take),
    ("finished_at", "timestamptz", Take),
    ("capsules", "bigint", Fill),
    ("result", "jsonb", Fill),
    ("outputs", "jsonb", Fill),
    ("failure", "text", Fill),
    ("stderr_tail", "text", Fill),
    ("requested", "text", Take),
    ("paused_by", "text", Take),
    ("ordinal", "bigint", Take),
    ("seq", "bigint", Take),
    ("author", "text", Take),
    ("recorded_at", "timestamptz", Take),
];

/// `placements`
pub(crate) const PLACEMENTS: &Columns = &[
    ("execution", "uuid", Keep),
    ("epoch", "bigint", Keep),
    ("node", "text", Keep),
    ("instance", "uuid", Keep),
    ("substrate", "text", Keep),
    ("cause", "text", Keep),
    ("bound_at", "timestamptz", Keep),
    ("started_at", "timestamptz", Keep),
    ("computing_since", "timestamptz", Keep),
    // What was computed before its first capsule belongs to the placement before.
    (
        "computed_until",
        "timestamptz",
        By("coalesce(placements.computed_until, CASE WHEN excluded.computed_until >= \
            coalesce(excluded.computing_since, placements.computing_since) \
            THEN excluded.computed_until END)"),
    ),
    ("ended_at", "timestamptz", Keep),
    ("end_reason", "text", Keep),
    ("gap_us", "bigint", Keep),
];

/// `decisions`
pub(crate) const DECISIONS: &Columns = &[
    ("execution", "uuid", Keep),
    ("epoch", "bigint", Keep),
    ("ordinal", "bigint", Keep),
    ("at", "timestamptz", Keep),
    ("cause", "text", Keep),
    ("chosen", "text", Keep),
    ("candidates", "jsonb", Keep),
    ("omitted", "integer", Keep),
];

/// `boundaries`
pub(crate) const BOUNDARIES: &Columns = &[
    ("execution", "uuid", Keep),
    ("index", "bigint", Keep),
    ("epoch", "bigint", Keep),
    ("node", "text", Keep),
    ("digest", "bytea", Keep),
    ("bytes", "bigint", Keep),
    ("computed_at", "timestamptz", Keep),
    ("committed_at", "timestamptz", Keep),
    ("compute_us", "bigint", Keep),
    ("seq", "bigint", Keep),
    ("ordinal", "bigint", Keep),
    ("note", "text", Keep),
    ("outputs", "jsonb", Keep),
];

/// `execution_events`
pub(crate) const EVENTS: &Columns = &[
    ("execution", "uuid", Keep),
    ("ordinal", "bigint", Keep),
    ("at", "timestamptz", Keep),
    ("kind", "text", Keep),
    ("epoch", "bigint", Keep),
    ("node", "text", Keep),
    ("who", "text", Keep),
    ("detail", "text", Keep),
];

/// The names, as a COPY or an INSERT lists them.
pub(crate) fn names(columns: &Columns) -> String {
    columns.iter().map(|(name, _, _)| *name).collect::<Vec<_>>().join(", ")
}

/// `INSERT … SELECT FROM UNNEST … ON CONFLICT (key) DO UPDATE …`, one array a column; JSON comes
/// as text. `guard` is the condition under which a row that is there is changed.
pub(crate) fn upsert(table: &str, key: &[&str], columns: &Columns, guard: &str) -> String {
    let list = names(columns);
    let values: Vec<String> = columns
        .iter()
        .map(|(name, ty, _)| if *ty == "jsonb" { format!("{name}::jsonb") } else { (*name).into() })
        .collect();
    let arrays: Vec<String> = columns
        .iter()
        .enumerate()
        .map(|(i, (_, ty, _))| format!("${}::{}[]", i + 1, if *ty == "jsonb" { "text" } else { ty }))
        .collect();
    let sets: Vec<String> = columns
        .iter()
        .filter(|(name, _, _)| !key.contains(name))
        .map(|(name, _, merge)| match merge {
            Keep => format!("{name} = coalesce({table}.{name}, excluded.{name})"),
            Fill => format!("{name} = coalesce(excluded.{name}, {table}.{name})"),
            Take => format!("{name} = excluded.{name}"),
            By(expression) => format!("{name} = {expression}"),
        })
        .collect();
    format!(
        "INSERT INTO {table} ({list}) SELECT {} FROM UNNEST({}) AS u({list}) \
         ON CONFLICT ({}) DO UPDATE SET {}{guard}",
        values.join(", "),
        arrays.join(", "),
        key.join(", "),
        sets.join(", "),
    )
}

impl ExecutionRow {
    pub(crate) fn copy(&self, to: &mut CopyBuffer) {
        const N: i16 = EXECUTIONS.len() as i16;
        let spec = self.spec.as_deref();
        let state = self.boundary.as_ref();
        to.row(N)
            .uuid(self.id.0)
            .text(self.tenant.as_str())
            .opt(spec.and_then(|s| s.id.as_ref()).map(AsRef::as_ref), CopyBuffer::text)
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
            .time(self.recorded_at);
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
            .opt(self.gap_us, CopyBuffer::i64);
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
            .opt(outputs.as_deref(), CopyBuffer::jsonb);
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
