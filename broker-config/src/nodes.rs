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
/// one. In this order, so that a node without a descriptor has no proof.
///
/// # Errors
/// When another instance has the name, or the broker does not answer.
pub async fn leave(bucket: &Store, node: &NodeId, revision: u64) -> Result<(), BrokerError> {
    let key = subjects::node_key(node);
    let entry = bucket.entry(&key).await;
    let entry = entry.map_err(BrokerError::operation(format!("read {key}")))?;
    if entry.is_some_and(|entry| entry.revision == revision) {
        delete_unless(bucket, &subjects::proof_key(node), |_| false).await?;
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
    let joined = |entry: &Entry| {
        let descriptor: Option<NodeDescriptor> = serde_json::from_slice(&entry.value).ok();
        descriptor.is_none_or(|d| Some(d.instance) != instance)
    };
    let key = subjects::node_key(node);
    if !delete_unless(&bucket, &key, joined).await? {
        return Ok(false);
    }
    delete_unless(&bucket, &subjects::proof_key(node), |_| false).await?;
    let flags = |entry: &Entry| {
        let flags: Option<NodeFlags> = serde_json::from_slice(&entry.value).ok();
        flags.is_none_or(|flags| flags.are_of_the_name())
    };
    delete_unless(&bucket, &subjects::flags_key(node), flags).await?;
    let quarantine = |entry: &Entry| {
        let quarantine: Option<Quarantine> = serde_json::from_slice(&entry.value).ok();
        quarantine.is_none_or(|quarantine| !quarantine.entries.is_empty())
    };
    delete_unless(&bucket, &subjects::quarantine_key(node), quarantine).await?;
    Ok(true)
}

/// Deletes a key unless `keep` is true of its value. True if it is not there now.
async fn delete_unless(
    bucket: &Store,
    key: &str,
    keep: impl FnOnce(&Entry) -> bool,
) -> Result<bool, BrokerError> {
    let entry = bucket.entry(key).await;
    let entry = entry.map_err(BrokerError::operation(format!("read {key}")))?;
    let Some(entry) = entry.filter(|entry| entry.operation == Operation::Put) else {
        return Ok(true);
    };
    if keep(&entry) {
        return Ok(false);
    }
    delete(bucket, key, entry.revision).await?;
    Ok(true)
}
