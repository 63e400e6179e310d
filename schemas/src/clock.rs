//! The offset of a machine's clock.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A machine's clock against the broker's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ClockReading {
    /// The machine's time minus the broker's, in µs. Negative if it is behind.
    pub ahead_us: i64,
    /// Bound on the error of `ahead_us`, in µs.
    pub within_us: u64,
}

impl ClockReading {
    /// Offset above which a person is warned: 100 ms, in µs.
    pub const FAR_US: u64 = 100_000;

    /// True if the clocks differ by more than the measurement's error.
    pub fn is_off(self) -> bool {
        self.ahead_us.unsigned_abs() > self.within_us
    }

    /// True if the clocks differ by more than [`Self::FAR_US`] beyond the error.
    pub fn is_far(self) -> bool {
        self.ahead_us.unsigned_abs() > self.within_us.saturating_add(Self::FAR_US)
    }

    /// The difference for people, e.g. `3600.0 s ahead of the broker's` or `152 ms behind the
    /// broker's`.
    pub fn in_words(self) -> String {
        let side = if self.ahead_us < 0 {
            "behind"
        } else {
            "ahead of"
        };
        match self.ahead_us.unsigned_abs() {
            us if us >= 10_000_000 => format!("{:.1} s {side} the broker's", us as f64 / 1e6),
            us => format!("{} ms {side} the broker's", us / 1_000),
        }
    }
}
