//! Programs of packages, as small shell and Python programs, under the run time of a child.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod container;
mod emits;
mod faults;
mod harness;
mod json_lines;
mod numbers;
mod sharing;
mod state_dir;
