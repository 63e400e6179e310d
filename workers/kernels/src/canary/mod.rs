//! Canaries: small computations that show which numeric contract a machine can keep.
//!
//! A suite has a version ([`SUITE`]) and fixed cases. Each case gives a digest of its result's
//! bits, which must equal the golden one (*bitwise*). It also gives an observed error divided by
//! the textbook's bound (*bounded*: at most 1). The inputs are made from integers and exact
//! operations, so they are the same everywhere. The tests recompute the golden digests by plain
//! scalar loops that follow the definitions (`reference.rs`).
//!
//! The cases cover products whose inner dimension crosses the edge of a block
//! ([`crate::dense::gemm::DEPTH`]), and sums that cancel. They cover results below the normal
//! range, which a machine may flush to zero, and signs of zeros. They cover pivots that tie,
//! reflectors, substitution, fixed trees of sums, and rows of a sparse product. The last case
//! combines them in 20 steps of CG.
//!
//! [`device`] computes them on an accelerator, as far as it has the operations.

mod bounds;
pub mod device;
mod inputs;
#[cfg(test)]
mod reference;

use crate::cg::{self, CgProblem, CgState, CgWork};
use crate::dense::{Into, Mat, gemm, lu, qr, triangular};
use crate::engine::Engine;
use crate::reduce;

/// Version of the suite: it changes with any case, input or golden digest.
pub const SUITE: u32 = 1;

/// The result of a case.
#[derive(Debug, Clone, PartialEq)]
pub struct Found {
    /// Its name.
    pub name: &'static str,
    /// BLAKE3-256 of the result's f64s, little endian, in order. All zeros without a result.
    pub digest: [u8; 32],
    /// Observed error divided by its bound. NaN without a result.
    pub error: f64,
    /// The reason for a missing result.
    pub failure: Option<String>,
}

impl Found {
    fn of(name: &'static str, computed: Computed) -> Self {
        match computed {
            Ok((values, error)) => Self {
                name,
                digest: crate::digest(&values),
                error,
                failure: None,
            },
            Err(failure) => Self {
                name,
                digest: [0; 32],
                error: f64::NAN,
                failure: Some(failure),
            },
        }
    }

    /// Whether the bits equal the golden ones.
    #[must_use]
    pub fn is_bitwise(&self) -> bool {
        self.failure.is_none()
            && golden(self.name) == Some(blake3::Hash::from_bytes(self.digest).to_hex().as_str())
    }

    /// Whether the error is within its bound.
    #[must_use]
    pub fn is_bounded(&self) -> bool {
        self.failure.is_none() && self.error <= 1.0
    }
}

/// The numbers of a case, and its error divided by its bound.
type Computed = Result<(Vec<f64>, f64), String>;

/// A case: its name and its computation.
struct Case {
    name: &'static str,
    golden: &'static str,
    compute: fn(&mut Engine) -> Computed,
}

const CASES: [Case; 13] = [
    Case {
        name: "gemm-511",
        golden: "8a76e22c10e3ec470b90d212be3bb2e0df255c40ceefad4007d33c4bf92e8d24",
        compute: |e| product(e, 511),
    },
    Case {
        name: "gemm-512",
        golden: "fc0b16f1675516d9872202812072397d6569ae303cb2c821e23f4f315c3f41e6",
        compute: |e| product(e, 512),
    },
    Case {
        name: "gemm-513",
        golden: "0f44404828e3d6d2545a31d9606c6abb32963baff4e9f53704a0d5bdaad9bd8b",
        compute: |e| product(e, 513),
    },
    Case {
        name: "gemm-1025",
        golden: "5a9d65137ebbcd26d15c2168dff012a9f3a1574285e8c62fa18e719660ef48e5",
        compute: |e| product(e, 1025),
    },
    Case {
        name: "gemm-cancellation",
        golden: "aeb8c290d1e06ea0ef6f34a0f5323be194fc77ee8fd3619c10f99d8d914ed3c9",
        compute: |e| of_product(e, inputs::cancelling(), Into::Replace),
    },
    Case {
        name: "gemm-denormals",
        golden: "d5f2c3f528f1fce7f54941e9d95c66869c7febcc47aa1285c0fd224be58b2499",
        compute: |e| of_product(e, inputs::denormal(), Into::Add),
    },
    Case {
        name: "gemm-zeros",
        golden: "815fa00d35f9e849440c67cc2107de0f80e846a3c5f9732fb361a557e2ee7ce7",
        compute: |e| of_product(e, inputs::zeros(), Into::Subtract),
    },
    Case {
        name: "lu-panel-ties",
        golden: "6c46e38fd9206b9709b5e88c6296e6c6abe7bfe828cbf3acb91aff1abf9c6d1d",
        compute: lu_panel,
    },
    Case {
        name: "qr-panel",
        golden: "f14fe643f28cd344ea110de5cc238309f22e8be616a6a93079c67b11b9d9eda2",
        compute: qr_panel,
    },
    Case {
        name: "triangular-solve",
        golden: "8ce5c6d3115a5e2584f74281e89b282c488e26da441360ccdabbdcb16717d6b9",
        compute: solve,
    },
    Case {
        name: "dot",
        golden: "20eb400d9bf8c9271262bc6c914c82a54d45fa2a16cc404fb658f15f3d033a03",
        compute: dots,
    },
    Case {
        name: "spmv",
        golden: "fa5b3a871d4bcad3ab749edc9dd75221b4c311f0d9c5f6b5a232333958b45de0",
        compute: sparse_product,
    },
    Case {
        name: "cg-20",
        golden: "03ac04c4d2963adeeba96df74ad303e0746e5165a523071890d0cfb71668cc45",
        compute: twenty_steps,
    },
];

/// Names of the cases, in order.
pub fn names() -> impl ExactSizeIterator<Item = &'static str> {
    CASES.iter().map(|case| case.name)
}

/// The golden digest of a case, in lower-case hexadecimal.
#[must_use]
pub fn golden(name: &str) -> Option<&'static str> {
    let case = CASES.iter().find(|case| case.name == name)?;
    Some(case.golden)
}

/// Computes the case of this index. None beyond the last case.
#[must_use]
pub fn run(index: usize, engine: &mut Engine) -> Option<Found> {
    let case = CASES.get(index)?;
    Some(Found::of(case.name, (case.compute)(engine)))
}

fn product(engine: &mut Engine, depth: usize) -> Computed {
    of_product(engine, inputs::factors(depth), Into::Subtract)
}

fn of_product(engine: &mut Engine, input: inputs::Product, into: Into) -> Computed {
    let inputs::Product { a, b, c } = input;
    let mut found = c.clone();
    gemm(engine, a.view(), b.view(), into, found.view_mut());
    let error = bounds::product(&a, &b, into, &c, &found);
    Ok((found.into_data(), error))
}

fn lu_panel(engine: &mut Engine) -> Computed {
    let a = inputs::ties();
    let mut factors = a.clone();
    let mut pivots = vec![0; a.cols()];
    lu::panel(engine, factors.view_mut(), &mut pivots).map_err(|e| e.to_string())?;
    let error = bounds::lu(&a, &factors, &pivots);
    let mut values = factors.into_data();
    values.extend(pivots.iter().map(|p| *p as f64));
    Ok((values, error))
}

fn qr_panel(engine: &mut Engine) -> Computed {
    let a = inputs::tall();
    let mut factors = a.clone();
    let reflectors = qr::panel(engine, factors.view_mut()).map_err(|e| e.to_string())?;
    let error = bounds::qr(&a, &factors, &reflectors);
    let mut values = factors.into_data();
    values.extend_from_slice(reflectors.t.data());
    Ok((values, error))
}

fn solve(engine: &mut Engine) -> Computed {
    let (l, b) = inputs::triangle();
    let mut x = b.clone();
    triangular::solve_unit_lower(engine, l.view(), x.view_mut());
    let error = bounds::solve(&l, &x, &b);
    Ok((x.into_data(), error))
}

fn dots(engine: &mut Engine) -> Computed {
    let mut values = Vec::new();
    let mut error = 0.0f64;
    for n in inputs::DOTS {
        let (a, b) = inputs::vectors(n);
        let found = reduce::dot(engine, &a, &b);
        error = error.max(bounds::dot(&a, &b, found));
        values.push(found);
    }
    Ok((values, error))
}

fn sparse_product(engine: &mut Engine) -> Computed {
    let a = inputs::irregular().map_err(|e| e.to_string())?;
    let x = inputs::vectors(a.cols()).0;
    let mut y = vec![0.0; a.rows()];
    a.spmv_with(engine, &x, &mut y);
    let error = bounds::sparse(&a, &x, &y);
    Ok((y, error))
}

/// Steps of CG in its case.
const STEPS: u64 = 20;

fn twenty_steps(engine: &mut Engine) -> Computed {
    let (a, b) = inputs::system().map_err(|e| e.to_string())?;
    let problem = CgProblem::new(a, b).map_err(|e| e.to_string())?;
    // Scratch owns its engine. The caller's engine gives the instruction set.
    let mut work = CgWork::with_engine(&problem, Engine::with_simd(engine.simd()));
    let mut state: CgState = cg::init(&problem);
    for _ in 0..STEPS {
        cg::step(&problem, &mut state, &mut work).map_err(|e| e.to_string())?;
    }
    after_steps(&problem, state, &mut work)
}

fn after_steps(problem: &CgProblem, state: CgState, work: &mut CgWork) -> Computed {
    let accuracy = cg::accuracy(problem, &state.x, work).map_err(|e| e.to_string())?;
    let error = bounds::recurrence(state.relative_residual(problem), accuracy.true_residual);
    let mut values = state.x;
    values.extend(state.r);
    values.extend([state.rz, state.rr]);
    Ok((values, error))
}

/// A matrix from `f(row, column)`, by columns.
fn matrix(rows: usize, cols: usize, f: impl FnMut(usize, usize) -> f64) -> Mat {
    Mat::from_fn(rows, cols, f)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Level, Simd};

    #[test]
    fn every_engine_keeps_both_contracts() {
        let mut engines: Vec<Engine> = [1, 2, 3].map(|n| Engine::new(n).unwrap()).into();
        engines.extend(
            [Level::Portable, Level::Avx2, Level::Avx512]
                .map(|level| Engine::with_simd(Simd::at_most(level))),
        );
        for engine in &mut engines {
            for index in 0..CASES.len() {
                let found = run(index, engine).unwrap();
                assert!(found.is_bitwise(), "{found:?} {engine:?}");
                assert!(found.is_bounded(), "{found:?} {engine:?}");
            }
        }
        assert!(run(CASES.len(), &mut engines[0]).is_none());
    }

    #[test]
    fn one_wrong_bit_breaks_the_digest_and_a_wrong_number_the_bound() {
        let mut engine = Engine::default();
        let good = run(0, &mut engine).unwrap();
        let mut flipped = good.clone();
        flipped.digest[7] ^= 1;
        assert!(good.is_bitwise() && !flipped.is_bitwise());
        let inputs::Product { a, b, c } = inputs::factors(513);
        let mut wrong = c.clone();
        gemm(
            &mut engine,
            a.view(),
            b.view(),
            Into::Subtract,
            wrong.view_mut(),
        );
        wrong.view_mut().col_mut(0)[0] *= 1.0 + 1e-9;
        assert!(bounds::product(&a, &b, Into::Subtract, &c, &wrong) > 1.0);
    }

    #[test]
    fn the_denormals_are_denormal_and_the_zeros_have_both_signs() {
        let mut engine = Engine::default();
        let (values, _) = of_product(&mut engine, inputs::denormal(), Into::Add).unwrap();
        let denormal = values.iter().filter(|v| v.is_subnormal()).count();
        assert!(
            denormal > values.len() / 2,
            "{denormal} of {}",
            values.len()
        );
        let (values, _) = of_product(&mut engine, inputs::zeros(), Into::Subtract).unwrap();
        let negative = |v: &&f64| **v == 0.0 && v.is_sign_negative();
        let positive = |v: &&f64| **v == 0.0 && v.is_sign_positive();
        assert!(values.iter().any(|v| negative(&v)) && values.iter().any(|v| positive(&v)));
    }

    #[test]
    fn pivots_tie_in_the_panel() {
        let a = inputs::ties();
        let column = a.col(0);
        let largest = column.iter().fold(0.0f64, |m, v| m.max(v.abs()));
        assert!(column.iter().filter(|v| v.abs() == largest).count() > 1);
    }
}
