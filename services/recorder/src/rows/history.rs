//! The history of executions, message by message, and its gaps.

use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::{
    BatchId, BoundaryIndex, CauseKind, Digest, Epoch, EventKind, ExecutionId, FaultKind, NodeId,
    Ordinal, Output, Owner, Sequence, Tenant, Timestamp,
};
use sqlx::types::Json;

use crate::table::table;

table! {
    /// A row of `batches`.
    struct BatchRow in "batches" {
        /// Its id.
        id: BatchId,
        /// Whose.
        tenant: Tenant,
        /// The client's name for it.
        name: Option<String>,
        /// When the broker stored its first execution.
        first_seen_at: Timestamp,
    }
}

table! {
    /// A row of `boundaries`.
    struct BoundaryRow in "boundaries" {
        /// Which execution.
        execution: ExecutionId,
        /// Capsules completed before it.
        index: BoundaryIndex,
        /// Under which binding.
        epoch: Epoch,
        /// Where.
        node: Option<NodeId>,
        /// Digest of the state.
        digest: Digest,
        /// Bytes of the state.
        bytes: u64,
        /// When the capsule before it ended.
        computed_at: Timestamp,
        /// When the broker stored it.
        committed_at: Timestamp,
        /// Microseconds spent computing since the commit before.
        compute_us: u64,
        /// Its message's sequence.
        seq: Sequence,
        /// Its message's ordinal.
        ordinal: Ordinal,
        /// The program's word on its progress.
        note: Option<String>,
        /// Outputs that became visible with it.
        outputs: Option<Json<Vec<Output>>>,
        /// Microjoules of the host since the commit before.
        host_uj: Option<u64>,
        /// The same of the device.
        device_uj: Option<u64>,
    }
    later { withdrawn_at: Option<Timestamp>, }
}

table! {
    /// A row of `execution_events`.
    struct EventRow in "execution_events" {
        /// Which execution.
        execution: ExecutionId,
        /// Its message.
        ordinal: Ordinal,
        /// When the broker stored it.
        at: Timestamp,
        /// What happened.
        kind: EventKind,
        /// Why it yielded, was parked or stepped back.
        cause: Option<CauseKind>,
        /// Under which binding.
        epoch: Epoch,
        /// Where.
        node: Option<NodeId>,
        /// Who asked.
        who: Option<String>,
        /// In one sentence.
        detail: String,
        /// What stopped or ended it.
        fault: Option<FaultKind>,
        /// Whose fault that was.
        fault_owner: Option<Owner>,
    }
}

table! {
    /// A row of `execution_changes`: one field or more that somebody changed about a live execution.
    /// The event's own row has the same as a sentence.
    struct ChangeRow in "execution_changes" {
        /// Which execution.
        execution: ExecutionId,
        /// Its message.
        ordinal: Ordinal,
        /// Which of the changes of that message, from 0.
        nth: u32,
        /// When the broker stored it.
        at: Timestamp,
        /// Who asked.
        who: String,
        /// The changed fields.
        change: Json<Adjustment>,
    }
}

table! {
    /// A row of `ledger_gaps`.
    struct MissingRow in "ledger_gaps" {
        /// Which execution.
        execution: ExecutionId,
        /// First ordinal missing.
        first_missing: Ordinal,
        /// Last ordinal missing.
        last_missing: Ordinal,
        /// Sequence of the message that showed it.
        seq: Sequence,
        /// Why.
        reason: &'static str,
        /// When the broker stored that message.
        at: Timestamp,
    }
}
