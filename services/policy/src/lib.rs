//! Pure placement policy of FIEC: it chooses where an execution is bound, and when and why it
//! moves.
//!
//! It has no clock, no I/O and no randomness. [`Policy::step`] takes the time and one input, and
//! pushes actions that a shell carries out. The same inputs give the same actions.
//!
//! ```text
//!  submissions ─┐   ┌──────────── lifecycle ─────────────┐   ┌─▶ Append (compare-and-set on the ledger)
//!  ledger feed ─┤   │ cluster: nodes × executions        │   ├─▶ SendCapsule, Control, Probe
//!  vectors ─────┼─▶ │ hysteresis ▶ placement ▶ binding   │ ──┼─▶ Record, Refuse, FetchSpec
//!  probes, tick ┘   └───────┬─────────────────▲──────────┘   └─▶ …
//!                  gate: hears, asks, leaves  │ reads, orders
//!                   ┌───────▼─────────────────┴──────────┐
//!                   │ the machines, each by itself       │
//!                   └────────────────────────────────────┘
//! ```
//!
//! * `policy`: the order of a step and of the machines.
//! * `lifecycle`: nodes, executions, and all that changes them.
//! * The machines: `verification` compares what nodes compute, `spreading` divides ranges among
//!   nodes, `prerequisites` has executions wait for others, `quotas` limits what runs, `gangs`
//!   starts executions together, `parking` keeps executions on a node without computing, `sharing`
//!   preempts, `reallocation` moves executions between devices, `explanation` says why.
//! * The types of a step: `input`, `action`, `submission`, `refusal`, `view`, `config`.
//!
//! Which module names which is tested (`tests/machine_arrows.rs`).
//!
//! Invariants: a destination is alive, viable and compatible when it is chosen. An execution has at
//! most one append or order of this replica in flight. It is rebound for pressure at most ⌈T/dwell⌉
//! + 1 times in a time T. Silence alone never moves an execution; an unanswered probe does.

mod action;
mod config;
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
mod time;
mod verification;
mod view;

pub use action::{Action, Good};
pub use config::Config;
pub use explanation::{Duties, ExplanationSettings};
pub use fate::{Fate, Seen};
pub use gangs::GangsSettings;
pub use input::{ControlOutcome, Input, Judged, Remembered, Ticket};
pub use lifecycle::cluster::hysteresis::{Automaton, State};
pub use lifecycle::queue::order::Discipline;
pub use lifecycle::replicas::Replicas;
pub use policy::Policy;
pub use prerequisites::{FoundMembers, PrerequisitesSettings, SoughtGroup};
pub use quotas::{Change, QuotasSettings};
pub use reallocation::ReallocationSettings;
pub use refusal::{UnknownNode, YieldRefusal};
pub use sharing::SharingSettings;
pub use spreading::SpreadingSettings;
pub use submission::{NewExecution, Submitted};
pub use time::{Millis, Now};
pub use verification::{Named, VerificationSettings};
pub use view::LedgerView;
