//! Settings of sharing. All times are in ms.

use serde::{Deserialize, Serialize};

/// Settings of sharing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SharingSettings {
    /// True if the end of a time slice preempts. It does so only while an execution has waited for
    /// longer than a slice.
    pub slicing: bool,
    /// Interval between two reviews of preemption.
    #[serde(rename = "preempt_review_ms")]
    pub review_ms: u64,
}

impl Default for SharingSettings {
    fn default() -> Self {
        Self {
            slicing: true,
            review_ms: 500,
        }
    }
}
