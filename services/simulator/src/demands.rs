//! The parts of a scenario that concern several executions: dependencies, tenants' limits, nodes
//! with a deadline, nodes that cannot start a program, and programs that end their workers.

use fiec_schemas::dependency::AfterOutcome;
use fiec_schemas::{NodeId, Tenant};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A dependency of a workload's executions: on another workload, or on earlier ones of their own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct After {
    /// The workload's name. For another workload, each execution waits for the execution with its
    /// own number. For its own workload, it waits for the previous execution. Executions that have
    /// not arrived by then are ignored.
    pub workload: String,
    /// Wait for all of its executions that have arrived, not for one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub all: bool,
    /// The required outcome.
    #[serde(default, skip_serializing_if = "is_ok")]
    pub on: AfterOutcome,
}

fn is_ok(on: &AfterOutcome) -> bool {
    *on == AfterOutcome::Ok
}

/// A tenant's limits from a moment on. A missing field means no limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct QuotaChange {
    /// The tenant.
    pub tenant: Tenant,
    /// Start of the limits.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub at_ms: u64,
    /// Most executions that are bound or running at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running: Option<u32>,
    /// Most bytes of memory that they request together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Its share relative to other tenants, 1 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// An operator drains a node, and ends the drain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Drain {
    /// The node.
    pub node: NodeId,
    /// Start of the drain.
    pub at_ms: u64,
    /// Length of the drain; forever by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub for_ms: Option<u64>,
    /// Deadline after the start of the drain; none by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within_ms: Option<u64>,
}

/// A node announces that it will disappear, and does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Revocation {
    /// The node.
    pub node: NodeId,
    /// Time of the announcement.
    pub at_ms: u64,
    /// Time from the announcement to its end.
    pub notice_ms: u64,
    /// Time from its end until it returns as a new instance; never by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub for_ms: Option<u64>,
}

/// A node cannot start a program. It gives back each execution of the program that it gets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CannotStart {
    /// The node.
    pub node: NodeId,
    /// The program; every program by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    /// Start of the fault.
    pub at_ms: u64,
    /// Length of the fault; forever by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub for_ms: Option<u64>,
    /// True if the node notices the fault only after `started`, as for a command that `env` starts.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub after_start: bool,
}

impl CannotStart {
    /// End of the fault.
    pub fn end_ms(&self) -> u64 {
        let length = self.for_ms.unwrap_or(u64::MAX);
        self.at_ms.saturating_add(length)
    }

    /// True if the fault concerns this program.
    pub fn concerns(&self, program: &str) -> bool {
        self.program.as_deref().is_none_or(|own| own == program)
    }
}

/// A program ends the worker that computes it, with all its executions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Kills {
    /// The program.
    pub program: String,
    /// The worker dies when an execution of the program reaches this boundary, before the commit.
    /// An execution with no more boundaries than this completes.
    pub boundary: u64,
    /// Time until the worker returns, as a new instance.
    pub for_ms: u64,
}
