//! The operations of a collector: list stored objects with their age, and remove an object unless
//! it was renewed meanwhile. The caller, who knows all references, decides what to remove. All ages
//! are by the broker's clock, which stamps what it stores.

use std::collections::HashSet;
use std::time::Duration;

use async_nats::jetstream::stream::Stream;
use fiec_schemas::{ExecutionId, Sequence, Timestamp, subjects};
use futures_util::{StreamExt, TryStreamExt, stream};

use crate::objects::Bucket;
use crate::{Broker, BrokerError, leader};

/// Concurrent requests.
const AT_ONCE: usize = 16;

/// A bucket of objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Store {
    /// Inputs, outputs, packages, submissions and results, by digest.
    Data,
    /// Verified states and notes about them, by execution.
    States,
}

impl Store {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Data => subjects::DATA_BUCKET,
            Self::States => subjects::STATE_BUCKET,
        }
    }
}

/// An object in a bucket.
#[derive(Debug, Clone)]
pub struct Stored {
    /// Its name: the digest of its bytes, or an execution with a suffix.
    pub name: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Time since it was stored or renewed.
    pub age: Duration,
    /// When the broker stored or renewed it.
    pub stored_at: Timestamp,
    /// The name of its chunks.
    nuid: String,
    /// The sequence of its description.
    seq: Sequence,
}

/// The objects of a bucket, and the chunks that belong to none of them.
#[derive(Debug, Default)]
pub struct Contents {
    /// The objects.
    pub objects: Vec<Stored>,
    /// Subjects of chunks without a description, from running or interrupted puts. Empty while a
    /// description cannot be read, since the chunks may belong to it.
    pub orphans: Vec<String>,
}

async fn subjects_of(
    broker: &Broker,
    stream: &str,
    filter: &str,
) -> Result<Vec<String>, BrokerError> {
    let what = || format!("list {filter} of {stream}");
    let opened = broker.js.get_stream_no_info(stream).await;
    let opened = opened.map_err(BrokerError::operation(what()))?;
    let listed = opened.info_with_subjects(filter).await;
    let listed = listed.map_err(BrokerError::operation(what()))?;
    let listed = listed.map_ok(|(subject, _)| subject).try_collect().await;
    listed.map_err(BrokerError::operation(what()))
}

/// Lists a bucket. An object whose description cannot be read is left out.
///
/// # Errors
/// When the broker does not answer.
pub async fn contents(broker: &Broker, store: Store) -> Result<Contents, BrokerError> {
    broker.ensure_clock().await?;
    let bucket = Bucket::new(broker, store.name());
    let stream = format!("OBJ_{}", store.name());
    // Chunks first, so that an object that becomes visible meanwhile is included.
    let chunk_subjects = subjects_of(broker, &stream, &bucket.chunks(">")).await?;
    let described = subjects_of(broker, &stream, &bucket.description_of_all()).await?;
    let objects = stream::iter(described)
        .map(|subject| {
            let bucket = &bucket;
            async move {
                match bucket.described_on(&subject).await {
                    Err(error @ BrokerError::Malformed { .. }) => {
                        tracing::warn!(%error, "an object is left out of this sweep");
                        Ok(None)
                    }
                    found => found.map(Some),
                }
            }
        })
        .buffer_unordered(AT_ONCE)
        .map_ok(|found| {
            found.map(|found| {
                found.map(|found| Stored {
                    name: found.info.name,
                    bytes: found.info.size as u64,
                    age: found.age,
                    stored_at: found.stored_at,
                    nuid: found.info.nuid,
                    seq: found.seq,
                })
            })
        });
    let listed: Vec<Option<Option<Stored>>> = objects.try_collect().await?;
    // The chunks of an unreadable object cannot be identified, so nothing counts as an orphan then.
    let all_read = listed.iter().all(Option::is_some);
    let objects: Vec<Stored> = listed.into_iter().flatten().flatten().collect();
    let known: HashSet<String> = objects.iter().map(|o| bucket.chunks(&o.nuid)).collect();
    let orphans = chunk_subjects.into_iter();
    let orphans = orphans.filter(|subject| all_read && !known.contains(subject));
    Ok(Contents {
        orphans: orphans.collect(),
        objects,
    })
}

/// Removes an object, unless it was renewed after the listing. Returns whether it was removed.
///
/// # Errors
/// When the broker does not answer.
pub async fn remove(broker: &Broker, store: Store, object: &Stored) -> Result<bool, BrokerError> {
    let bucket = Bucket::new(broker, store.name());
    let removed = bucket.forget(&object.name, object.seq).await?;
    if removed {
        bucket.discard(&object.nuid).await;
    }
    Ok(removed)
}

/// Time since the last message of a subject. None if it has no message.
async fn age_of(
    broker: &Broker,
    stream: &Stream<()>,
    subject: &str,
) -> Result<Option<Duration>, BrokerError> {
    broker.ensure_clock().await?;
    let last = leader::last(stream, subject).await?;
    Ok(last.map(|last| broker.clock.age(last.time)))
}

/// Removes a subject's messages from a stream, if the last one is older than `grace`. Returns
/// whether they were removed, or with `dry` would be.
async fn purge_old(
    broker: &Broker,
    stream: &str,
    subject: &str,
    grace: Duration,
    dry: bool,
) -> Result<bool, BrokerError> {
    let opened = broker.js.get_stream_no_info(stream).await;
    let opened = opened.map_err(BrokerError::operation(format!("open {stream}")))?;
    if age_of(broker, &opened, subject)
        .await?
        .is_none_or(|age| age < grace)
    {
        return Ok(false);
    }
    if !dry {
        let purged = opened.purge().filter(subject).await;
        purged.map_err(BrokerError::operation(format!("remove {subject}")))?;
    }
    Ok(true)
}

/// Removes chunks of no object, if they are older than `grace`.
///
/// # Errors
/// When the broker does not answer.
pub async fn remove_orphan(
    broker: &Broker,
    store: Store,
    orphan: &str,
    grace: Duration,
    dry: bool,
) -> Result<bool, BrokerError> {
    let stream = format!("OBJ_{}", store.name());
    purge_old(broker, &stream, orphan, grace, dry).await
}

/// The executions that have chunks in `FIEC_CHUNK`, each with its subject.
///
/// # Errors
/// When the broker does not answer.
pub async fn chunk_holders(broker: &Broker) -> Result<Vec<(ExecutionId, String)>, BrokerError> {
    let all = subjects_of(broker, subjects::CHUNK_STREAM, "fiec.chunk.>").await?;
    let holder = |subject: String| {
        let id = subject.rsplit('.').next()?.parse().ok()?;
        Some((ExecutionId(id), subject))
    };
    Ok(all.into_iter().filter_map(holder).collect())
}

/// Removes the chunks of an execution that needs none any more, if the last one is older than
/// `grace`.
///
/// # Errors
/// When the broker does not answer.
pub async fn remove_chunks(
    broker: &Broker,
    subject: &str,
    grace: Duration,
    dry: bool,
) -> Result<bool, BrokerError> {
    purge_old(broker, subjects::CHUNK_STREAM, subject, grace, dry).await
}

/// Whether a submission has waited for longer than this.
///
/// # Errors
/// When the broker does not answer.
pub async fn submissions_wait(broker: &Broker, longer: Duration) -> Result<bool, BrokerError> {
    broker.ensure_clock().await?;
    let opened = broker.js.get_stream(subjects::SUBMIT_STREAM).await;
    let opened = opened.map_err(BrokerError::operation("look at the submissions that wait"))?;
    let state = &opened.cached_info().state;
    let age = broker.clock.age(state.first_timestamp);
    Ok(state.messages > 0 && age > longer)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use fiec_dev_servers::{NatsOptions, NatsServer, NoProgress, locate_nats};
    use fiec_schemas::Tenant;

    use super::*;
    use crate::ConnectOptions;
    use crate::topology::{self, Profile};

    const GRACE: Duration = Duration::from_millis(50);

    #[tokio::test]
    async fn a_machine_whose_clock_is_ahead_removes_nothing_early() {
        let folder = tempfile::tempdir().unwrap();
        let binary = locate_nats(&NoProgress).await.unwrap();
        let options = NatsOptions::new(binary, folder.path().join("nats"));
        let server = NatsServer::start(options).await.unwrap();
        let broker = Broker::connect(ConnectOptions::new(server.client_url(), "test"));
        let broker = broker.await.unwrap();
        topology::apply(&broker, &Profile::default()).await.unwrap();
        let (tenant, id) = (
            Tenant::new("lab").unwrap(),
            ExecutionId(uuid::Uuid::now_v7()),
        );
        let chunk = subjects::chunk(&tenant, id);
        let submission = subjects::submit(&tenant);
        for subject in [&chunk, &submission] {
            let sent = broker.js.publish(subject.clone(), Bytes::new()).await;
            sent.unwrap().await.unwrap();
        }
        let digest = fiec_schemas::Digest::of(b"x");
        crate::store::put_data(&broker, digest, b"x").await.unwrap();
        let is_old = async || {
            let objects = contents(&broker, Store::Data).await.unwrap().objects;
            let chunk = remove_chunks(&broker, &chunk, GRACE, true).await.unwrap();
            let waits = submissions_wait(&broker, GRACE).await.unwrap();
            (objects[0].age >= GRACE, chunk, waits)
        };
        let grown_old = async {
            while is_old().await != (true, true, true) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let waited = tokio::time::timeout(Duration::from_secs(30), grown_old);
        waited.await.unwrap();
        broker.clock.set_ahead_for_test(Duration::from_secs(3_600));
        assert_eq!(is_old().await, (false, false, false));
    }
}
