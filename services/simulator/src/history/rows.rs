//! The rows of a recorded history.

use std::collections::BTreeMap;

use fiec_schemas::messages::NodeEventKind;
use fiec_schemas::{
    ExecutionId, NodeId, Reading, Signal, Submission, Tenant, Threshold, Timestamp,
};

/// A recorded node.
#[derive(Debug, Clone)]
pub struct NodeRow {
    /// Its name.
    pub node: NodeId,
    /// Number of executions that it runs at once.
    pub slots: u32,
    /// Number of executions that it can park beside its slots.
    pub parks: u32,
    /// Memory limit, in bytes.
    pub memory_bytes: u64,
    /// Logical processors.
    pub cpus: u32,
    /// The operator's labels.
    pub labels: BTreeMap<String, String>,
    /// Thresholds.
    pub thresholds: BTreeMap<Signal, Threshold>,
}

/// A recorded vector.
#[derive(Debug, Clone)]
pub struct VectorRow {
    /// The node.
    pub node: NodeId,
    /// Its time.
    pub at: Timestamp,
    /// Its readings.
    pub readings: Vec<Reading>,
}

/// A recorded event of a node.
#[derive(Debug, Clone)]
pub struct EventRow {
    /// The node.
    pub node: NodeId,
    /// Its time.
    pub at: Timestamp,
    /// The kind.
    pub what: NodeEventKind,
}

/// A tenant's limits from a moment on. A missing field means no limit.
#[derive(Debug, Clone)]
pub struct QuotaRow {
    /// The tenant.
    pub tenant: Tenant,
    /// Time of the change. It lies before the span if the limits were already in force.
    pub at: Timestamp,
    /// Most executions at once.
    pub running: Option<u32>,
    /// Most bytes of memory that they request together.
    pub memory_bytes: Option<u64>,
    /// Its share relative to other tenants.
    pub weight: Option<u32>,
}

/// A recorded execution.
#[derive(Debug, Clone)]
pub struct ExecutionRow {
    /// Its id.
    pub execution: ExecutionId,
    /// Its tenant.
    pub tenant: Tenant,
    /// Time of its submission. It lies before the span if it lived at the start.
    pub submitted_at: Timestamp,
    /// Its submission, if the ledger carried it.
    pub spec: Option<Submission>,
    /// Computing time over all its placements since the start of the span, in microseconds.
    pub computed_us: u64,
    /// Capsules in that time.
    pub capsules: u64,
    /// Size of its last state, in bytes.
    pub state_bytes: u64,
    /// True if its program failed at its end. A failure because of dependencies or a deadline does
    /// not count.
    pub failed: bool,
    /// The execution at the root of its range, if it is a part.
    pub part_of: Option<ExecutionId>,
}
