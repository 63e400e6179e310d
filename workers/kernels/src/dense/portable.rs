//! The chains of [`super::gemm`] in plain Rust, for CPUs without special kernels.

use super::gemm::{DEPTH, Into};
use super::mat::{MatMut, MatRef};
use crate::simd::{Simd, dispatched};

/// Rows and columns of C that are computed at once.
const ROWS: usize = 8;
const COLS: usize = 4;

/// C ← A·B, C + A·B or C − A·B, on the calling thread. Shapes fit; the inner dimension is not 0.
pub(super) fn gemm(simd: Simd, a: MatRef<'_>, b: MatRef<'_>, into: Into, mut c: MatMut<'_>) {
    let (m, n, k) = (c.rows(), c.cols(), a.cols());
    let deepest = k.min(DEPTH);
    // Panels of ROWS rows of A and of COLS columns of B, with zeros beyond the border.
    let mut rows = vec![[0.0; ROWS]; m.div_ceil(ROWS) * deepest];
    let mut cols = vec![[0.0; COLS]; deepest];
    for from in (0..k).step_by(DEPTH) {
        let depth = DEPTH.min(k - from);
        let into = if into == Into::Replace && from > 0 {
            Into::Add
        } else {
            into
        };
        for (i, panel) in rows.chunks_mut(depth).take(m.div_ceil(ROWS)).enumerate() {
            let count = ROWS.min(m - i * ROWS);
            for (p, line) in panel.iter_mut().enumerate() {
                for (r, value) in line.iter_mut().take(count).enumerate() {
                    *value = a.at(i * ROWS + r, from + p);
                }
            }
        }
        for j in (0..n).step_by(COLS) {
            let count = COLS.min(n - j);
            for (p, line) in cols.iter_mut().take(depth).enumerate() {
                *line = [0.0; COLS];
                for (q, value) in line.iter_mut().take(count).enumerate() {
                    *value = b.at(from + p, j + q);
                }
            }
            for (i, panel) in rows.chunks(depth).take(m.div_ceil(ROWS)).enumerate() {
                let mut acc = [[0.0; ROWS]; COLS];
                chains(simd, panel, &cols[..depth], &mut acc);
                for (q, acc) in acc.iter().take(count).enumerate() {
                    let column = &mut c.col_mut(j + q)[i * ROWS..];
                    finish(into, acc, column);
                }
            }
        }
    }
}

#[inline(always)]
fn chains_body(a: &[[f64; ROWS]], b: &[[f64; COLS]], out: &mut [[f64; ROWS]; COLS]) {
    let mut acc = [[0.0; ROWS]; COLS];
    for (a, b) in a.iter().zip(b) {
        for q in 0..COLS {
            for r in 0..ROWS {
                acc[q][r] = a[r].mul_add(b[q], acc[q][r]);
            }
        }
    }
    *out = acc;
}

fn finish(into: Into, acc: &[f64; ROWS], c: &mut [f64]) {
    for (c, acc) in c.iter_mut().zip(acc) {
        *c = match into {
            Into::Replace => *acc,
            Into::Add => *c + acc,
            Into::Subtract => *c - acc,
        };
    }
}

dispatched! { fn chains(a: &[[f64; ROWS]], b: &[[f64; COLS]], out: &mut [[f64; ROWS]; COLS]) = chains_body }
