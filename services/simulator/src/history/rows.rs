//! What was recorded, row by row.

use std::collections::BTreeMap;

use fiec_schemas::{
    ExecutionId, NodeId, Reading, Signal, Submission, Tenant, Threshold, Timestamp,
};

/// A node as it was recorded.
#[derive(Debug, Clone)]
pub struct NodeRow {
    /// Its name.
    pub node: NodeId,
    /// Executions that it runs at once.
    pub slots: u32,
    /// Executions that may wait on it with their processes, beside its slots.
    pub parks: u32,
    /// Memory limit in bytes.
    pub memory_bytes: u64,
    /// Logical processors.
    pub cpus: u32,
    /// The operator's labels.
    pub labels: BTreeMap<String, String>,
    /// Thresholds.
    pub thresholds: BTreeMap<Signal, Threshold>,
}

/// What a node told.
#[derive(Debug, Clone)]
pub struct VectorRow {
    /// Which node.
    pub node: NodeId,
    /// When.
    pub at: Timestamp,
    /// Its readings.
    pub readings: Vec<Reading>,
}

/// What happened to a node.
#[derive(Debug, Clone)]
pub struct EventRow {
    /// Which node.
    pub node: NodeId,
    /// When.
    pub at: Timestamp,
    /// `joined`, `left`, `lost`, `returned`, `cordoned`, `draining`, `uncordoned`.
    pub what: String,
}

/// What a tenant might use at once from a moment on; what is absent was without limit.
#[derive(Debug, Clone)]
pub struct QuotaRow {
    /// Whose.
    pub tenant: Tenant,
    /// When it was set; before the span where that was in force when it began.
    pub at: Timestamp,
    /// Executions at once.
    pub running: Option<u32>,
    /// Bytes of memory that they asked for together.
    pub memory_bytes: Option<u64>,
    /// Its share relative to other tenants.
    pub weight: Option<u32>,
}

/// An execution as it was recorded.
#[derive(Debug, Clone)]
pub struct ExecutionRow {
    /// Which it is.
    pub execution: ExecutionId,
    /// Whose.
    pub tenant: Tenant,
    /// When it was submitted; before the span where it lived when that began.
    pub submitted_at: Timestamp,
    /// Its submission, where the ledger carried it.
    pub spec: Option<Submission>,
    /// Computing time in microseconds, over all its placements, from the span's beginning on.
    pub computed_us: u64,
    /// Capsules in that time.
    pub capsules: u64,
    /// Bytes of its last state.
    pub state_bytes: u64,
    /// Its program failed at its end. What failed for want of others, or of time, did not.
    pub failed: bool,
    /// The execution of whose range it is a part, through however many holders.
    pub part_of: Option<ExecutionId>,
}
