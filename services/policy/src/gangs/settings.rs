//! Settings of gangs. All times are in ms.

use serde::{Deserialize, Serialize};

/// Settings of gangs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GangsSettings {
    /// Time within which all members of a gang must be bound and started. Otherwise the gang starts
    /// again.
    #[serde(rename = "gang_ms")]
    pub start_ms: u64,
    /// Time without places after which free places are reserved for a gang.
    #[serde(rename = "gang_keep_ms")]
    pub keep_ms: u64,
}

impl Default for GangsSettings {
    fn default() -> Self {
        Self {
            start_ms: 10_000,
            keep_ms: 10_000,
        }
    }
}
