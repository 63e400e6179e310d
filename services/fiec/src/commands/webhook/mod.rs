//! `fiec webhook`: posts how executions end to a URL.
//!
//! NATS keeps its place, by a durable consumer: a process that starts again goes on where the last one
//! was, and several with one name share the posts. A notice counts once the other side answers with a
//! status from 200 to 299. Until then it is posted again, for a day. So the other side may get one
//! twice, with the same `webhook-id`, and not in the order of the ends.

mod notice;
mod sign;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, pull};
use async_nats::jetstream::{AckKind, Message};
use bytes::Bytes;
use clap::Args;
use fiec_broker::Broker;
use fiec_schemas::{LedgerMessage, Tenant, Timestamp, subjects};
use futures_util::StreamExt as _;
use http::header::CONTENT_TYPE;
use http::{Request, StatusCode, Uri};
use http_body_util::Full;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::signal::unix::{SignalKind, signal};

use crate::context::{Global, TenantArg, parse_tenant};
use crate::exit::Outcome;
use notice::{End, Notice};
use sign::Key;

/// Time limit of one post.
const WITHIN: Duration = Duration::from_secs(20);
/// Posts at once.
const AT_ONCE: usize = 8;
/// Messages that wait for their posts.
const PENDING: i64 = 256;
/// Longest pause before a notice is posted again; the first is a second.
const PAUSE: Duration = Duration::from_secs(600);
/// A notice that is older than this is given up.
const GIVEN_UP: Duration = Duration::from_secs(24 * 3600);
/// NATS forgets the place of a name that nobody has used for so long.
const FORGOTTEN: Duration = Duration::from_secs(30 * 24 * 3600);
/// Pause before NATS is asked again, where it does not answer.
const AGAIN: Duration = Duration::from_secs(1);

/// Post how executions end to a URL, signed
///
/// Each post is JSON with a signature by Standard Webhooks, and is repeated until the other side
/// answers with success. It starts with the ends from now on, and later goes on where it was.
#[derive(Debug, Args)]
pub struct WebhookArgs {
    /// Where to post to: https, or http on this machine
    #[arg(long)]
    url: Uri,
    /// File with the secret of the signature: whsec_ and 24 to 64 bytes in base64
    #[arg(long, value_name = "FILE")]
    secret_file: PathBuf,
    /// Only these ends [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    on: Vec<End>,
    /// Name of this webhook: each has its own place in the stream
    #[arg(long, default_value = "default", value_parser = parse_name)]
    name: Tenant,
    #[command(flatten)]
    tenant: TenantArg,
}

fn parse_name(text: &str) -> Result<Tenant, String> {
    parse_tenant(text).map_err(|error| error.replace("tenant", "name"))
}

/// Runs the command, until it is told to stop.
///
/// # Errors
/// If the secret or the URL cannot be used, the broker cannot be reached at the beginning, or the other
/// side says that it is gone.
pub async fn run(args: WebhookArgs, global: &Global) -> anyhow::Result<Outcome> {
    let key = match (Key::read(&args.secret_file), check(&args.url)) {
        (Ok(key), Ok(())) => key,
        (Err(error), _) | (_, Err(error)) => {
            eprintln!("{error:#}");
            return Ok(Outcome::BadInput);
        }
    };
    let broker = global.broker("webhook").await?;
    let wanted = match args.on.is_empty() {
        true => notice::ALL.to_vec(),
        false => args.on,
    };
    let connector = HttpsConnectorBuilder::new()
        .with_native_roots()
        .context("the system's certificates cannot be read")?
        .https_or_http()
        .enable_http1()
        .build();
    let hook = Webhook {
        url: args.url,
        key,
        wanted,
        client: Client::builder(TokioExecutor::new()).build(connector),
    };
    let place = Place {
        consumer: format!("webhook-{}-{}", args.tenant.tenant, args.name),
        subject: subjects::ledgers(&args.tenant.tenant),
    };
    // Before anybody is told that it runs.
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM cannot be heard")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT cannot be heard")?;
    place.open(&broker).await?;
    tracing::info!(url = %hook.shown(), consumer = place.consumer, "posting how executions end");
    tokio::select! {
        gone = place.follow(&broker, &hook) => {
            eprintln!("{}", gone);
            Ok(Outcome::Failed)
        }
        _ = terminate.recv() => Ok(Outcome::Done),
        _ = interrupt.recv() => Ok(Outcome::Done),
    }
}

/// Refuses a URL over which others could read the posts.
fn check(url: &Uri) -> anyhow::Result<()> {
    let host = url.host().unwrap_or_default();
    let is_here = host == "localhost"
        || host
            .trim_matches(['[', ']'])
            .parse::<std::net::IpAddr>()
            .is_ok_and(|addr| addr.is_loopback());
    match url.scheme_str() {
        Some("https") if !host.is_empty() => Ok(()),
        Some("http") if is_here => Ok(()),
        _ => bail!("--url must be https://…, or http://… on this machine"),
    }
}

/// Where this webhook is in the stream.
struct Place {
    consumer: String,
    subject: String,
}

/// What became of a notice.
enum Posted {
    Yes,
    /// It is posted again.
    No(String),
    /// The other side wants no more.
    Gone,
}

/// The other side says that it is gone.
#[derive(Debug, thiserror::Error)]
#[error(
    "{0} answers 410 Gone: nothing more is posted; start the webhook again if that was a mistake"
)]
struct Gone(String);

impl Place {
    /// Makes the consumer, or finds it.
    async fn open(&self, broker: &Broker) -> anyhow::Result<pull::Stream> {
        let stream = broker.js.get_stream(subjects::LEDGER_STREAM).await?;
        let config = pull::Config {
            durable_name: Some(self.consumer.clone()),
            description: Some("fiec webhook".to_owned()),
            ack_policy: AckPolicy::Explicit,
            ack_wait: WITHIN * 2,
            deliver_policy: DeliverPolicy::New,
            filter_subject: self.subject.clone(),
            headers_only: true,
            max_ack_pending: PENDING,
            inactive_threshold: FORGOTTEN,
            ..Default::default()
        };
        let consumer = stream
            .get_or_create_consumer(&self.consumer, config)
            .await?;
        let messages = consumer.stream().max_messages_per_batch(AT_ONCE).messages();
        Ok(messages.await?)
    }

    /// Posts what comes, through outages of the broker, until the other side wants no more.
    async fn follow(&self, broker: &Broker, hook: &Webhook) -> Gone {
        loop {
            match self.follow_once(broker, hook).await {
                Ended::Gone(gone) => return gone,
                Ended::Lost(error) => tracing::warn!(
                    error = format!("{error:#}"),
                    "the ledgers do not answer; trying again"
                ),
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Posts what comes until the reader of the stream fails. NATS sends a message again whose post is
    /// interrupted by that.
    async fn follow_once(&self, broker: &Broker, hook: &Webhook) -> Ended {
        let messages = match self.open(broker).await {
            Ok(messages) => messages,
            Err(error) => return Ended::Lost(error),
        };
        let mut posts = messages
            .map(|message| async {
                match message {
                    Ok(message) => hook.take(message).await.map_err(Ended::Gone),
                    Err(error) => Err(Ended::Lost(error.into())),
                }
            })
            .buffer_unordered(AT_ONCE);
        while let Some(posted) = posts.next().await {
            if let Err(ended) = posted {
                return ended;
            }
        }
        Ended::Lost(anyhow!("the stream of messages has ended"))
    }
}

/// Why no more messages are posted.
enum Ended {
    Gone(Gone),
    /// The ledgers cannot be read.
    Lost(anyhow::Error),
}

struct Webhook {
    url: Uri,
    key: Key,
    wanted: Vec<End>,
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
}

impl Webhook {
    /// The URL without its query, which may have a token.
    fn shown(&self) -> String {
        let host = self.url.host().unwrap_or_default();
        let port = self.url.port_u16().map(|port| format!(":{port}"));
        format!("{host}{}{}", port.unwrap_or_default(), self.url.path())
    }

    /// Posts a message if it is an end, and acknowledges it.
    async fn take(&self, message: Message) -> Result<(), Gone> {
        let (kind, gone) = match self.notice(&message) {
            None => (AckKind::Ack, None),
            Some((notice, tries, age)) => match self.post(&notice).await {
                Posted::Yes => (AckKind::Ack, None),
                Posted::Gone => (AckKind::Nak(None), Some(Gone(self.shown()))),
                Posted::No(why) if age > GIVEN_UP => {
                    tracing::error!(notice = notice.id(), why, "given up after a day");
                    (AckKind::Term, None)
                }
                Posted::No(why) => {
                    let pause = pause(tries);
                    tracing::warn!(
                        notice = notice.id(),
                        why,
                        ?pause,
                        "not posted; it is tried again"
                    );
                    (AckKind::Nak(Some(pause)), None)
                }
            },
        };
        if let Err(error) = message.ack_with(kind).await {
            tracing::warn!(%error, "not acknowledged; it is posted again");
        }
        gone.map_or(Ok(()), Err)
    }

    /// The notice of a message, how often it was tried, and how old it is.
    fn notice(&self, message: &Message) -> Option<(Notice, i64, Duration)> {
        let info = message.info().ok()?;
        let headers = message.headers.as_ref()?;
        let header = headers.get(subjects::EVENT_HEADER)?;
        let ledger = LedgerMessage::decode(header.as_str(), info.stream_sequence);
        let ledger = match ledger {
            Ok(ledger) => ledger,
            Err(error) => {
                tracing::error!(%error, sequence = info.stream_sequence, "a ledger message cannot be read");
                return None;
            }
        };
        let notice = Notice::of(&ledger, &self.wanted)?;
        let age = Timestamp::now().millis() - ledger.state.at.millis();
        let age = Duration::from_millis(u64::try_from(age).unwrap_or(0));
        Some((notice, info.delivered, age))
    }

    async fn post(&self, notice: &Notice) -> Posted {
        let body = match serde_json::to_vec(notice) {
            Ok(body) => Bytes::from(body),
            Err(error) => return Posted::No(error.to_string()),
        };
        let (id, at) = (notice.id(), Timestamp::now().millis() / 1_000);
        let request = Request::post(self.url.clone())
            .header(CONTENT_TYPE, "application/json")
            .header("user-agent", concat!("fiec/", env!("CARGO_PKG_VERSION")))
            .header("webhook-id", &id)
            .header("webhook-timestamp", at)
            .header("webhook-signature", self.key.sign(&id, at, &body))
            .body(Full::new(body));
        let request = match request {
            Ok(request) => request,
            Err(error) => return Posted::No(error.to_string()),
        };
        // Only the status counts.
        match tokio::time::timeout(WITHIN, self.client.request(request)).await {
            Ok(Ok(answer)) if answer.status().is_success() => Posted::Yes,
            Ok(Ok(answer)) if answer.status() == StatusCode::GONE => Posted::Gone,
            Ok(Ok(answer)) => Posted::No(format!("it answers {}", answer.status())),
            Ok(Err(error)) => Posted::No(error.to_string()),
            Err(_) => Posted::No(format!("no answer within {WITHIN:?}")),
        }
    }
}

/// The pause before the next try, after this number of them.
fn pause(tries: i64) -> Duration {
    let doubled = u32::try_from((tries - 1).clamp(0, 16)).unwrap_or(16);
    Duration::from_secs(1 << doubled).min(PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_ten_minutes() {
        let seconds: Vec<u64> = [1, 2, 3, 10, 11, 1_000].map(|n| pause(n).as_secs()).into();
        assert_eq!(seconds, [1, 2, 4, 512, 600, 600]);
    }

    #[test]
    fn nothing_is_posted_in_the_clear_beyond_this_machine() {
        for url in [
            "https://example.org/x",
            "http://127.0.0.1:9/x",
            "http://[::1]:9/",
            "http://localhost/",
        ] {
            assert!(check(&url.parse().unwrap()).is_ok(), "{url}");
        }
        for url in [
            "http://example.org/",
            "ftp://localhost/",
            "/path",
            "http://127.0.0.1.example.org/",
        ] {
            assert!(check(&url.parse().unwrap()).is_err(), "{url}");
        }
    }
}
