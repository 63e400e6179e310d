//! Conjugate gradients with Jacobi's preconditioner, one iteration at a time.
//!
//! The state is plain data: x, r, p, `r·z`, `r·r` and the iteration. A run that continues from a
//! copy of it, on any machine, gets the bits of the undisturbed run.
//!
//! One iteration: `q = A p`, `α = rz/(p·q)`, `r −= α q`, `x += α p`, `β = rz′/rz`, `p = D⁻¹r + β
//! p`. `passes` says how these are fused.
//!
//! The recurrence's residual keeps falling long after the true one has stopped. Below 2⁻²⁰⁰ of ‖b‖
//! it is *exhausted*: further iterations count and change nothing else. So no long run ends in
//! underflow and a false verdict on the matrix.

use std::sync::Arc;

use crate::engine::Engine;
use crate::passes::{InverseDiagonal, product_dot, update_direction, update_residual};
use crate::reduce::{dot, leaves, norm_inf, norm2};
use crate::sparse::Csr;

pub use crate::state::{HEADER_BYTES, StateError};

/// 2⁻⁴⁰⁰, the square of the relative residual below which the state does not change any more.
pub const EXHAUSTED: f64 = f64::from_bits((1023 - 400) << 52);

/// The reason why a solve cannot start or continue. Rows count from 0.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CgError {
    #[error("the matrix is {rows} x {cols}; conjugate gradients need a square one")]
    NotSquare { rows: usize, cols: usize },
    #[error("the matrix is not symmetric at ({row}, {col})")]
    NotSymmetric { row: usize, col: usize },
    #[error("the diagonal of row {row} is {value}; Jacobi's preconditioner needs a positive one")]
    Diagonal { row: usize, value: f64 },
    #[error("{what} has {found} elements for {expected} unknowns")]
    Length {
        what: &'static str,
        found: usize,
        expected: usize,
    },
    #[error("element {index} of the right-hand side is {value}, not a finite number")]
    RightHandSide { index: usize, value: f64 },
    #[error("the right-hand side is too large: its squared norm overflows")]
    Overflow,
    #[error("not positive definite: p·Ap is {value:e} in iteration {iteration}")]
    NotPositiveDefinite { iteration: u64, value: f64 },
    #[error("{what} became {value} in iteration {iteration}: the numbers overflowed")]
    NotFinite {
        what: &'static str,
        iteration: u64,
        value: f64,
    },
}

/// `A x = b` with the data that every iteration needs.
#[derive(Debug, Clone)]
pub struct CgProblem {
    a: Arc<Csr>,
    b: Vec<f64>,
    inverse: InverseDiagonal,
    bb: f64,
}

impl CgProblem {
    /// Checks that CG can be applied: square, symmetric, positive diagonal, finite `b`.
    ///
    /// # Errors
    /// See [`CgError`].
    pub fn new(a: impl Into<Arc<Csr>>, b: Vec<f64>) -> Result<Self, CgError> {
        let a = a.into();
        let n = a.rows();
        if a.cols() != n {
            return Err(CgError::NotSquare {
                rows: n,
                cols: a.cols(),
            });
        }
        if b.len() != n {
            return Err(CgError::Length {
                what: "the right-hand side",
                found: b.len(),
                expected: n,
            });
        }
        if let Some(index) = b.iter().position(|v| !v.is_finite()) {
            return Err(CgError::RightHandSide {
                index,
                value: b[index],
            });
        }
        if let Some((row, col)) = a.first_asymmetry() {
            return Err(CgError::NotSymmetric { row, col });
        }
        let mut inverse = Vec::with_capacity(n);
        for row in 0..n {
            let value = a.get(row, row).unwrap_or(0.0);
            if value <= 0.0 || !(1.0 / value).is_finite() {
                return Err(CgError::Diagonal { row, value });
            }
            inverse.push(1.0 / value);
        }
        let inverse = match inverse.first() {
            Some(&d) if inverse.iter().all(|v| v.to_bits() == d.to_bits()) => {
                InverseDiagonal::Constant(d)
            }
            _ => InverseDiagonal::PerRow(inverse),
        };
        let bb = dot(&mut Engine::default(), &b, &b);
        if !bb.is_finite() {
            return Err(CgError::Overflow);
        }
        Ok(Self { a, b, inverse, bb })
    }

    /// A.
    #[must_use]
    pub fn matrix(&self) -> &Arc<Csr> {
        &self.a
    }

    /// b, one element a row.
    #[must_use]
    pub fn right_hand_side(&self) -> &[f64] {
        &self.b
    }

    /// Number of unknowns.
    #[must_use]
    pub fn n(&self) -> usize {
        self.b.len()
    }

    /// `b·b`, in the order of [`crate::reduce`].
    #[must_use]
    pub fn squared_norm(&self) -> f64 {
        self.bb
    }

    /// The inverse of the diagonal: one number if all rows share it.
    ///
    /// # Errors
    /// One number per row, if they differ.
    pub fn inverse_diagonal(&self) -> Result<f64, &[f64]> {
        match &self.inverse {
            InverseDiagonal::Constant(d) => Ok(*d),
            InverseDiagonal::PerRow(d) => Err(d),
        }
    }

    fn inverse_at(&self, row: usize) -> f64 {
        match &self.inverse {
            InverseDiagonal::Constant(d) => *d,
            InverseDiagonal::PerRow(d) => d[row],
        }
    }
}

/// The state that suffices to continue. Encoded by [`CgState::to_bytes`].
#[derive(Debug, Clone, PartialEq)]
pub struct CgState {
    pub x: Vec<f64>,
    pub r: Vec<f64>,
    pub p: Vec<f64>,
    /// `r·D⁻¹r`.
    pub rz: f64,
    /// `r·r`, from the recurrence.
    pub rr: f64,
    /// Iterations done.
    pub iteration: u64,
}

impl CgState {
    /// ‖r‖₂/‖b‖₂ of the recurrence, which needs no product. 0 for `b = 0`.
    #[must_use]
    pub fn relative_residual(&self, problem: &CgProblem) -> f64 {
        if problem.bb == 0.0 {
            0.0
        } else {
            (self.rr / problem.bb).sqrt()
        }
    }

    /// Whether further iterations change only their count.
    #[must_use]
    pub fn is_exhausted(&self, problem: &CgProblem) -> bool {
        self.rr <= EXHAUSTED * problem.bb || self.rz == 0.0
    }

    fn check(&self, n: usize) -> Result<(), CgError> {
        for (what, v) in [
            ("x of the state", &self.x),
            ("r of the state", &self.r),
            ("p of the state", &self.p),
        ] {
            if v.len() != n {
                return Err(CgError::Length {
                    what,
                    found: v.len(),
                    expected: n,
                });
            }
        }
        Ok(())
    }
}

/// Scratch that is not part of the state: `q`, partial sums, and the engine.
#[derive(Debug)]
pub struct CgWork {
    engine: Engine,
    q: Vec<f64>,
    dots: Vec<[f64; 1]>,
    pairs: Vec<[f64; 2]>,
}

impl CgWork {
    /// One thread.
    #[must_use]
    pub fn new(problem: &CgProblem) -> Self {
        Self::with_engine(problem, Engine::default())
    }

    /// The threads and instruction set of `engine`.
    #[must_use]
    pub fn with_engine(problem: &CgProblem, engine: Engine) -> Self {
        let n = problem.n();
        Self {
            engine,
            q: vec![0.0; n],
            dots: vec![[0.0]; leaves(n)],
            pairs: vec![[0.0; 2]; leaves(n)],
        }
    }

    /// The engine.
    pub fn engine(&mut self) -> &mut Engine {
        &mut self.engine
    }
}

/// The state before the first iteration, from `x = 0`.
#[must_use]
pub fn init(problem: &CgProblem) -> CgState {
    let r = problem.b.clone();
    let p: Vec<f64> = r
        .iter()
        .enumerate()
        .map(|(i, v)| v * problem.inverse_at(i))
        .collect();
    let rz = dot(&mut Engine::default(), &r, &p);
    CgState {
        x: vec![0.0; r.len()],
        r,
        p,
        rz,
        rr: problem.bb,
        iteration: 0,
    }
}

/// Computes one iteration.
///
/// # Errors
/// A breakdown. If the matrix proved indefinite or α was not finite, the state is unchanged. If `r`
/// overflowed the state is damaged, and the last copy must be used.
pub fn step(problem: &CgProblem, state: &mut CgState, work: &mut CgWork) -> Result<(), CgError> {
    let n = problem.n();
    state.check(n)?;
    if work.q.len() != n {
        return Err(CgError::Length {
            what: "the scratch",
            found: work.q.len(),
            expected: n,
        });
    }
    let iteration = state.iteration + 1;
    let finite = |what: &'static str, value: f64| {
        if value.is_finite() {
            Ok(value)
        } else {
            Err(CgError::NotFinite {
                what,
                iteration,
                value,
            })
        }
    };
    if state.is_exhausted(problem) {
        state.iteration = iteration;
        return Ok(());
    }
    let CgWork {
        engine,
        q,
        dots,
        pairs,
    } = work;
    let pq = finite("p·Ap", product_dot(engine, &problem.a, &state.p, q, dots))?;
    if pq <= 0.0 {
        return Err(CgError::NotPositiveDefinite {
            iteration,
            value: pq,
        });
    }
    let alpha = finite("α", state.rz / pq)?;
    let (rz, rr) = update_residual(engine, alpha, &problem.inverse, q, &mut state.r, pairs);
    let (rz, rr) = (finite("r·z", rz)?, finite("r·r", rr)?);
    let beta = finite("β", rz / state.rz)?;
    update_direction(
        engine,
        (alpha, beta),
        &problem.inverse,
        &state.r,
        &mut state.x,
        &mut state.p,
    );
    state.rz = rz;
    state.rr = rr;
    state.iteration = iteration;
    Ok(())
}

/// The quality of a solution, from `b − A x` itself.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Accuracy {
    /// ‖b − Ax‖₂/‖b‖₂; 0 for `b = 0` and `x = 0`.
    pub true_residual: f64,
    /// η = ‖b − Ax‖∞/(‖A‖∞‖x‖∞ + ‖b‖∞) (Rigal and Gaches), the size of the smallest change of A
    /// and b for which x is exact.
    pub backward_error: f64,
}

/// Computes one product. Meant for the end of a solve or an occasional check.
///
/// # Errors
/// `x` has the wrong length.
pub fn accuracy(problem: &CgProblem, x: &[f64], work: &mut CgWork) -> Result<Accuracy, CgError> {
    if x.len() != problem.n() {
        return Err(CgError::Length {
            what: "x",
            found: x.len(),
            expected: problem.n(),
        });
    }
    let mut d = vec![0.0; problem.n()];
    problem.a.spmv_with(&mut work.engine, x, &mut d);
    for (d, b) in d.iter_mut().zip(&problem.b) {
        *d = b - *d;
    }
    let ratio = |above: f64, below: f64| if above == 0.0 { 0.0 } else { above / below };
    let scale = problem.a.norm_inf() * norm_inf(x) + norm_inf(&problem.b);
    Ok(Accuracy {
        true_residual: ratio(norm2(&mut work.engine, &d), problem.bb.sqrt()),
        backward_error: ratio(norm_inf(&d), scale),
    })
}
