//! σ and data by digest: in a ledger message's body, or in an object store.

use async_nats::jetstream::object_store::{ObjectMetadata, ObjectStore};
use bytes::Bytes;
use fiec_schemas::{Digest, ExecutionId, StatePlace, subjects};
use tokio::io::AsyncReadExt;

use crate::ledger::Ledger;
use crate::{Broker, BrokerError};

/// A large σ belongs to its execution: two with equal bytes have one each, so that either can be
/// dropped when its ledger has gone beyond it.
fn state_name(execution: ExecutionId, digest: Digest) -> String {
    format!("{execution}.{digest}")
}

/// Stores a σ that is too large for a ledger message. Storing it twice is harmless.
///
/// # Errors
/// When the broker refuses it.
pub async fn put_state(
    broker: &Broker,
    execution: ExecutionId,
    digest: Digest,
    state: &[u8],
) -> Result<(), BrokerError> {
    put(
        broker.states().await?,
        "state",
        state_name(execution, digest),
        state,
    )
    .await
}

/// Stores an input or an output.
///
/// # Errors
/// When the broker refuses it.
pub async fn put_data(broker: &Broker, digest: Digest, data: &[u8]) -> Result<(), BrokerError> {
    put(broker.data().await?, "data", digest.to_string(), data).await
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
            entry.body
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

/// Removes a σ that no ledger names any more.
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

fn verify(what: &str, expected: Digest, bytes: Bytes) -> Result<Bytes, BrokerError> {
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
    let mut object = store
        .get(name)
        .await
        .map_err(BrokerError::operation(format!("fetch {what}")))?;
    // The size comes from a message; the buffer grows with what really arrives.
    let mut buffer = Vec::with_capacity(usize::try_from(bytes.min(1 << 26)).unwrap_or(0));
    object
        .read_to_end(&mut buffer)
        .await
        .map_err(BrokerError::operation(format!("read {what}")))?;
    Ok(buffer.into())
}
