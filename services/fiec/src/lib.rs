//! FIEC's one command, as a library so that tests drive the very code that operators run.
//!
//! The binary depends on every other crate; no other crate depends on it.

pub mod bench;
pub mod cli;
pub mod client;
pub mod cluster;
pub mod commands;
pub mod context;
pub mod demo;
pub mod exit;
pub mod experiment;
pub mod local;
pub mod node_keys;
pub mod package;
pub mod pressure;
pub mod process;
pub mod sql;
pub mod transfer;
pub mod ui;
pub mod up;
