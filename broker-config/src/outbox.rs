//! Messages that programs emit: stored before the commit that carries them, published after it,
//! once each.
//!
//! The ledger's last `emitted` names the messages to publish. The holder of the execution publishes
//! them: the worker that appended it, or the next one. Before that nothing more is emitted and the
//! execution does not end. So at most one set is pending.
//!
//! **Promise.** At every moment the stream holds a prefix of an execution's messages, in order and
//! each once. This lasts for the week that it keeps a message. Several messages are one atomic
//! batch, so a lost connection leaves no gap. Each publish expects the last message of the
//! execution that its author has read. So a publisher that was stopped for hours, or that races
//! with another one, publishes nothing twice. One case is not covered: a publisher that stops for
//! over a week between its read and its first publish.

use std::time::Duration;

use async_nats::HeaderMap;
use async_nats::jetstream::context::{PublishError, PublishErrorKind};
use async_nats::jetstream::message::PublishMessage;
use bytes::{BufMut, Bytes, BytesMut};
use fiec_schemas::event::Outbox;
use fiec_schemas::ids::check_emit_name;
use fiec_schemas::{
    BoundaryIndex, Digest, ExecutionId, ExecutionState, Sequence, Tenant, subjects,
};
use serde::{Deserialize, Serialize};

use tokio::time::Instant;

use crate::chunks::{self, Chunk};
use crate::{Broker, BrokerError, leader};

/// Header of a published message: `<boundary>.<index>`.
pub const PLACE_HEADER: &str = "Fiec-Emitted";
/// Headers of the server: a batch's name, a message's number in it from 1, and its end.
const BATCH: &str = "Nats-Batch-Id";
const BATCH_SEQUENCE: &str = "Nats-Batch-Sequence";
const BATCH_COMMIT: &str = "Nats-Batch-Commit";
/// Headers of the server: the expected sequence of the last message on these subjects.
const EXPECTED: &str = "Nats-Expected-Last-Subject-Sequence";
const EXPECTED_OF: &str = "Nats-Expected-Last-Subject-Sequence-Subject";
/// Attempts while other publishers of the execution come first. Each of those has published.
const TRIES: usize = 16;

/// A message to the outside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Emit {
    /// The last part of its subject.
    pub name: String,
    /// The boundary at which it was emitted.
    pub boundary: BoundaryIndex,
    /// Its number at that boundary, from 0.
    pub index: u32,
    /// Its contents.
    pub bytes: Bytes,
}

#[derive(Serialize, Deserialize)]
struct Entry {
    name: String,
    boundary: BoundaryIndex,
    index: u32,
    bytes: u32,
}

/// Packs the messages of one commit into one body.
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

/// Unpacks a body from [`pack`].
///
/// # Errors
/// When it is no such body, or a name would not be one part of a subject.
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
        check_emit_name(&entry.name).map_err(|error| malformed(&error.to_string()))?;
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

/// Stores the messages of a commit before it. Returns the contents of its `emitted`.
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
    let ack = ack.map_err(BrokerError::operation("store the emitted messages"))?;
    Ok(Outbox {
        seq: ack.sequence,
        digest,
        bytes,
        count: emits.len() as u32,
        through: emits.iter().map(|e| e.boundary).max().unwrap_or(0),
    })
}

/// Publishes, in order, the messages that are not published yet.
///
/// # Errors
/// When the broker did not store them. Then either none or all are stored.
pub async fn publish(
    broker: &Broker,
    tenant: &Tenant,
    execution: ExecutionId,
    emits: &[Emit],
) -> Result<(), BrokerError> {
    let mut overtaken = None;
    for _ in 0..TRIES {
        let last = last_published(broker, tenant, execution).await?;
        let first =
            emits.partition_point(|e| last.place.is_some_and(|p| (e.boundary, e.index) <= p));
        let rest = emits.get(first..).unwrap_or_default();
        if rest.is_empty() {
            return Ok(());
        }
        match send(broker, tenant, execution, rest, last.seq).await {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == PublishErrorKind::WrongLastSequence => {
                overtaken = Some(error);
            }
            Err(error) => {
                return Err(BrokerError::operation("publish the emitted messages")(
                    error,
                ));
            }
        }
        // Another publisher was first, or a replica is behind.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Err(match overtaken {
        Some(error) => BrokerError::operation("publish the emitted messages")(error),
        None => malformed("nothing was sent"),
    })
}

/// Sends messages as one batch, after the message `expected` of their execution.
async fn send(
    broker: &Broker,
    tenant: &Tenant,
    execution: ExecutionId,
    emits: &[Emit],
    expected: Sequence,
) -> Result<(), PublishError> {
    let batch = uuid::Uuid::new_v4().simple().to_string();
    let count = emits.len();
    for (emit, number) in emits.iter().zip(1..) {
        let mut headers = HeaderMap::new();
        headers.insert(PLACE_HEADER, format!("{}.{}", emit.boundary, emit.index));
        if number == 1 {
            headers.insert(EXPECTED, expected.to_string());
            headers.insert(EXPECTED_OF, subjects::outbox(tenant, execution, "*"));
        }
        if count > 1 {
            headers.insert(BATCH, batch.as_str());
            headers.insert(BATCH_SEQUENCE, number.to_string());
        }
        let subject = subjects::outbox(tenant, execution, &emit.name);
        if number < count {
            // The server acknowledges only the last one.
            let sent = broker
                .client
                .publish_with_headers(subject, headers, emit.bytes.clone());
            let sent = sent.await;
            sent.map_err(|e| PublishError::with_source(PublishErrorKind::Other, e))?;
            continue;
        }
        if count > 1 {
            headers.insert(BATCH_COMMIT, "1");
        }
        let message = PublishMessage::build()
            .payload(emit.bytes.clone())
            .headers(headers);
        let ack = broker.js.send_publish(subject, message).await?;
        broker.sent(ack).settled().await?;
    }
    Ok(())
}

/// The last message of an execution in the stream.
struct Last {
    /// Its sequence, or 0 if there is none.
    seq: Sequence,
    /// The boundary and the index at which it was emitted.
    place: Option<(BoundaryIndex, u32)>,
}

/// Returns the last published message of an execution.
async fn last_published(
    broker: &Broker,
    tenant: &Tenant,
    execution: ExecutionId,
) -> Result<Last, BrokerError> {
    let stream = broker.js.get_stream_no_info(subjects::OUTBOX_STREAM).await;
    let stream = stream.map_err(BrokerError::operation(
        "open the stream of emitted messages",
    ))?;
    let all = subjects::outbox(tenant, execution, "*");
    let Some(last) = leader::last(&stream, &all).await? else {
        return Ok(Last {
            seq: 0,
            place: None,
        });
    };
    let place = last.headers.get(PLACE_HEADER).map(|place| place.as_str());
    let place = place.and_then(|place| place.split_once('.'));
    Ok(Last {
        seq: last.sequence,
        place: place
            .and_then(|(boundary, index)| Some((boundary.parse().ok()?, index.parse().ok()?))),
    })
}

/// Publishes an execution's pending messages, for a worker that takes it over or ends it. Returns
/// the sequence of the chunk that is not needed any more.
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
    let chunk = Chunk {
        digest: owed.digest,
        seq: owed.seq,
        bytes: owed.bytes,
        hour: 0,
    };
    let looked_until = Instant::now() + leader::CUT_OFF;
    let packed = loop {
        let missing = match chunks::get(broker, chunk).await {
            Ok(packed) => break packed,
            Err(error @ BrokerError::Missing { .. }) => error,
            Err(error) => return Err(error),
        };
        let done = last_published(broker, tenant, execution).await?.place;
        if done.is_some_and(|(at, _)| at >= owed.through) {
            // Another holder published the messages and removed the chunk.
            return Ok(None);
        }
        if Instant::now() < looked_until {
            tokio::time::sleep(Duration::from_secs(1)).await;
            continue;
        }
        match done {
            // The stream drops old messages first.
            Some(_) => tracing::error!(%execution, through = owed.through, %missing,
                "the broker has lost the emitted messages; they are not published"),
            None => tracing::warn!(%execution, through = owed.through,
                "the emitted messages are no longer stored; they were published more than a week \
                 ago"),
        }
        return Ok(None);
    };
    let emits = unpack(packed)?;
    publish(broker, tenant, execution, &emits).await?;
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

    #[test]
    fn a_name_that_is_no_part_of_a_subject_is_not_unpacked() {
        for name in ["", "a b", "a.b", "*", ">", "a\r\nPUB x", &"x".repeat(65)] {
            let emit = Emit {
                name: name.to_owned(),
                boundary: 1,
                index: 0,
                bytes: Bytes::new(),
            };
            let error = unpack(pack(&[emit]).unwrap()).unwrap_err();
            assert!(error.to_string().contains("1 to 64 characters"), "{error}");
        }
    }
}
