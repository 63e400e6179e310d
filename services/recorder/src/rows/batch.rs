//! Everything that one transaction writes.

use std::collections::BTreeSet;

use fiec_schemas::{
    BatchId, BoundaryIndex, Digest, Epoch, ExecutionId, Ordinal, Sequence, StatePlace, Timestamp,
};
use indexmap::IndexMap;

use super::{
    BatchRow, BoundaryRow, ChangeRow, DecisionRow, EventRow, ExecutionRow, MissingRow,
    PlacementRow, RebindingRow,
};
use crate::parts::{DroppedParts, MergedPart, SplitRow};
use crate::results::ResultRow;
use crate::series::{PointKey, PointRow};
use crate::unread::UnreadRow;

/// The rows of a batch, and the changes of rows that are there.
#[derive(Debug, Default, Clone)]
pub struct Rows {
    /// Messages that were read, duplicates included.
    pub messages: usize,
    /// Their last sequence: the new checkpoint.
    pub last_seq: Sequence,
    /// Digest of that message's header, and when the broker stored it.
    pub last: Option<(Digest, Timestamp)>,
    /// One row an execution, however many of its messages are in the batch.
    pub executions: Vec<ExecutionRow>,
    /// One row a placement that began or changed.
    pub placements: IndexMap<(ExecutionId, Epoch), PlacementRow>,
    /// Choices of nodes.
    pub decisions: Vec<DecisionRow>,
    /// Committed boundaries.
    pub boundaries: Vec<BoundaryRow>,
    /// Points of curves.
    pub points: IndexMap<PointKey, PointRow>,
    /// Executions that compute once more what comes after a boundary: their points beyond it go.
    pub repeated: Vec<(ExecutionId, BoundaryIndex)>,
    /// Other events.
    pub events: Vec<EventRow>,
    /// Bindings after the first.
    pub rebindings: IndexMap<(ExecutionId, Epoch), RebindingRow>,
    /// Gaps in µs of rebindings of earlier batches that have started now.
    pub gaps_closed: IndexMap<(ExecutionId, Epoch), i64>,
    /// Batches that executions belong to.
    pub batches: IndexMap<BatchId, BatchRow>,
    /// Executions of which the ledger has lost messages, and others stand in their place.
    pub rewinds: Vec<Rewind>,
    /// Messages that were never seen.
    pub missing: Vec<MissingRow>,
    /// Messages that this version cannot read.
    pub unread: Vec<UnreadRow>,
    /// Executions that went back to an earlier boundary.
    pub steps_back: Vec<StepBack>,
    /// Holders that began anew, with fewer parts.
    pub drops: Vec<DroppedParts>,
    /// Parts that were split off.
    pub splits: Vec<SplitRow>,
    /// Parts that were taken back.
    pub merges: Vec<MergedPart>,
    /// Changes of live executions.
    pub changes: Vec<ChangeRow>,
    /// Results that are still to be copied.
    pub results: Vec<ResultRow>,
    /// Live executions whose last boundary changed.
    pub states: Vec<(ExecutionId, StatePlace)>,
    /// Executions that start again after they had failed, were held or were cancelled.
    pub retried: Vec<ExecutionId>,
    /// Executions with committed state that are finished.
    pub finished: Vec<ExecutionId>,
    /// Days since 1970 (UTC) for which partitions must exist.
    pub days: BTreeSet<i32>,
}

impl Rows {
    /// The execution computes once more what comes after this boundary.
    pub(crate) fn repeat(&mut self, execution: ExecutionId, after: BoundaryIndex) {
        // Points of this very batch have not been written yet.
        self.points
            .retain(|(of, _, boundary), _| *of != execution || *boundary <= after);
        self.repeated.push((execution, after));
    }
}

/// The rows of an execution from a message on do not count: the ledger has lost that message, and
/// another one has its place or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rewind {
    /// Which execution.
    pub execution: ExecutionId,
    /// Ordinal of the first message that does not count.
    pub from: Ordinal,
    /// The last epoch that counts.
    pub epoch: Epoch,
    /// When the broker stored the message that took its place; without one, when that was found.
    pub at: Timestamp,
}

/// A step back: the boundaries beyond it do not count any more.
#[derive(Debug, Clone)]
pub struct StepBack {
    /// Which execution.
    pub execution: ExecutionId,
    /// The boundary from which it goes on; 0: the beginning.
    pub to: BoundaryIndex,
    /// Ordinal of the message.
    pub ordinal: Ordinal,
    /// When the broker stored it.
    pub at: Timestamp,
}
