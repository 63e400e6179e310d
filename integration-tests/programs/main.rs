//! Programs of every kind: built in, pushed, in Python, in containers, on devices, without servers.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../stage/mod.rs"]
mod stage;

mod chart;
mod client;
mod container;
mod containers;
mod dense;
mod device;
mod environment;
mod frozen_children;
mod last_messages;
mod local;
mod manifests;
mod programs;
mod python;
mod python_moves;
mod python_program;
mod python_spread;
mod slurm;
mod stuck;
mod time_limits;
