//! The lab: measures, simulates and demonstrates the product, and has servers for development.
//!
//! It links the product and includes its commands. So the services and workers of a demo, a bench or
//! a test are processes of one executable. The product never depends on the lab.

#[macro_use(eprintln, println)]
extern crate fiec;

pub mod bench;
pub mod chaos;
pub mod cli;
pub mod cluster;
pub mod demo;
pub mod doctor;
pub mod experiment;
pub mod judge;
pub mod load;
pub mod process;
pub mod replay;
pub mod simulate;
pub mod trace;
pub mod up;
