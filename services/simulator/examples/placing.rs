//! How fast the policy places, without the command around it:
//! `cargo run --release -p fiec-simulator --example placing`. `fiec bench policy` is the same with
//! memory and growth.
#![allow(clippy::unwrap_used, reason = "it ends where it cannot measure")]

use std::time::Instant;

use fiec_simulator::placements::{Asks, Bench};

fn main() {
    for nodes in [100u32, 1_000, 10_000] {
        let mut bench = Bench::new(nodes, &Asks::default()).unwrap();
        let count = 2 * nodes.min(2_500);
        let mut took: Vec<f64> = (0..count)
            .map(|_| {
                let began = Instant::now();
                bench.place().unwrap();
                began.elapsed().as_secs_f64() * 1e6
            })
            .collect();
        took.sort_by(f64::total_cmp);
        let mean = took.iter().sum::<f64>() / took.len() as f64;
        let p99 = took[took.len() * 99 / 100];
        println!(
            "{nodes:>6} nodes  {:>9.0} placements/s  p99 {p99:>7.0} us",
            1e6 / mean
        );
    }
}
