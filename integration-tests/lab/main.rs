//! The lab: the demo, experiments, simulation and replay, benches against another build, `fiec up`.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../stage/mod.rs"]
mod stage;

mod bench_against;
mod chaos;
mod demo;
mod experiments;
mod simulate_and_replay;
mod up;

/// Tests that hold the same one run one after the other.
type Lock = tokio::sync::Mutex<()>;

/// Held by each test that puts real pressure on the memory or the processors of its nodes.
static HOST: Lock = Lock::const_new(());
