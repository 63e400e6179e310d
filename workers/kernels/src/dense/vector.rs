//! Vector operations with fixed lanes. Element i goes to lane i mod [`LANES`]. Each lane is one
//! chain of fused multiply-adds from +0. Lanes are added by halving (lane l with l + 16, then l +
//! 8, …).

use crate::simd::dispatched;

/// Lanes of a sum.
pub(crate) const LANES: usize = 32;

#[inline(always)]
fn halved(mut lanes: [f64; LANES]) -> f64 {
    let mut half = LANES / 2;
    while half > 0 {
        for l in 0..half {
            lanes[l] += lanes[l + half];
        }
        half /= 2;
    }
    lanes[0]
}

#[inline(always)]
fn dot_body(a: &[f64], b: &[f64]) -> f64 {
    let mut lanes = [0.0; LANES];
    let n = a.len().min(b.len());
    let (a, a_tail) = a[..n].as_chunks::<LANES>();
    let (b, b_tail) = b[..n].as_chunks::<LANES>();
    for (a, b) in a.iter().zip(b) {
        for l in 0..LANES {
            lanes[l] = a[l].mul_add(b[l], lanes[l]);
        }
    }
    for (l, (a, b)) in a_tail.iter().zip(b_tail).enumerate() {
        lanes[l] = a.mul_add(*b, lanes[l]);
    }
    halved(lanes)
}

#[inline(always)]
fn magnitudes_body(a: &[f64], b: &[f64]) -> f64 {
    let mut lanes = [0.0; LANES];
    let n = a.len().min(b.len());
    let (a, a_tail) = a[..n].as_chunks::<LANES>();
    let (b, b_tail) = b[..n].as_chunks::<LANES>();
    for (a, b) in a.iter().zip(b) {
        for l in 0..LANES {
            lanes[l] = a[l].abs().mul_add(b[l].abs(), lanes[l]);
        }
    }
    for (l, (a, b)) in a_tail.iter().zip(b_tail).enumerate() {
        lanes[l] = a.abs().mul_add(b.abs(), lanes[l]);
    }
    halved(lanes)
}

#[inline(always)]
fn axpy_body(alpha: f64, x: &[f64], y: &mut [f64]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = alpha.mul_add(*x, *y);
    }
}

#[inline(always)]
fn scale_body(alpha: f64, x: &mut [f64]) {
    for x in x {
        *x *= alpha;
    }
}

#[inline(always)]
fn largest_body(x: &[f64]) -> f64 {
    let mut lanes = [0.0; LANES];
    let (chunks, tail) = x.as_chunks::<LANES>();
    let larger = |m: f64, v: f64| if v > m { v } else { m };
    for chunk in chunks {
        for l in 0..LANES {
            lanes[l] = larger(lanes[l], chunk[l].abs());
        }
    }
    for (l, v) in tail.iter().enumerate() {
        lanes[l] = larger(lanes[l], v.abs());
    }
    lanes.iter().fold(0.0, |m, v| larger(m, *v))
}

dispatched! {
    /// `a · b`, over the shorter length.
    pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 = dot_body
}
dispatched! {
    /// `|a| · |b|`, over the shorter length.
    pub(crate) fn magnitudes(a: &[f64], b: &[f64]) -> f64 = magnitudes_body
}
dispatched! {
    /// `y ← fma(α, x, y)`.
    pub(crate) fn axpy(alpha: f64, x: &[f64], y: &mut [f64]) = axpy_body
}
dispatched! {
    /// `x ← α·x`.
    pub(crate) fn scale(alpha: f64, x: &mut [f64]) = scale_body
}
dispatched! {
    /// The largest magnitude, or 0 without elements. NaNs are ignored.
    pub(crate) fn largest(x: &[f64]) -> f64 = largest_body
}

/// A sum with its error, after Ogita, Rump and Oishi ("Accurate sum and dot product", 2005). It is
/// as accurate as a sum with twice the digits that is rounded once.
#[inline(always)]
fn compensated_body(a: &[f64], b: &[f64]) -> f64 {
    let (mut sums, mut errors) = ([0.0; LANES], [0.0; LANES]);
    let n = a.len().min(b.len());
    let (a, a_tail) = a[..n].as_chunks::<LANES>();
    let (b, b_tail) = b[..n].as_chunks::<LANES>();
    for (a, b) in a.iter().zip(b) {
        for l in 0..LANES {
            (sums[l], errors[l]) = more(sums[l], errors[l], a[l], b[l]);
        }
    }
    for (l, (a, b)) in a_tail.iter().zip(b_tail).enumerate() {
        (sums[l], errors[l]) = more(sums[l], errors[l], *a, *b);
    }
    let (mut sum, mut error) = (0.0, 0.0);
    for l in 0..LANES {
        let (s, e) = two_sum(sum, sums[l]);
        (sum, error) = (s, error + (e + errors[l]));
    }
    sum + error
}

#[inline(always)]
fn two_sum(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    let part = sum - a;
    (sum, (a - (sum - part)) + (b - part))
}

#[inline(always)]
fn more(sum: f64, error: f64, a: f64, b: f64) -> (f64, f64) {
    let product = a * b;
    let rest = a.mul_add(b, -product);
    let (sum, lost) = two_sum(sum, product);
    (sum, error + (lost + rest))
}

dispatched! {
    /// `a · b` as if in twice the precision, over the shorter length.
    pub(crate) fn compensated(a: &[f64], b: &[f64]) -> f64 = compensated_body
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rhs::load_case;
    use crate::simd::Simd;

    #[test]
    fn the_instruction_set_changes_no_bit() {
        let (wide, plain) = (Simd::detect(), Simd::portable());
        for n in [0, 1, 31, 32, 33, 64, 1000] {
            let (a, b) = (load_case(1, 5, n), load_case(2, 5, n));
            for f in [dot, magnitudes, compensated] {
                assert_eq!(f(wide, &a, &b).to_bits(), f(plain, &a, &b).to_bits());
            }
            let (mut x, mut y) = (b.clone(), b.clone());
            axpy(wide, 0.3, &a, &mut x);
            axpy(plain, 0.3, &a, &mut y);
            assert_eq!((&x, largest(wide, &a)), (&y, largest(plain, &a)));
        }
    }

    #[test]
    fn a_compensated_sum_keeps_what_cancels_in_a_plain_one() {
        let a: Vec<f64> = [1e16, 1.0, -1e16, 0.5].repeat(100);
        let b = vec![1.0; 400];
        let exact = 150.0;
        assert_eq!(compensated(Simd::detect(), &a, &b), exact);
        let long = [vec![1e16], vec![1.0; 99], vec![-1e16]].concat();
        assert_eq!(compensated(Simd::detect(), &long, &b), 99.0);
        assert_eq!(compensated(Simd::detect(), &b[..3], &b), 3.0);
    }
}
