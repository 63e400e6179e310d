//! Agents in this process against a real broker: from the offer of a capsule to its end.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;
#[path = "../../../integration-tests/stage/slow_link.rs"]
mod slow_link;

mod agent;
mod aging;
mod ahead;
mod contexts;
mod daemons;
mod devices;
mod entrusted;
mod frames_room;
mod full_streams;
mod large_states;
mod last_messages;
mod limits;
mod logs;
mod missing_states;
mod outage;
mod outage_of_data;
mod outbox;
mod packages;
mod panics;
mod parking;
mod reconfigure;
mod slow_fetches;
mod spreading;
mod surroundings;
