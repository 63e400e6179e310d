//! The console: what runs, waits, fails and moves, in a browser.
//!
//! It listens on loopback and acts as its user, never more: a browser enters with a ticket that is good
//! for one time, and then has a cookie (`session.rs`). It reads PostgreSQL as the role that reads, with
//! connections and time limits of its own (`database.rs`), asks policy services for the nodes, and
//! follows the feed of the ledgers to know what has changed (`hub.rs`). A page is made here, whole
//! (`pages/`); a browser fetches the parts of it again that have changed (`assets/live.js`). If broker or
//! database are away, pages show what was known last, and since when.

mod assets;
mod database;
mod health;
mod hub;
mod known;
mod pages;
mod server;
mod session;
mod words;

use std::net::SocketAddr;

use fiec_broker::ConnectOptions;
use fiec_schemas::{Secret, Tenant};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub use health::Service;
pub use server::Running;
pub use session::Key;

/// What the console looks at, and as whom.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where it listens. Port 0 takes a free one.
    pub addr: SocketAddr,
    /// The broker.
    pub broker: ConnectOptions,
    /// PostgreSQL, as the role that reads.
    pub database: Secret,
    /// Services and workers that are asked for their health. They may change.
    pub services: watch::Receiver<Vec<Service>>,
    /// Its user, for the history.
    pub who: String,
    /// The tenant of commands that its pages name.
    pub tenant: Tenant,
}

/// An error while the console starts.
#[derive(Debug, thiserror::Error)]
pub enum ConsoleError {
    /// The address cannot be listened on.
    #[error("the console cannot listen on {addr}: {error}")]
    Listen {
        /// The address.
        addr: SocketAddr,
        /// Why.
        error: std::io::Error,
    },
    /// The URL of PostgreSQL cannot be read.
    #[error("--database is no URL of PostgreSQL: {0}")]
    Database(sqlx::Error),
}

/// Starts the console. It runs until `stop`.
///
/// # Errors
/// If it cannot listen. Servers that are away are no error: its pages say so.
pub async fn start(options: Options, stop: CancellationToken) -> Result<Running, ConsoleError> {
    server::start(options, stop).await
}
