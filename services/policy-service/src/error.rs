//! Why the service could not start or had to end.

use fiec_broker::BrokerError;
use fiec_broker::identity::Break;

/// Why the service ended.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// The broker did not do what the start needs.
    #[error(transparent)]
    Broker(#[from] BrokerError),
    /// The address for `/metrics` and `/healthz` cannot be had.
    #[error("cannot serve /metrics and /healthz on {addr}: {source}")]
    Http {
        /// Which.
        addr: std::net::SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// A part of the service ended by itself.
    #[error("the {task} task of the policy service ended: {reason}")]
    Task {
        /// Which.
        task: &'static str,
        /// Why.
        reason: String,
    },
    /// The ledger stream has lost messages that were seen; the service takes it over anew.
    #[error(transparent)]
    Lost(#[from] Break),
}
