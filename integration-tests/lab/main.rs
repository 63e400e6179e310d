//! The lab: experiments, simulation and replay, benches against another build, `fiec up`.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../stage/mod.rs"]
mod stage;

mod bench_against;
mod experiments;
mod simulate_and_replay;
mod up;
