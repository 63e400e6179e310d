//! The three passes over memory of a CG iteration, each fused with the reductions it feeds.
//!
//! 1. `q = A p`, and `p·q` while the leaf of `q` is in cache.
//! 2. `r −= α q`, and `r·z`, `r·r` with `z = D⁻¹ r`, which is never stored.
//! 3. `x += α p` and `p = z + β p`: the old `p` is read once for both.

use std::ops::Range;

use crate::engine::{Engine, split_mut};
use crate::reduce::{LANES, LEAF, combine, dot_leaf, leaves, tree};
use crate::simd::dispatched;
use crate::sparse::{Csr, product_rows};

/// The inverse of the diagonal. A constant one is kept as one number, which saves reading it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum InverseDiagonal {
    Constant(f64),
    PerRow(Vec<f64>),
}

/// The factors for a part of the rows, in blocks of lanes.
trait Factors: Copy {
    fn block(self, at: usize) -> [f64; LANES];
    fn at(self, i: usize) -> f64;
}

#[derive(Clone, Copy)]
struct Constant(f64);

impl Factors for Constant {
    #[inline(always)]
    fn block(self, _: usize) -> [f64; LANES] {
        [self.0; LANES]
    }
    #[inline(always)]
    fn at(self, _: usize) -> f64 {
        self.0
    }
}

impl Factors for &[f64] {
    #[inline(always)]
    fn block(self, at: usize) -> [f64; LANES] {
        let mut block = [0.0; LANES];
        block.copy_from_slice(&self[at..at + LANES]);
        block
    }
    #[inline(always)]
    fn at(self, i: usize) -> f64 {
        self[i]
    }
}

// ---- pass 1 ----

#[inline(always)]
fn product_dot_body(a: &Csr, start: usize, p: &[f64], q: &mut [f64], out: &mut [[f64; 1]]) {
    let mut row = start;
    for (q, out) in q.chunks_mut(LEAF).zip(out) {
        product_rows(a, row, p, q);
        *out = [dot_leaf(&p[row..row + q.len()], q)];
        row += q.len();
    }
}

dispatched! { fn product_dot_range(a: &Csr, start: usize, p: &[f64], q: &mut [f64], out: &mut [[f64; 1]]) = product_dot_body }

/// `q = A p`; returns `p·q`.
pub(crate) fn product_dot(
    engine: &mut Engine,
    a: &Csr,
    p: &[f64],
    q: &mut [f64],
    partial: &mut [[f64; 1]],
) -> f64 {
    let simd = engine.simd();
    if engine.threads() == 1 {
        product_dot_range(simd, a, 0, p, q, partial);
    } else {
        let ranges = engine.ranges(q.len());
        let qs = split_mut(q, ranges.iter().map(Range::len));
        let outs = split_mut(partial, ranges.iter().map(|r| leaves(r.len())));
        let parts = ranges.iter().map(|r| r.start).zip(qs).zip(outs).collect();
        engine.run(parts, |((start, q), out)| {
            product_dot_range(simd, a, start, p, q, out)
        });
    }
    tree(partial)[0]
}

// ---- pass 2 ----

#[inline(always)]
fn residual_body<F: Factors>(
    alpha: f64,
    inverse: F,
    q: &[f64],
    r: &mut [f64],
    out: &mut [[f64; 2]],
) {
    for ((leaf, (q, r)), out) in q.chunks(LEAF).zip(r.chunks_mut(LEAF)).enumerate().zip(out) {
        let base = leaf * LEAF;
        let mut rz = [0.0; LANES];
        let mut rr = [0.0; LANES];
        let (q8, q_tail) = q.as_chunks::<LANES>();
        let (r8, r_tail) = r.as_chunks_mut::<LANES>();
        let full = q8.len() * LANES;
        for (b, (q, r)) in q8.iter().zip(r8).enumerate() {
            let d = inverse.block(base + b * LANES);
            for l in 0..LANES {
                let v = (-alpha).mul_add(q[l], r[l]);
                r[l] = v;
                rz[l] = v.mul_add(v * d[l], rz[l]);
                rr[l] = v.mul_add(v, rr[l]);
            }
        }
        for l in 0..q_tail.len().min(r_tail.len()) {
            let v = (-alpha).mul_add(q_tail[l], r_tail[l]);
            r_tail[l] = v;
            rz[l] = v.mul_add(v * inverse.at(base + full + l), rz[l]);
            rr[l] = v.mul_add(v, rr[l]);
        }
        *out = [combine(rz), combine(rr)];
    }
}

dispatched! { fn residual_constant(alpha: f64, d: Constant, q: &[f64], r: &mut [f64], out: &mut [[f64; 2]]) = residual_body }
dispatched! { fn residual_per_row(alpha: f64, d: &[f64], q: &[f64], r: &mut [f64], out: &mut [[f64; 2]]) = residual_body }

/// `r −= α q`; returns `(r·D⁻¹r, r·r)`.
pub(crate) fn update_residual(
    engine: &mut Engine,
    alpha: f64,
    inverse: &InverseDiagonal,
    q: &[f64],
    r: &mut [f64],
    partial: &mut [[f64; 2]],
) -> (f64, f64) {
    let simd = engine.simd();
    let pass = |range: Range<usize>, r: &mut [f64], out: &mut [[f64; 2]]| match inverse {
        InverseDiagonal::Constant(d) => {
            residual_constant(simd, alpha, Constant(*d), &q[range], r, out)
        }
        InverseDiagonal::PerRow(d) => {
            residual_per_row(simd, alpha, &d[range.clone()], &q[range], r, out)
        }
    };
    if engine.threads() == 1 {
        pass(0..r.len(), r, partial);
    } else {
        let ranges = engine.ranges(r.len());
        let rs = split_mut(r, ranges.iter().map(Range::len));
        let outs = split_mut(partial, ranges.iter().map(|r| leaves(r.len())));
        let parts = ranges.iter().cloned().zip(rs).zip(outs).collect();
        engine.run(parts, |((range, r), out)| pass(range, r, out));
    }
    let [rz, rr] = tree(partial);
    (rz, rr)
}

// ---- pass 3 ----

#[inline(always)]
fn direction_body<F: Factors>(
    alpha: f64,
    beta: f64,
    inverse: F,
    r: &[f64],
    x: &mut [f64],
    p: &mut [f64],
) {
    let (r8, r_tail) = r.as_chunks::<LANES>();
    let (x8, x_tail) = x.as_chunks_mut::<LANES>();
    let (p8, p_tail) = p.as_chunks_mut::<LANES>();
    let full = r8.len() * LANES;
    for (b, ((r, x), p)) in r8.iter().zip(x8).zip(p8).enumerate() {
        let d = inverse.block(b * LANES);
        for l in 0..LANES {
            let old = p[l];
            x[l] = alpha.mul_add(old, x[l]);
            p[l] = beta.mul_add(old, r[l] * d[l]);
        }
    }
    for l in 0..r_tail.len().min(x_tail.len()).min(p_tail.len()) {
        let old = p_tail[l];
        x_tail[l] = alpha.mul_add(old, x_tail[l]);
        p_tail[l] = beta.mul_add(old, r_tail[l] * inverse.at(full + l));
    }
}

dispatched! { fn direction_constant(alpha: f64, beta: f64, d: Constant, r: &[f64], x: &mut [f64], p: &mut [f64]) = direction_body }
dispatched! { fn direction_per_row(alpha: f64, beta: f64, d: &[f64], r: &[f64], x: &mut [f64], p: &mut [f64]) = direction_body }

/// `x += α p`, then `p = D⁻¹r + β p`.
pub(crate) fn update_direction(
    engine: &mut Engine,
    (alpha, beta): (f64, f64),
    inverse: &InverseDiagonal,
    r: &[f64],
    x: &mut [f64],
    p: &mut [f64],
) {
    let simd = engine.simd();
    let pass = |range: Range<usize>, x: &mut [f64], p: &mut [f64]| match inverse {
        InverseDiagonal::Constant(d) => {
            direction_constant(simd, alpha, beta, Constant(*d), &r[range], x, p)
        }
        InverseDiagonal::PerRow(d) => {
            direction_per_row(simd, alpha, beta, &d[range.clone()], &r[range], x, p)
        }
    };
    if engine.threads() == 1 {
        pass(0..r.len(), x, p);
    } else {
        let ranges = engine.ranges(r.len());
        let xs = split_mut(x, ranges.iter().map(Range::len));
        let ps = split_mut(p, ranges.iter().map(Range::len));
        let parts = ranges.iter().cloned().zip(xs).zip(ps).collect();
        engine.run(parts, |((range, x), p)| pass(range, x, p));
    }
}
