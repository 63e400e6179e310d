#![allow(clippy::unwrap_used, clippy::expect_used)]
//! Speed of the dense kernels in GFLOP/s.
//!
//! `cargo run --release -p fiec-kernels --example dense_speed [N [BLOCK [ROUNDS]]]`

use std::time::Instant;

use fiec_kernels::dense::{Into, Mat, gemm, lu};
use fiec_kernels::digest_hex;
use fiec_kernels::engine::Engine;
use fiec_kernels::rhs::load_case;

fn main() {
    let mut args = std::env::args()
        .skip(1)
        .map(|a| a.parse::<usize>().unwrap());
    let n = args.next().unwrap_or(2048);
    let block = args.next().unwrap_or(256);
    let rounds = args.next().unwrap_or(5);
    let a = Mat::from_columns(n, n, load_case(1, 1, n * n));
    let b = Mat::from_columns(n, n, load_case(2, 1, n * n));
    let cubed = (n as f64).powi(3);
    for threads in [1, 2] {
        let mut engine = Engine::new(threads).unwrap();
        let mut c = Mat::zeros(n, n);
        best("gemm", threads, rounds, 2.0 * cubed, || {
            gemm(&mut engine, a.view(), b.view(), Into::Replace, c.view_mut());
            digest_hex(c.data())
        });
        best("lu", threads, rounds, 2.0 / 3.0 * cubed, || {
            let mut f = a.clone();
            lu::factor(&mut engine, f.view_mut(), block).unwrap();
            digest_hex(f.data())
        });
    }
}

fn best(name: &str, threads: usize, rounds: usize, flops: f64, mut run: impl FnMut() -> String) {
    let mut digest = run();
    let mut seconds = f64::INFINITY;
    for _ in 0..rounds {
        let start = Instant::now();
        digest = run();
        seconds = seconds.min(start.elapsed().as_secs_f64());
    }
    println!(
        "{name} {threads} thread(s): {:.1} GFLOP/s {}",
        flops / seconds * 1e-9,
        &digest[..16]
    );
}
