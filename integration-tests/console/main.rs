//! The console in a real browser, against a real cluster.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../stage/mod.rs"]
mod stage;

mod browser;
mod entering;
mod pages;
