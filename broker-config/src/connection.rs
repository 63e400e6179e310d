//! The connection to NATS, as every process of FIEC makes it.

use std::time::Duration;

use async_nats::jetstream::context::{PublishAckFuture, PublishError, PublishErrorKind};
use async_nats::jetstream::object_store::ObjectStore;
use async_nats::jetstream::publish::PublishAck;
use async_nats::jetstream::{self, ErrorCode};
use fiec_schemas::Secret;
use percent_encoding::percent_decode_str;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use tokio::sync::{OnceCell, watch};
use tokio::time::Instant;

use crate::BrokerClock;
use crate::collect::Store;

/// An error of the broker or of its connection.
#[derive(Debug, thiserror::Error)]
pub enum BrokerError {
    /// No connection.
    #[error("cannot connect to NATS at {url}: {source}; is the server running, is the URL right?")]
    Connect {
        /// The URL.
        url: String,
        /// The cause.
        source: async_nats::ConnectError,
    },
    /// An operation failed.
    #[error("NATS: cannot {what}: {source}")]
    Operation {
        /// The operation.
        what: String,
        /// The cause.
        source: async_nats::Error,
    },
    /// A stream has no room for a message.
    #[error(
        "NATS: cannot {what}: the stream or the store is full ({source}); an operator can give it more \
         room with `fiec setup --store-bytes`"
    )]
    Full {
        /// The operation.
        what: String,
        /// The cause.
        source: async_nats::Error,
    },
    /// The server cannot reserve the limit of a stream.
    #[error(
        "the broker has no room for stream {stream} of {limit}: lower --store-bytes, or raise \
         `max_file_store` in the server's configuration; no data was lost"
    )]
    NoRoom {
        /// Its name.
        stream: String,
        /// Its limit, for people.
        limit: String,
    },
    /// The store is too small for all streams.
    #[error(
        "the broker has {bytes} bytes for streams and buckets, and {least} are the least: raise \
         --store-bytes, or `max_file_store` in the server's configuration, or free its disk"
    )]
    SmallStore {
        /// The bytes to share.
        bytes: u64,
        /// The least.
        least: u64,
    },
    /// Bytes that do not have the digest under which they were stored.
    #[error("{what} has digest {found}, expected {expected}: it is damaged and was not used")]
    Digest {
        /// The name of the data.
        what: String,
        /// The digest of the bytes.
        found: String,
        /// The digest that it was named by.
        expected: String,
    },
    /// A stream would lose copies.
    #[error(
        "stream {stream} has {has} copies, and {asked} were requested: nothing was changed; use \
         --replicas {has}, or add --allow-fewer-replicas"
    )]
    FewerCopies {
        /// Its name.
        stream: String,
        /// Its copies.
        has: usize,
        /// The copies that it would have.
        asked: usize,
    },
    /// A required object or message is missing.
    #[error("{what} is not there{hint}")]
    Missing {
        /// Its name.
        what: String,
        /// The remedy, starting with a separator; may be empty.
        hint: String,
    },
    /// A message of the ledger stream that is no ledger message.
    #[error("message {seq} of the ledger stream is no ledger message: {reason}")]
    Foreign {
        /// Its sequence.
        seq: fiec_schemas::Sequence,
        /// The reason.
        reason: &'static str,
    },
    /// Bytes of no known form.
    #[error("{what} cannot be read: {reason}")]
    Malformed {
        /// The name of the data.
        what: String,
        /// The reason.
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
        move |source| {
            let source = source.into();
            match is_full(&*source) {
                true => Self::Full { what, source },
                false => Self::Operation { what, source },
            }
        }
    }
}

/// Whether the broker refused a message because a stream or the store is full.
fn is_full(error: &(dyn std::error::Error + Send + Sync + 'static)) -> bool {
    let first: &(dyn std::error::Error + 'static) = error;
    let mut chain = std::iter::successors(Some(first), |error| (*error).source());
    chain.any(|error| {
        let refusal = error.downcast_ref::<PublishError>();
        let cause = refusal.and_then(std::error::Error::source);
        let cause = cause.and_then(|cause| cause.downcast_ref::<jetstream::Error>());
        cause.is_some_and(|cause| {
            [
                ErrorCode::STREAM_STORE_FAILED,
                ErrorCode::INSUFFICIENT_RESOURCES,
            ]
            .contains(&cause.error_code())
        })
    })
}

/// Removes user, password and token from a URL, or from several with commas, for messages.
pub fn without_secrets(url: &str) -> String {
    let bare = |url: &str| {
        let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
        // A password may contain any character, so everything up to the last `@` is removed.
        let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
        let host = host.split_once('?').map_or(host, |(host, _)| host);
        match scheme {
            "" => host.to_owned(),
            scheme => format!("{scheme}://{host}"),
        }
    };
    url.split(',').map(bare).collect::<Vec<_>>().join(",")
}

/// User and password, or a token alone, of the first URL that has them.
fn login(urls: &str) -> Option<(String, Option<String>)> {
    let decoded = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
    urls.split(',').find_map(|url| {
        let (_, rest) = url.split_once("://").unwrap_or(("", url));
        let (login, _) = rest.rsplit_once('@')?;
        Some(match login.split_once(':') {
            Some((user, password)) => (decoded(user), Some(decoded(password))),
            None => (decoded(login), None),
        })
    })
}

/// Settings of a connection.
#[derive(Debug, Clone)]
pub struct ConnectOptions {
    /// `nats://host:port`, several separated by commas. `nats://user:password@host:port` and
    /// `nats://token@host:port` include the login.
    pub url: Secret,
    /// The connection's name in the server's lists, e.g. `fiec worker n1`.
    pub name: String,
    /// A credentials file, if the server requires one.
    pub credentials: Option<std::path::PathBuf>,
    /// Inbox prefix, for a permission that names it.
    pub inbox_prefix: Option<String>,
    /// Time limit of requests and acknowledgements.
    pub timeout: Duration,
}

impl ConnectOptions {
    /// Defaults: no credentials, five seconds.
    pub fn new(url: impl Into<Secret>, name: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            name: name.into(),
            credentials: None,
            inbox_prefix: None,
            timeout: Duration::from_secs(5),
        }
    }
}

/// Most unacknowledged publishes of one connection.
pub const UNACKNOWLEDGED: usize = 5_000;

/// A connection with its JetStream context. Cheap to clone.
#[derive(Clone)]
pub struct Broker {
    /// Core NATS.
    pub client: async_nats::Client,
    /// JetStream. Publishing waits while [`UNACKNOWLEDGED`] acknowledgements are outstanding.
    pub js: jetstream::Context,
    ack_within: Duration,
    connections: Connections,
    pub(crate) clock: BrokerClock,
    states: Arc<OnceCell<ObjectStore>>,
    data: Arc<OnceCell<ObjectStore>>,
}

/// The number of connections so far. The client counts them itself. Its events only wake those who
/// wait for a new one: of a flood of events the client drops some. So each event, of any kind, is a
/// reason to look at the count. A connection is counted before its own event, and an event is
/// dropped only behind others that are still to come. So the last look sees every connection.
#[derive(Clone)]
struct Connections {
    /// The client's own count, once it is connected.
    counted: Arc<OnceLock<Arc<async_nats::Statistics>>>,
    noticed: watch::Sender<u64>,
}

impl Connections {
    fn new() -> Self {
        Self {
            counted: Arc::default(),
            noticed: watch::Sender::new(0),
        }
    }

    fn now(&self) -> u64 {
        let counted = self.counted.get();
        counted.map_or(0, |counted| counted.connects.load(Ordering::Acquire))
    }

    fn look(&self) {
        self.noticed.send_if_modified(|noticed| {
            let now = self.now();
            std::mem::replace(noticed, now) != now
        });
    }
}

/// A publish in flight, and when it counts as lost. The time counts from its sending, not from the
/// first poll. So if a connection breaks with a thousand publishes and they are awaited in turn,
/// only the first one costs the full time.
pub struct Unacknowledged {
    ack: PublishAckFuture,
    until: Instant,
}

impl Unacknowledged {
    /// Waits for the acknowledgement.
    ///
    /// # Errors
    /// The broker's refusal, or [`PublishErrorKind::TimedOut`].
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
    /// Connects. Afterwards it reconnects by itself, forever.
    ///
    /// # Errors
    /// When the server cannot be reached now, or the credentials file cannot be read.
    pub async fn connect(options: ConnectOptions) -> Result<Self, BrokerError> {
        let connections = Connections::new();
        let at_event = connections.clone();
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
            .event_callback(move |event| {
                at_event.look();
                async move {
                    match event {
                        async_nats::Event::Connected => tracing::debug!("connected to NATS"),
                        // Caused by this process, which is about to end.
                        async_nats::Event::Draining | async_nats::Event::Closed => {}
                        async_nats::Event::SlowConsumer(id) => {
                            tracing::warn!(
                                subscription = id,
                                "slow consumer: messages were dropped"
                            );
                        }
                        // Permission violations arrive here and nowhere else.
                        other => tracing::warn!(event = %other, "NATS connection"),
                    }
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
        nats = match login(options.url.expose()) {
            Some((user, Some(password))) => nats.user_and_password(user, password),
            Some((token, None)) => nats.token(token),
            None => nats,
        };
        // Without secrets: the client takes none from a URL, and shows URLs in its own messages.
        let url = without_secrets(options.url.expose());
        let servers: Vec<&str> = url.split(',').map(str::trim).collect();
        let client = nats
            .connect(servers)
            .await
            .map_err(|source| BrokerError::Connect {
                url: url.clone(),
                source,
            })?;
        // Nobody else has set it.
        let _ = connections.counted.set(client.statistics());
        connections.look();
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
            connections,
            clock: BrokerClock::default(),
            states: Arc::default(),
            data: Arc::default(),
        })
    }

    /// The number of the present connection. A sequence from another connection must be checked: a
    /// restarted broker may have lost the end of a stream, and then reuses its sequences.
    pub fn connection(&self) -> u64 {
        self.connections.now()
    }

    /// A receiver that notices each new connection.
    pub fn connections(&self) -> watch::Receiver<u64> {
        self.connections.noticed.subscribe()
    }

    /// The id of the present server process. Behind a new connection it is the id of the one before,
    /// for a moment: see [`Broker::server_in_use`].
    pub fn server(&self) -> String {
        self.client.server_info().server_id
    }

    /// The id of the server process behind the present connection. The client counts a connection
    /// a moment before it takes it into use and stores its id. It flushes what it is told to only
    /// with a connection in use.
    ///
    /// # Errors
    /// When the time limit of a request is over.
    pub async fn server_in_use(&self) -> Result<String, BrokerError> {
        const WHAT: &str = "flush the connection";
        let flushed = tokio::time::timeout(self.ack_within, self.client.flush()).await;
        flushed
            .map_err(BrokerError::operation(WHAT))?
            .map_err(BrokerError::operation(WHAT))?;
        Ok(self.server())
    }

    /// Wraps a publish that was just sent.
    pub fn sent(&self, ack: PublishAckFuture) -> Unacknowledged {
        Unacknowledged {
            ack,
            until: Instant::now() + self.ack_within,
        }
    }

    /// Time without data after which a read fails: four times the limit of a request.
    pub(crate) fn silence(&self) -> Duration {
        self.ack_within * 4
    }

    /// An object store.
    pub(crate) async fn store(&self, store: Store) -> Result<&ObjectStore, BrokerError> {
        let cell = match store {
            Store::States => &self.states,
            Store::Data => &self.data,
        };
        let name = store.name();
        cell.get_or_try_init(|| self.js.get_object_store(name))
            .await
            .map_err(BrokerError::operation(format!("open object store {name}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_error_names_the_server_and_not_the_password() {
        for (url, shown) in [
            ("nats://u:s3cret@127.0.0.1:1", "nats://127.0.0.1:1"),
            ("nats://s3cret@127.0.0.1:1", "nats://127.0.0.1:1"),
            ("u:s3/c@ret@127.0.0.1:1", "127.0.0.1:1"),
            (
                "nats://u:s3cret@127.0.0.1:1,nats://v:s3cret@127.0.0.1:2",
                "nats://127.0.0.1:1,nats://127.0.0.1:2",
            ),
            (
                "postgres://u@db.example/x?password=s3cret",
                "postgres://db.example/x",
            ),
        ] {
            assert_eq!(without_secrets(url), shown);
            let options = ConnectOptions::new(url, "test");
            let text = format!("{options:?}");
            assert!(!text.contains("s3cret") && !text.contains("s3/c"), "{text}");
            let refused = Broker::connect(options).await;
            let text = with_causes(&refused.unwrap_err());
            assert!(!text.contains("s3cret") && !text.contains("s3/c"), "{text}");
        }
    }

    #[test]
    fn a_url_says_who_connects() {
        let pair = |user: &str, password: &str| Some((user.to_owned(), Some(password.to_owned())));
        assert_eq!(login("nats://u:p%40%3A@h:1"), pair("u", "p@:"));
        assert_eq!(login("nats://h:1, nats://u:p@h:2"), pair("u", "p"));
        assert_eq!(login("nats://t0ken@h:1"), Some(("t0ken".to_owned(), None)));
        assert_eq!(login("nats://h:1"), None);
    }

    /// Formats an error with all its causes.
    fn with_causes(error: &dyn std::error::Error) -> String {
        let mut text = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            text += &format!(": {error}");
            cause = error.source();
        }
        text
    }
}
