//! Right-hand sides that can be reproduced from a few integers.
//!
//! SplitMix64 (Steele, Lea, Flood 2014): element `i` of load case `k` under `seed` is `mix(s +
//! (i+1)·γ)`. Here `γ = 0x9E3779B97F4A7C15` and `s = mix(seed + γ) ⊕ mix(k·γ + 1)`. Its upper 53
//! bits, as an integer `m`, give the value `2m/2⁵³ − 1`, exactly, in [−1, 1).

use crate::engine::Engine;
use crate::sparse::Csr;

const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Load case `k` under `seed`: `n` values in [−1, 1), the same everywhere.
#[must_use]
pub fn load_case(k: u64, seed: u64, n: usize) -> Vec<f64> {
    let mut s = mix(seed.wrapping_add(GAMMA)) ^ mix(k.wrapping_mul(GAMMA).wrapping_add(1));
    (0..n)
        .map(|_| {
            s = s.wrapping_add(GAMMA);
            // 53 bits and a power of two: conversion and product are exact, the sum rounds once.
            (mix(s) >> 11) as f64 * (2.0 / (1u64 << 53) as f64) - 1.0
        })
        .collect()
}

/// The right-hand side of load case `k` for `a`: `A·(1, …, 1)` for `k = 0`, whose solution is
/// known, else [`load_case`]`(k, seed, n)`.
#[must_use]
pub fn right_hand_side(a: &Csr, k: u64, seed: u64) -> Vec<f64> {
    if k != 0 {
        return load_case(k, seed, a.rows());
    }
    let mut b = vec![0.0; a.rows()];
    a.spmv_with(&mut Engine::default(), &vec![1.0; a.cols()], &mut b);
    b
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_differ_repeat_and_stay_in_range() {
        let a = load_case(1, 42, 1000);
        assert_eq!(a, load_case(1, 42, 1000));
        assert_ne!(a, load_case(2, 42, 1000));
        assert_ne!(a, load_case(1, 43, 1000));
        assert!(a.iter().all(|v| (-1.0..1.0).contains(v)));
        assert_eq!(a[..10], load_case(1, 42, 10));
    }
}
