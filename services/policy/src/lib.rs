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

mod action;
pub mod config;
mod explanation;
mod fate;
mod gangs;
mod input;
mod lifecycle;
mod parking;
mod policy;
mod prerequisites;
mod quotas;
mod reallocation;
mod refusal;
mod sharing;
mod spreading;
mod submission;
pub mod time;
pub mod verification;
pub mod view;

pub use action::{Action, Good};
pub use config::Config;
pub use explanation::Duties;
pub use fate::{Fate, Seen};
pub use input::{ControlOutcome, Input, Judged, Remembered, Ticket};
pub use lifecycle::cluster::{hysteresis, quick};
pub use lifecycle::order::Discipline;
pub use lifecycle::replicas;
pub use policy::Policy;
pub use refusal::{UnknownNode, YieldRefusal};
pub use submission::{NewExecution, Submitted};
pub use time::{Millis, Now};
pub use view::LedgerView;

/// Changes to the reservations of a tenant.
pub mod reservations {
    pub use crate::quotas::change::{Change, apply};
}
