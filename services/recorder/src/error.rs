//! The recorder's errors, each with what to do.

use fiec_broker::BrokerError;
use fiec_schemas::Sequence;
use fiec_schemas::event::MessageError;

use crate::schema::detail;

/// An error that ends the recorder, or a command that reads its tables.
#[derive(Debug, thiserror::Error)]
pub enum RecorderError {
    /// PostgreSQL refused something or is not there.
    #[error("PostgreSQL: cannot {what}: {source}")]
    Database {
        /// The attempt.
        what: &'static str,
        /// Why it failed.
        source: sqlx::Error,
    },
    /// The tables could not be brought up to date.
    #[error("PostgreSQL: cannot bring the tables up to date: {0}")]
    Migrate(sqlx::migrate::MigrateError),
    /// Another version of this program has made the tables.
    #[error(
        "PostgreSQL: another version of fiec has made the tables of this database ({0}), and nothing \
         was changed: use that version, or a newer one. Do not empty the database: it has history that \
         no stream has any more (migrations/README.md, Upgrade). To try this version, name a new database \
         in --database (`fiec up`: another --data-dir), and run `fiec setup`"
    )]
    OtherVersion(sqlx::migrate::MigrateError),
    /// The views could not be brought up to date.
    #[error("PostgreSQL: cannot bring the views up to date: {source}{advice}")]
    Views {
        /// Why it failed.
        source: sqlx::Error,
        /// What to do.
        advice: String,
    },
    /// The broker refused something.
    #[error(transparent)]
    Broker(#[from] BrokerError),
    /// The tables are not there.
    #[error(
        "the database has no checkpoint for {stream}, or lacks a table: its tables are missing, damaged, \
         or of an earlier version; run `fiec setup`"
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
        /// The error in it.
        source: MessageError,
    },
    /// A port that is not available.
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
    /// The tables do not have what was asked for.
    #[error("{0}")]
    NotFound(String),
    /// A figure could not be drawn.
    #[error("cannot draw a figure: {0}")]
    Figure(String),
}

/// The recorder's results.
pub type Result<T> = std::result::Result<T, RecorderError>;

impl RecorderError {
    /// Views that were not applied.
    pub(crate) fn views(source: sqlx::Error) -> Self {
        let code = source.as_database_error().and_then(|e| e.code());
        let advice = match code.as_deref() {
            // lock_not_available
            Some("55P03") => {
                "; somebody reads them: end that transaction (pg_stat_activity), and run \
                 `fiec setup` again"
                    .to_owned()
            }
            // dependent_objects_still_exist
            Some("2BP01") => format!(
                " ({}); drop what is built on them, run `fiec setup`, and create it again",
                detail(&source).unwrap_or_default().replace('\n', ", ")
            ),
            _ => String::new(),
        };
        Self::Views { source, advice }
    }

    /// For `map_err`: a statement that failed.
    pub(crate) fn database(what: &'static str) -> impl FnOnce(sqlx::Error) -> Self {
        move |source| Self::Database { what, source }
    }
}
