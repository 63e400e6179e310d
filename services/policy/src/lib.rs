//! Pure placement policy of FIEC: what to bind where, when to move it, and why.
//!
//! No clock, no I/O, no randomness: [`Policy::step`] takes the time and one input, and pushes the
//! actions that a shell must carry out. The same inputs give the same actions.
//!
//! ```text
//!  submissions ─┐                                     ┌─▶ Append (compare-and-set on the ledger)
//!  ledger feed ─┤   cluster: nodes × executions       ├─▶ SendCapsule, Control, Probe
//!  vectors ─────┼─▶ hysteresis ▶ placement ▶ engine ──┼─▶ Record, Refuse, FetchSpec
//!  probes, tick ┘                                     └─▶ Hold
//! ```
//!
//! Invariants: a destination is alive, viable and compatible when it is chosen; one execution has
//! at most one append or order of this replica under way; an execution is rebound for pressure at
//! most ⌈T/dwell⌉ + 1 times in time T; silence alone never moves anything, an unanswered probe does.

pub mod capacity;
pub mod changes;
pub mod cluster;
pub mod config;
pub mod engine;
pub mod execution;
pub mod holds;
pub mod hysteresis;
pub mod placement;
pub mod places;
pub mod profile;
pub mod quick;
pub mod realloc;
pub mod replicas;
pub mod share;
pub mod spread;
mod strangers;
pub mod time;
pub mod trust;
pub mod verify;
pub mod view;
pub mod watch;

pub use config::Config;
pub use engine::{
    Action, ControlOutcome, Duties, Good, Input, NewExecution, Policy, ProbeOutcome, Submitted,
    Ticket, UnknownNode, YieldRefusal,
};
pub use time::{Millis, Now};
pub use view::LedgerView;
