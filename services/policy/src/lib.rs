//! Pure placement policy of FIEC: it chooses where an execution is bound, and when and why it
//! moves.
//!
//! It has no clock, no I/O and no randomness. [`Policy::step`] takes the time and one input, and
//! pushes actions that a shell carries out. The same inputs give the same actions.
//!
//! ```text
//!  submissions ─┐                                     ┌─▶ Append (compare-and-set on the ledger)
//!  ledger feed ─┤   cluster: nodes × executions       ├─▶ SendCapsule, Control, Probe
//!  vectors ─────┼─▶ hysteresis ▶ placement ▶ engine ──┼─▶ Record, Refuse, FetchSpec
//!  probes, tick ┘
//! ```
//!
//! Invariants: a destination is alive, viable and compatible when it is chosen. An execution has at
//! most one append or order of this replica in flight. It is rebound for pressure at most ⌈T/dwell⌉
//! + 1 times in a time T. Silence alone never moves an execution; an unanswered probe does.

pub mod config;
pub mod engine;
mod fate;
mod gangs;
mod lifecycle;
mod parking;
mod prerequisites;
mod quotas;
mod reallocation;
mod sharing;
mod spreading;
mod submission;
pub mod time;
pub mod verification;
pub mod view;

pub use config::Config;
pub use engine::{
    Action, ControlOutcome, Duties, Good, Input, Judged, Policy, Remembered, Ticket, UnknownNode,
    YieldRefusal,
};
pub use fate::{Fate, Seen};
pub use lifecycle::cluster::{hysteresis, quick};
pub use lifecycle::order::Discipline;
pub use lifecycle::replicas;
pub use submission::{NewExecution, Submitted};
pub use time::{Millis, Now};
pub use view::LedgerView;

/// Changes to the reservations of a tenant.
pub mod reservations {
    pub use crate::quotas::change::{Change, apply};
}
