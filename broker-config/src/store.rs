//! σ where its commit says: in a ledger message's body, or in chunks that the body lists. Data by
//! digest, in an object store.

use async_nats::jetstream::object_store::{
    GetErrorKind, InfoErrorKind, ObjectMetadata, ObjectStore,
};
use bytes::Bytes;
use fiec_schemas::trust::VerifiedUpTo;
use fiec_schemas::{Digest, ExecutionId, StatePlace, subjects};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::chunks::{self, Manifest};
use crate::ledger::Ledger;
use crate::{Broker, BrokerError};

/// The name of a σ that was stored whole: a verified one, or a large one of an earlier version.
fn state_name(execution: ExecutionId, digest: Digest) -> String {
    format!("{execution}.{digest}")
}

/// Stores an input or an output.
///
/// # Errors
/// When the broker refuses it.
pub async fn put_data(broker: &Broker, digest: Digest, data: &[u8]) -> Result<(), BrokerError> {
    put(broker.data().await?, "data", digest.to_string(), data).await
}

/// True where σ lies in chunks, and the message's body lists them.
pub fn is_large(place: &StatePlace) -> bool {
    place.bytes > subjects::INLINE_STATE_LIMIT as u64 && place.seq.is_some()
}

/// The chunks of a large σ, from the message that commits it.
///
/// # Errors
/// When the message is not there any more, or cannot be read.
pub async fn manifest(broker: &Broker, place: &StatePlace) -> Result<Manifest, BrokerError> {
    let entry = Ledger::new(broker)
        .by_sequence(place.seq.unwrap_or(0))
        .await?;
    Manifest::decode(&entry.body)
}

/// Fetches σ from wherever its place says, and checks its digest.
///
/// # Errors
/// When it is not there, or damaged.
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
                Box::pin(chunks::assemble(broker, &manifest, |_| None))
                    .await?
                    .state
            } else {
                entry.body
            }
        }
        None => {
            let name = state_name(execution, place.digest);
            get(broker.states().await?, &what(), name, place.bytes).await?
        }
    };
    verify(&what(), place.digest, bytes)
}

/// Fetches data by its digest and checks it.
///
/// # Errors
/// When it is not there, or damaged.
pub async fn get_data(broker: &Broker, digest: Digest, bytes: u64) -> Result<Bytes, BrokerError> {
    let what = format!("data {}", digest.short());
    let found = get(broker.data().await?, &what, digest.to_string(), bytes).await?;
    verify(&what, digest, found)
}

/// Bytes that are copied at once.
const COPY: usize = 256 * 1024;
/// A fetch that brings nothing for so long is given up.
const SILENCE: std::time::Duration = std::time::Duration::from_secs(20);

/// The digest and the number of the bytes that a reader gives.
///
/// # Errors
/// Those of the reader.
pub fn digest_of(reader: impl std::io::Read) -> std::io::Result<(Digest, u64)> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(reader)?;
    Ok((Digest(*hasher.finalize().as_bytes()), hasher.count()))
}

/// Stores what a reader gives under a digest that the caller has computed from the same bytes.
/// An object of this digest becomes visible only when it is stored in full.
///
/// # Errors
/// When the broker refuses it, or the reader fails.
pub async fn put_data_from(
    broker: &Broker,
    digest: Digest,
    reader: &mut (impl AsyncRead + Unpin),
) -> Result<(), BrokerError> {
    let name = digest.to_string();
    let metadata = ObjectMetadata {
        name: name.clone(),
        chunk_size: Some(subjects::INLINE_STATE_LIMIT),
        ..Default::default()
    };
    broker
        .data()
        .await?
        .put(metadata, reader)
        .await
        .map_err(BrokerError::operation(format!("store data {name}")))?;
    Ok(())
}

/// The size in bytes of an object in `FIEC_DATA`; none where it is not there.
///
/// # Errors
/// When the broker does not answer.
pub async fn data_size(broker: &Broker, digest: Digest) -> Result<Option<u64>, BrokerError> {
    match broker.data().await?.info(digest.to_string()).await {
        Ok(info) if info.deleted => Ok(None),
        Ok(info) => Ok(Some(info.size as u64)),
        Err(error) if error.kind() == InfoErrorKind::NotFound => Ok(None),
        Err(error) => Err(BrokerError::operation(format!(
            "look for data {}",
            digest.short()
        ))(error)),
    }
}

/// Copies data into a writer, at most `limit` bytes, checks its digest at the end, and returns how
/// many bytes it has. What was written is to be thrown away on an error. `progress` hears after
/// each piece how many bytes have come.
///
/// # Errors
/// When it is not there, larger than `limit`, damaged, or the writer fails.
pub async fn get_data_to(
    broker: &Broker,
    digest: Digest,
    limit: u64,
    writer: &mut (impl AsyncWrite + Unpin),
    mut progress: impl FnMut(u64),
) -> Result<u64, BrokerError> {
    let what = format!("data {}", digest.short());
    if data_size(broker, digest).await?.is_none() {
        return Err(BrokerError::Missing {
            what,
            hint: format!(" ({} has no object {digest})", subjects::DATA_BUCKET),
        });
    }
    let mut object = broker
        .data()
        .await?
        .get(digest.to_string())
        .await
        .map_err(BrokerError::operation(format!("fetch {what}")))?;
    let mut hasher = blake3::Hasher::new();
    let mut chunk = vec![0; COPY];
    let mut copied = 0;
    loop {
        let read = match tokio::time::timeout(SILENCE, object.read(&mut chunk)).await {
            Ok(read) => read,
            Err(_) => {
                return Err(BrokerError::Missing {
                    what: format!("the rest of {what} after {copied} bytes"),
                    hint: format!(": nothing came for {SILENCE:?}"),
                });
            }
        };
        let found = match read {
            // The object store's own check: the bytes are not those that were stored.
            Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
                return Err(BrokerError::Digest {
                    what,
                    found: format!("unknown ({error})"),
                    expected: digest.to_string(),
                });
            }
            read => read.map_err(BrokerError::operation(format!("read {what}")))?,
        };
        if found == 0 {
            break;
        }
        copied += found as u64;
        if copied > limit {
            return Err(BrokerError::Malformed {
                what,
                reason: format!("it has more than the {limit} bytes that were expected"),
            });
        }
        hasher.update(&chunk[..found]);
        writer
            .write_all(&chunk[..found])
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

/// Stores a σ whole, beside the ledger: one that was verified, so that its execution can go back to
/// it whatever its ledger still holds. Storing it twice is harmless.
///
/// # Errors
/// When the broker refuses it.
pub async fn keep_state(
    broker: &Broker,
    execution: ExecutionId,
    digest: Digest,
    state: &[u8],
) -> Result<(), BrokerError> {
    let name = state_name(execution, digest);
    put(broker.states().await?, "state", name, state).await
}

/// Removes a σ that was stored whole and no ledger names any more.
///
/// # Errors
/// When the broker refuses; one that is not there is no error.
pub async fn drop_state(
    broker: &Broker,
    execution: ExecutionId,
    digest: Digest,
) -> Result<(), BrokerError> {
    let store = broker.states().await?;
    let name = state_name(execution, digest);
    if store.info(&name).await.is_err() {
        return Ok(());
    }
    store
        .delete(&name)
        .await
        .map_err(BrokerError::operation(format!("delete state {name}")))
}

/// The name of the note how far an execution is verified.
fn verified_name(execution: ExecutionId) -> String {
    format!("{execution}.verified")
}

/// Notes how far an execution is verified, beside the σ that [`keep_state`] has stored.
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
    put(broker.states().await?, what, name, &value).await
}

/// How far an execution was verified; none where nothing of it was, or it has ended.
///
/// # Errors
/// When the broker does not answer, or the note cannot be read.
pub async fn get_verified(
    broker: &Broker,
    execution: ExecutionId,
) -> Result<Option<VerifiedUpTo>, BrokerError> {
    let what = format!("how far {execution} is verified");
    let name = verified_name(execution);
    let store = broker.states().await?;
    match store.info(&name).await {
        Ok(info) if info.deleted => return Ok(None),
        Err(error) if error.kind() == InfoErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(BrokerError::operation(format!("look {what} up"))(error)),
        Ok(_) => {}
    }
    let value = match get(store, &what, name, 0).await {
        Err(BrokerError::Missing { .. }) => return Ok(None),
        value => value?,
    };
    let up_to = serde_json::from_slice(&value);
    up_to.map(Some).map_err(|error| BrokerError::Malformed {
        what,
        reason: error.to_string(),
    })
}

/// Removes the note how far an execution was verified.
///
/// # Errors
/// When the broker refuses; where there is none, that is no error.
pub async fn drop_verified(broker: &Broker, execution: ExecutionId) -> Result<(), BrokerError> {
    if get_verified(broker, execution).await?.is_none() {
        return Ok(());
    }
    let name = verified_name(execution);
    let deleted = broker.states().await?.delete(&name).await;
    deleted.map_err(BrokerError::operation(format!("delete {name}")))
}

/// The bytes, if they have this digest; `what` they are is for the error.
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
    store: &ObjectStore,
    what: &str,
    name: String,
    bytes: u64,
) -> Result<Bytes, BrokerError> {
    let mut object = match store.get(name).await {
        Ok(object) => object,
        Err(error) if error.kind() == GetErrorKind::NotFound => {
            return Err(BrokerError::Missing {
                what: what.to_owned(),
                hint: String::new(),
            });
        }
        Err(error) => return Err(BrokerError::operation(format!("fetch {what}"))(error)),
    };
    // The size comes from a message; the buffer grows with what really arrives.
    let mut buffer = Vec::with_capacity(usize::try_from(bytes.min(1 << 26)).unwrap_or(0));
    object
        .read_to_end(&mut buffer)
        .await
        .map_err(BrokerError::operation(format!("read {what}")))?;
    Ok(buffer.into())
}
