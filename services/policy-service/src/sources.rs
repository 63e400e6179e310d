//! Sources of news. A source that ends is opened again with back-off, and keeps its knowledge. Only
//! a ledger stream that lost messages ends all sources: the service then reads all ledgers again.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, pull};
use async_nats::jetstream::kv;
use fiec_broker::feed::{self, FeedItem, Start};
use fiec_broker::identity::Identity;
use fiec_broker::{Broker, BrokerError, buckets, next_fetched, registry};
use fiec_schemas::messages::PolicyPresence;
use fiec_schemas::trust::Quarantine;
use fiec_schemas::{
    Glance, HardwareVector, InstanceId, NodeDescriptor, NodeFlags, NodeId, subjects,
};
use futures_util::StreamExt;
use prometheus_client::metrics::counter::Counter;
use serde::de::DeserializeOwned;
use tokio::sync::mpsc::Sender;

use crate::ServiceError;
use crate::events::News;
use crate::programs::Programs;
use crate::reservation;

const BACK_OFF: Duration = Duration::from_millis(100);
const BACK_OFF_LIMIT: Duration = Duration::from_secs(5);
/// While the ledgers are loaded, the messages come without a pause. An unreadable message does not
/// say whether it is the last one. After such a message, this much silence means that all are
/// loaded.
const QUIET: Duration = Duration::from_secs(1);

/// Opens a source again whenever it ends, with back-off.
pub async fn again<F: Future<Output = Result<(), BrokerError>>>(
    what: &'static str,
    mut open: impl FnMut() -> F,
) -> Result<(), ServiceError> {
    let mut wait = BACK_OFF;
    loop {
        let began = tokio::time::Instant::now();
        match open().await {
            Ok(()) => tracing::warn!(what, "the stream ended; opening it anew"),
            Err(error) => tracing::warn!(what, %error, "opening the stream anew"),
        }
        wait = if began.elapsed() > BACK_OFF_LIMIT {
            BACK_OFF
        } else {
            (wait * 2).min(BACK_OFF_LIMIT)
        };
        tokio::time::sleep(wait).await;
    }
}

/// Reason why a source is closed, if it is. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct SourceHealth {
    trouble: Arc<Mutex<Option<String>>>,
}

impl SourceHealth {
    /// Checks that the source is open.
    ///
    /// # Errors
    /// While it is closed, with the reason.
    pub fn check(&self) -> Result<(), String> {
        self.trouble().clone().map_or(Ok(()), Err)
    }

    /// Notes that the source is open.
    pub fn opened(&self) {
        *self.trouble() = None;
    }

    /// Notes that the source is closed.
    pub fn closed(&self, reason: String) {
        *self.trouble() = Some(reason);
    }

    fn trouble(&self) -> MutexGuard<'_, Option<String>> {
        // The text is complete even if a holder of the lock panicked.
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Follows all ledgers: first the last message of each, then every new message.
pub async fn ledgers(
    broker: Broker,
    news: Sender<News>,
    health: SourceHealth,
) -> Result<(), ServiceError> {
    let (mut seen, mut before) = (None, None);
    let mut identity = Identity::default();
    let mut wait = BACK_OFF;
    loop {
        let place = (&mut seen, &mut before, &mut identity);
        match follow(&broker, &news, &health, place, &mut wait).await {
            Ok(()) if news.is_closed() => return Ok(()),
            Ok(()) => tracing::warn!(seen, "the ledger feed ended; opening it anew"),
            Err(ServiceError::Broker(error)) => {
                tracing::warn!(seen, %error, "opening the ledger feed anew");
                health.closed(format!("the ledgers are not read: {error}"));
            }
            Err(error) => return Err(error),
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(BACK_OFF_LIMIT);
    }
}

/// Event that a follower of the ledgers waits for.
enum Heard {
    /// The next message. `None` if the feed has ended.
    Item(Option<Result<FeedItem, BrokerError>>),
    /// The connection was made again, so the broker may have lost messages.
    Connected,
}

/// Follows the ledgers until the feed ends. `seen` is the last message that was passed on, once all
/// ledgers are loaded. `before` is the last message that existed when loading began. `identity`
/// remembers what was read, and so detects a stream that lost messages.
async fn follow(
    broker: &Broker,
    news: &Sender<News>,
    health: &SourceHealth,
    (seen, before, identity): (&mut Option<u64>, &mut Option<u64>, &mut Identity),
    wait: &mut Duration,
) -> Result<(), ServiceError> {
    let stream = broker
        .js
        .get_stream(subjects::LEDGER_STREAM)
        .await
        .map_err(BrokerError::operation("look at the ledger stream"))?;
    let state = &stream.cached_info().state;
    let mut connections = broker.connections();
    if let Some(lost) = identity.check(broker).await? {
        return Err(lost.into());
    }
    let start = match *seen {
        Some(seen) => Start::At(seen + 1),
        None => Start::LastOfEach,
    };
    let (mut loading, mut unread) = (seen.is_none(), false);
    let before = *before.get_or_insert(state.last_sequence);
    let mut items = feed::ledger(broker, start).await?;
    health.opened();
    if loading && state.messages == 0 {
        *seen = Some(state.last_sequence);
        loading = false;
        let _ = news.send(News::Loaded).await;
    }
    loop {
        let next = async {
            tokio::select! {
                biased;
                Ok(()) = connections.changed() => Heard::Connected,
                item = items.next() => Heard::Item(item),
            }
        };
        let next = match loading && unread {
            true => tokio::time::timeout(QUIET, next).await,
            false => Ok(next.await),
        };
        let item = match next {
            Ok(Heard::Item(Some(item))) => item,
            Ok(Heard::Item(None)) => break,
            Ok(Heard::Connected) => match identity.check(broker).await? {
                Some(lost) => return Err(lost.into()),
                None => continue,
            },
            Err(_) => {
                *seen = Some(state.last_sequence);
                loading = false;
                let _ = news.send(News::Loaded).await;
                continue;
            }
        };
        let item = match item {
            Ok(item) => item,
            Err(error @ BrokerError::Foreign { .. }) => {
                tracing::warn!(%error, "a message of the ledger stream was passed over");
                unread = true;
                continue;
            }
            // If this happens while the ledgers are loaded, loading begins again.
            Err(error) => return Err(error.into()),
        };
        *wait = BACK_OFF;
        identity.note(item.seq, &item.header);
        let (seq, last) = (item.seq, loading && item.pending == 0);
        // Only an execution that ended before loading began is unknown to the core. One that ends
        // during loading may have been passed on while it was live.
        let unknown = loading && seq <= before;
        if !(unknown && is_over(&item.header)) && news.send(News::Feed(item)).await.is_err() {
            return Ok(());
        }
        // While loading, the messages also come in order of their sequences.
        if !loading || last {
            *seen = Some(seq);
        }
        if last {
            loading = false;
            let _ = news.send(News::Loaded).await;
        }
    }
    Ok(())
}

/// True if the execution has ended. An unreadable message goes to the core, which reports it.
fn is_over(header: &str) -> bool {
    Glance::read(header).is_ok_and(|glance| glance.phase().is_terminal())
}

fn read<T: DeserializeOwned>(what: &str, payload: &[u8]) -> Option<T> {
    serde_json::from_slice(payload)
        .map_err(|error| tracing::warn!(what, %error, "a message was passed over"))
        .ok()
}

/// Reads a vector. Counts a message that is none, or that speaks for another node.
fn vector(message: &async_nats::Message, unreadable: &Counter) -> Option<HardwareVector> {
    HardwareVector::read(&message.subject, &message.payload)
        .inspect_err(|error| {
            unreadable.inc();
            let subject = &message.subject;
            tracing::warn!(%subject, %error, "a vector was passed over");
        })
        .ok()
}

/// Vectors, live.
pub async fn telemetry(
    broker: Broker,
    unreadable: Counter,
    news: Sender<News>,
) -> Result<(), ServiceError> {
    again("telemetry", || async {
        let mut messages = broker
            .client
            .subscribe("fiec.telemetry.*")
            .await
            .map_err(BrokerError::operation("subscribe to telemetry"))?;
        while let Some(message) = messages.next().await {
            if let Some(vector) = vector(&message, &unreadable) {
                let _ = news.send(News::Vector(Box::new(vector))).await;
            }
        }
        Ok(())
    })
    .await
}

/// Verdicts of nodes that computed parts of executions again.
pub async fn verdicts(broker: Broker, news: Sender<News>) -> Result<(), ServiceError> {
    again("verdicts", || async {
        let mut messages = broker
            .client
            .subscribe(subjects::VERDICT)
            .await
            .map_err(BrokerError::operation("subscribe to verdicts"))?;
        while let Some(message) = messages.next().await {
            if let Some(verdict) = read(&message.subject, &message.payload) {
                let _ = news.send(News::Verdict(verdict)).await;
            }
        }
        Ok(())
    })
    .await
}

/// The last vector of each node, read when the service starts.
///
/// # Errors
/// If the broker does not deliver them.
pub async fn last_vectors(
    broker: &Broker,
    unreadable: &Counter,
) -> Result<Vec<HardwareVector>, BrokerError> {
    let consumer = broker
        .js
        .create_consumer_on_stream(
            pull::Config {
                ack_policy: AckPolicy::None,
                deliver_policy: DeliverPolicy::LastPerSubject,
                filter_subject: "fiec.telemetry.*".to_owned(),
                inactive_threshold: Duration::from_secs(10),
                ..Default::default()
            },
            subjects::TELEMETRY_STREAM,
        )
        .await
        .map_err(BrokerError::operation("read the last vectors"))?;
    let mut messages = consumer
        .fetch()
        .max_messages(20_000)
        .messages()
        .await
        .map_err(BrokerError::operation("read the last vectors"))?;
    let mut vectors = Vec::new();
    while let Some(message) = next_fetched(&mut messages, "read the last vectors").await? {
        vectors.extend(vector(&message, unreadable));
    }
    Ok(vectors)
}

/// Announcements of other replicas.
pub async fn presence(
    broker: Broker,
    own: InstanceId,
    news: Sender<News>,
) -> Result<(), ServiceError> {
    again("presence", || async {
        let mut messages = broker
            .client
            .subscribe(subjects::POLICY_PRESENCE)
            .await
            .map_err(BrokerError::operation(
                "subscribe to the replicas' presence",
            ))?;
        while let Some(message) = messages.next().await {
            if let Some(PolicyPresence { id, leaving, .. }) =
                read(&message.subject, &message.payload)
                && id != own
            {
                let _ = news.send(News::Replica(id, leaving)).await;
            }
        }
        Ok(())
    })
    .await
}

async fn nodes_bucket(broker: &Broker) -> Result<kv::Store, BrokerError> {
    broker
        .js
        .get_key_value(subjects::NODES_BUCKET)
        .await
        .map_err(BrokerError::operation("open the bucket of nodes"))
}

/// Descriptors, proofs, quarantines and flags in the bucket now.
///
/// # Errors
/// If the broker does not deliver them.
pub async fn known_nodes(broker: &Broker) -> Result<Vec<News>, BrokerError> {
    let entries = buckets::entries(&nodes_bucket(broker).await?).await?;
    let entries = entries.iter();
    Ok(entries
        .filter_map(|(key, value)| node_news(key, Some(value)))
        .collect())
}

/// Pushed programs that run in containers. Unreadable records are skipped.
pub async fn contained_programs(broker: &Broker) -> Vec<News> {
    match registry::list(broker).await {
        Ok(records) => {
            let contained = records.into_iter().filter(|r| r.manifest.image.is_some());
            contained.map(|r| News::Container(r.program)).collect()
        }
        Err(error) => {
            tracing::warn!(%error, "starting without knowing which programs run in containers; workers refuse those that they cannot start");
            Vec::new()
        }
    }
}

/// Changes of descriptors, proofs, quarantines and flags.
pub async fn nodes(broker: Broker, news: Sender<News>) -> Result<(), ServiceError> {
    again("nodes", || async {
        let bucket = nodes_bucket(&broker).await?;
        let mut entries = bucket
            .watch_with_history(">")
            .await
            .map_err(BrokerError::operation("watch the nodes"))?;
        while let Some(entry) = entries.next().await {
            let entry = entry.map_err(BrokerError::operation("watch the nodes"))?;
            let value = (entry.operation == kv::Operation::Put).then_some(&*entry.value);
            if let Some(item) = node_news(&entry.key, value) {
                let _ = news.send(item).await;
            }
        }
        Ok(())
    })
    .await
}

/// Changes of quotas.
pub async fn quotas(broker: Broker, news: Sender<News>) -> Result<(), ServiceError> {
    again("quotas", || reservation::watch_quotas(&broker, &news)).await
}

/// Changes of reservations.
pub async fn reservations(broker: Broker, news: Sender<News>) -> Result<(), ServiceError> {
    again("reservations", || reservation::follow(&broker, &news)).await
}

/// Changes of registered programs.
pub async fn programs(programs: Programs, news: Sender<News>) -> Result<(), ServiceError> {
    again("programs", || programs.follow(&news)).await
}

fn node_news(key: &str, value: Option<&[u8]>) -> Option<News> {
    let (kind, name) = key.split_once('.')?;
    let node: NodeId = name.parse().ok()?;
    match (kind, value) {
        ("node", Some(value)) => {
            let descriptor: NodeDescriptor = read(key, value)?;
            (descriptor.node == node).then(|| News::Descriptor(Box::new(descriptor)))
        }
        ("node", None) => Some(News::Gone(node)),
        ("proof", Some(value)) => Some(News::Proof(node, Box::new(read(key, value)?))),
        ("quarantine", Some(value)) => Some(News::Quarantine(node, read(key, value)?)),
        ("quarantine", None) => Some(News::Quarantine(node, Quarantine::default())),
        ("flags", Some(value)) => Some(News::Flags(node, read(key, value)?)),
        ("flags", None) => Some(News::Flags(node, NodeFlags::default())),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may end so")]

    use super::*;
    use async_nats::HeaderMap;
    use fiec_broker::{ConnectOptions, topology};
    use fiec_dev_servers::{NatsOptions, NatsServer, NoProgress, locate_nats};

    #[tokio::test]
    async fn loading_goes_on_after_the_server_has_deleted_the_consumer() {
        const LEDGERS: u64 = 3_000;
        let dir = tempfile::tempdir().unwrap();
        let binary = locate_nats(&NoProgress).await.unwrap();
        let options = NatsOptions::new(binary, dir.path().join("nats"));
        let server = NatsServer::start(options).await.unwrap();
        let connect = ConnectOptions::new(server.client_url(), "test");
        let broker = Broker::connect(connect).await.unwrap();
        let profile = topology::Profile::default();
        topology::apply(&broker, &profile).await.unwrap();
        let mut acks = Vec::new();
        for _ in 0..LEDGERS {
            let id = fiec_schemas::ExecutionId(uuid::Uuid::now_v7());
            let subject = subjects::ledger(&"lab".parse().unwrap(), id);
            let mut headers = HeaderMap::new();
            headers.insert(subjects::EVENT_HEADER, "{}");
            let sent = broker.js.publish_with_headers(subject, headers, "".into());
            acks.push(sent.await.unwrap());
        }
        for ack in acks {
            ack.await.unwrap();
        }
        // A core that is busy: it takes nothing, so that the reader asks for nothing.
        let (to, mut news) = tokio::sync::mpsc::channel(1);
        let loading = tokio::spawn(ledgers(broker.clone(), to, SourceHealth::default()));
        let stream = broker.js.get_stream(subjects::LEDGER_STREAM).await.unwrap();
        let consumer = loop {
            tokio::time::sleep(Duration::from_millis(20)).await;
            let Some(info) = stream.consumers().next().await else {
                continue;
            };
            let info = info.unwrap();
            if info.num_waiting == 0 && info.delivered.consumer_sequence > 0 {
                break info.name;
            }
        };
        stream.delete_consumer(&consumer).await.unwrap();
        let loaded = async { while !matches!(news.recv().await.unwrap(), News::Loaded) {} };
        let patience = Duration::from_secs(30);
        tokio::time::timeout(patience, loaded).await.unwrap();
        loading.abort();
    }
}
