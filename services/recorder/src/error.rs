//! What can go wrong for a recorder, and what to do about it.

use fiec_broker::BrokerError;
use fiec_schemas::Sequence;
use fiec_schemas::event::MessageError;

/// An error that ends the recorder, or a command that reads its tables.
#[derive(Debug, thiserror::Error)]
pub enum RecorderError {
    /// PostgreSQL refused something or is not there.
    #[error("PostgreSQL: cannot {what}: {source}")]
    Database {
        /// What was attempted.
        what: &'static str,
        /// Why it failed.
        source: sqlx::Error,
    },
    /// The schema could not be brought up to date.
    #[error("PostgreSQL: cannot bring the schema up to date: {0}")]
    Migrate(#[from] sqlx::migrate::MigrateError),
    /// The broker refused something.
    #[error(transparent)]
    Broker(#[from] BrokerError),
    /// The tables are not there.
    #[error(
        "the database has no checkpoint for {stream}: its schema is missing or damaged; run the \
         migrations (fiec up, or fiec recorder, does it) against an empty database"
    )]
    NoCheckpoint {
        /// Which stream.
        stream: &'static str,
    },
    /// A newer program writes the ledger.
    #[error("ledger message {seq}: {source}")]
    Version {
        /// Its sequence.
        seq: Sequence,
        /// What it says.
        source: MessageError,
    },
    /// A port that cannot be had.
    #[error("cannot serve /metrics on {addr}: {source}; is the port in use?")]
    Listen {
        /// Where.
        addr: std::net::SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// A task of the recorder panicked.
    #[error("a part of the recorder ended unexpectedly: {0}")]
    Task(#[from] tokio::task::JoinError),
    /// Something asked for is not in the tables.
    #[error("{0}")]
    NotFound(String),
    /// A figure could not be drawn.
    #[error("cannot draw a figure: {0}")]
    Figure(String),
}

/// The recorder's results.
pub type Result<T> = std::result::Result<T, RecorderError>;

impl RecorderError {
    /// For `map_err`: a statement that failed.
    pub(crate) fn database(what: &'static str) -> impl FnOnce(sqlx::Error) -> Self {
        move |source| Self::Database { what, source }
    }
}
