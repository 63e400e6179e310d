//! Observed errors divided by their bounds. `γ_k = k·u/(1 − k·u)`. The bounds come from Higham,
//! "Accuracy and Stability of Numerical Algorithms" (2002), chapters 3, 8, 9 and 19. Exact values
//! are computed by compensated sums (Ogita, Rump and Oishi, 2005), so that the observed error is
//! that of the kernel.

use crate::dense::check::gamma;
use crate::dense::qr::Reflectors;
use crate::dense::{Into, Mat};
use crate::sparse::Csr;

/// Absolute error of underflow for each operation, and a margin for the observer.
const TINY: f64 = f64::MIN_POSITIVE * f64::EPSILON;

/// A sum of products as if in twice the precision, and the sum of magnitudes.
#[derive(Default)]
struct Sum {
    sum: f64,
    error: f64,
    size: f64,
    terms: usize,
}

impl Sum {
    fn add(&mut self, a: f64, b: f64) {
        let product = a * b;
        let rest = a.mul_add(b, -product);
        let sum = self.sum + product;
        let part = sum - self.sum;
        let lost = (self.sum - (sum - part)) + (product - part);
        self.sum = sum;
        self.error += lost + rest;
        self.size += product.abs();
        self.terms += 1;
    }

    /// `|found − sum| / (γ·Σ|terms| + error of underflow)`. NaN never passes.
    fn ratio(&self, found: f64, gamma: f64) -> f64 {
        let off = ((found - self.sum) - self.error).abs();
        ratio(off, gamma * self.size + (self.terms + 1) as f64 * TINY)
    }
}

fn ratio(off: f64, bound: f64) -> f64 {
    if off == 0.0 { 0.0 } else { off / bound }
}

/// The largest error. A NaN counts as beyond any bound.
fn worst(errors: impl Iterator<Item = f64>) -> f64 {
    errors.fold(
        0.0,
        |m: f64, e| {
            if e.is_nan() { f64::INFINITY } else { m.max(e) }
        },
    )
}

fn elements(m: &Mat) -> impl Iterator<Item = (usize, usize)> + use<> {
    let (rows, cols) = (m.rows(), m.cols());
    (0..cols).flat_map(move |j| (0..rows).map(move |i| (i, j)))
}

pub(super) fn product(a: &Mat, b: &Mat, into: Into, c: &Mat, found: &Mat) -> f64 {
    let (a, b, c) = (a.view(), b.view(), c.view());
    let depth = a.cols();
    worst(elements(found).map(|(i, j)| {
        let mut sum = Sum::default();
        if into != Into::Replace {
            sum.add(c.at(i, j), 1.0);
        }
        let sign = if into == Into::Subtract { -1.0 } else { 1.0 };
        for p in 0..depth {
            sum.add(sign * a.at(i, p), b.at(p, j));
        }
        sum.ratio(found.view().at(i, j), gamma(depth + 3))
    }))
}

pub(super) fn lu(a: &Mat, factors: &Mat, pivots: &[usize]) -> f64 {
    let mut exchanged = a.clone();
    let mut view = exchanged.view_mut();
    for (i, pivot) in pivots.iter().enumerate() {
        view.swap_rows(i, *pivot);
    }
    let f = factors.view();
    worst(elements(factors).map(|(i, j)| {
        let mut sum = Sum::default();
        for p in 0..=i.min(j) {
            let l = if p == i { 1.0 } else { f.at(i, p) };
            sum.add(l, f.at(p, j));
        }
        sum.ratio(exchanged.view().at(i, j), gamma(f.cols() + 3))
    }))
}

pub(super) fn qr(a: &Mat, factors: &Mat, reflectors: &Reflectors) -> f64 {
    let (m, n) = (a.rows(), a.cols());
    let (v, t) = (reflectors.v.view(), reflectors.t.view());
    let mut off = 0.0f64;
    for j in 0..n {
        // Q·R's column: R's, less V·(T·(Vᵀ·R's)).
        let r = |i: usize| if i <= j { factors.view().at(i, j) } else { 0.0 };
        let vr: Vec<f64> = (0..n)
            .map(|p| (0..m).map(|i| v.at(i, p) * r(i)).sum())
            .collect();
        let tv: Vec<f64> = (0..n)
            .map(|p| (p..n).map(|q| t.at(p, q) * vr[q]).sum())
            .collect();
        for i in 0..m {
            let qr = r(i) - (0..n).map(|p| v.at(i, p) * tv[p]).sum::<f64>();
            off += (a.view().at(i, j) - qr).powi(2);
        }
    }
    let size: f64 = a.data().iter().map(|v| v * v).sum();
    // Theorem 19.4 with its modest constant, doubled for the observer's own products.
    ratio(off.sqrt(), 2.0 * gamma(m * n) * size.sqrt())
}

pub(super) fn solve(l: &Mat, x: &Mat, b: &Mat) -> f64 {
    let (l, x) = (l.view(), x.view());
    worst(elements(b).map(|(i, j)| {
        let mut sum = Sum::default();
        for p in 0..=i {
            sum.add(if p == i { 1.0 } else { l.at(i, p) }, x.at(p, j));
        }
        sum.ratio(b.view().at(i, j), gamma(l.rows() + 3))
    }))
}

pub(super) fn dot(a: &[f64], b: &[f64], found: f64) -> f64 {
    let mut sum = Sum::default();
    a.iter().zip(b).for_each(|(a, b)| sum.add(*a, *b));
    sum.ratio(found, gamma(a.len() + 3))
}

pub(super) fn sparse(a: &Csr, x: &[f64], y: &[f64]) -> f64 {
    worst((0..a.rows()).map(|row| {
        let (columns, values) = a.row(row);
        let mut sum = Sum::default();
        for (col, value) in columns.iter().zip(values) {
            sum.add(*value, x[*col as usize]);
        }
        sum.ratio(y[row], gamma(columns.len() + 3))
    }))
}

/// The residuals of the recurrence and of the solution differ little after a few steps, on a system
/// of modest condition (Greenbaum, 1997).
pub(super) fn recurrence(relative: f64, real: f64) -> f64 {
    ratio((relative - real).abs(), 1e-12)
}
