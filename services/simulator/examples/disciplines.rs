//! The disciplines on one trace after another, without the command around it:
//! `cargo run --release -p fiec-simulator --example disciplines -- SEEDS LOAD START_MS JOBS NODES`.
//! `fiec bench disciplines` is the same in its tables, and with real processes.
#![allow(clippy::unwrap_used, reason = "it ends where it cannot measure")]

use fiec_simulator::disciplines::{Discipline, Trace};

fn main() {
    let mut numbers = std::env::args().skip(1);
    let mut next = |other: f64| numbers.next().map_or(other, |n| n.parse().unwrap());
    let (seeds, load, start_ms, jobs) = (next(3.0), next(0.85), next(10_000.0), next(2_000.0));
    let nodes = next(4.0) as u32;
    for seed in 1..=seeds as u64 {
        for discipline in Discipline::ALL {
            let trace = Trace {
                seed,
                load,
                start_ms: start_ms as u64,
                nodes,
                jobs: jobs as u64,
            };
            let s = trace.play(discipline).unwrap();
            println!(
                "seed {seed} {discipline:>15}: mean {:>8.0} s  p50 {:>7.0} s  p95 {:>8.0} s  gave way {:>6}  \
                 utilization {:.3}  makespan {:>9.0} s  ({:.1} s, {} steps)",
                s.lasted.mean_ms / 1e3,
                s.lasted.p50_ms / 1e3,
                s.lasted.p95_ms / 1e3,
                s.preemptions,
                s.utilization,
                s.makespan_ms / 1e3,
                s.wall_s,
                s.steps
            );
        }
    }
}
