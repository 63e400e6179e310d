//! A = Q·R by Householder reflectors, left-looking by block columns in compact WY form (Schreiber
//! and Van Loan, 1989). The reflectors of a block are `I − V·T·Vᵀ` with V unit lower trapezoidal
//! and T upper triangular.
//!
//! The order of operations extends that of [`mod@super::gemm`] and the fixed lanes of a dot product. A
//! panel of more than [`LEAF`] columns is halved (the left half a multiple of [`LEAF`]). The left
//! half is factored and applied to the right half ([`apply`]), which is then factored. Then `T₁₂ =
//! −T₁₁·((V₁ᵀV₂)·T₂₂)` (Elmroth and Gustavson, 2000).
//!
//! In a leaf, column by column, for the column x:
//!
//! * `σ = ‖x‖`, `β = −sign(x₀)·σ`, `τ = (β − x₀)/β`;
//! * `v = x/(x₀ − β)` with `v₀ = 1`;
//! * each column c to the right loses `(τ·(c₀ + v·c))·v`.
//!
//! The block size is part of this definition, threads are not.

use super::gemm::{Into, gemm};
use super::mat::{Mat, MatMut, MatRef};
use super::vector::{axpy, dot, largest, scale};
use crate::engine::Engine;
use crate::simd::Simd;

/// Columns of a panel that are factored without products.
pub const LEAF: usize = 8;

/// Squares of numbers in this range neither overflow nor lose digits, for any number of summands.
const SAFE: std::ops::Range<f64> = 1e-140..1e140;

/// The reason why a matrix has no factors.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum QrError {
    /// The numbers grew beyond f64. Columns count from 0.
    #[error("the norm of column {} is {value}: the numbers overflowed", .column + 1)]
    Overflow {
        /// The column, from 0. The message counts from 1, as files do.
        column: usize,
        /// The norm.
        value: f64,
    },
}

impl QrError {
    /// Adds `by` to the column, for columns that are counted from further left.
    #[must_use]
    pub fn shifted(self, by: usize) -> Self {
        let Self::Overflow { column, value } = self;
        Self::Overflow {
            column: column + by,
            value,
        }
    }
}

/// The reflectors of a block column, in the form that products use.
#[derive(Debug, Clone, PartialEq)]
pub struct Reflectors {
    /// V: ones on the diagonal, zeros above it.
    pub v: Mat,
    /// T: zeros below the diagonal.
    pub t: Mat,
}

/// X ← (I − V·T·Vᵀ)ᵀ·X. X starts at the first row of V.
///
/// # Panics
/// If V and X have not the same number of rows.
pub fn apply(engine: &mut Engine, v: MatRef<'_>, t: MatRef<'_>, x: MatMut<'_>) {
    let (width, cols) = (v.cols(), x.cols());
    let mut w = Mat::zeros(width, cols);
    gemm(engine, v.t(), x.view(), Into::Replace, w.view_mut());
    let mut tw = Mat::zeros(width, cols);
    gemm(engine, t.t(), w.view(), Into::Replace, tw.view_mut());
    gemm(engine, v, tw.view(), Into::Subtract, x);
}

/// Factors a panel of at least as many rows as columns in place: R on and above the diagonal,
/// the reflectors below it.
///
/// # Errors
/// See [`QrError`]; columns count from the panel's first.
///
/// # Panics
/// If there are more columns than rows.
pub fn panel(engine: &mut Engine, mut a: MatMut<'_>) -> Result<Reflectors, QrError> {
    let (rows, width) = (a.rows(), a.cols());
    assert!(width <= rows, "shape of a panel");
    let mut v = Mat::zeros(rows, width);
    let mut t = Mat::zeros(width, width);
    halve(engine, a.reborrow(), v.view_mut(), t.view_mut())?;
    Ok(Reflectors { v, t })
}

fn halve(engine: &mut Engine, a: MatMut<'_>, v: MatMut<'_>, t: MatMut<'_>) -> Result<(), QrError> {
    let (rows, width) = (a.rows(), a.cols());
    if width <= LEAF {
        return leaf(engine.simd(), a, v, t);
    }
    let half = (width / 2).next_multiple_of(LEAF);
    let (left, mut right) = a.split_cols(half);
    let (mut v1, v2) = v.split_cols(half);
    let (t1, t2) = t.split_cols(half);
    let ((mut t11, _), (mut t12, mut t22)) = (t1.split_rows(half), t2.split_rows(half));
    halve(engine, left, v1.reborrow(), t11.reborrow())?;
    apply(engine, v1.view(), t11.view(), right.reborrow());
    let (_, below) = right.split_rows(half);
    let (_, mut v2) = v2.split_rows(half);
    halve(engine, below, v2.reborrow(), t22.reborrow()).map_err(|error| error.shifted(half))?;
    let (_, v1) = v1.split_rows(half);
    debug_assert_eq!(v1.rows(), rows - half);
    let mut cross = Mat::zeros(half, width - half);
    gemm(
        engine,
        v1.view().t(),
        v2.view(),
        Into::Replace,
        cross.view_mut(),
    );
    let mut times = Mat::zeros(half, width - half);
    gemm(
        engine,
        cross.view(),
        t22.view(),
        Into::Replace,
        times.view_mut(),
    );
    t12.clear();
    gemm(engine, t11.view(), times.view(), Into::Subtract, t12);
    Ok(())
}

fn leaf(
    simd: Simd,
    mut a: MatMut<'_>,
    mut v: MatMut<'_>,
    mut t: MatMut<'_>,
) -> Result<(), QrError> {
    for j in 0..a.cols() {
        let (mut left, mut right) = a.reborrow().split_cols(j + 1);
        let column = &mut left.col_mut(j)[j..];
        let tau =
            reflector(simd, column).map_err(|value| QrError::Overflow { column: j, value })?;
        let own = &mut v.col_mut(j)[j..];
        own.copy_from_slice(column);
        own[0] = 1.0;
        for p in 0..right.cols() {
            let other = &mut right.col_mut(p)[j..];
            let share = tau * dot(simd, own, other);
            axpy(simd, -share, own, other);
        }
        // T's column: −τ·T·(Vᵀv), and τ on the diagonal.
        let mut cross = [0.0; LEAF];
        for (p, value) in cross.iter_mut().enumerate().take(j) {
            let view = v.view();
            *value = dot(simd, &view.col(p)[j..], &view.col(j)[j..]);
        }
        for i in 0..j {
            let mut sum = 0.0f64;
            for (p, value) in cross.iter().enumerate().take(j).skip(i) {
                sum = t.view().at(i, p).mul_add(*value, sum);
            }
            t.col_mut(j)[i] = -tau * sum;
        }
        t.col_mut(j)[j] = tau;
    }
    Ok(())
}

/// Turns a column into β and the rest of v, and returns τ. If the norm is not finite, returns the
/// norm as the error.
fn reflector(simd: Simd, x: &mut [f64]) -> Result<f64, f64> {
    let Some((first, rest)) = x.split_first_mut() else {
        return Ok(0.0);
    };
    let size = largest(simd, rest);
    if size == 0.0 && first.is_finite() {
        return Ok(0.0);
    }
    let largest = size.max(first.abs());
    let norm = if SAFE.contains(&largest) {
        first.mul_add(*first, dot(simd, rest, rest)).sqrt()
    } else if largest.is_finite() {
        // A rare case, so a simple method: division by a power of two, which is exact.
        let by = f64::from_bits(largest.to_bits() & (0x7ff << 52)).max(f64::MIN_POSITIVE);
        let scaled: Vec<f64> = rest.iter().map(|v| v / by).collect();
        let first = *first / by;
        by * first.mul_add(first, dot(simd, &scaled, &scaled)).sqrt()
    } else {
        largest
    };
    if !norm.is_finite() {
        return Err(norm);
    }
    let beta = -norm.copysign(*first);
    let divisor = *first - beta;
    let tau = (beta - *first) / beta;
    if divisor.abs() > f64::MIN_POSITIVE * 4.0 {
        scale(simd, 1.0 / divisor, rest);
    } else {
        rest.iter_mut().for_each(|v| *v /= divisor);
    }
    *first = beta;
    Ok(tau)
}

/// Factors a matrix of at least as many rows as columns in place, by block columns of `block`,
/// and returns the reflectors of each.
///
/// # Errors
/// See [`QrError`].
///
/// # Panics
/// If there are more columns than rows, or `block` is 0.
pub fn factor(
    engine: &mut Engine,
    a: MatMut<'_>,
    block: usize,
) -> Result<Vec<Reflectors>, QrError> {
    let (rows, cols) = (a.rows(), a.cols());
    assert!(cols <= rows && block > 0, "shapes of a factorization");
    let mut all: Vec<Reflectors> = Vec::with_capacity(cols.div_ceil(block));
    let mut rest = a;
    for from in (0..cols).step_by(block) {
        let (mut x, right) = rest.split_cols(block.min(cols - from));
        for (i, reflectors) in all.iter().enumerate() {
            let (_, x) = x.reborrow().split_rows(i * block);
            apply(engine, reflectors.v.view(), reflectors.t.view(), x);
        }
        let (_, own) = x.split_rows(from);
        all.push(panel(engine, own).map_err(|error| error.shifted(from))?);
        rest = right;
    }
    Ok(all)
}
