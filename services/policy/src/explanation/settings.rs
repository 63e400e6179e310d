//! Settings of explanation. All times are in ms.

use serde::{Deserialize, Serialize};

/// Settings of explanation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ExplanationSettings {
    /// Interval of the reports on waiting executions; 0 turns them off.
    #[serde(rename = "tell_ms")]
    pub report_ms: u64,
}

impl Default for ExplanationSettings {
    fn default() -> Self {
        Self { report_ms: 500 }
    }
}
