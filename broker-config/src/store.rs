//! σ at the place that its commit names: in a ledger message's body, or in chunks that the body
//! lists. Data by digest, in an object store.

use async_nats::jetstream::object_store::{ObjectMetadata, ObjectStore};
use bytes::Bytes;
use fiec_schemas::trust::VerifiedUpTo;
use fiec_schemas::{Digest, ExecutionId, StatePlace, subjects};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};

use crate::chunks::{self, Manifest};
use crate::collect::Store;
use crate::ledger::Ledger;
use crate::objects::{Bucket, Pieces};
use crate::{Broker, BrokerError};

/// The name of a σ that was stored whole: a verified or a restored one, or a large one of an earlier
/// version.
fn state_name(execution: ExecutionId, digest: Digest) -> String {
    format!("{execution}.{digest}")
}

/// Stores an input or an output. If it exists, nothing is sent. Concurrent equal puts leave one
/// object, and do not disturb its readers.
///
/// # Errors
/// When the broker refuses it.
pub async fn put_data(broker: &Broker, digest: Digest, mut data: &[u8]) -> Result<(), BrokerError> {
    put_data_from(broker, digest, &mut data).await
}

/// Whether σ lies in chunks that the message's body lists.
pub fn is_large(place: &StatePlace) -> bool {
    place.bytes > subjects::INLINE_STATE_LIMIT as u64 && place.seq.is_some()
}

/// Returns the chunks of a large σ, from the message that commits it.
///
/// # Errors
/// When the message has dropped out, or cannot be read.
pub async fn manifest(broker: &Broker, place: &StatePlace) -> Result<Manifest, BrokerError> {
    let entry = Ledger::new(broker)
        .by_sequence(place.seq.unwrap_or(0))
        .await?;
    Manifest::decode(&entry.body)
}

/// Fetches σ from its place, and checks its digest.
///
/// # Errors
/// When it is missing or damaged.
pub async fn get_state(
    broker: &Broker,
    execution: ExecutionId,
    place: &StatePlace,
) -> Result<Bytes, BrokerError> {
    let what = || format!("state of boundary {}", place.index);
    let bytes = match place.seq {
        Some(seq) => {
            let entry = Ledger::new(broker).by_sequence(seq).await?;
            if is_large(place) {
                let manifest = Manifest::decode(&entry.body)?;
                Box::pin(chunks::assemble(broker, &manifest)).await?
            } else {
                entry.body
            }
        }
        None => {
            return kept_state(broker, execution, place, |_| ()).await;
        }
    };
    verify(&what(), place.digest, bytes)
}

/// Fetches data by its digest and checks it.
///
/// # Errors
/// When it is missing or damaged.
pub async fn get_data(broker: &Broker, digest: Digest, bytes: u64) -> Result<Bytes, BrokerError> {
    let what = format!("data {}", digest.short());
    let name = digest.to_string();
    let found = get(broker, Store::Data, &what, &name, bytes).await?;
    verify(&what, digest, found)
}

/// Returns the digest and the number of a reader's bytes.
///
/// # Errors
/// The reader's errors.
pub fn digest_of(reader: impl std::io::Read) -> std::io::Result<(Digest, u64)> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(reader)?;
    Ok((Digest(*hasher.finalize().as_bytes()), hasher.count()))
}

/// Stores a reader's bytes under the digest that the caller has computed from them. An object
/// becomes visible only when it is stored in full.
///
/// # Errors
/// When the broker refuses it, or the reader fails.
pub async fn put_data_from(
    broker: &Broker,
    digest: Digest,
    reader: &mut (impl AsyncRead + Unpin),
) -> Result<(), BrokerError> {
    let bucket = Bucket::new(broker, subjects::DATA_BUCKET);
    bucket.put_once(&digest.to_string(), reader).await
}

/// Removes data that does not match its digest, so that it can be stored again. Returns whether it
/// was removed.
///
/// # Errors
/// When the broker does not answer.
pub async fn drop_damaged(broker: &Broker, digest: Digest) -> Result<bool, BrokerError> {
    match get_data_to(broker, digest, u64::MAX, &mut tokio::io::sink(), |_| ()).await {
        Err(BrokerError::Digest { .. }) => {}
        Ok(_) | Err(BrokerError::Missing { .. }) => return Ok(false),
        Err(error) => return Err(error),
    }
    let removed = broker
        .store(Store::Data)
        .await?
        .delete(digest.to_string())
        .await;
    removed.map_err(BrokerError::operation(format!(
        "remove damaged data {}",
        digest.short()
    )))?;
    Ok(true)
}

/// Returns the size in bytes of an object in `FIEC_DATA`, or none if it does not exist.
///
/// # Errors
/// When the broker does not answer.
pub async fn data_size(broker: &Broker, digest: Digest) -> Result<Option<u64>, BrokerError> {
    let bucket = Bucket::new(broker, subjects::DATA_BUCKET);
    let found = bucket.described(&digest.to_string()).await?;
    let found = found.filter(|found| !found.info.deleted);
    Ok(found.map(|found| found.info.size as u64))
}

/// Copies data into a writer, at most `limit` bytes. Checks its digest at the end, and returns its
/// size. After an error the caller must discard the written bytes. `progress` receives the number
/// of bytes after each piece.
///
/// # Errors
/// When it is missing, larger than `limit`, damaged, or the writer fails.
pub async fn get_data_to(
    broker: &Broker,
    digest: Digest,
    limit: u64,
    writer: &mut (impl AsyncWrite + Unpin),
    mut progress: impl FnMut(u64),
) -> Result<u64, BrokerError> {
    let what = format!("data {}", digest.short());
    let name = digest.to_string();
    let mut pieces = Pieces::open(broker, Store::Data, &name, &what).await?;
    let mut hasher = blake3::Hasher::new();
    let mut copied = 0;
    loop {
        let piece = pieces.next().await?;
        if piece.is_empty() {
            break;
        }
        copied += piece.len() as u64;
        if copied > limit {
            return Err(BrokerError::Malformed {
                what,
                reason: format!("the object has more than the expected {limit} bytes"),
            });
        }
        hasher.update(piece);
        writer
            .write_all(piece)
            .await
            .map_err(BrokerError::operation(format!("write {what}")))?;
        progress(copied);
    }
    writer
        .flush()
        .await
        .map_err(BrokerError::operation(format!("write {what}")))?;
    let found = Digest(*hasher.finalize().as_bytes());
    if found != digest {
        return Err(BrokerError::Digest {
            what,
            found: found.to_string(),
            expected: digest.to_string(),
        });
    }
    Ok(copied)
}

/// Removes the large σ of an execution that has ended.
///
/// # Errors
/// When the broker refuses.
pub async fn drop_last(
    broker: &Broker,
    execution: ExecutionId,
    place: &StatePlace,
) -> Result<(), BrokerError> {
    if is_large(place) {
        let manifest = manifest(broker, place).await?;
        return chunks::drop_chunks(broker, &manifest.beyond(None)).await;
    }
    if place.seq.is_none() {
        return drop_state(broker, execution, place.digest).await;
    }
    Ok(())
}

/// Stores a verified or a restored σ whole, beside the ledger. Its execution can then return to it
/// even after the ledger has dropped it. Storing it twice is harmless.
///
/// # Errors
/// When the broker refuses it.
pub async fn keep_state(
    broker: &Broker,
    execution: ExecutionId,
    digest: Digest,
    mut state: &[u8],
) -> Result<(), BrokerError> {
    let bucket = Bucket::new(broker, subjects::STATE_BUCKET);
    let name = state_name(execution, digest);
    bucket.put_once(&name, &mut state).await
}

/// Fetches a σ that was stored whole: a verified one, or one that the recorder restored. `progress`
/// receives the number of bytes after each piece.
///
/// # Errors
/// When it is missing or damaged.
pub async fn kept_state(
    broker: &Broker,
    execution: ExecutionId,
    place: &StatePlace,
    progress: impl FnMut(u64),
) -> Result<Bytes, BrokerError> {
    let what = format!("copy of the state of boundary {}", place.index);
    let name = state_name(execution, place.digest);
    let pieces = Pieces::open(broker, Store::States, &name, &what).await?;
    let kept = pieces.all(place.bytes, progress).await?;
    verify(&what, place.digest, kept)
}

/// Removes a σ that was stored whole and that no ledger names any more.
///
/// # Errors
/// When the broker refuses. A missing σ is no error.
pub async fn drop_state(
    broker: &Broker,
    execution: ExecutionId,
    digest: Digest,
) -> Result<(), BrokerError> {
    let store = broker.store(Store::States).await?;
    let name = state_name(execution, digest);
    let bucket = Bucket::new(broker, subjects::STATE_BUCKET);
    if bucket.described(&name).await?.is_none() {
        return Ok(());
    }
    store
        .delete(&name)
        .await
        .map_err(BrokerError::operation(format!("delete state {name}")))
}

/// The name of the note on an execution's verified boundary.
fn verified_name(execution: ExecutionId) -> String {
    format!("{execution}.verified")
}

/// Notes up to which boundary an execution is verified, beside the σ that [`keep_state`] has
/// stored.
///
/// # Errors
/// When the broker refuses it.
pub async fn keep_verified(
    broker: &Broker,
    execution: ExecutionId,
    up_to: &VerifiedUpTo,
) -> Result<(), BrokerError> {
    let what = "how far it is verified";
    let value = serde_json::to_vec(up_to).map_err(BrokerError::operation(what))?;
    let name = verified_name(execution);
    put(broker.store(Store::States).await?, what, name, &value).await
}

/// Returns up to which boundary an execution was verified. None if nothing was verified, or if it
/// has ended.
///
/// # Errors
/// When the broker does not answer, or the note cannot be read.
pub async fn get_verified(
    broker: &Broker,
    execution: ExecutionId,
) -> Result<Option<VerifiedUpTo>, BrokerError> {
    let what = format!("how far {execution} is verified");
    let name = verified_name(execution);
    let value = match get(broker, Store::States, &what, &name, 0).await {
        Err(BrokerError::Missing { .. }) => return Ok(None),
        value => value?,
    };
    let up_to = serde_json::from_slice(&value);
    up_to.map(Some).map_err(|error| BrokerError::Malformed {
        what,
        reason: error.to_string(),
    })
}

/// Removes the note on an execution's verified boundary.
///
/// # Errors
/// When the broker refuses. A missing note is no error.
pub async fn drop_verified(broker: &Broker, execution: ExecutionId) -> Result<(), BrokerError> {
    if get_verified(broker, execution).await?.is_none() {
        return Ok(());
    }
    let name = verified_name(execution);
    let deleted = broker.store(Store::States).await?.delete(&name).await;
    deleted.map_err(BrokerError::operation(format!("delete {name}")))
}

/// Returns the bytes if they have this digest. `what` names them in the error.
///
/// # Errors
/// When they are damaged.
pub fn verify(what: &str, expected: Digest, bytes: Bytes) -> Result<Bytes, BrokerError> {
    let found = Digest::of(&bytes);
    if found == expected {
        Ok(bytes)
    } else {
        Err(BrokerError::Digest {
            what: what.to_owned(),
            found: found.to_string(),
            expected: expected.to_string(),
        })
    }
}

async fn put(
    store: &ObjectStore,
    what: &str,
    name: String,
    bytes: &[u8],
) -> Result<(), BrokerError> {
    let metadata = ObjectMetadata {
        name: name.clone(),
        chunk_size: Some(subjects::INLINE_STATE_LIMIT),
        ..Default::default()
    };
    let mut reader = bytes;
    store
        .put(metadata, &mut reader)
        .await
        .map_err(BrokerError::operation(format!("store {what} {name}")))?;
    Ok(())
}

async fn get(
    broker: &Broker,
    store: Store,
    what: &str,
    name: &str,
    bytes: u64,
) -> Result<Bytes, BrokerError> {
    Pieces::open(broker, store, name, what)
        .await?
        .all(bytes, |_| ())
        .await
}
