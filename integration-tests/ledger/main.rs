//! The ledger and what is made of it: losses, restarts, garbage, bounds, first bindings, verification.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../stage/mod.rs"]
mod stage;

mod bounds;
mod broker_restart;
mod clocks;
mod cluster;
mod dice;
mod empty_store;
mod entrusted;
mod forged_histories;
mod forged_observations;
mod garbage;
mod history;
mod lost_tail;
mod partition;
mod policies;
mod references;
mod slow_commits;
mod trust;
