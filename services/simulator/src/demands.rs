//! What a scenario says about executions that wait for others, tenants with limits, and nodes that
//! are to be empty by a time.

use fiec_schemas::scheduling::AfterOutcome;
use fiec_schemas::{NodeId, Tenant};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What the executions of a workload wait for: those of another one, or earlier ones of their own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct After {
    /// The workload's name. Of another one each waits for the execution of its own number; of its
    /// own one for the execution before it. What has not come by then is not waited for.
    pub workload: String,
    /// For every execution of it that has come, and not for one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub all: bool,
    /// How it must have ended.
    #[serde(default, skip_serializing_if = "is_ok")]
    pub on: AfterOutcome,
}

fn is_ok(on: &AfterOutcome) -> bool {
    *on == AfterOutcome::Ok
}

/// What a tenant may use at once, from a moment on; what is absent is without limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct QuotaChange {
    /// Whose.
    pub tenant: Tenant,
    /// From when on.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub at_ms: u64,
    /// Most executions that are bound or running at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running: Option<u32>,
    /// Most bytes of memory that they ask for together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Its share relative to other tenants; 1 where nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// An operator drains a node, and takes it back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Drain {
    /// Which.
    pub node: NodeId,
    /// When.
    pub at_ms: u64,
    /// For how long; for ever where nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub for_ms: Option<u64>,
    /// It is to be empty so long after that; whenever it is where nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within_ms: Option<u64>,
}

/// A node says that it will be gone, and is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Revocation {
    /// Which.
    pub node: NodeId,
    /// When it says so.
    pub at_ms: u64,
    /// It dies so long after that.
    pub notice_ms: u64,
    /// After so long it returns under a new life; never where nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub for_ms: Option<u64>,
}
