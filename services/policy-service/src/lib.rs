//! The policy service: a shell around the pure policy. It reads telemetry, submissions and ledgers,
//! and performs the policy's actions.
//!
//! ```text
//!  FIEC_SUBMIT ─▶ intake ─┐                         ┌─▶ appends ─▶ acks in order ─┐
//!  FIEC_LEDGER ─▶ feed ───┤   core (owns Policy,    ├─▶ outbox ─▶ FIEC_CAPSULE_*  │
//!  telemetry, FIEC_NODES ─┤   one task, no locks) ──┤─▶ control requests, probes ─┤
//!  fiec.api.> ─▶ api ─────┘                         └─▶ FIEC_RECORD               │
//!                                  ▲──────────────── results ─────────────────────┘
//! ```
//!
//! Invariants:
//!
//! - One task owns the policy.
//! - A submission message is acknowledged when each of its lines is in a ledger or recorded as
//!   rejected.
//! - A capsule is sent only for a stored binding.
//! - A task that ends early ends the service with an error.

mod acks;
mod allowance;
mod api;
mod bounds;
mod core;
mod dependencies;
mod effects;
mod error;
mod events;
mod groups;
mod history;
mod intake;
mod metrics;
mod options;
mod outbox;
mod programs;
mod pulling;
mod reading;
mod refusal;
mod reservation;
mod running;
mod service;
mod sources;
mod spread;
mod trust;
mod vetting;
mod waiting;

pub use error::ServiceError;
pub use intake::STAMP_HEADER;
pub use options::{Options, WAITING};
pub use service::PolicyService;
