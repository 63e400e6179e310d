//! The console in a real browser, against a real cluster.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../stage/mod.rs"]
mod stage;

mod acting;
mod browser;
mod devices;
mod entering;
mod helping;
mod large;
mod pages;
mod pictures;
mod reading;
