//! Random numbers. Each purpose has its own stream under the scenario's seed. If a node or a fault
//! is removed, the draws for the others stay the same, so that a failing scenario can be shrunk.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::scenario::Quantity;

/// The purpose of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Arrivals and sizes of a workload.
    Workload(u32),
    /// Speed and loads of a node.
    Node(u32),
    /// Random faults.
    Fault(u32),
    /// Delays and losses of the network.
    Network,
    /// Random scenarios.
    Scenario,
    /// Dependencies, gangs and limits of random scenarios.
    Demands,
    /// Spread ranges of random scenarios.
    Spread,
}

/// One stream of random numbers: ChaCha with 8 rounds, whose output never changes.
#[derive(Debug, Clone)]
pub struct Draw(ChaCha8Rng);

impl Draw {
    /// The stream of a purpose under a seed.
    pub fn new(seed: u64, purpose: Purpose) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(match purpose {
            Purpose::Network => 1,
            Purpose::Scenario => 2,
            Purpose::Demands => 3,
            Purpose::Spread => 4,
            Purpose::Workload(n) => (1 << 32) | u64::from(n),
            Purpose::Node(n) => (2 << 32) | u64::from(n),
            Purpose::Fault(n) => (3 << 32) | u64::from(n),
        });
        Self(rng)
    }

    /// Uniform in [0, 1).
    #[expect(clippy::cast_precision_loss, reason = "53 bits fit")]
    pub fn unit(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform from 0 to below `n`; 0 if `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        // The bias of the remainder is negligible here.
        self.0.next_u64().checked_rem(n).unwrap_or(0)
    }

    /// True with this probability.
    pub fn chance(&mut self, share: f64) -> bool {
        share > 0.0 && self.unit() < share
    }

    /// Exponentially distributed.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.unit()).ln()
    }

    /// Normally distributed with mean 0 and deviation 1 (Box–Muller, one of the pair).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// One value of a quantity.
    pub fn quantity(&mut self, q: &Quantity) -> f64 {
        match *q {
            Quantity::Fixed(n) => n,
            Quantity::Uniform { low, high } => low + (high - low) * self.unit(),
            Quantity::Exponential { mean } => self.exponential(mean),
            Quantity::Lognormal { median, sigma } => median * (sigma * self.normal()).exp(),
            // The inverse of the bounded Pareto's distribution function.
            Quantity::Pareto { low, high, alpha } => {
                let tail = 1.0 - (low / high).powf(alpha);
                low / (1.0 - self.unit() * tail).powf(1.0 / alpha)
            }
        }
    }

    /// One value in thousandths of its unit, at least `least`.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "float casts saturate"
    )]
    pub fn thousandths(&mut self, q: &Quantity, least: u64) -> u64 {
        ((self.quantity(q) * 1_000.0) as u64).max(least)
    }

    /// One value as a whole number.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "float casts saturate"
    )]
    pub fn whole(&mut self, q: &Quantity) -> u64 {
        self.quantity(q) as u64
    }

    /// An exponential time in microseconds with a mean in milliseconds.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "times far below 2^52"
    )]
    pub fn micros(&mut self, mean_ms: u64) -> u64 {
        self.exponential(mean_ms as f64 * 1_000.0) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_and_a_purpose_give_the_same_numbers_for_ever() {
        let mut draw = Draw::new(7, Purpose::Node(3));
        let drawn: Vec<u64> = (0..3).map(|_| draw.below(1_000_000)).collect();
        assert_eq!(drawn, [913_089, 843_384, 414_854]);
    }

    #[test]
    fn quantities_have_their_means_and_bounds() {
        let mut draw = Draw::new(1, Purpose::Workload(0));
        let mut mean = |q: Quantity| {
            let all: Vec<f64> = (0..20_000).map(|_| draw.quantity(&q)).collect();
            (all.iter().sum::<f64>() / 20_000.0, all)
        };
        let (exponential, _) = mean(Quantity::Exponential { mean: 5.0 });
        assert!((exponential - 5.0).abs() < 0.2, "{exponential}");
        let (even, all) = mean(Quantity::Uniform {
            low: 2.0,
            high: 4.0,
        });
        assert!((even - 3.0).abs() < 0.05 && all.iter().all(|n| (2.0..4.0).contains(n)));
        let (_, mut all) = mean(Quantity::Lognormal {
            median: 10.0,
            sigma: 1.0,
        });
        all.sort_by(f64::total_cmp);
        assert!((all[10_000] - 10.0).abs() < 0.5, "{}", all[10_000]);
        let (_, all) = mean(Quantity::Pareto {
            low: 1.0,
            high: 100.0,
            alpha: 1.1,
        });
        assert!(all.iter().all(|n| (1.0..=100.0).contains(n)));
        let tail = all.iter().filter(|n| **n > 10.0).count();
        // 1 − F(10) of the bounded Pareto is about 0.0736.
        assert!((1_300..1_650).contains(&tail), "{tail}");
    }
}
