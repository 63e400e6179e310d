#![allow(clippy::unwrap_used, clippy::expect_used)]
//! Iterations to 1e-10 on BCSSTK16, time per iteration, and iterations/s of Poisson 1000².
//!
//! `cargo run --release -p fiec-kernels --example cg_speed [THREADS]`

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use fiec_kernels::cg::{CgProblem, CgState, CgWork, accuracy, init, step};
use fiec_kernels::engine::Engine;
use fiec_kernels::rhs::right_hand_side;
use fiec_kernels::sparse::Csr;
use fiec_kernels::{digest_hex, matrix_market, poisson};

fn main() -> Result<(), Box<dyn Error>> {
    let threads = std::env::args().nth(1).map_or(Ok(1), |t| t.parse())?;
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/data/bcsstk16.mtx");
    let start = Instant::now();
    let a = matrix_market::read_symmetric_positive_definite_candidate(&path)?;
    println!(
        "bcsstk16: read in {:.1} ms",
        start.elapsed().as_secs_f64() * 1e3
    );
    for case in [0, 1] {
        solve(&a, case, threads)?;
    }
    rate("bcsstk16", a, threads, 900)?;

    let start = Instant::now();
    let a = poisson::poisson_2d(1000, 1000)?;
    println!(
        "poisson 1000²: made in {:.1} ms, {} repeated rows",
        start.elapsed().as_secs_f64() * 1e3,
        a.repeated_rows()
    );
    rate(
        "poisson 1000², rows as stored",
        a.clone().without_runs(),
        threads,
        300,
    )?;
    rate("poisson 1000², runs", a, threads, 600)?;
    rate(
        "poisson 100³, runs",
        poisson::poisson_3d(100, 100, 100)?,
        threads,
        300,
    )
}

fn solve(a: &Csr, case: u64, threads: usize) -> Result<(), Box<dyn Error>> {
    let problem = CgProblem::new(a.clone(), right_hand_side(a, case, 1))?;
    let mut work = CgWork::with_engine(&problem, Engine::new(threads)?);
    let mut state = init(&problem);
    while state.relative_residual(&problem) > 1e-10 {
        step(&problem, &mut state, &mut work)?;
    }
    let good = accuracy(&problem, &state.x, &mut work)?;
    println!(
        "bcsstk16 case {case}: {} iterations to 1e-10, true residual {:.2e}, backward error {:.2e}, x {}",
        state.iteration,
        good.true_residual,
        good.backward_error,
        digest_hex(&state.x)
    );
    Ok(())
}

/// Best of five runs; also what encoding the state costs.
fn rate(name: &str, a: Csr, threads: usize, iterations: u64) -> Result<(), Box<dyn Error>> {
    let b = right_hand_side(&a, 1, 1);
    let problem = CgProblem::new(a, b)?;
    let mut work = CgWork::with_engine(&problem, Engine::new(threads)?);
    let mut best = f64::INFINITY;
    let mut state = init(&problem);
    for _ in 0..5 {
        state = init(&problem);
        step(&problem, &mut state, &mut work)?;
        let start = Instant::now();
        for _ in 0..iterations {
            step(&problem, &mut state, &mut work)?;
        }
        best = best.min(start.elapsed().as_secs_f64() / iterations as f64);
    }
    let exhausted = if state.is_exhausted(&problem) {
        ", EXHAUSTED: figure void"
    } else {
        ""
    };
    println!(
        "{name}: {:.4} ms/iteration, {:.0} iterations/s, {threads} thread(s){exhausted}",
        best * 1e3,
        1.0 / best
    );
    let mut bytes = Vec::new();
    state.write_bytes(&mut bytes);
    let start = Instant::now();
    state.write_bytes(&mut bytes);
    let wrote = start.elapsed();
    let start = Instant::now();
    let back = CgState::from_bytes(&bytes)?;
    println!(
        "  state {} bytes: encoded in {wrote:.1?}, decoded in {:.1?}",
        bytes.len(),
        start.elapsed()
    );
    assert!(back == state, "the state did not survive its encoding");
    Ok(())
}
