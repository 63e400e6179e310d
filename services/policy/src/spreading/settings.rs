//! Settings of spreading. All times are in ms.

use serde::{Deserialize, Serialize};

/// Settings of spreading.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SpreadingSettings {
    /// Interval between two reviews of spread ranges.
    #[serde(rename = "spread_look_ms")]
    pub look_ms: u64,
    /// Time for which a place must be free before a range is split. Also the time after which a
    /// part without a place is given back if its holder waits for it.
    #[serde(rename = "spread_dwell_ms")]
    pub dwell_ms: u64,
    /// Least remaining time of an execution that is split.
    #[serde(rename = "spread_least_ms")]
    pub least_ms: u64,
    /// The same as a multiple of the cost of a move.
    #[serde(rename = "spread_moves")]
    pub moves: u64,
    /// Time, plus four capsules, within which a split must follow its order.
    #[serde(rename = "spread_answer_ms")]
    pub answer_ms: u64,
}

impl Default for SpreadingSettings {
    fn default() -> Self {
        Self {
            look_ms: 250,
            dwell_ms: 1_000,
            least_ms: 2_000,
            moves: 2,
            answer_ms: 10_000,
        }
    }
}
