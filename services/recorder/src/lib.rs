//! The recorder: writes the ledger stream to PostgreSQL, for people and for recovery.
//!
//! Flow, each step a module: the feed of all ledgers in batches (`ledger`), the pure fold into rows
//! (`fold`, `rows`), one transaction with the checkpoint (`write`). Facts that belong to no ledger come
//! from a stream of their own (`records`), hardware vectors from telemetry (`telemetry`). Each table's
//! columns are declared once (`table`).
//!
//! Invariants:
//! - Each message is applied exactly once: the checkpoint moves in the transaction that writes its
//!   rows, under a guard on its former value.
//! - No row and no live execution refers to an object that `collect` removes from the broker, and no
//!   history that is missing may refer to it (`held`).
//! - A ledger message that this version cannot read is kept until a version that can records it
//!   (`unread`).
//! - `restore` gives workers the states that the broker has lost.
//! - PostgreSQL is a projection: no execution waits for it.
//! - Only the recorder writes these tables, and no row of them changes an execution.
//!
//! Absent on purpose: the recorder does not seed a lost stream from these tables. That is an
//! operator's decision (`fiec repair`).

mod collect;
mod error;
pub mod fold;
mod held;
mod known;
#[cfg(feature = "lab-support")]
pub mod lab_support;
mod ledger;
mod lost;
mod metrics;
mod mirror;
pub mod missing;
mod parts;
mod read;
mod recorded;
mod recorder;
mod records;
pub mod report;
mod requests;
mod restore;
mod rests;
mod results;
pub mod rows;
mod schema;
mod series;
mod standstill;
mod submissions;
mod table;
mod tasks;
mod telemetry;
mod time;
mod unnamed_chunks;
mod unread;
mod write;

pub use collect::Collection;
pub use error::{RecorderError, Result};
pub use lost::checkpoints;
pub use metrics::Health;
pub use recorder::{Recorder, RecorderOptions};
pub use schema::{connect, migrate};
pub use time::PgTime;
