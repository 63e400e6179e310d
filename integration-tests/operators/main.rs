//! What operators and clients see and ask for: batches, quotas, listings, history, changes, telemetry.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../stage/mod.rs"]
mod stage;

mod bad_input;
mod batch_by_nats_cli;
mod batches;
mod changes;
mod curves;
mod energy_and_envelopes;
mod foreign_text;
mod groups;
mod listing;
mod logs;
mod missing_history;
mod reading_history;
mod refusals;
mod sight;
mod telemetry;
mod webhook;
mod workflows;
