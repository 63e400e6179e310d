//! Settings of reallocation. All times are in ms.

use serde::{Deserialize, Serialize};

/// Settings of reallocation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReallocationSettings {
    /// True if running executions are moved between devices: to a smaller one that suffices if
    /// others need the large one, and to a larger idle one that they gain from.
    #[serde(rename = "reallocate")]
    pub enabled: bool,
    /// Shortest stay on a device before such a move.
    #[serde(rename = "reallocate_residency_ms")]
    pub residency_ms: u64,
    /// Time for which a larger device must be idle before an execution is moved to it.
    pub upgrade_dwell_ms: u64,
    /// Contention of its device from which an execution gains from a larger one, in [0, 1].
    pub device_bound: f64,
}

impl Default for ReallocationSettings {
    fn default() -> Self {
        Self {
            enabled: true,
            residency_ms: 30_000,
            upgrade_dwell_ms: 10_000,
            device_bound: 0.8,
        }
    }
}
