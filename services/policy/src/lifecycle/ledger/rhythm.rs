//! Learns from the ledgers the interval between an execution's boundaries, and the cost of a resume
//! and of a move. It is the only cost model of moves: pauses, reallocation and regrets use it.

use crate::time::Millis;

/// Number of stored intervals.
const KEPT: usize = 16;
/// Weight of a new measurement in a mean.
const WEIGHT: f64 = 0.2;
/// Longest start that counts, in ms: a longer one waited for something else.
const LONGEST_TAKE_UP_MS: f64 = 120_000.0;
/// Assumed bandwidth between nodes if none was measured, in bytes per second: a gigabit link.
const ASSUMED_LINK_BYTES_S: u64 = 125_000_000;

/// Statistics of one execution. The quantiles cover its last 16 intervals, so they follow a program
/// that changes its pace.
#[derive(Debug, Clone, Default)]
pub struct Rhythm {
    intervals: [f32; KEPT],
    count: u32,
    /// The last committed boundary, and when it became known.
    pub last: Option<(u64, Millis)>,
    /// Mean time of its last starts on another node, in ms.
    pub move_ms: Option<f64>,
    /// Number of parks after a preemption, as far as seen here.
    pub parks: u64,
}

impl Rhythm {
    /// Notes a committed boundary and the computing time since the last one.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "an interval for an estimate"
    )]
    pub fn committed(&mut self, now: Millis, index: u64, compute_us: u64) {
        let before = self.last.map_or(0, |(before, _)| before);
        let capsules = index.saturating_sub(before);
        if capsules > 0 && compute_us > 0 {
            let each = compute_us as f64 / 1_000.0 / capsules as f64;
            self.intervals[self.count as usize % KEPT] = each as f32;
            self.count = self.count.wrapping_add(1).max(1);
        }
        self.last = Some((index, now));
    }

    /// Quantile of the last intervals, in ms.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of 16"
    )]
    pub fn quantile(&self, share: f64) -> Option<f64> {
        let known = (self.count as usize).min(KEPT);
        let mut sorted = self.intervals;
        let sorted = &mut sorted[..known];
        sorted.sort_by(f32::total_cmp);
        let at = (share * known.saturating_sub(1) as f64).round() as usize;
        sorted.get(at).map(|ms| f64::from(*ms))
    }

    /// Time until its next boundary, in ms: the 90th percentile less the time since the last known
    /// boundary. If more time has passed, boundaries were crossed without a commit: half the
    /// median.
    #[expect(clippy::cast_precision_loss, reason = "times below 2^52")]
    pub fn to_boundary_ms(&self, now: Millis) -> Option<f64> {
        let (_, at) = self.last?;
        let passed = now.since(at) as f64;
        let late = self.quantile(0.9)?;
        Some(if passed < late {
            late - passed
        } else {
            self.quantile(0.5)? / 2.0
        })
    }

    /// Notes the time of a start on another node.
    pub fn moved(&mut self, took_ms: f64) {
        let took = took_ms.clamp(0.0, LONGEST_TAKE_UP_MS);
        self.move_ms = Some(mean(self.move_ms, took));
    }
}

/// A σ below this size, in bytes, does not measure the link.
const LEAST_CARRIED: u64 = 1 << 20;

/// Mean time of a start on a node over all executions, and the transfer rate of σ.
#[derive(Debug, Clone, Copy, Default)]
pub struct TakeUp {
    mean_ms: Option<f64>,
    /// Time for one MiB of σ.
    mebibyte_ms: Option<f64>,
}

impl TakeUp {
    /// Notes a start with a σ of `bytes`. For a large σ, the time beyond the mean of small ones
    /// belongs to the link.
    #[expect(clippy::cast_precision_loss, reason = "bytes below 2^52")]
    pub fn began(&mut self, took_ms: f64, bytes: u64) {
        let took = took_ms.clamp(0.0, LONGEST_TAKE_UP_MS);
        if bytes < LEAST_CARRIED {
            self.mean_ms = Some(mean(self.mean_ms, took));
            return;
        }
        let carried = took - self.mean_ms();
        if carried > 0.0 {
            let each = carried * LEAST_CARRIED as f64 / bytes as f64;
            self.mebibyte_ms = Some(mean(self.mebibyte_ms, each));
        }
    }

    /// Mean time of a start without σ, in ms; 0 before the first measurement.
    pub fn mean_ms(&self) -> f64 {
        self.mean_ms.unwrap_or(0.0)
    }

    /// Cost of a resume, in ms: σ over the link, then the start. The start counts whole
    /// milliseconds.
    pub fn resume_ms(&self, state_bytes: u64) -> f64 {
        self.carry_ms(state_bytes) + self.mean_ms().floor()
    }

    /// Cost of a move, in ms: σ out and in over the link, and the start.
    pub fn move_ms(&self, state_bytes: u64) -> f64 {
        self.mean_ms() + 2.0 * self.carry_ms(state_bytes)
    }

    /// Transfer time of σ over the link, in ms.
    fn carry_ms(&self, state_bytes: u64) -> f64 {
        let link = self.link_bytes_s().unwrap_or(ASSUMED_LINK_BYTES_S);
        transfer_ms(state_bytes, link)
    }

    /// Measured transfer rate of σ between nodes, in bytes per second. None before a large σ was
    /// moved.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a bandwidth, not negative"
    )]
    fn link_bytes_s(&self) -> Option<u64> {
        let ms = self.mebibyte_ms?.max(1e-3);
        Some((LEAST_CARRIED as f64 * 1_000.0 / ms) as u64)
    }
}

/// Transfer time of bytes at a bandwidth, in ms.
#[expect(clippy::cast_precision_loss, reason = "bytes below 2^52")]
pub fn transfer_ms(bytes: u64, bytes_s: u64) -> f64 {
    bytes as f64 * 1_000.0 / bytes_s.max(1) as f64
}

/// An exponentially weighted mean.
fn mean(before: Option<f64>, new: f64) -> f64 {
    before.map_or(new, |mean| mean + WEIGHT * (new - mean))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_boundary_is_as_far_as_the_last_ones_were_apart() {
        let mut rhythm = Rhythm::default();
        assert_eq!(rhythm.to_boundary_ms(Millis(0)), None);
        for n in 1..=40u64 {
            let each = if n % 10 == 0 { 90_000 } else { 60_000 };
            rhythm.committed(Millis(n * 60_000), n, each * 1_000);
        }
        let quantile = |share| rhythm.quantile(share).unwrap_or_default();
        assert!((quantile(0.5) - 60_000.0).abs() < 1.0);
        assert!((quantile(1.0) - 90_000.0).abs() < 1.0);
        let left = rhythm.to_boundary_ms(Millis(40 * 60_000 + 50_000));
        assert!(
            left.is_some_and(|ms| ms > 5_000.0 && ms <= 40_000.0),
            "{left:?}"
        );
    }

    #[test]
    fn boundaries_between_two_commits_count() {
        let mut rhythm = Rhythm::default();
        rhythm.committed(Millis(1_000), 500, 1_000_000);
        let each = rhythm.quantile(0.5).unwrap_or_default();
        assert!((each - 2.0).abs() < 1e-3, "500 capsules in a second");
        let left = rhythm.to_boundary_ms(Millis(1_700)).unwrap_or_default();
        assert!((left - 1.0).abs() < 1e-3, "half of the median");
    }

    #[test]
    fn the_link_is_known_by_what_large_states_took_beyond_small_ones() {
        let mut take_up = TakeUp::default();
        assert_eq!(take_up.link_bytes_s(), None);
        (0..20).for_each(|_| take_up.began(500.0, 10_000));
        // 100 MiB take two seconds more.
        (0..20).for_each(|_| take_up.began(2_500.0, 100 << 20));
        assert!((take_up.mean_ms() - 500.0).abs() < 1e-6);
        let link = take_up.link_bytes_s().unwrap_or(0);
        assert!(link.abs_diff(50 << 20) < 1_000, "{link}");
        // A start before σ was durable does not measure the link.
        take_up.began(100.0, 100 << 20);
        assert_eq!(take_up.link_bytes_s(), Some(link));
    }

    #[test]
    fn what_moves_cost_is_a_mean_of_the_last() {
        let mut rhythm = Rhythm::default();
        rhythm.moved(100.0);
        (0..40).for_each(|_| rhythm.moved(900.0));
        assert!(rhythm.move_ms.is_some_and(|ms| ms > 850.0));
    }
}
