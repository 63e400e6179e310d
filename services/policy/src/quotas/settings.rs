//! Settings of quotas. All times are in ms.

use serde::{Deserialize, Serialize};

/// Settings of quotas.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct QuotasSettings {
    /// Time after which the reservation of an execution without a place is given back, so that
    /// others of its tenant have their turn.
    pub reserve_ms: u64,
    /// Time for which a tenant may exceed a lowered quota before executions are preempted.
    #[serde(rename = "quota_grace_ms")]
    pub grace_ms: u64,
}

impl Default for QuotasSettings {
    fn default() -> Self {
        Self {
            reserve_ms: 5_000,
            grace_ms: 30_000,
        }
    }
}
