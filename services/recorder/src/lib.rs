//! The recorder: folds the ledger stream into PostgreSQL, for people and for recovery.
//!
//! Flow: feed of all ledgers → batches ([`ledger`]) → pure fold ([`fold`]) → rows ([`rows`]) →
//! one transaction with the checkpoint ([`write`]).
//!
//! Invariants:
//! - A message is applied exactly once: the checkpoint moves in the transaction that writes its
//!   rows, under a guard on its former value.
//! - What [`collect`] removes from the broker is referred to by nothing; [`restore`] gives workers
//!   states that the broker has lost.
//! - PostgreSQL is a projection: nothing here is needed for an execution to go on.
//! - Nothing is written by anybody else, and nothing that is written changes an execution.
//!
//! Absent on purpose: re-seeding a lost stream from these tables; it is an operator's decision.

pub mod bench_support;
pub mod changes;
mod collect;
mod columns;
pub mod copy;
mod error;
pub mod fold;
mod known;
mod ledger;
mod lost;
mod metrics;
mod mirror;
pub mod missing;
pub mod parts;
mod recorder;
mod records;
pub mod report;
mod restore;
pub mod results;
pub mod rows;
mod schema;
mod standstill;
mod submissions;
pub mod telemetry;
mod time;
mod trust;
pub mod write;

pub use collect::Collection;
pub use error::{RecorderError, Result};
pub use lost::checkpoints;
pub use metrics::Health;
pub use recorder::{Recorder, RecorderOptions};
pub use schema::{connect, migrate};
pub use time::PgTime;
