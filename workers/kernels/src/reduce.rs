//! Reductions of fixed shape.
//!
//! Element `i` of a leaf of [`LEAF`] elements goes to lane `i mod 8`. A lane is one chain of fused
//! multiply-adds from +0. The lanes are added as `((l0+l4)+(l2+l6)) + ((l1+l5)+(l3+l7))`. Leaves
//! are added pairwise, neighbour with neighbour, level by level. An odd last one moves up
//! unchanged.

use crate::engine::{Engine, split_mut};
use crate::simd::dispatched;

/// Elements of a leaf.
pub const LEAF: usize = 1024;
/// Chains inside a leaf.
pub const LANES: usize = 8;

/// Number of leaves of `n` elements.
#[must_use]
pub const fn leaves(n: usize) -> usize {
    n.div_ceil(LEAF)
}

#[inline(always)]
pub(crate) fn combine(l: [f64; LANES]) -> f64 {
    ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]))
}

/// `a · b` over one leaf (or less).
#[inline(always)]
pub(crate) fn dot_leaf(a: &[f64], b: &[f64]) -> f64 {
    let mut acc = [0.0; LANES];
    let (a8, a_tail) = a.as_chunks::<LANES>();
    let (b8, b_tail) = b.as_chunks::<LANES>();
    for (a, b) in a8.iter().zip(b8) {
        for l in 0..LANES {
            acc[l] = a[l].mul_add(b[l], acc[l]);
        }
    }
    for l in 0..a_tail.len().min(b_tail.len()) {
        acc[l] = a_tail[l].mul_add(b_tail[l], acc[l]);
    }
    combine(acc)
}

/// Adds the leaves' results, destroying `v`; zero leaves give +0.
#[inline]
pub(crate) fn tree<const K: usize>(v: &mut [[f64; K]]) -> [f64; K] {
    let mut len = v.len();
    if len == 0 {
        return [0.0; K];
    }
    while len > 1 {
        let half = len / 2;
        for i in 0..half {
            let (a, b) = (v[2 * i], v[2 * i + 1]);
            v[i] = std::array::from_fn(|k| a[k] + b[k]);
        }
        if len % 2 == 1 {
            v[half] = v[len - 1];
        }
        len = len.div_ceil(2);
    }
    v[0]
}

#[inline(always)]
fn dot_leaves(a: &[f64], b: &[f64], out: &mut [[f64; 1]]) {
    for ((a, b), out) in a.chunks(LEAF).zip(b.chunks(LEAF)).zip(out) {
        *out = [dot_leaf(a, b)];
    }
}

dispatched! { fn dot_range(a: &[f64], b: &[f64], out: &mut [[f64; 1]]) = dot_leaves }

/// `a · b`.
///
/// # Panics
/// If the lengths differ.
pub fn dot(engine: &mut Engine, a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len(), "dot of vectors of different lengths");
    let simd = engine.simd();
    let mut partial = vec![[0.0; 1]; leaves(a.len())];
    let ranges = engine.ranges(a.len());
    let outs = split_mut(&mut partial, ranges.iter().map(|r| leaves(r.len())));
    let parts = ranges.iter().cloned().zip(outs).collect();
    engine.run(parts, |(range, out)| {
        dot_range(simd, &a[range.clone()], &b[range], out)
    });
    tree(&mut partial)[0]
}

/// `√(a · a)`.
pub fn norm2(engine: &mut Engine, a: &[f64]) -> f64 {
    dot(engine, a, a).sqrt()
}

/// The largest magnitude; 0 for an empty vector, NaN if an element is NaN.
#[must_use]
pub fn norm_inf(a: &[f64]) -> f64 {
    a.iter().fold(0.0, |m, &v| {
        if v.abs() > m || v.is_nan() {
            v.abs()
        } else {
            m
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rhs::load_case;
    use crate::simd::Simd;

    #[test]
    fn dot_has_its_documented_shape() {
        let (a, b) = (load_case(1, 7, 5000), load_case(2, 7, 5000));
        let mut level: Vec<f64> = a
            .chunks(LEAF)
            .zip(b.chunks(LEAF))
            .map(|(a, b)| {
                let mut l = [0.0f64; 8];
                for i in 0..a.len() {
                    l[i % 8] = a[i].mul_add(b[i], l[i % 8]);
                }
                ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]))
            })
            .collect();
        while level.len() > 1 {
            level = level
                .chunks(2)
                .map(|c| c.iter().copied().reduce(|a, b| a + b).unwrap())
                .collect();
        }
        assert_eq!(
            dot(&mut Engine::default(), &a, &b).to_bits(),
            level[0].to_bits()
        );
    }

    #[test]
    fn threads_and_instruction_set_change_no_bit() {
        for n in [0, 1, 7, 8, 9, 1023, 1024, 1025, 100_003] {
            let (a, b) = (load_case(3, 1, n), load_case(4, 1, n));
            let one = dot(&mut Engine::default(), &a, &b).to_bits();
            for threads in [2, 3, 4] {
                assert_eq!(
                    dot(&mut Engine::new(threads).unwrap(), &a, &b).to_bits(),
                    one,
                    "{n} {threads}"
                );
            }
            assert_eq!(
                dot(&mut Engine::with_simd(Simd::portable()), &a, &b).to_bits(),
                one,
                "{n}"
            );
        }
    }

    #[test]
    fn infinity_norm_keeps_nan() {
        assert_eq!(norm_inf(&[1.0, -3.0, 2.0]), 3.0);
        assert!(norm_inf(&[1.0, f64::NAN]).is_nan());
        assert_eq!(norm_inf(&[]), 0.0);
    }
}
