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

/// Held by each test that puts real pressure on its nodes, so that these run one after the other.
static ONE_AT_A_TIME: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
