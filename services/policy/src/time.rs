//! Time in the policy: always an argument, never read from a clock.

use fiec_schemas::Timestamp;

/// A moment of the observer's monotonic clock in milliseconds. The origin is arbitrary but lies
/// before everything that matters, so that earlier moments can be expressed too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Millis(pub u64);

impl Millis {
    /// Milliseconds from `earlier` to this moment; 0 if `earlier` lies in the future.
    pub fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    /// This moment plus `ms`.
    #[must_use]
    pub fn plus(self, ms: u64) -> Self {
        Self(self.0.saturating_add(ms))
    }
}

/// One moment on both clocks: durations by the monotonic one, stamps by the wall.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Now {
    /// For durations.
    pub mono: Millis,
    /// For stamps.
    pub wall: Timestamp,
}

impl Now {
    /// The monotonic moment of a wall-clock stamp. A stamp from the future counts as now.
    pub fn moment_of(self, stamp: Timestamp) -> Millis {
        let ago = self.wall.millis().saturating_sub(stamp.millis());
        Millis(self.mono.0.saturating_sub(u64::try_from(ago).unwrap_or(0)))
    }

    /// The wall-clock stamp of a monotonic moment.
    pub fn stamp_of(self, moment: Millis) -> Timestamp {
        let ago = i64::try_from(self.mono.since(moment)).unwrap_or(i64::MAX / 2_000);
        Timestamp::from_micros(self.wall.micros().saturating_sub(ago.saturating_mul(1_000)))
    }
}

/// A time for people.
pub(crate) fn seconds(ms: f64) -> String {
    if ms < 1_000.0 {
        format!("{ms:.0} ms")
    } else {
        format!("{:.1} s", ms / 1_000.0)
    }
}
