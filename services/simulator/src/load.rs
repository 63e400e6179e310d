//! Loads over time, beside the load of a node's own executions.

use crate::draw::Draw;
use crate::scenario::Load;

/// A load during a run.
#[derive(Debug, Clone)]
pub struct Playing {
    load: Load,
    /// Phase of a sine in ms, level of a walk, or 1 during a burst.
    at: f64,
    /// Time of the last value, or of the next start or end of a burst, in microseconds.
    moment: u64,
    /// Number of steps that have passed.
    step: usize,
}

impl Playing {
    /// Starts the load. Random values come from the node's stream.
    #[expect(clippy::cast_precision_loss, reason = "milliseconds far below 2^52")]
    pub fn new(load: Load, draw: &mut Draw) -> Self {
        let (at, moment) = match &load {
            Load::Constant(_) | Load::Steps(_) => (0.0, 0),
            Load::Sine {
                phase_ms: Some(phase),
                ..
            } => (*phase as f64, 0),
            Load::Sine { period_ms, .. } => (draw.unit() * *period_ms as f64, 0),
            Load::Walk {
                mean, deviation, ..
            } => (mean + deviation * draw.normal(), 0),
            Load::Bursts { every_ms, .. } => (0.0, draw.micros(*every_ms)),
        };
        Self {
            load,
            at,
            moment,
            step: 0,
        }
    }

    /// The load if it is constant.
    pub fn steady(&self) -> Option<f64> {
        match self.load {
            Load::Constant(value) => Some(value.clamp(0.0, 1.0)),
            _ => None,
        }
    }

    /// The load at a moment in microseconds, in [0, 1]. Moments must not decrease.
    #[expect(clippy::cast_precision_loss, reason = "microseconds far below 2^52")]
    pub fn value(&mut self, now: u64, draw: &mut Draw) -> f64 {
        let value = match &self.load {
            Load::Constant(value) => *value,
            Load::Steps(steps) => {
                while steps
                    .get(self.step)
                    .is_some_and(|(at, _)| at * 1_000 <= now)
                {
                    self.step += 1;
                }
                let last = self.step.checked_sub(1);
                last.and_then(|n| steps.get(n)).map_or(0.0, |(_, v)| *v)
            }
            Load::Sine {
                mean,
                amplitude,
                period_ms,
                ..
            } => {
                let swings = (now as f64 / 1_000.0 + self.at) / *period_ms as f64;
                mean + amplitude * (std::f64::consts::TAU * swings).sin()
            }
            Load::Walk {
                mean,
                deviation,
                memory_ms,
            } => {
                // The exact step of an Ornstein–Uhlenbeck process since the last value.
                let passed = now.saturating_sub(self.moment) as f64 / 1_000.0;
                let keeps = (-passed / *memory_ms as f64).exp();
                let noise = deviation * (1.0 - keeps * keeps).sqrt() * draw.normal();
                self.at = mean + (self.at - mean) * keeps + noise;
                self.moment = now;
                self.at
            }
            Load::Bursts {
                calm,
                burst,
                every_ms,
                for_ms,
            } => {
                while self.moment <= now {
                    self.at = 1.0 - self.at;
                    let mean = if self.at > 0.5 { *for_ms } else { *every_ms };
                    self.moment += draw.micros(mean).max(1);
                }
                if self.at > 0.5 { *burst } else { *calm }
            }
        };
        value.clamp(0.0, 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::Purpose;

    fn play(load: Load, moments: impl Iterator<Item = u64>) -> Vec<f64> {
        let mut draw = Draw::new(5, Purpose::Node(0));
        let mut playing = Playing::new(load, &mut draw);
        moments.map(|at| playing.value(at, &mut draw)).collect()
    }

    #[test]
    fn steps_hold_until_the_next() {
        let steps = Load::Steps(vec![(0, 0.1), (1_000, 0.9), (2_000, 0.3)]);
        let seen = play(steps, [0, 999_999, 1_000_000, 5_000_000].into_iter());
        assert_eq!(seen, [0.1, 0.1, 0.9, 0.3]);
    }

    #[test]
    fn a_swing_goes_round_in_its_period() {
        let sine = Load::Sine {
            mean: 0.5,
            amplitude: 0.4,
            period_ms: 1_000,
            phase_ms: Some(0),
        };
        let seen = play(sine, [0, 250_000, 500_000, 750_000].into_iter());
        for (found, wanted) in seen.iter().zip([0.5, 0.9, 0.5, 0.1]) {
            assert!((found - wanted).abs() < 1e-9, "{seen:?}");
        }
    }

    #[test]
    fn a_walk_keeps_to_its_mean_and_deviation_however_often_it_is_looked_at() {
        for gap in [50_000, 5_000_000] {
            let walk = Load::Walk {
                mean: 0.5,
                deviation: 0.1,
                memory_ms: 2_000,
            };
            let seen = play(walk, (0..40_000).map(|n| n * gap));
            let mean = seen.iter().sum::<f64>() / seen.len() as f64;
            let spread = seen.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / seen.len() as f64;
            assert!((mean - 0.5).abs() < 0.02, "{gap}: {mean}");
            assert!((spread.sqrt() - 0.1).abs() < 0.01, "{gap}: {spread}");
        }
    }

    #[test]
    fn bursts_come_and_go() {
        let bursts = Load::Bursts {
            calm: 0.2,
            burst: 0.95,
            every_ms: 8_000,
            for_ms: 2_000,
        };
        let seen = play(bursts, (0..100_000).map(|n| n * 100_000));
        let full = seen.iter().filter(|v| **v == 0.95).count();
        assert!((17_000..23_000).contains(&full), "{full} of 100,000");
    }
}
