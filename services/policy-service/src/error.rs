//! Why the service could not start or had to end.

use fiec_broker::BrokerError;
use fiec_broker::identity::Break;

/// Why the service ended.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// The broker failed at something that the start needs.
    #[error(transparent)]
    Broker(#[from] BrokerError),
    /// The address for `/metrics` and `/healthz` cannot be bound.
    #[error("cannot serve /metrics and /healthz on {addr}: {source}")]
    Http {
        /// The address.
        addr: std::net::SocketAddr,
        /// The cause.
        source: std::io::Error,
    },
    /// A task of the service ended early.
    #[error("the {task} task of the policy service ended: {reason}")]
    Task {
        /// The task.
        task: &'static str,
        /// The cause.
        reason: String,
    },
    /// The ledger stream lost messages that were seen. The service reads all ledgers again.
    #[error(transparent)]
    Lost(#[from] Break),
}
