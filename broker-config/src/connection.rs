//! The connection to NATS, as every process of FIEC makes it.

use std::time::Duration;

use async_nats::jetstream;
use async_nats::jetstream::context::{PublishAckFuture, PublishError, PublishErrorKind};
use async_nats::jetstream::object_store::ObjectStore;
use async_nats::jetstream::publish::PublishAck;
use fiec_schemas::subjects;
use std::sync::Arc;
use tokio::sync::OnceCell;
use tokio::time::Instant;

/// Something that the broker did not do.
#[derive(Debug, thiserror::Error)]
pub enum BrokerError {
    /// No connection.
    #[error("cannot connect to NATS at {url}: {source}; is the server running, is the URL right?")]
    Connect {
        /// Where.
        url: String,
        /// Why.
        source: async_nats::ConnectError,
    },
    /// An operation failed.
    #[error("NATS: cannot {what}: {source}")]
    Operation {
        /// What was attempted.
        what: String,
        /// Why it failed.
        source: async_nats::Error,
    },
    /// Bytes that do not have the digest under which they were stored.
    #[error("{what} has digest {found}, expected {expected}: it is damaged and was not used")]
    Digest {
        /// What was read.
        what: String,
        /// The digest of what was read.
        found: String,
        /// The digest that it was named by.
        expected: String,
    },
    /// Something that must be there is not.
    #[error("{what} is not there{hint}")]
    Missing {
        /// What.
        what: String,
        /// What to do, beginning with a separator; may be empty.
        hint: String,
    },
    /// Bytes that are no message of ours.
    #[error("{what} cannot be read: {reason}")]
    Malformed {
        /// What was read.
        what: String,
        /// Why.
        reason: String,
    },
}

impl BrokerError {
    /// For `map_err`: an operation that failed.
    pub fn operation<E>(what: impl Into<String>) -> impl FnOnce(E) -> Self
    where
        E: Into<async_nats::Error>,
    {
        let what = what.into();
        move |source| Self::Operation {
            what,
            source: source.into(),
        }
    }
}

/// How to connect.
#[derive(Debug, Clone)]
pub struct ConnectOptions {
    /// `nats://host:port`, several separated by commas.
    pub url: String,
    /// The connection's name in the server's lists, e.g. `fiec worker n1`.
    pub name: String,
    /// A credentials file, where the server asks for one.
    pub credentials: Option<std::path::PathBuf>,
    /// Inbox prefix, for a permission that names it.
    pub inbox_prefix: Option<String>,
    /// How long requests and acknowledgements may take.
    pub timeout: Duration,
}

impl ConnectOptions {
    /// Defaults: no credentials, five seconds.
    pub fn new(url: impl Into<String>, name: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            name: name.into(),
            credentials: None,
            inbox_prefix: None,
            timeout: Duration::from_secs(5),
        }
    }
}

/// Publishes of one connection whose acknowledgements may be outstanding.
pub const UNACKNOWLEDGED: usize = 5_000;

/// A connection with its JetStream context. Cheap to clone.
#[derive(Clone)]
pub struct Broker {
    /// Core NATS.
    pub client: async_nats::Client,
    /// JetStream. Publishing waits while [`UNACKNOWLEDGED`] acknowledgements are outstanding.
    pub js: jetstream::Context,
    ack_within: Duration,
    states: Arc<OnceCell<ObjectStore>>,
    data: Arc<OnceCell<ObjectStore>>,
}

/// A publish on its way, and when it counts as lost. That is counted from its sending, not from
/// when somebody waits for it: of a thousand that a broken connection took along, waited for one
/// after the other, only the first then takes its time.
pub struct Unacknowledged {
    ack: PublishAckFuture,
    until: Instant,
}

impl Unacknowledged {
    /// Waits for the acknowledgement.
    ///
    /// # Errors
    /// What the broker says, or [`PublishErrorKind::TimedOut`].
    pub async fn settled(self) -> Result<PublishAck, PublishError> {
        match tokio::time::timeout_at(self.until, self.ack.into_future()).await {
            Ok(settled) => settled,
            Err(_) => Err(PublishErrorKind::TimedOut.into()),
        }
    }
}

impl std::fmt::Debug for Broker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Broker").finish_non_exhaustive()
    }
}

impl Broker {
    /// Connects; reconnects by itself for ever afterwards.
    ///
    /// # Errors
    /// When the server cannot be reached now, or the credentials file cannot be read.
    pub async fn connect(options: ConnectOptions) -> Result<Self, BrokerError> {
        let mut nats = async_nats::ConnectOptions::new()
            .name(&options.name)
            .request_timeout(Some(options.timeout))
            .connection_timeout(options.timeout)
            .ping_interval(Duration::from_secs(10))
            .client_capacity(4096)
            .read_buffer_capacity(u16::MAX)
            .reconnect_delay_callback(|attempt| {
                Duration::from_millis((50 * attempt as u64).min(1_000))
            })
            .event_callback(|event| async move {
                match event {
                    async_nats::Event::Connected => tracing::debug!("connected to NATS"),
                    // Ours: the process is about to end.
                    async_nats::Event::Draining | async_nats::Event::Closed => {}
                    async_nats::Event::SlowConsumer(id) => {
                        tracing::warn!(subscription = id, "slow consumer: messages were dropped");
                    }
                    // Permission violations arrive here and nowhere else.
                    other => tracing::warn!(event = %other, "NATS connection"),
                }
            });
        if let Some(prefix) = &options.inbox_prefix {
            nats = nats.custom_inbox_prefix(prefix);
        }
        if let Some(path) = &options.credentials {
            nats = nats
                .credentials_file(path)
                .await
                .map_err(BrokerError::operation(format!(
                    "read credentials {}",
                    path.display()
                )))?;
        }
        let servers: Vec<&str> = options.url.split(',').map(str::trim).collect();
        let client = nats
            .connect(servers)
            .await
            .map_err(|source| BrokerError::Connect {
                url: options.url.clone(),
                source,
            })?;
        let js = jetstream::context::ContextBuilder::new()
            .timeout(options.timeout)
            .ack_timeout(options.timeout)
            .max_ack_inflight(UNACKNOWLEDGED)
            .backpressure_on_inflight(true)
            .build(client.clone());
        Ok(Self {
            client,
            js,
            ack_within: options.timeout,
            states: Arc::default(),
            data: Arc::default(),
        })
    }

    /// A publish that was sent just now.
    pub fn sent(&self, ack: PublishAckFuture) -> Unacknowledged {
        Unacknowledged {
            ack,
            until: Instant::now() + self.ack_within,
        }
    }

    /// The object store of large σ.
    pub(crate) async fn states(&self) -> Result<&ObjectStore, BrokerError> {
        self.bucket(&self.states, subjects::STATE_BUCKET).await
    }

    /// The object store of inputs and outputs.
    pub(crate) async fn data(&self) -> Result<&ObjectStore, BrokerError> {
        self.bucket(&self.data, subjects::DATA_BUCKET).await
    }

    async fn bucket<'a>(
        &'a self,
        cell: &'a OnceCell<ObjectStore>,
        name: &str,
    ) -> Result<&'a ObjectStore, BrokerError> {
        cell.get_or_try_init(|| self.js.get_object_store(name))
            .await
            .map_err(BrokerError::operation(format!("open object store {name}")))
    }
}
