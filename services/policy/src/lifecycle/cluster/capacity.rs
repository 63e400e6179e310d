//! The capacity of a node: its slots, plus a queue of executions that will start soon.
//!
//! `limit = slots + min(k · completions of the last 2 s, horizon · slots not stuck / mean service
//! time, max(64, queue time · completions a second))`
//!
//! All bounds but the last start at 0. The first grows like a slow start: each completion allows
//! `k` more queued executions. So a flood of short executions fills the queue within a few round
//! trips.
//!
//! The second keeps long work out of queues. An execution of ten seconds leaves no room in the
//! queue. A slot whose execution has run for longer than the horizon does not count at all.
//!
//! The third limits a queue by the node's real rate, because queued executions could have run
//! elsewhere. It never goes below a fixed floor, since short executions are cheap to record. An
//! execution without a slot or a queue place stays `pending` and can still go to any node.

use crate::config::Config;
use crate::time::Millis;

/// Measured speed of a node.
#[derive(Debug, Clone, Default)]
pub struct Speed {
    bucket: u64,
    current: u32,
    previous: u32,
    mean_service_us: f64,
}

const BUCKET_MS: u64 = 1_000;
const WEIGHT: f64 = 0.05;
/// Queue length that the rate bound always allows.
const AHEAD_FLOOR: u32 = 64;

impl Speed {
    /// Notes a completed execution with its computing time on this node.
    pub fn completed(&mut self, now: Millis, service_us: u64) {
        self.roll(now);
        self.current = self.current.saturating_add(1);
        #[expect(clippy::cast_precision_loss, reason = "microseconds far below 2^52")]
        let service = service_us as f64;
        self.mean_service_us = if self.mean_service_us == 0.0 {
            service.max(1.0)
        } else {
            (self.mean_service_us + WEIGHT * (service - self.mean_service_us)).max(1.0)
        };
    }

    fn roll(&mut self, now: Millis) {
        let bucket = now.0 / BUCKET_MS;
        match bucket.saturating_sub(self.bucket) {
            0 => {}
            1 => (self.previous, self.current) = (self.current, 0),
            _ => (self.previous, self.current) = (0, 0),
        }
        self.bucket = bucket;
    }

    fn recent(&self, now: Millis) -> u32 {
        match (now.0 / BUCKET_MS).saturating_sub(self.bucket) {
            0 => self.current.saturating_add(self.previous),
            1 => self.current,
            _ => 0,
        }
    }

    fn fullest(&self, now: Millis) -> u32 {
        match (now.0 / BUCKET_MS).saturating_sub(self.bucket) {
            0 => self.current.max(self.previous),
            1 => self.current,
            _ => 0,
        }
    }

    /// Queue length beyond the slots, of which `stuck` run long executions.
    pub fn ahead(&self, now: Millis, slots: u32, stuck: u32, config: &Config) -> u32 {
        let by_growth = self.recent(now).saturating_mul(config.ahead_per_completion);
        if by_growth == 0 {
            return 0;
        }
        #[expect(clippy::cast_precision_loss, reason = "a horizon of milliseconds")]
        let horizon_us = config.horizon_ms as f64 * 1_000.0;
        let by_service =
            horizon_us * f64::from(slots.saturating_sub(stuck)) / self.mean_service_us.max(50.0);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "float casts saturate, and this one is not negative"
        )]
        let by_service = by_service as u32;
        // The buckets cover one to two seconds, so the fullest one is the better estimate.
        let by_rate = u64::from(self.fullest(now)) * config.queue_ms / BUCKET_MS;
        let by_rate = u32::try_from(by_rate).unwrap_or(u32::MAX).max(AHEAD_FLOOR);
        by_growth
            .min(by_service)
            .min(by_rate)
            .min(config.ahead_limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_work_is_bound_ahead_and_long_work_is_not() {
        let config = Config::default();
        let mut short = Speed::default();
        assert_eq!(short.ahead(Millis(0), 4, 0, &config), 0);
        (0..1_000).for_each(|_| short.completed(Millis(500), 200));
        assert_eq!(
            short.ahead(Millis(600), 4, 0, &config),
            AHEAD_FLOOR,
            "sixty milliseconds' worth at a thousand a second is below the floor"
        );
        (0..9_000).for_each(|_| short.completed(Millis(500), 200));
        assert_eq!(short.ahead(Millis(600), 4, 0, &config), 600);
        let mut beginning = Speed::default();
        (0..10).for_each(|_| beginning.completed(Millis(500), 200));
        assert_eq!(
            beginning.ahead(Millis(600), 4, 0, &config),
            40,
            "slow start"
        );
        assert_eq!(
            short.ahead(Millis(600), 4, 4, &config),
            0,
            "every slot is stuck"
        );
        assert_eq!(short.ahead(Millis(3_000), 4, 0, &config), 0, "long ago");
        let mut long = Speed::default();
        long.completed(Millis(500), 10_000_000);
        assert_eq!(long.ahead(Millis(600), 4, 0, &config), 0);
    }
}
