//! What programs emit: stored before the commit that carries it, published after it, once each.
//!
//! The ledger's last `emitted` says what is owed. Whoever holds the execution then publishes it:
//! the worker that appended it, or the next one, which first looks at how far the stream has come.
//! Nothing more is emitted, and nothing ends, before that is done; so only the last one can be
//! owed. Two that publish at the same moment are told apart from nobody: a message's id is made of
//! execution, boundary and index, and the stream takes each id once.

use async_nats::HeaderMap;
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::stream::DirectGetErrorKind;
use bytes::{BufMut, Bytes, BytesMut};
use fiec_schemas::event::Outbox;
use fiec_schemas::{
    BoundaryIndex, Digest, ExecutionId, ExecutionState, Sequence, Tenant, subjects,
};
use serde::{Deserialize, Serialize};

use crate::chunks::{self, Chunk};
use crate::{Broker, BrokerError};

/// Header of a published message: `<boundary>.<index>`.
pub const PLACE_HEADER: &str = "Fiec-Emitted";
/// Header that makes the stream take a message once.
const ID_HEADER: &str = "Nats-Msg-Id";

/// A message to the outside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Emit {
    /// The last part of its subject.
    pub name: String,
    /// The boundary at which it was emitted.
    pub boundary: BoundaryIndex,
    /// Which one at that boundary, from 0.
    pub index: u32,
    /// What it says.
    pub bytes: Bytes,
}

#[derive(Serialize, Deserialize)]
struct Entry {
    name: String,
    boundary: BoundaryIndex,
    index: u32,
    bytes: u32,
}

/// The messages of one commit in one piece.
///
/// ```text
/// u32 LE length of list │ list (JSON) │ bytes of each
/// ```
///
/// # Errors
/// When the list cannot be written.
pub fn pack(emits: &[Emit]) -> Result<Bytes, BrokerError> {
    let entries: Vec<Entry> = emits
        .iter()
        .map(|e| Entry {
            name: e.name.clone(),
            boundary: e.boundary,
            index: e.index,
            bytes: e.bytes.len() as u32,
        })
        .collect();
    let list = serde_json::to_vec(&entries).map_err(|error| malformed(&error.to_string()))?;
    let mut out = BytesMut::new();
    out.put_u32_le(list.len() as u32);
    out.extend_from_slice(&list);
    emits.iter().for_each(|e| out.extend_from_slice(&e.bytes));
    Ok(out.freeze())
}

fn malformed(reason: &str) -> BrokerError {
    BrokerError::Malformed {
        what: "messages that an execution owes".to_owned(),
        reason: reason.to_owned(),
    }
}

/// Reads what [`pack`] made.
///
/// # Errors
/// When it is something else.
pub fn unpack(mut packed: Bytes) -> Result<Vec<Emit>, BrokerError> {
    let short = || malformed("they are shorter than they say");
    if packed.len() < 4 {
        return Err(short());
    }
    let length = packed.split_to(4);
    let length = u32::from_le_bytes([length[0], length[1], length[2], length[3]]) as usize;
    if packed.len() < length {
        return Err(short());
    }
    let entries: Vec<Entry> = serde_json::from_slice(&packed.split_to(length))
        .map_err(|error| malformed(&error.to_string()))?;
    let mut emits = Vec::with_capacity(entries.len());
    for entry in entries {
        if packed.len() < entry.bytes as usize {
            return Err(short());
        }
        emits.push(Emit {
            name: entry.name,
            boundary: entry.boundary,
            index: entry.index,
            bytes: packed.split_to(entry.bytes as usize),
        });
    }
    Ok(emits)
}

/// Stores the messages of a commit ahead of it; what its `emitted` says.
///
/// # Errors
/// When the broker refuses.
pub async fn store(
    broker: &Broker,
    tenant: &Tenant,
    execution: ExecutionId,
    emits: &[Emit],
) -> Result<Outbox, BrokerError> {
    let packed = pack(emits)?;
    let (digest, bytes) = (Digest::of(&packed), packed.len() as u32);
    let ack = chunks::send(broker, tenant, execution, packed).await?;
    let ack = broker.sent(ack).settled().await;
    let ack = ack.map_err(BrokerError::operation("store what was emitted"))?;
    Ok(Outbox {
        seq: ack.sequence,
        digest,
        bytes,
        count: emits.len() as u32,
        through: emits.iter().map(|e| e.boundary).max().unwrap_or(0),
    })
}

/// Publishes messages in their order. Publishing one twice is harmless.
///
/// # Errors
/// When one was not acknowledged.
pub async fn publish(
    broker: &Broker,
    tenant: &Tenant,
    execution: ExecutionId,
    emits: &[Emit],
) -> Result<(), BrokerError> {
    const WHAT: &str = "publish what was emitted";
    let mut under_way = Vec::with_capacity(emits.len());
    for emit in emits {
        let place = format!("{}.{}", emit.boundary, emit.index);
        let mut headers = HeaderMap::new();
        headers.insert(ID_HEADER, format!("{execution}.{place}"));
        headers.insert(PLACE_HEADER, place);
        let message = PublishMessage::build()
            .payload(emit.bytes.clone())
            .headers(headers);
        let subject = subjects::outbox(tenant, execution, &emit.name);
        let ack = broker.js.send_publish(subject, message).await;
        under_way.push(broker.sent(ack.map_err(BrokerError::operation(WHAT))?));
    }
    for ack in under_way {
        ack.settled().await.map_err(BrokerError::operation(WHAT))?;
    }
    Ok(())
}

/// How far the stream has come with an execution.
async fn last_place(
    broker: &Broker,
    tenant: &Tenant,
    execution: ExecutionId,
) -> Result<Option<(BoundaryIndex, u32)>, BrokerError> {
    let stream = broker.js.get_stream_no_info(subjects::OUTBOX_STREAM).await;
    let stream = stream.map_err(BrokerError::operation(
        "open the stream of what was emitted",
    ))?;
    let all = subjects::outbox(tenant, execution, "*");
    let last = match stream.direct_get_last_for_subject(all).await {
        Ok(last) => last,
        Err(error) if error.kind() == DirectGetErrorKind::NotFound => return Ok(None),
        Err(error) => {
            return Err(BrokerError::operation("look at what was emitted last")(
                error,
            ));
        }
    };
    let place = last.headers.get(PLACE_HEADER).map(|place| place.as_str());
    let place = place.and_then(|place| place.split_once('.'));
    Ok(place.and_then(|(boundary, index)| Some((boundary.parse().ok()?, index.parse().ok()?))))
}

/// Publishes what an execution owes, as far as it is not published yet; for whoever takes it over,
/// or ends it. Gives the sequence of the chunk that is then of no use any more.
///
/// # Errors
/// When the broker does not answer.
pub async fn settle(
    broker: &Broker,
    state: &ExecutionState,
) -> Result<Option<Sequence>, BrokerError> {
    let Some(owed) = &state.outbox else {
        return Ok(None);
    };
    let (tenant, execution) = (&state.tenant, state.execution);
    let done = last_place(broker, tenant, execution).await?;
    let chunk = Chunk {
        digest: owed.digest,
        seq: owed.seq,
        bytes: owed.bytes,
        hour: 0,
    };
    let packed = match chunks::get(broker, chunk).await {
        Ok(packed) => packed,
        // Dropped by somebody who had published it.
        Err(BrokerError::Missing { .. }) if done.is_some_and(|(at, _)| at >= owed.through) => {
            return Ok(None);
        }
        Err(BrokerError::Missing { .. }) => {
            tracing::warn!(%execution, through = owed.through,
                "what was emitted is not stored any more; it was published more than a week ago");
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let mut emits = unpack(packed)?;
    emits.retain(|e| done.is_none_or(|done| (e.boundary, e.index) > done));
    if !emits.is_empty() {
        tracing::info!(%execution, count = emits.len(), "publishing what was owed");
        publish(broker, tenant, execution, &emits).await?;
    }
    Ok(Some(owed.seq))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_packed_is_unpacked_and_anything_else_refused() {
        let emit = |name: &str, index, bytes: &'static [u8]| Emit {
            name: name.to_owned(),
            boundary: 7,
            index,
            bytes: Bytes::from_static(bytes),
        };
        let emits = vec![
            emit("a", 0, b"one"),
            emit("b", 1, b""),
            emit("a", 2, b"two"),
        ];
        let packed = pack(&emits).unwrap();
        assert_eq!(unpack(packed.clone()).unwrap(), emits);
        assert!(unpack(packed.slice(..packed.len() - 1)).is_err());
        assert!(unpack(packed.slice(..3)).is_err());
    }
}
