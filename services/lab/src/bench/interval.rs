//! The interval of a median by order statistics: exact for any distribution, without a seed.

/// An interval holds its median with at least this chance, if it has enough samples.
pub const CHANCE: f64 = 0.95;

/// The median; of an even number of samples, the mean of the two in the middle. 0 for none.
pub fn middle(samples: &mut [f64]) -> f64 {
    samples.sort_by(f64::total_cmp);
    let n = samples.len();
    let at = |i: usize| samples.get(i).copied().unwrap_or(0.0);
    let (lower, upper) = (at(n.saturating_sub(1) / 2), at(n / 2));
    if lower == upper {
        lower // also if both are infinite
    } else {
        (lower + upper) / 2.0
    }
}

/// The narrowest interval between two of the samples, as far from one end as from the other, that
/// holds the median with [`CHANCE`] (else the widest), and its chance. Each of `n` samples lies
/// below the median with a chance of one half. The k-th smallest and the k-th largest therefore
/// miss it with 2·Σ C(n, i)/2ⁿ over i < k. At most 1,000 samples.
pub fn interval(samples: &mut [f64]) -> (f64, f64, f64) {
    let n = samples.len();
    samples.sort_by(f64::total_cmp);
    // The share of all 2ⁿ cases in which i samples lie below, and in which fewer than k do.
    let (mut share, mut fewer) = (0.5f64.powi(n as i32), 0.0);
    let (mut k, mut chance) = (0, 0.0);
    for i in 0..n.div_ceil(2) {
        fewer += share;
        share *= (n - i) as f64 / (i + 1) as f64;
        let holds = (1.0 - 2.0 * fewer).max(0.0);
        if i > 0 && holds < CHANCE {
            break;
        }
        (k, chance) = (i, holds);
    }
    let at = |i: usize| samples.get(i).copied().unwrap_or(0.0);
    (at(k), at(n.saturating_sub(k + 1)), chance)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_of_an_even_number_lies_between_two() {
        assert_eq!(middle(&mut [4.0, 1.0, 3.0, 2.0]), 2.5);
        assert_eq!(middle(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(middle(&mut [7.0]), 7.0);
        assert_eq!(middle(&mut []), 0.0);
        assert_eq!(middle(&mut [f64::INFINITY, f64::INFINITY]), f64::INFINITY);
    }

    #[test]
    fn the_interval_leaves_out_as_many_samples_as_its_chance_allows() {
        let of = |n: u32| {
            let mut ratios: Vec<f64> = (1..=n).rev().map(f64::from).collect();
            let (low, high, chance) = interval(&mut ratios);
            (low, high, (chance * 1e4).round() / 1e4)
        };
        // Tables of the sign test.
        assert_eq!(of(12), (3.0, 10.0, 0.9614));
        assert_eq!(of(10), (2.0, 9.0, 0.9785));
        assert_eq!(of(9), (2.0, 8.0, 0.9609));
        assert_eq!(of(6), (1.0, 6.0, 0.9688));
        assert_eq!(of(1), (1.0, 1.0, 0.0));
    }

    #[test]
    fn the_interval_holds_the_median_of_a_known_distribution_as_often_as_it_says() {
        // Skewed: the cube of a uniform number. Its median is 1/8. A fixed linear congruential
        // generator gives the numbers.
        let mut state = 20_u64;
        let mut uniform = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1_u64 << 53) as f64
        };
        for n in [10, 15, 40] {
            const RUNS: u32 = 20_000;
            let (mut held, mut chance) = (0, 0.0);
            for _ in 0..RUNS {
                let mut samples: Vec<f64> = (0..n).map(|_| uniform().powi(3)).collect();
                let (low, high, stated) = interval(&mut samples);
                held += u32::from(low <= 0.125 && 0.125 <= high);
                chance = stated;
            }
            let held = f64::from(held) / f64::from(RUNS);
            assert!(chance >= CHANCE, "{n} samples: {chance}");
            assert!((held - chance).abs() < 0.006, "{n}: {held}, not {chance}");
        }
    }
}
