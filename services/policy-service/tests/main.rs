//! Policy services in this process against a real broker.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod stage;

mod absent;
mod aging;
mod answers;
mod batches;
mod behind;
mod bounds;
mod entrusted;
mod flood;
mod full_streams;
mod health;
mod history;
mod offers;
mod parts;
mod reservations;
mod shell;
mod strangers;
mod waiting;
mod waiting_limit;
