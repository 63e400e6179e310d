//! The schedule of commits. Pure: the caller passes the time.

use std::time::Duration;

use fiec_schemas::CommitPolicy;

/// Commits that may be unacknowledged at once: one on its way to the ledger, the others ready to
/// follow it. With a small σ more than one is ready. A computation of short capsules then hears of
/// two commits at a time and wakes half as often.
pub const WINDOW: usize = 4;
/// The same for a σ of more than [`SMALL`] bytes: each ready commit is a copy in memory.
const WINDOW_LARGE: usize = 2;
const SMALL: usize = 256 * 1024;
const AUTO: Duration = Duration::from_secs(1);
const AUTO_LONGEST: Duration = Duration::from_secs(60);
/// Under `auto`, commits may take one part in this many of the time.
const AUTO_SHARE: u32 = 100;
/// Assumed cost of a commit before the first acknowledgement, in nanoseconds per byte. Measured
/// with 24 MB over a broker on the same machine.
const COST_OF_A_BYTE: u64 = 4;

/// The decision at a boundary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// Continue without a commit.
    No,
    /// Commit it.
    Commit,
    /// Commit it once an acknowledgement makes room.
    CommitWhenAcknowledged,
}

/// The schedule of one execution.
#[derive(Debug, Clone)]
pub struct Schedule {
    policy: CommitPolicy,
    stretch: Duration,
    cost: Duration,
    last: Duration,
    since: u64,
    unacknowledged: usize,
    window: usize,
}

impl Schedule {
    /// A schedule that starts at `now` with no unacknowledged commit.
    pub fn new(policy: CommitPolicy, stretch: Duration, now: Duration) -> Self {
        Self {
            policy,
            stretch,
            cost: Duration::ZERO,
            last: now,
            since: 0,
            unacknowledged: 0,
            window: WINDOW_LARGE,
        }
    }

    /// Sets the expected bytes of σ. They determine the cost of a commit until the first one is
    /// acknowledged.
    pub fn expecting(mut self, bytes: usize) -> Self {
        let nanos = u64::try_from(bytes).unwrap_or(u64::MAX);
        self.cost = Duration::from_nanos(nanos.saturating_mul(COST_OF_A_BYTE));
        self
    }

    /// Sets the least interval of routine commits by time.
    pub fn stretch(&mut self, interval: Duration) {
        self.stretch = interval;
    }

    fn interval(&self) -> Duration {
        let own = match self.policy {
            CommitPolicy::Every(_) => return Duration::ZERO,
            CommitPolicy::EveryMs(ms) => Duration::from_millis(u64::from(ms.get())),
            CommitPolicy::Auto => (self.cost * AUTO_SHARE).clamp(AUTO, AUTO_LONGEST),
        };
        own.max(self.stretch)
    }

    /// Decides at a boundary that was reached at `now`.
    #[inline]
    pub fn boundary(&mut self, now: Duration) -> Due {
        self.since += 1;
        match self.policy {
            CommitPolicy::Every(k) if self.since < k.get() => Due::No,
            CommitPolicy::Every(_) if self.is_full() => Due::CommitWhenAcknowledged,
            CommitPolicy::Every(_) => Due::Commit,
            _ if now.saturating_sub(self.last) < self.interval() || self.unacknowledged > 0 => {
                Due::No
            }
            _ => Due::Commit,
        }
    }

    /// Notes a commit that was sent at `now`. Encoding its σ of `bytes` bytes took `encoding`.
    pub fn sent(&mut self, now: Duration, encoding: Duration, bytes: usize) {
        self.window = if bytes <= SMALL { WINDOW } else { WINDOW_LARGE };
        self.last = now;
        self.since = 0;
        self.unacknowledged += 1;
        self.cost = encoding;
    }

    /// Notes an acknowledgement that came at least `latency` after its commit was sent.
    pub fn acknowledged(&mut self, latency: Duration) {
        self.unacknowledged = self.unacknowledged.saturating_sub(1);
        self.cost += latency;
    }

    /// Whether the window of unacknowledged commits is full.
    pub fn is_full(&self) -> bool {
        self.unacknowledged >= self.window
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::{NonZeroU32, NonZeroU64};

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn every_kth_boundary_is_kept_by_waiting_never_by_skipping() {
        for (bytes, window) in [(SMALL, WINDOW), (SMALL + 1, WINDOW_LARGE)] {
            let every_second = CommitPolicy::Every(NonZeroU64::new(2).unwrap());
            let mut s = Schedule::new(every_second, MS * 60_000, MS);
            for _ in 0..window {
                assert_eq!(s.boundary(MS), Due::No);
                assert_eq!(s.boundary(MS), Due::Commit);
                s.sent(MS, MS, bytes);
            }
            s.boundary(MS);
            assert_eq!(s.boundary(MS), Due::CommitWhenAcknowledged);
            s.acknowledged(MS);
            assert!(!s.is_full());
        }
    }

    #[test]
    fn a_commit_by_time_is_skipped_while_one_is_unacknowledged() {
        let policy = CommitPolicy::EveryMs(NonZeroU32::new(10).unwrap());
        let mut s = Schedule::new(policy, Duration::ZERO, Duration::ZERO);
        assert_eq!(s.boundary(MS * 9), Due::No);
        assert_eq!(s.boundary(MS * 10), Due::Commit);
        s.sent(MS * 10, MS, 1);
        assert_eq!(s.boundary(MS * 30), Due::No);
        s.acknowledged(MS);
        assert_eq!(s.boundary(MS * 31), Due::Commit);
        s.stretch(MS * 100);
        assert_eq!(s.boundary(MS * 31), Due::No);
    }

    #[test]
    fn auto_keeps_commits_under_one_per_cent() {
        let mut s = Schedule::new(CommitPolicy::Auto, Duration::ZERO, Duration::ZERO);
        assert_eq!(s.boundary(MS * 999), Due::No);
        assert_eq!(s.boundary(MS * 1000), Due::Commit);
        s.sent(MS * 1000, MS * 10, 1);
        s.acknowledged(MS * 40);
        assert_eq!(s.boundary(MS * 5_999), Due::No);
        assert_eq!(s.boundary(MS * 6_000), Due::Commit);
    }

    #[test]
    fn the_first_commit_of_a_large_state_waits_as_long_as_its_size_makes_likely() {
        let of = |bytes| {
            Schedule::new(CommitPolicy::Auto, Duration::ZERO, Duration::ZERO).expecting(bytes)
        };
        assert_eq!(of(72_000).boundary(MS * 1_000), Due::Commit);
        let mut large = of(24_000_000);
        assert_eq!(large.boundary(MS * 9_599), Due::No);
        assert_eq!(large.boundary(MS * 9_600), Due::Commit);
        // The measured cost counts from then on.
        large.sent(MS * 9_600, MS * 5, 24_000_000);
        large.acknowledged(MS * 15);
        assert_eq!(large.boundary(MS * 11_599), Due::No);
        assert_eq!(large.boundary(MS * 11_600), Due::Commit);
        assert_eq!(of(usize::MAX).boundary(MS * 60_000), Due::Commit);
    }
}
