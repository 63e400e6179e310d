//! Everything FIEC knows about its broker. Streams, buckets and server configurations as data, and
//! the code that applies them. The ledger's compare-and-set appends, state and data by digest, the
//! feed of all ledgers, the registry of programs. This crate takes no decision.

pub mod aging;
pub mod api;
pub mod buckets;
pub mod capsules;
pub mod chunk_list;
pub mod chunks;
mod clock;
pub mod collect;
mod connection;
pub mod copies;
pub mod feed;
pub mod figures;
pub mod flags;
pub mod identity;
pub mod last_messages;
pub mod leader;
pub mod ledger;
pub mod limits;
pub mod lists;
pub mod logs;
pub mod nodes;
mod objects;
pub mod outbox;
mod reader;
pub mod recut;
pub mod registry;
pub mod results;
pub mod sight;
pub mod store;
pub mod topology;
pub mod trust;
mod upkeep;

#[doc(hidden)]
pub use prometheus_client;

pub use clock::BrokerClock;
pub use connection::{
    Broker, BrokerError, ConnectOptions, UNACKNOWLEDGED, Unacknowledged, without_secrets,
};
pub use ledger::{AppendError, Draft, Entry, Ledger, Tip};
pub use reader::{Delivered, Reader, next_fetched};
pub use upkeep::Upkeep;
