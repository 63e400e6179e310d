//! `bench kernels`: the cost of reproducible bits. Our kernels against those of faer, and our
//! conjugate gradients against the plain loop, in turns in this process, without server or child.
//!
//! The bits of faer's factorizations may depend on the number of threads. Ours must not: a run in
//! which they do fails. `reproducibility_cost` is how much longer ours take, in per cent; it is
//! negative if ours are faster. faer takes minutes to compile and nothing else needs it, so only the
//! feature `faer` compiles it. Without it the dense kernels have no floor.

use std::time::Instant;

use anyhow::{Context as _, ensure};
use fiec_kernels::cg::{self, CgProblem, CgWork};
use fiec_kernels::dense::{Into, Mat, gemm, lu, qr};
use fiec_kernels::engine::Engine;
use fiec_kernels::rhs::{load_case, right_hand_side};
use fiec_kernels::sparse::Csr;
use fiec_kernels::{digest_hex, matrix_market, poisson};

use super::Lab;
use super::figures::median;
use super::library::Library;

/// Order of the dense matrices.
const N: usize = 2048;
/// Block columns: the defaults of `lu@1` and `qr@1`.
const LU_BLOCK: usize = 256;
const QR_BLOCK: usize = 128;

/// A dense kernel.
#[derive(Debug, Clone, Copy)]
pub enum Kernel {
    /// C = A·B.
    Gemm,
    /// PA = LU.
    Lu,
    /// A = QR.
    Qr,
}

/// Runs the bench: `gflops` of GEMM, LU and QR of order 2048 with 1 and 2 threads, floor = faer;
/// `iterations_per_s` of conjugate gradients, floor = the plain loop.
///
/// # Errors
/// When a kernel fails, or its bits depend on the number of threads.
pub async fn run(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    let rounds = if lab.quick { 3 } else { 15 };
    if let Err(why) = Library::available() {
        lab.left_out("faer's own GEMM, LU and QR, the floor of ours", why);
    }
    for (name, kernel, work) in [
        ("gemm", Kernel::Gemm, 2.0),
        ("lu", Kernel::Lu, 2.0 / 3.0),
        ("qr", Kernel::Qr, 4.0 / 3.0),
    ] {
        let operations = work * (N as f64).powi(3) * 1e-9;
        let mut digests = Vec::new();
        for threads in [1, 2] {
            lab.steps_message(&format!("{name}, {threads} thread(s), {rounds} rounds"));
            let pairs = tokio::task::spawn_blocking(move || dense(kernel, threads, rounds));
            let Pairs {
                ours,
                theirs,
                digest,
            } = pairs.await??;
            let case = format!("{name} {N}, {threads} thread(s)");
            add(lab, &case, "gflops", "GFLOP/s", operations, &ours, &theirs);
            digests.push(digest);
        }
        ensure!(
            digests.iter().all(|d| *d == digests[0]),
            "{name} gave other bits with other threads: {digests:?}"
        );
    }
    let matrix = crate::demo::matrix()?;
    for name in ["bcsstk16", "poisson 1000x1000"] {
        lab.steps_message(&format!("cg, {name}, {rounds} rounds"));
        let file = matrix.clone();
        let pairs = tokio::task::spawn_blocking(move || {
            let (a, iterations) = if name == "bcsstk16" {
                let a = matrix_market::read_symmetric_positive_definite_candidate(file)?;
                (a, 200)
            } else {
                (poisson::poisson_2d(1000, 1000)?, 40)
            };
            let pairs = solves(&a, iterations, rounds)?;
            anyhow::Ok((pairs, f64::from(iterations)))
        });
        let (Pairs { ours, theirs, .. }, iterations) = pairs.await??;
        let case = format!("cg {name}, 1 thread");
        add(
            lab,
            &case,
            "iterations_per_s",
            "1/s",
            iterations,
            &ours,
            &theirs,
        );
    }
    Ok(())
}

/// Seconds of each turn, and the digest of our result.
struct Pairs {
    ours: Vec<f64>,
    theirs: Vec<f64>,
    digest: String,
}

/// Adds a rate and its cost. The machine's speed drifts, so the ratio is the median of the pairs'
/// ratios, not the ratio of the medians.
fn add(
    lab: &mut Lab<'_>,
    case: &str,
    metric: &str,
    unit: &str,
    work: f64,
    ours: &[f64],
    theirs: &[f64],
) {
    let rates = |times: &[f64]| times.iter().map(|s| work / s).collect::<Vec<f64>>();
    if theirs.is_empty() {
        let rate = median(&mut rates(ours));
        lab.figures.add("kernels", case, metric, unit, rate, None);
        return;
    }
    let mut ratios: Vec<f64> = theirs.iter().zip(ours).map(|(t, o)| t / o).collect();
    let (ratio, floor) = (median(&mut ratios), median(&mut rates(theirs)));
    lab.figures
        .add("kernels", case, metric, unit, floor * ratio, Some(floor));
    let cost = 100.0 * (1.0 / ratio - 1.0);
    lab.figures
        .add("kernels", case, "reproducibility_cost", "%", cost, None);
}

/// The time of `run`, in seconds.
pub fn seconds(run: impl FnOnce()) -> f64 {
    let start = Instant::now();
    run();
    start.elapsed().as_secs_f64()
}

/// Runs each side once a turn. A first turn does not count.
fn dense(kernel: Kernel, threads: usize, rounds: usize) -> anyhow::Result<Pairs> {
    let random = |seed| Mat::from_columns(N, N, load_case(1, seed, N * N));
    let (a, b) = (random(1), random(2));
    let mut library = Library::new(kernel, threads, &a, &b);
    let mut c = Mat::zeros(N, N);
    let mut engine = Engine::new(threads)?;
    let mut pairs = Pairs {
        ours: Vec::new(),
        theirs: Vec::new(),
        digest: String::new(),
    };
    for round in 0..=rounds {
        let theirs = library.turn();
        let mut failed = None;
        // faer's side also copies the matrix that it factors.
        let ours = seconds(|| match kernel {
            Kernel::Gemm => gemm(&mut engine, a.view(), b.view(), Into::Replace, c.view_mut()),
            Kernel::Lu => {
                c = a.clone();
                failed = lu::factor(&mut engine, c.view_mut(), LU_BLOCK)
                    .err()
                    .map(|error| error.to_string());
            }
            Kernel::Qr => {
                c = a.clone();
                failed = qr::factor(&mut engine, c.view_mut(), QR_BLOCK)
                    .err()
                    .map(|error| error.to_string());
            }
        });
        if let Some(error) = failed {
            anyhow::bail!("{kernel:?}: {error}");
        }
        if round > 0 {
            pairs.ours.push(ours);
            pairs.theirs.extend(theirs);
        }
    }
    library.compare(&c)?;
    pairs.digest = digest_hex(c.data());
    Ok(pairs)
}

/// Runs `iterations` of ours and of the plain loop, in turns.
fn solves(a: &Csr, iterations: u32, rounds: usize) -> anyhow::Result<Pairs> {
    let b = right_hand_side(a, 1, 1);
    let problem = CgProblem::new(a.clone(), b.clone())?;
    let mut pairs = Pairs {
        ours: Vec::new(),
        theirs: Vec::new(),
        digest: String::new(),
    };
    for round in 0..=rounds {
        let mut work = CgWork::new(&problem);
        let mut state = cg::init(&problem);
        let mut failed = None;
        let ours = seconds(|| {
            for _ in 0..iterations {
                failed = cg::step(&problem, &mut state, &mut work).err();
            }
        });
        if let Some(error) = failed {
            return Err(error).context("conjugate gradients");
        }
        let mut plain = Plain::new(a, &b);
        let theirs = seconds(|| {
            for _ in 0..iterations {
                plain.step();
            }
        });
        // Both solve the same system, so the same number of steps leaves the same residual.
        let (ours_left, left) = (state.rr.sqrt(), plain.rr.sqrt());
        ensure!(
            ours_left <= 10.0 * left + 1e-6 && left <= 10.0 * ours_left + 1e-6,
            "the plain loop has a residual of {left:e}, ours one of {ours_left:e}"
        );
        if round > 0 {
            pairs.ours.push(ours);
            pairs.theirs.push(theirs);
        }
    }
    Ok(pairs)
}

/// Plain conjugate gradients with Jacobi's preconditioner: arrays and loops, and sums in the fastest
/// order.
struct Plain {
    row_ptr: Vec<usize>,
    col_idx: Vec<u32>,
    values: Vec<f64>,
    inverse: Vec<f64>,
    x: Vec<f64>,
    r: Vec<f64>,
    z: Vec<f64>,
    p: Vec<f64>,
    q: Vec<f64>,
    rz: f64,
    rr: f64,
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut lanes = [0.0; 8];
    let ((a, a_tail), (b, b_tail)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    for (a, b) in a.iter().zip(b) {
        for l in 0..8 {
            lanes[l] += a[l] * b[l];
        }
    }
    let tail: f64 = a_tail.iter().zip(b_tail).map(|(a, b)| a * b).sum();
    lanes.iter().sum::<f64>() + tail
}

impl Plain {
    fn new(a: &Csr, b: &[f64]) -> Self {
        let n = a.rows();
        let (mut row_ptr, mut col_idx, mut values) = (vec![0], Vec::new(), Vec::new());
        for row in 0..n {
            let (cols, entries) = a.row(row);
            col_idx.extend_from_slice(cols);
            values.extend_from_slice(entries);
            row_ptr.push(values.len());
        }
        let inverse: Vec<f64> = (0..n).map(|i| 1.0 / a.get(i, i).unwrap_or(1.0)).collect();
        let z: Vec<f64> = b.iter().zip(&inverse).map(|(b, d)| b * d).collect();
        Self {
            row_ptr,
            col_idx,
            values,
            inverse,
            x: vec![0.0; n],
            r: b.to_vec(),
            p: z.clone(),
            rz: dot(b, &z),
            rr: dot(b, b),
            z,
            q: vec![0.0; n],
        }
    }

    fn step(&mut self) {
        for (row, q) in self.q.iter_mut().enumerate() {
            let range = self.row_ptr[row]..self.row_ptr[row + 1];
            let mut sum = 0.0;
            for (col, value) in self.col_idx[range.clone()].iter().zip(&self.values[range]) {
                sum += value * self.p[*col as usize];
            }
            *q = sum;
        }
        let alpha = self.rz / dot(&self.p, &self.q);
        for i in 0..self.x.len() {
            self.x[i] += alpha * self.p[i];
            self.r[i] -= alpha * self.q[i];
            self.z[i] = self.r[i] * self.inverse[i];
        }
        let rz = dot(&self.r, &self.z);
        self.rr = dot(&self.r, &self.r);
        let beta = rz / self.rz;
        self.rz = rz;
        for (p, z) in self.p.iter_mut().zip(&self.z) {
            *p = *z + beta * *p;
        }
    }
}
