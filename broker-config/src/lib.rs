//! Everything FIEC knows about its broker: streams, buckets and server configurations as data and
//! the code that applies them; the ledger's compare-and-set appends; state and data by digest;
//! the feed of all ledgers; the register of programs. No decision is taken here.

pub mod chunks;
mod connection;
pub mod feed;
pub mod flags;
pub mod ledger;
pub mod lists;
pub mod outbox;
pub mod recut;
pub mod registry;
pub mod sight;
pub mod store;
pub mod topology;
pub mod trust;

pub use connection::{Broker, BrokerError, ConnectOptions, UNACKNOWLEDGED, Unacknowledged};
pub use ledger::{AppendError, Draft, Entry, Ledger, Tip};
