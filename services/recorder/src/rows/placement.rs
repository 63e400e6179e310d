//! Where executions were: placements, the decisions that led to them, and the moves between them.

use fiec_schemas::{
    BoundaryIndex, Candidate, CauseKind, Digest, Epoch, ExecutionId, InstanceId, NodeId, Ordinal,
    Reading, Signal, Timestamp,
};
use sqlx::types::Json;

use crate::table::Merge::{By, Key};
use crate::table::table;

/// A column of `placements` as the sum of both values, null if both are. A sum beyond `bigint`
/// becomes its greatest value: PostgreSQL would refuse the whole batch.
macro_rules! sum {
    ($column:literal) => {
        concat!(
            "CASE WHEN excluded.",
            $column,
            " IS NULL THEN placements.",
            $column,
            " ELSE least(9223372036854775807, coalesce(placements.",
            $column,
            ", 0)::numeric + excluded.",
            $column,
            ")::bigint END"
        )
    };
}

/// A capsule that ended before the placement's first one belongs to the placement before.
const COMPUTED_UNTIL: &str = "coalesce(placements.computed_until, \
    CASE WHEN excluded.computed_until >= \
    coalesce(excluded.computing_since, placements.computing_since) \
    THEN excluded.computed_until END)";

/// A column of the end of a placement. After a gap the end is only known to be there (`unseen`). The
/// missing message says it exactly, if it is read late.
macro_rules! end {
    ($column:literal) => {
        concat!(
            "CASE WHEN placements.end_reason = 'unseen' THEN coalesce(excluded.",
            $column,
            ", placements.",
            $column,
            ") ELSE coalesce(placements.",
            $column,
            ", excluded.",
            $column,
            ") END"
        )
    };
}

table! {
    /// A row of `placements`.
    struct PlacementRow in "placements" {
        /// Which execution.
        execution: ExecutionId = Key,
        /// Which binding.
        epoch: Epoch = Key,
        /// Where.
        node: Option<NodeId>,
        /// Which life of the agent.
        instance: Option<InstanceId>,
        /// Which place on the node.
        substrate: Option<String>,
        /// Why.
        cause: Option<CauseKind>,
        /// When it was bound.
        bound_at: Option<Timestamp>,
        /// When `started` was written.
        started_at: Option<Timestamp>,
        /// When its first capsule began.
        computing_since: Option<Timestamp>,
        /// When its last capsule ended.
        computed_until: Option<Timestamp> = By(COMPUTED_UNTIL),
        /// When it ended.
        ended_at: Option<Timestamp> = By(end!("ended_at")),
        /// Why it ended.
        end_reason: Option<&'static str> = By(end!("end_reason")),
        /// Microseconds between the capsules before and after.
        gap_us: Option<i64>,
        /// Microjoules of the host that this batch adds, if any were measured. A batch is written
        /// once.
        host_uj: Option<u64> = By(sum!("host_uj")),
        /// The same of the device.
        device_uj: Option<u64> = By(sum!("device_uj")),
        /// Ordinal of the message that says that it started.
        started_in: Option<Ordinal>,
        /// Ordinal of the message with which it ended.
        ended_in: Option<Ordinal> = By(end!("ended_in")),
    }
    beside {
        /// True if the table cannot hold it yet.
        is_new: bool,
    }
}

impl PlacementRow {
    /// A change of a placement that the table has; it changes nothing yet.
    pub(crate) fn new(execution: ExecutionId, epoch: Epoch) -> Self {
        Self {
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
            started_in: None,
            ended_in: None,
            is_new: false,
        }
    }

    /// Withdraws what messages from this ordinal on said of it, and what is not known to be older.
    pub(crate) fn withdraw(&mut self, from: Ordinal) {
        if self.ended_in.is_none_or(|ended_in| ended_in >= from) {
            (self.ended_at, self.end_reason, self.ended_in) = (None, None, None);
        }
        if self.started_in.is_some_and(|started_in| started_in >= from) {
            (self.started_at, self.started_in) = (None, None);
            (self.computing_since, self.gap_us) = (None, None);
        }
    }
}

table! {
    /// A row of `decisions`.
    struct DecisionRow in "decisions" {
        /// Which execution.
        execution: ExecutionId,
        /// The binding that it led to.
        epoch: Epoch,
        /// Its message.
        ordinal: Ordinal,
        /// When the broker stored it.
        at: Timestamp,
        /// Why a node was chosen.
        cause: CauseKind,
        /// The node.
        chosen: NodeId,
        /// All candidates that are named.
        candidates: Json<Vec<Candidate>>,
        /// How many more there were.
        omitted: u32,
    }
}

table! {
    /// A row of `rebindings`.
    struct RebindingRow in "rebindings" {
        /// Which execution.
        execution: ExecutionId,
        /// The new binding.
        epoch: Epoch,
        /// When it was made.
        at: Timestamp,
        /// From where.
        from_node: Option<NodeId>,
        /// To where.
        to_node: NodeId,
        /// Why.
        cause: CauseKind,
        /// Why, in a sentence.
        cause_detail: String,
        /// Who asked for it, if somebody did.
        who: Option<String>,
        /// The signal that pressed, if pressure was the cause.
        signal: Option<Signal>,
        /// Its device.
        device: Option<String>,
        /// Its value.
        value: Option<f64>,
        /// The threshold's upper limit.
        high: Option<f64>,
        /// The threshold's lower limit.
        low: Option<f64>,
        /// How long the signal must press, in ms.
        dwell_ms: Option<u32>,
        /// Since when it pressed.
        since: Option<Timestamp>,
        /// The readings at the decision.
        vector: Option<Json<Vec<Reading>>>,
        /// The boundary from which it goes on.
        state_index: Option<BoundaryIndex>,
        /// Digest of its state.
        state_digest: Option<Digest>,
        /// Bytes of its state.
        state_bytes: Option<u64>,
        /// When the node yielded it.
        yielded_at: Option<Timestamp>,
        /// The gap in µs, where the first capsule is in the same batch.
        gap_us: Option<i64>,
    }
}
