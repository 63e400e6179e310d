//! L: round trips to the broker (or another node), measured by whoever has the connection.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use fiec_schemas::hardware::{Reading, Signal};
use fiec_schemas::ids::Timestamp;

use crate::Probe;
use crate::reading::Make;

/// Samples kept at most, both those not yet read and those in the window.
const MOST: usize = 256;

/// How round trips become L.
#[derive(Debug, Clone, PartialEq)]
pub struct LatencyConfig {
    /// RTT_base in microseconds; without one, the shortest round trip seen since the start.
    pub base_us: Option<f64>,
    /// RTT_ref in microseconds: this much above the base gives L = 0.63, thrice 0.95.
    pub ref_us: f64,
    /// A round trip counts for this long, in milliseconds.
    pub window_ms: u32,
    /// What is measured, e.g. `broker ping`.
    pub source: String,
}

impl Default for LatencyConfig {
    fn default() -> Self {
        Self {
            base_us: None,
            ref_us: 10_000.0,
            window_ms: 30_000,
            source: "broker ping".into(),
        }
    }
}

/// Where round trips are reported; cheap to clone and to call from anywhere.
#[derive(Debug, Clone, Default)]
pub struct LatencyRecorder(Arc<Mutex<VecDeque<f64>>>);

impl LatencyRecorder {
    /// Reports one round trip in microseconds.
    pub fn record(&self, us: f64) {
        if us.is_finite() && us >= 0.0 {
            let mut pending = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if pending.len() == MOST {
                pending.pop_front();
            }
            pending.push_back(us);
        }
    }
}

/// 1 − exp(−max(0, RTT_p95 − RTT_base) / RTT_ref) over the round trips of the window.
pub struct LatencyProbe {
    config: LatencyConfig,
    recorder: LatencyRecorder,
    window: VecDeque<(Timestamp, f64)>,
    lowest: f64,
}

impl LatencyProbe {
    /// A probe without samples.
    pub fn new(config: LatencyConfig) -> Self {
        Self {
            config,
            recorder: LatencyRecorder::default(),
            window: VecDeque::new(),
            lowest: f64::INFINITY,
        }
    }

    /// Where round trips are reported.
    pub fn recorder(&self) -> LatencyRecorder {
        self.recorder.clone()
    }

    /// Reports one round trip in microseconds.
    pub fn record(&self, us: f64) {
        self.recorder.record(us);
    }
}

impl Probe for LatencyProbe {
    fn name(&self) -> &'static str {
        "latency"
    }

    fn read(&mut self, now: Timestamp, out: &mut Vec<Reading>) {
        // A sample is dated by the read that finds it: no clock is read here.
        for us in self
            .recorder
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .drain(..)
        {
            self.lowest = self.lowest.min(us);
            if self.window.len() == MOST {
                self.window.pop_front();
            }
            self.window.push_back((now, us));
        }
        let oldest = now.micros() - i64::from(self.config.window_ms) * 1000;
        self.window.retain(|(at, _)| at.micros() >= oldest);
        let make = Make {
            signal: Signal::Latency,
            device: None,
            unit: "us",
            source: &self.config.source,
            at: now,
        };
        let mut sorted: Vec<f64> = self.window.iter().map(|(_, us)| *us).collect();
        sorted.sort_by(f64::total_cmp);
        let rank = (sorted.len() * 95).div_ceil(100);
        let Some(&p95) = rank.checked_sub(1).and_then(|i| sorted.get(i)) else {
            out.push(make.missing(format!("no round trip within {} ms", self.config.window_ms)));
            return;
        };
        let base = self.config.base_us.unwrap_or(self.lowest);
        let value = 1.0 - (-(p95 - base).max(0.0) / self.config.ref_us).exp();
        out.push(make.value(value, p95, None));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: i64) -> Timestamp {
        Timestamp::from_micros(ms * 1000)
    }

    fn value(probe: &mut LatencyProbe, ms: i64) -> Reading {
        let mut out = Vec::new();
        probe.read(at(ms), &mut out);
        out.remove(0)
    }

    #[test]
    fn the_ninety_fifth_percentile_is_held_against_base_and_reference() {
        let mut probe = LatencyProbe::new(LatencyConfig {
            base_us: Some(100.0),
            ref_us: 1000.0,
            ..Default::default()
        });
        (0..95).for_each(|_| probe.record(1100.0));
        (0..5).for_each(|_| probe.record(1e9));
        let r = value(&mut probe, 0);
        assert_eq!(r.raw, Some(1100.0));
        assert!((r.value.unwrap() - (1.0 - (-1.0f64).exp())).abs() < 1e-12);
    }

    #[test]
    fn steady_round_trips_are_no_latency_and_samples_age_out_after_the_window() {
        let mut probe = LatencyProbe::new(LatencyConfig::default());
        assert!(value(&mut probe, 0).missing.is_some());
        probe.record(f64::NAN);
        probe.record(250.0);
        assert_eq!(value(&mut probe, 0).value, Some(0.0));
        assert_eq!(value(&mut probe, 30_000).value, Some(0.0));
        assert!(value(&mut probe, 30_001).missing.is_some());
    }
}
