//! Executions that leave a node: for pressure, losses, links, drains, other work and other grants.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../stage/mod.rs"]
mod stage;

mod confirmed_requests;
mod devices;
mod faults;
mod gangs;
mod holdings;
mod leaving;
mod link;
mod links;
mod loss_and_fencing;
mod operations;
mod pressure_and_bits;
mod reallocation;
mod reconfigure;
mod retries;
mod sharing;
mod slow_links;
mod spread;
