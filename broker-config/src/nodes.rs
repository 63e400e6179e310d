//! What the bucket `FIEC_NODES` keeps of a node, and how it is deleted. The mark of a deletion tells
//! those who watch, and ages out: names that come once leave nothing behind.

use std::time::Duration;

use async_nats::jetstream::kv::{Entry, Operation, Store};
use fiec_schemas::trust::Quarantine;
use fiec_schemas::{InstanceId, NodeDescriptor, NodeFlags, NodeId, subjects};

use crate::{Broker, BrokerError};

/// Age at which the mark of a deletion goes.
pub const MARKS_KEPT: Duration = Duration::from_secs(3_600);

/// Deletes a key of the bucket if `revision` is its last one. Its mark ages out, or stays in a bucket
/// that an earlier version made and no `fiec setup` has changed since.
///
/// # Errors
/// When the key has another revision, or the broker does not answer.
pub async fn delete(bucket: &Store, key: &str, revision: u64) -> Result<(), BrokerError> {
    let deleted = match bucket.stream.cached_info().config.allow_message_ttl {
        true => {
            bucket
                .purge_expect_revision_with_ttl(key, revision, MARKS_KEPT)
                .await
        }
        false => bucket.purge_expect_revision(key, Some(revision)).await,
    };
    deleted.map_err(BrokerError::operation(format!("delete {key}")))
}

/// Deletes the proof and the descriptor of a node that leaves, if `revision` is its descriptor's last
/// one.
///
/// # Errors
/// When another instance has the name, or the broker does not answer.
pub async fn leave(bucket: &Store, node: &NodeId, revision: u64) -> Result<(), BrokerError> {
    let proof = value(bucket, subjects::proof_key(node)).await?;
    let key = subjects::node_key(node);
    let descriptor = value(bucket, key.clone()).await?;
    if descriptor.is_some_and(|found| found.revision == revision) {
        delete_all(bucket, proof).await?;
    }
    delete(bucket, &key, revision).await
}

/// Deletes what is kept of a node: its descriptor, if it is of this instance, its proof, and its flags
/// and quarantine if they say nothing. Does nothing, and returns false, if another instance has joined,
/// or one whose descriptor cannot be read.
///
/// # Errors
/// When the broker does not answer, or a key is written at this moment.
pub async fn forget(
    broker: &Broker,
    node: &NodeId,
    instance: Option<InstanceId>,
) -> Result<bool, BrokerError> {
    let bucket = broker.js.get_key_value(subjects::NODES_BUCKET).await;
    let bucket = bucket.map_err(BrokerError::operation("open the bucket of nodes"))?;
    let proof = value(&bucket, subjects::proof_key(node)).await?;
    let flags = value(&bucket, subjects::flags_key(node)).await?;
    let flags = flags.filter(|entry| {
        let flags = serde_json::from_slice::<NodeFlags>(&entry.value);
        flags.is_ok_and(|flags| !flags.are_of_the_name())
    });
    let quarantine = value(&bucket, subjects::quarantine_key(node)).await?;
    let quarantine = quarantine.filter(|entry| {
        let quarantine = serde_json::from_slice::<Quarantine>(&entry.value);
        quarantine.is_ok_and(|quarantine| quarantine.entries.is_empty())
    });
    let descriptor = value(&bucket, subjects::node_key(node)).await?;
    let is_of_it = |entry: &Entry| {
        let descriptor = serde_json::from_slice::<NodeDescriptor>(&entry.value);
        descriptor.is_ok_and(|d| Some(d.instance) == instance)
    };
    if !descriptor.as_ref().is_none_or(is_of_it) {
        return Ok(false);
    }
    let all = [proof, flags, quarantine, descriptor];
    delete_all(&bucket, all.into_iter().flatten()).await?;
    Ok(true)
}

/// The entry of a key that has a value.
async fn value(bucket: &Store, key: String) -> Result<Option<Entry>, BrokerError> {
    let what = format!("read {key}");
    let entry = bucket
        .entry(key)
        .await
        .map_err(BrokerError::operation(what))?;
    Ok(entry.filter(|entry| entry.operation == Operation::Put))
}

/// Deletes entries as they were read, in this order. The caller reads the descriptor last and deletes
/// it last: what a new instance writes after it joins is never deleted, and a node without a
/// descriptor has no proof.
async fn delete_all(
    bucket: &Store,
    entries: impl IntoIterator<Item = Entry>,
) -> Result<(), BrokerError> {
    for entry in entries {
        delete(bucket, &entry.key, entry.revision).await?;
    }
    Ok(())
}
