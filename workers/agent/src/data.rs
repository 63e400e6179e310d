//! Data by digest for the programs of this node: from its disk cache, else from `FIEC_DATA`.
//! Outputs of this node are kept, since their own execution may fetch them.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fiec_broker::{Broker, BrokerError, store};
use fiec_kit::frames::BODY_LIMIT;
use fiec_schemas::Digest;
use serde_json::Value;

use crate::cache::{Cache, Fetched, Kind, NotCached};

/// The field of a parameter that names an object.
const OBJECT: &str = "object";
/// Objects that are fetched early for one execution.
const AHEAD: usize = 64;

/// Pause before the next attempt of a fetch.
const RETRY: Duration = Duration::from_secs(1);
/// Retries of a fetch if the object exists but its bytes cannot be had.
const RETRIES: u32 = 2;

/// Why data cannot be had. Each has the reason, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoData {
    /// There is no such object, or it cannot be the expected one: a retry is pointless.
    Never(String),
    /// The object exists, but its bytes cannot be had.
    Failed(String),
    /// The broker does not say whether the object exists.
    Unanswered(String),
}

impl NoData {
    /// The reason.
    pub fn reason(&self) -> &str {
        match self {
            Self::Never(reason) | Self::Failed(reason) | Self::Unanswered(reason) => reason,
        }
    }

    /// Whether a retry is pointless.
    pub fn is_permanent(&self) -> bool {
        matches!(self, Self::Never(_))
    }
}

/// The data of a node.
#[derive(Clone)]
pub struct Data {
    broker: Broker,
    cache: Arc<Cache>,
}

impl Data {
    /// Data that is fetched through this cache.
    pub fn new(broker: &Broker, cache: Arc<Cache>) -> Self {
        Self {
            broker: broker.clone(),
            cache,
        }
    }

    /// Returns the bytes of this digest, checked. `bytes` is their expected number; 0 if it is not
    /// known.
    ///
    /// # Errors
    /// When they do not exist, are damaged, or cannot be fetched now.
    pub async fn get(&self, digest: Digest, bytes: u64) -> Result<Bytes, NoData> {
        let later = NoData::Failed;
        // A damaged copy on the disk is fetched once more.
        for _ in 0..2 {
            let key = (Kind::Data, digest);
            let held = match self.cache.get(key) {
                Some(held) => held,
                None => {
                    let size = self.size(digest, bytes).await?;
                    if size > self.cache.limit() {
                        let found = store::get_data(&self.broker, digest, size).await;
                        return found.map_err(|error| later(error.to_string()));
                    }
                    let fetch = || fetch(self.broker.clone(), self.cache.clone(), digest, size);
                    let fetched = self.cache.get_or_fetch(key, size, fetch).await;
                    fetched.map_err(|error| later(error.to_string()))?
                }
            };
            let path = held.path();
            let read = move || {
                let found = std::fs::read(path)?;
                Ok::<_, std::io::Error>((Digest::of(&found), Bytes::from(found)))
            };
            match tokio::task::spawn_blocking(read).await {
                Ok(Ok((found, body))) if found == digest => return Ok(body),
                Ok(Ok(_)) => tracing::warn!(%digest, "a damaged file in the cache was removed"),
                Ok(Err(error)) => {
                    tracing::warn!(%digest, %error, "a file in the cache cannot be read");
                }
                Err(error) => return Err(later(error.to_string())),
            }
            held.discard();
        }
        Err(later(format!(
            "the copy of {digest} on this node's disk is damaged again and again"
        )))
    }

    /// Returns the bytes as [`Data::get`] does. Waits while the broker does not answer, until the
    /// caller drops the future. An object whose bytes cannot be had is tried a few times: the broker
    /// may have gone away while it sent them.
    ///
    /// # Errors
    /// When the data does not exist, or exists and cannot be had.
    pub async fn get_when_answered(&self, digest: Digest, bytes: u64) -> Result<Bytes, NoData> {
        let mut failures = 0;
        loop {
            let error = match self.get(digest, bytes).await {
                Err(error @ NoData::Unanswered(_)) => error,
                Err(error @ NoData::Failed(_)) if failures < RETRIES => {
                    failures += 1;
                    error
                }
                found => return found,
            };
            let reason = error.reason();
            tracing::warn!(%digest, reason, "cannot fetch a program's data; trying again");
            tokio::time::sleep(RETRY).await;
        }
    }

    /// Returns the size of an existing object.
    async fn size(&self, digest: Digest, expected: u64) -> Result<u64, NoData> {
        let never = NoData::Never;
        match store::data_size(&self.broker, digest).await {
            Ok(Some(size)) if expected != 0 && size != expected => Err(never(format!(
                "the object has {size} bytes; {expected} were expected"
            ))),
            Ok(Some(size)) if size > BODY_LIMIT => Err(never(format!(
                "the object has {size} bytes; a program can fetch at most {BODY_LIMIT}"
            ))),
            Ok(Some(size)) => Ok(size),
            Ok(None) => Err(never(
                "the object is not in the object store; run `fiec data push FILE`".to_owned(),
            )),
            Err(error) => Err(NoData::Unanswered(error.to_string())),
        }
    }

    /// Keeps bytes that were made here and are stored already, if there is room.
    pub async fn keep(&self, digest: Digest, bytes: &Bytes) {
        let (path, bytes) = (self.cache.new_path(), bytes.clone());
        let size = bytes.len() as u64;
        let write = move || async move {
            let fetched = Fetched { path, bytes: size };
            tokio::fs::write(&fetched.path, bytes)
                .await
                .map_err(NotCached::because("cannot write into the node's cache"))?;
            Ok(fetched)
        };
        let kept = self.cache.get_or_fetch((Kind::Data, digest), size, write);
        if let Err(error) = kept.await {
            tracing::debug!(%digest, %error, "an output is not kept on this node");
        }
    }

    /// Fetches the objects that parameters name to this node's disk.
    pub async fn fetch_ahead(&self, params: &Value) {
        let mut named = Vec::new();
        objects(params, &mut named);
        for digest in named {
            let size = match self.size(digest, 0).await {
                Ok(size) if size <= self.cache.limit() => size,
                Ok(_) => continue,
                Err(error) => {
                    tracing::debug!(%digest, reason = error.reason(), "an object was not fetched ahead");
                    continue;
                }
            };
            let fetch = || fetch(self.broker.clone(), self.cache.clone(), digest, size);
            let held = self
                .cache
                .get_or_fetch((Kind::Data, digest), size, fetch)
                .await;
            if let Err(error) = held {
                tracing::debug!(%digest, %error, "an object was not fetched ahead");
            }
        }
    }
}

/// The objects that parameters name as `{"object": "<digest>"}`, at most [`AHEAD`].
fn objects(params: &Value, found: &mut Vec<Digest>) {
    if found.len() >= AHEAD {
        return;
    }
    match params {
        Value::Object(fields) => {
            if let (1, Some(Ok(digest))) = (
                fields.len(),
                fields.get(OBJECT).and_then(Value::as_str).map(str::parse),
            ) {
                found.push(digest);
            }
            fields.values().for_each(|value| objects(value, found));
        }
        Value::Array(items) => items.iter().for_each(|item| objects(item, found)),
        _ => {}
    }
}

async fn fetch(
    broker: Broker,
    cache: Arc<Cache>,
    digest: Digest,
    size: u64,
) -> Result<Fetched, NotCached> {
    let path = cache.new_path();
    let copy = async {
        let mut file = tokio::fs::File::create(&path)
            .await
            .map_err(BrokerError::operation("write into the node's cache"))?;
        store::get_data_to(&broker, digest, size, &mut file, |_| {}).await
    };
    match copy.await {
        Ok(bytes) => Ok(Fetched { path, bytes }),
        Err(error) => {
            let _ = tokio::fs::remove_file(&path).await;
            Err(NotCached(error.to_string()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn objects_are_found_wherever_parameters_name_them() {
        let (a, b) = (Digest::of(b"a"), Digest::of(b"b"));
        let params = json!({"x": {"object": a}, "list": [{"y": {"object": b}}, 3],
            "no": {"object": "zz"}, "other": {"object": a, "more": 1}});
        let mut found = Vec::new();
        objects(&params, &mut found);
        found.sort();
        let mut expected = vec![a, b];
        expected.sort();
        assert_eq!(found, expected);
    }
}
