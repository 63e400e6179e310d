//! Checks of products and factorizations while they are computed, at the cost of a few dot
//! products.
//!
//! After Freivalds (1979): instead of `X = Y·Z`, the check compares `yᵀX` with `(yᵀY)·Z` for one
//! vector y of signs. It uses compensated arithmetic (`super::vector`), so that it shows the
//! error of X and not its own. No element of y is zero, so a single wrong element always shows. For
//! y of independent signs `E‖yᵀΔ‖² = ‖Δ‖_F²`. So the root of the sum of squares over all columns
//! estimates the Frobenius norm of the error.
//!
//! u = 2⁻⁵³ and γₖ = k·u/(1 − k·u), as in Higham, "Accuracy and Stability of Numerical
//! Algorithms", 2002.

use super::mat::MatRef;
use super::qr::{self, Reflectors};
use super::vector::{compensated, magnitudes};
use super::{Mat, MatMut};
use crate::engine::Engine;
use crate::rhs::load_case;
use crate::simd::Simd;

/// 2⁻⁵³, half the distance from 1 to the next f64.
const UNIT: f64 = f64::EPSILON / 2.0;

/// Seed of the signs. Fixed, because all attempts must make the same check.
const SEED: u64 = 0x005E_EDF0_0000_C4EC;

/// γₖ.
#[must_use]
pub fn gamma(k: usize) -> f64 {
    let ku = k as f64 * UNIT;
    ku / (1.0 - ku)
}

/// The vector y: `n` signs, ±1.
#[must_use]
pub fn signs(n: usize) -> Vec<f64> {
    let mut y = load_case(0, SEED, n);
    y.iter_mut().for_each(|v| *v = 1.0f64.copysign(*v));
    y
}

/// A column whose error exceeds the rounding bound. Columns count from 0.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("the check of column {} gives {found:e}, over its bound of {bound:e}", .column + 1)]
pub struct Exceeded {
    /// The column, from 0. The message counts from 1, as files do.
    pub column: usize,
    /// Its error.
    pub found: f64,
    /// The bound of rounding.
    pub bound: f64,
}

fn within(column: usize, found: f64, bound: f64) -> Result<(), Exceeded> {
    // A NaN is never within a bound.
    if found <= bound {
        Ok(())
    } else {
        Err(Exceeded {
            column,
            found,
            bound,
        })
    }
}

/// γ of the depth `k` of a product: the bound of [`ProductCheck::check`].
#[must_use]
pub fn product_bound(k: usize) -> f64 {
    gamma(k + k / super::gemm::DEPTH + 8)
}

/// The check of those rows of C = A·B that belong to some rows of A.
#[derive(Debug, Clone)]
pub struct ProductCheck {
    y: Vec<f64>,
    /// yᵀA and eᵀ|A|.
    sums: Vec<f64>,
    sizes: Vec<f64>,
}

impl ProductCheck {
    /// A check for these rows of A.
    #[must_use]
    pub fn new(simd: Simd, a: MatRef<'_>) -> Self {
        let y = signs(a.rows());
        let sums = (0..a.cols()).map(|p| compensated(simd, &y, a.col(p)));
        let sums: Vec<f64> = sums.collect();
        let sizes = (0..a.cols()).map(|p| magnitudes(simd, &y, a.col(p)));
        Self {
            sizes: sizes.collect(),
            sums,
            y,
        }
    }

    /// γ of the depth of this product: the bound of [`ProductCheck::check`].
    #[must_use]
    pub fn bound(&self) -> f64 {
        product_bound(self.sums.len())
    }

    /// Returns the largest `|yᵀC − (yᵀA)B|/(eᵀ|A||B|)` over the columns of C.
    ///
    /// # Errors
    /// When it exceeds γ: C is not this product.
    ///
    /// # Panics
    /// If the shapes do not fit.
    pub fn check(&self, simd: Simd, b: MatRef<'_>, c: MatRef<'_>) -> Result<f64, Exceeded> {
        assert_eq!(
            (b.rows(), c.rows(), c.cols()),
            (self.sums.len(), self.y.len(), b.cols()),
            "shapes of a product"
        );
        let mut worst: f64 = 0.0;
        for j in 0..c.cols() {
            let sum = compensated(simd, &self.sums, b.col(j));
            let found = (compensated(simd, &self.y, c.col(j)) - sum).abs();
            let size = magnitudes(simd, &self.sizes, b.col(j));
            let off = if found == 0.0 { 0.0 } else { found / size };
            within(j, off, self.bound())?;
            worst = worst.max(off);
        }
        Ok(worst)
    }
}

/// The check of P·A = L·U, block column by block column. All of it is state: a copy continues like
/// the original.
#[derive(Debug, Clone, PartialEq)]
pub struct LuCheck {
    /// yᵀPᵀL, one element per finished column.
    pub sums: Vec<f64>,
    /// Sum of the squares of the errors, …
    pub found: f64,
    /// … of the bounds, …
    pub allowed: f64,
    /// … and of the elements of A.
    pub squares: f64,
}

impl LuCheck {
    /// A check of no column.
    #[must_use]
    pub fn new() -> Self {
        Self {
            sums: Vec::new(),
            found: 0.0,
            allowed: 0.0,
            squares: 0.0,
        }
    }

    /// Checks the next finished block column. `a` is the column of A, and `finished` has its
    /// factors with U on and above the diagonal. `row_of[i]` is the row of A that is now row i. The
    /// number of rows is the order n of A.
    ///
    /// Rounding allows `|yᵀΔⱼ| ≤ γₙ·eᵀ|L||Uⱼ|` (Higham, theorem 9.3). With partial pivoting no
    /// element of L exceeds 1.
    ///
    /// # Errors
    /// When a column exceeds that bound.
    ///
    /// # Panics
    /// If the shapes do not fit.
    pub fn add(
        &mut self,
        simd: Simd,
        a: MatRef<'_>,
        finished: MatRef<'_>,
        row_of: &[usize],
    ) -> Result<(), Exceeded> {
        let (n, from) = (a.rows(), self.sums.len());
        assert_eq!(
            (a.rows(), a.cols(), row_of.len()),
            (finished.rows(), finished.cols(), n),
            "shapes of a check"
        );
        let y = signs(n);
        let exchanged: Vec<f64> = row_of.iter().map(|row| y[*row]).collect();
        for j in 0..a.cols() {
            let (column, at) = (finished.col(j), from + j);
            let below = compensated(simd, &exchanged[at + 1..], &column[at + 1..]);
            self.sums.push(exchanged[at] + below);
        }
        let sizes: Vec<f64> = (0..from + a.cols()).map(|i| (n - i) as f64).collect();
        for j in 0..a.cols() {
            let u = &finished.col(j)[..=from + j];
            let column = a.col(j);
            let found = compensated(simd, &y, column) - compensated(simd, &self.sums, u);
            let bound = gamma(n + 8) * magnitudes(simd, &sizes, u);
            within(from + j, found.abs(), bound)?;
            self.found = found.mul_add(found, self.found);
            self.allowed = bound.mul_add(bound, self.allowed);
            self.squares += compensated(simd, column, column);
        }
        Ok(())
    }

    /// An estimate of ‖PA − LU‖/‖A‖ in Frobenius norms, and its rounding bound.
    #[must_use]
    pub fn residual(&self) -> (f64, f64) {
        let norm = self.squares.sqrt().max(f64::MIN_POSITIVE);
        (self.found.sqrt() / norm, self.allowed.sqrt() / norm)
    }
}

impl Default for LuCheck {
    fn default() -> Self {
        Self::new()
    }
}

/// The check of A = Q·R and of QᵀQ = I, block column by block column. All of it is state.
#[derive(Debug, Clone, PartialEq)]
pub struct QrCheck {
    /// Qᵀy by the reflectors so far; one element per row of A.
    pub turned: Vec<f64>,
    /// Columns of A so far.
    pub columns: usize,
    /// Sum of the squares of the errors, …
    pub found: f64,
    /// … and of the elements of A.
    pub squares: f64,
    /// Sum over the blocks of `‖HHᵀy − y‖/‖y‖`, where H is the block's reflectors. It estimates the
    /// deviation of Q from orthogonality.
    pub orthogonality: f64,
}

impl QrCheck {
    /// A check of no column, for `rows` rows.
    #[must_use]
    pub fn new(rows: usize) -> Self {
        Self {
            turned: signs(rows),
            columns: 0,
            found: 0.0,
            squares: 0.0,
            orthogonality: 0.0,
        }
    }

    /// The bound of all errors: `30·m·u` for m rows, the threshold of LAPACK's own tests (Anderson
    /// et al., "LAPACK Users' Guide"). The proven bound is larger still.
    #[must_use]
    pub fn bound(&self) -> f64 {
        30.0 * self.turned.len() as f64 * UNIT
    }

    /// Checks the next finished block column. `a` is the column of A, and `finished` has R on and
    /// above the diagonal, with its reflectors.
    ///
    /// # Errors
    /// When a column's `|yᵀΔⱼ|/‖aⱼ‖`, or the deviation from orthogonality, exceeds the bound.
    ///
    /// # Panics
    /// If the shapes do not fit.
    pub fn add(
        &mut self,
        engine: &mut Engine,
        a: MatRef<'_>,
        finished: MatRef<'_>,
        reflectors: &Reflectors,
    ) -> Result<(), Exceeded> {
        let (rows, from, bound) = (a.rows(), self.columns, self.bound());
        assert_eq!(
            (rows, a.cols(), self.turned.len()),
            (finished.rows(), finished.cols(), rows),
            "shapes of a check"
        );
        let (v, t) = (reflectors.v.view(), reflectors.t.view());
        let part = rows - from;
        let y = signs(part);
        let mut there_and_back = Mat::from_columns(part, 1, y.clone());
        qr::apply(engine, v, t, there_and_back.view_mut());
        qr::apply(engine, v, t.t(), there_and_back.view_mut());
        let simd = engine.simd();
        let back = there_and_back.data().iter().zip(&y);
        let off: Vec<f64> = back.map(|(b, y)| b - y).collect();
        self.orthogonality += (compensated(simd, &off, &off) / part as f64).sqrt();
        within(from, self.orthogonality, bound)?;
        qr::apply(
            engine,
            v,
            t,
            MatMut::from_columns(part, 1, &mut self.turned[from..]),
        );
        let y = signs(rows);
        for j in 0..a.cols() {
            let r = &finished.col(j)[..=from + j];
            let column = a.col(j);
            let found = compensated(simd, &y, column) - compensated(simd, &self.turned, r);
            let size = compensated(simd, column, column);
            within(from + j, found.abs(), bound * size.sqrt())?;
            self.found = found.mul_add(found, self.found);
            self.squares += size;
        }
        self.columns += a.cols();
        Ok(())
    }

    /// An estimate of ‖A − QR‖/‖A‖ in Frobenius norms.
    #[must_use]
    pub fn residual(&self) -> f64 {
        self.found.sqrt() / self.squares.sqrt().max(f64::MIN_POSITIVE)
    }
}
