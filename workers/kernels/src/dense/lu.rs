//! P·A = L·U with partial pivoting, left-looking by block columns.
//!
//! A block column of A first gets the row exchanges of all earlier ones. Then each of them updates
//! it in ascending order ([`update`]), and it is factored ([`panel`]). So a block column needs no
//! column to its right. It is final, except that later exchanges still apply to the rows below its
//! own diagonal block.
//!
//! The order of operations extends those of [`mod@super::gemm`] and [`super::triangular`]. A panel of
//! more than [`LEAF`] columns is halved (the left half a multiple of [`LEAF`]). The left half is
//! factored. The right half is exchanged, solved, updated by one product, and factored. In a leaf,
//! column by column: the first row of largest magnitude becomes the pivot. The column below it is
//! multiplied by the pivot's reciprocal (divided by a pivot below 2⁻¹⁰²⁰). Each column to the right
//! gets `fma(−u, l, ·)`. The block size is part of this definition, threads are not.

use super::gemm::{Into, gemm};
use super::mat::{MatMut, MatRef};
use super::triangular::solve_unit_lower;
use super::vector::{axpy, largest, scale};
use crate::engine::Engine;
use crate::simd::Simd;

/// Columns of a panel that are factored without products.
pub const LEAF: usize = 8;

/// 2⁻¹⁰²⁰: the reciprocal of any number at least this large is finite.
const SMALLEST: f64 = f64::from_bits(3 << 52);

/// The reason why a matrix has no factors. Columns count from 0.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum LuError {
    /// All remaining rows have a zero in this column.
    #[error("the matrix is singular: column {} has no nonzero pivot", .column + 1)]
    Singular {
        /// The column, from 0. The message counts from 1, as files do.
        column: usize,
    },
    /// The numbers grew beyond f64.
    #[error("the pivot of column {} is {value}: the numbers overflowed", .column + 1)]
    Overflow {
        /// The column, from 0. The message counts from 1, as files do.
        column: usize,
        /// The pivot.
        value: f64,
    },
}

impl LuError {
    /// Adds `by` to the column, for columns that are counted from further left.
    #[must_use]
    pub fn shifted(self, by: usize) -> Self {
        match self {
            Self::Singular { column } => Self::Singular {
                column: column + by,
            },
            Self::Overflow { column, value } => Self::Overflow {
                column: column + by,
                value,
            },
        }
    }
}

/// Exchanges row `i` with row `pivots[i]`, by ascending i, in every column.
///
/// # Panics
/// If a row does not exist.
pub fn exchange(mut a: MatMut<'_>, pivots: &[usize]) {
    for j in 0..a.cols() {
        let column = a.col_mut(j);
        for (i, pivot) in pivots.iter().enumerate() {
            column.swap(i, *pivot);
        }
    }
}

/// Updates a block column by a finished one. Both start at the first row of the finished one's
/// diagonal block. Its rows have been exchanged like those of `x`.
///
/// # Panics
/// If `finished` has not as many rows as `x`, or more columns than rows.
pub fn update(engine: &mut Engine, finished: MatRef<'_>, x: MatMut<'_>) {
    let (rows, width) = (finished.rows(), finished.cols());
    let (mut top, below) = x.split_rows(width);
    solve_unit_lower(engine, finished.part(0, width, 0, width), top.reborrow());
    let l = finished.part(width, rows - width, 0, width);
    gemm(engine, l, top.view(), Into::Subtract, below);
}

/// Factors a panel of at least as many rows as columns in place. `pivots[j]` is the row that row
/// `j` was exchanged with, counted from the panel's first.
///
/// # Errors
/// See [`LuError`]; columns count from the panel's first.
///
/// # Panics
/// If there are more columns than rows, or not one pivot for each column.
pub fn panel(engine: &mut Engine, a: MatMut<'_>, pivots: &mut [usize]) -> Result<(), LuError> {
    let width = a.cols();
    assert!(
        width <= a.rows() && pivots.len() == width,
        "shapes of a panel"
    );
    if width <= LEAF {
        return leaf(engine.simd(), a, pivots);
    }
    let half = (width / 2).next_multiple_of(LEAF);
    let (first, second) = pivots.split_at_mut(half);
    let (mut left, mut right) = a.split_cols(half);
    panel(engine, left.reborrow(), first)?;
    exchange(right.reborrow(), first);
    update(engine, left.view(), right.reborrow());
    let (_, below) = right.split_rows(half);
    panel(engine, below, second).map_err(|error| error.shifted(half))?;
    let (_, below) = left.split_rows(half);
    exchange(below, second);
    for pivot in second {
        *pivot += half;
    }
    Ok(())
}

fn leaf(simd: Simd, mut a: MatMut<'_>, pivots: &mut [usize]) -> Result<(), LuError> {
    for j in 0..a.cols() {
        let below = &a.col_mut(j)[j..];
        let size = largest(simd, below);
        if size == 0.0 {
            return Err(LuError::Singular { column: j });
        }
        let found = below.iter().position(|v| v.abs() == size);
        let Some(row) = found.filter(|_| size.is_finite()) else {
            return Err(LuError::Overflow {
                column: j,
                value: size,
            });
        };
        pivots[j] = j + row;
        a.swap_rows(j, j + row);
        let (mut left, mut right) = a.reborrow().split_cols(j + 1);
        let column = left.col_mut(j);
        let pivot = column[j];
        let l = &mut column[j + 1..];
        if pivot.abs() >= SMALLEST {
            scale(simd, 1.0 / pivot, l);
        } else {
            l.iter_mut().for_each(|v| *v /= pivot);
        }
        for p in 0..right.cols() {
            let other = &mut right.col_mut(p)[j..];
            if let Some((u, rest)) = other.split_first_mut() {
                axpy(simd, -*u, l, rest);
            }
        }
    }
    Ok(())
}

/// Factors a matrix in place, by block columns of `block`: U on and above the diagonal, L below it.
/// It has at least as many rows as columns. Row `j` was exchanged with row `pivots[j]`.
///
/// # Errors
/// See [`LuError`].
///
/// # Panics
/// If there are more columns than rows, or `block` is 0.
pub fn factor(engine: &mut Engine, mut a: MatMut<'_>, block: usize) -> Result<Vec<usize>, LuError> {
    let (rows, cols) = (a.rows(), a.cols());
    assert!(cols <= rows && block > 0, "shapes of a factorization");
    let mut pivots: Vec<usize> = Vec::with_capacity(cols);
    for from in (0..cols).step_by(block) {
        let width = block.min(cols - from);
        let (left, right) = a.reborrow().split_cols(from);
        let (mut x, _) = right.split_cols(width);
        exchange(x.reborrow(), &pivots);
        for at in (0..from).step_by(block) {
            let finished = left.view().part(at, rows - at, at, block);
            let (_, x) = x.reborrow().split_rows(at);
            update(engine, finished, x);
        }
        let (_, own) = x.split_rows(from);
        let mut found = vec![0; width];
        panel(engine, own, &mut found).map_err(|error| error.shifted(from))?;
        let (_, below) = left.split_rows(from);
        exchange(below, &found);
        pivots.extend(found.iter().map(|p| p + from));
    }
    Ok(pivots)
}
