//! The recorder against a real broker and a real PostgreSQL.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

mod catalogue;
mod changes;
mod collect;
mod database;
mod fold;
mod held;
mod live;
mod queue;
mod restore;
mod rests;
mod rewinds;
mod schema;
mod series;
mod spread;
mod substrates;
mod tls;
mod unread;
mod upgrade;
mod views;
mod waiting;
