//! The entries of a key-value bucket. The client library's list of keys waits long for an entry that is
//! deleted while it lists, so the server is asked for its subjects instead.

use async_nats::jetstream::kv::Store;
use bytes::Bytes;
use futures_util::TryStreamExt as _;

use crate::BrokerError;

/// The keys of a bucket with their values, in order of the keys. What is written or deleted meanwhile
/// is there or not.
///
/// # Errors
/// When the broker does not answer.
pub async fn entries(bucket: &Store) -> Result<Vec<(String, Bytes)>, BrokerError> {
    let what = || format!("list the entries of {}", bucket.name);
    let all = format!("{}>", bucket.prefix);
    let listed = bucket.stream.info_with_subjects(all).await;
    let listed = listed.map_err(BrokerError::operation(what()))?;
    let listed: Vec<(String, usize)> = listed
        .try_collect()
        .await
        .map_err(BrokerError::operation(what()))?;
    let keys = listed.into_iter();
    let keys =
        keys.filter_map(|(subject, _)| Some(subject.strip_prefix(&bucket.prefix)?.to_owned()));
    let mut keys: Vec<String> = keys.collect();
    keys.sort_unstable();
    let mut entries = Vec::new();
    for key in keys {
        let value = bucket.get(&key).await;
        // A deleted key has its mark, and no value.
        if let Some(value) = value.map_err(BrokerError::operation(what()))? {
            entries.push((key, value));
        }
    }
    Ok(entries)
}
