//! Settings of verification. All times are in ms.

use serde::{Deserialize, Serialize};

/// Settings of verification.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct VerificationSettings {
    /// Share of the committed boundaries of built-in programs that other nodes compute again if the
    /// submission does not choose, in [0, 1]. It applies to the bitwise contract.
    #[serde(rename = "verify_share")]
    pub share: f64,
    /// Most verifications at the same time.
    #[serde(rename = "verify_at_once")]
    pub at_once: usize,
    /// Time until a failed verification is tried again. It doubles with each failure, up to 32
    /// times.
    #[serde(rename = "verify_retry_ms")]
    pub retry_ms: u64,
    /// Silence after which a verifier is given up.
    #[serde(rename = "verify_silence_ms")]
    pub silence_ms: u64,
}

impl Default for VerificationSettings {
    fn default() -> Self {
        Self {
            share: 0.0,
            at_once: 8,
            retry_ms: 500,
            silence_ms: 30_000,
        }
    }
}
