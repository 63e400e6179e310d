//! Settings of prerequisites. All times are in ms.

use serde::{Deserialize, Serialize};

/// Settings of prerequisites.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PrerequisitesSettings {
    /// Time after which a dependency without a ledger counts as vanished.
    pub vanished_ms: u64,
}

impl Default for PrerequisitesSettings {
    fn default() -> Self {
        Self {
            vanished_ms: 60_000,
        }
    }
}
