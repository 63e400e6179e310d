//! σ of many megabytes is cut into chunks. A commit stores only chunks that the last commit has not
//! stored.
//!
//! The bytes themselves determine the limits of chunks, so that an insertion moves no other limits.
//! The algorithm is FastCDC (W. Xia et al., “The Design of Fast Content-Defined Chunking for Data
//! Deduplication Based Storage Systems”, IEEE TPDS 31 (2020) 2017–2031).
//!
//! Measured on 24 MB of numbers with a change of 1 %, for limits of 3, 6 and 12 KiB: a change in
//! one place or an insertion makes 1.1 % of the bytes new. A change in 60 places makes 4.5 % new.
//! Chunks of one length do as well on changes in place (3 to 5 %). After an insertion they store up
//! to the whole σ again.
//!
//! A chunk is one message of the stream `FIEC_CHUNK`, and is named by its sequence. So the removal
//! of a superseded chunk never removes bytes that were stored again later. Its header
//! [`subjects::CHUNK_HEADER`] holds its digest.
//!
//! ```text
//! "FIECCHK1" │ chunks u32 │ σ u64 │ stored with this commit u64 │ chunk …      little endian
//! chunk: digest 32 bytes │ sequence u64 │ bytes u32 │ hours since 1970 u32
//! ```

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_nats::jetstream::context::{Context, PublishAckFuture};
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::stream::Stream;
use bytes::{Bytes, BytesMut};
use fiec_schemas::{Digest, ExecutionId, Sequence, Tenant, subjects};
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt, TryStreamExt, stream};
use serde_json::json;
use tokio::time::Instant;

use crate::{Broker, BrokerError, leader};

const MAGIC: &[u8; 8] = b"FIECCHK1";
const HEAD: usize = 28;
const ENTRY: usize = 48;
/// Most chunks in a manifest, so that it fits a ledger message.
pub(crate) const CHUNKS_LIMIT: usize = (subjects::INLINE_STATE_LIMIT - HEAD) / ENTRY;
/// A chunk that is older than this is stored again with the next commit. The stream keeps chunks
/// for any time. A stream that `fiec setup` has not updated drops them after 30 days.
const REFRESH_HOURS: u32 = 15 * 24;
/// Chunks that are fetched or dropped concurrently.
const AT_ONCE: usize = 64;
/// Bytes of chunks that are asked for at once. They are ahead of all other answers to this process,
/// and a server closes a connection on which 10 s are not enough for what it has begun to write.
const WINDOW: u64 = 4 << 20;
/// Time without the arrival of any chunk after which a fetch fails.
const SILENCE: Duration = Duration::from_secs(20);

/// A chunk of a σ and its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Chunk {
    /// Digest of its bytes.
    pub digest: Digest,
    /// Its message's sequence in `FIEC_CHUNK`, or 0 if it is not stored yet.
    pub seq: Sequence,
    /// Its size in bytes.
    pub bytes: u32,
    /// Time of storage, in hours since 1970.
    pub hour: u32,
}

/// A piece of a σ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Digest of its bytes.
    pub digest: Digest,
    /// Its range in the σ.
    pub range: Range<usize>,
}

/// Average length of a chunk, before its limits are applied, for a σ of this many bytes. It gives
/// at most about 4,000 chunks of up to 768 KiB.
fn length_for(bytes: usize) -> usize {
    const MIB: usize = 1 << 20;
    match bytes {
        n if n <= 32 * MIB => 6 * 1024,
        n if n <= 128 * MIB => 24 * 1024,
        n if n <= 512 * MIB => 96 * 1024,
        _ => 384 * 1024,
    }
}

/// Returns the chunker of a σ, and the longest chunk.
pub(crate) fn cutter(state: &[u8]) -> (fastcdc::v2020::FastCDC<'_>, usize) {
    let average = length_for(state.len());
    let longest = 2 * average;
    let cutter = fastcdc::v2020::FastCDC::new(state, average / 2, average, longest);
    (cutter, longest)
}

/// Cuts a σ into pieces, in order. Equal bytes of equal length are cut alike everywhere.
pub fn cut(state: &[u8]) -> Vec<Piece> {
    cutter(state)
        .0
        .map(|c| {
            let range = c.offset..c.offset + c.length;
            Piece {
                digest: Digest::of(&state[range.clone()]),
                range,
            }
        })
        .collect()
}

/// Hours since 1970.
pub fn hour_now() -> u32 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        u32::try_from(since.as_secs() / 3600).unwrap_or(u32::MAX)
    })
}

/// The chunks of a σ, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Manifest {
    /// The chunks.
    pub chunks: Vec<Chunk>,
    /// Bytes of the chunks that were stored with this commit.
    pub stored: u64,
}

impl Manifest {
    /// Lists these pieces. A chunk of `previous` that is not too old is reused.
    ///
    /// # Errors
    /// When there are more chunks than a message can list.
    pub fn of(
        pieces: &[Piece],
        previous: Option<&Manifest>,
        hour: u32,
    ) -> Result<Self, BrokerError> {
        if pieces.len() > CHUNKS_LIMIT {
            return Err(BrokerError::Malformed {
                what: "state".to_owned(),
                reason: format!(
                    "the state has {} chunks; a message lists at most {CHUNKS_LIMIT}",
                    pieces.len()
                ),
            });
        }
        let known: HashMap<Digest, Chunk> = previous
            .iter()
            .flat_map(|m| &m.chunks)
            .filter(|c| c.seq != 0 && hour.saturating_sub(c.hour) < REFRESH_HOURS)
            .map(|c| (c.digest, *c))
            .collect();
        let chunks = pieces.iter().map(|piece| Chunk {
            digest: piece.digest,
            bytes: piece.range.len() as u32,
            seq: known.get(&piece.digest).map_or(0, |c| c.seq),
            hour: known.get(&piece.digest).map_or(hour, |c| c.hour),
        });
        let mut manifest = Self {
            chunks: chunks.collect(),
            stored: 0,
        };
        manifest.stored = manifest.missing().map(|(_, c)| u64::from(c.bytes)).sum();
        Ok(manifest)
    }

    /// The chunks that are not stored yet, each digest once, with their index.
    pub fn missing(&self) -> impl Iterator<Item = (usize, Chunk)> {
        let mut seen = HashSet::new();
        let missing = self.chunks.iter().copied().enumerate();
        missing.filter(move |(_, c)| c.seq == 0 && seen.insert(c.digest))
    }

    /// The chunks that are not here, each digest once.
    pub fn without(&self, here: impl Fn(&Digest) -> bool) -> Vec<Chunk> {
        let mut seen = HashSet::new();
        let mut wanted = self.chunks.clone();
        wanted.retain(|chunk| seen.insert(chunk.digest) && !here(&chunk.digest));
        wanted
    }

    /// Notes the sequences of stored chunks.
    pub fn stored_at(&mut self, places: &HashMap<Digest, Sequence>) {
        for chunk in self.chunks.iter_mut().filter(|c| c.seq == 0) {
            chunk.seq = places.get(&chunk.digest).copied().unwrap_or(0);
        }
    }

    /// Sequences of the chunks that `later` does not need. Without `later`: all of them.
    pub fn beyond(&self, later: Option<&Manifest>) -> Vec<Sequence> {
        let needed: HashSet<Sequence> = later
            .iter()
            .flat_map(|m| &m.chunks)
            .map(|c| c.seq)
            .collect();
        let mut gone: Vec<Sequence> = self.chunks.iter().map(|c| c.seq).collect();
        gone.retain(|seq| *seq != 0 && !needed.contains(seq));
        gone.sort_unstable();
        gone.dedup();
        gone
    }

    /// Total bytes of the σ.
    pub fn bytes(&self) -> u64 {
        self.chunks.iter().map(|c| u64::from(c.bytes)).sum()
    }

    /// Encodes it as a ledger message's body.
    pub fn encode(&self) -> Bytes {
        let mut out = BytesMut::with_capacity(HEAD + ENTRY * self.chunks.len());
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&(self.chunks.len() as u32).to_le_bytes());
        out.extend_from_slice(&self.bytes().to_le_bytes());
        out.extend_from_slice(&self.stored.to_le_bytes());
        for chunk in &self.chunks {
            out.extend_from_slice(&chunk.digest.0);
            out.extend_from_slice(&chunk.seq.to_le_bytes());
            out.extend_from_slice(&chunk.bytes.to_le_bytes());
            out.extend_from_slice(&chunk.hour.to_le_bytes());
        }
        out.freeze()
    }

    /// Decodes a body from [`Manifest::encode`].
    ///
    /// # Errors
    /// When it is no such body.
    pub fn decode(body: &[u8]) -> Result<Self, BrokerError> {
        let malformed = |reason: &str| BrokerError::Malformed {
            what: "list of a state's chunks".to_owned(),
            reason: reason.to_owned(),
        };
        let word = |bytes: &[u8]| {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            u64::from_le_bytes(word)
        };
        if body.len() < HEAD || &body[..8] != MAGIC {
            return Err(malformed("the magic bytes at its start are missing"));
        }
        let (head, entries) = body.split_at(HEAD);
        if word(&head[8..12]) * ENTRY as u64 != entries.len() as u64 {
            return Err(malformed("its length disagrees with its number of chunks"));
        }
        let mut chunks = Vec::with_capacity(entries.len() / ENTRY);
        for entry in entries.chunks_exact(ENTRY) {
            let mut digest = [0; 32];
            digest.copy_from_slice(&entry[..32]);
            chunks.push(Chunk {
                digest: Digest(digest),
                seq: word(&entry[32..40]),
                bytes: word(&entry[40..44]) as u32,
                hour: word(&entry[44..48]) as u32,
            });
        }
        let manifest = Self {
            chunks,
            stored: word(&head[20..28]),
        };
        if manifest.bytes() != word(&head[12..20]) {
            return Err(malformed("its chunks do not add up"));
        }
        Ok(manifest)
    }
}

/// Sends a piece of a σ to the stream, with its digest: [`crate::chunk_list`] needs no bytes to
/// compare. Its acknowledgement holds its sequence.
///
/// # Errors
/// When it could not be sent.
pub async fn send_piece(
    broker: &Broker,
    tenant: &Tenant,
    execution: ExecutionId,
    digest: Digest,
    bytes: Bytes,
) -> Result<PublishAckFuture, BrokerError> {
    let message = PublishMessage::build().header(subjects::CHUNK_HEADER, digest.to_string());
    publish(broker, tenant, execution, message.payload(bytes)).await
}

/// Sends a chunk that is no piece of a σ to the stream. Its acknowledgement holds its sequence.
///
/// # Errors
/// When it could not be sent.
pub async fn send(
    broker: &Broker,
    tenant: &Tenant,
    execution: ExecutionId,
    bytes: Bytes,
) -> Result<PublishAckFuture, BrokerError> {
    let message = PublishMessage::build().payload(bytes);
    publish(broker, tenant, execution, message).await
}

async fn publish(
    broker: &Broker,
    tenant: &Tenant,
    execution: ExecutionId,
    message: PublishMessage,
) -> Result<PublishAckFuture, BrokerError> {
    broker
        .js
        .send_publish(subjects::chunk(tenant, execution), message)
        .await
        .map_err(BrokerError::operation(format!(
            "store a chunk of {execution}"
        )))
}

/// Reads a chunk and checks it. The caller limits the time.
async fn read(stream: &Stream<()>, chunk: Chunk) -> Result<Bytes, BrokerError> {
    let what = || format!("chunk {} ({})", chunk.digest.short(), chunk.seq);
    let missing = |hint: &str| BrokerError::Missing {
        what: what(),
        hint: hint.to_owned(),
    };
    if chunk.seq == 0 {
        return Err(missing(": it was not stored yet"));
    }
    let found = match leader::contents(stream, chunk.seq, &what()).await? {
        Some(message) => message.payload,
        None => return Err(missing(": a newer commit has superseded it")),
    };
    let digest = Digest::of(&found);
    if digest != chunk.digest {
        return Err(BrokerError::Digest {
            what: what(),
            found: digest.to_string(),
            expected: chunk.digest.to_string(),
        });
    }
    Ok(found)
}

fn silent(what: &str) -> BrokerError {
    // It may exist: a retry may read it.
    let late = format!("the broker sent nothing for {SILENCE:?}");
    let late = std::io::Error::new(std::io::ErrorKind::TimedOut, late);
    BrokerError::operation(format!("read {what}"))(late)
}

/// Reads one chunk and checks its digest.
///
/// # Errors
/// When it is missing or damaged.
pub async fn get(broker: &Broker, chunk: Chunk) -> Result<Bytes, BrokerError> {
    let stream = open(&broker.js).await?;
    let read = tokio::time::timeout(SILENCE, read(&stream, chunk)).await;
    read.unwrap_or_else(|_| Err(silent("a chunk of a state")))
}

/// Fetches chunks from the stream. `arrived` receives each of them once it is checked. The fetch
/// fails when no chunk arrives for a while, however long one of them waits behind others. After a
/// new connection the rest is asked for again, since answers to the old one are lost.
///
/// # Errors
/// When a chunk is missing or damaged, or nothing arrives.
pub async fn fetch(
    broker: &Broker,
    wanted: &[Chunk],
    mut arrived: impl FnMut(Chunk, Bytes),
) -> Result<(), BrokerError> {
    if wanted.is_empty() {
        return Ok(());
    }
    let mut js = broker.js.clone();
    // A chunk may wait behind others, each of which may take this long.
    js.set_timeout(SILENCE * AT_ONCE as u32);
    let stream = open(&js).await?;
    let mut connections = broker.connections();
    let mut left: Vec<Chunk> = wanted.to_vec();
    let mut last_arrival = Instant::now();
    while !left.is_empty() {
        connections.mark_unchanged();
        let mut here = HashSet::new();
        let mut next = left.iter().copied();
        let mut asked = FuturesUnordered::new();
        let mut bytes = 0;
        loop {
            while asked.len() < AT_ONCE
                && bytes < WINDOW
                && let Some(chunk) = next.next()
            {
                bytes += u64::from(chunk.bytes);
                let stream = stream.clone();
                asked.push(async move { (chunk, read(&stream, chunk).await) }.boxed());
            }
            let answer = tokio::select! {
                biased;
                answer = asked.next() => answer,
                Ok(()) = connections.changed() => break,
                () = tokio::time::sleep_until(last_arrival + SILENCE) => {
                    return Err(silent(&format!("the chunks of a state, {} of them", asked.len())));
                }
            };
            let Some((chunk, found)) = answer else { break };
            bytes -= u64::from(chunk.bytes);
            arrived(chunk, found?);
            here.insert(chunk.seq);
            last_arrival = Instant::now();
        }
        left.retain(|chunk| !here.contains(&chunk.seq));
    }
    Ok(())
}

/// Puts a σ together from its chunks. None if one of them is not there, or is no chunk of this
/// length. The caller must still compare the digest of the whole.
pub fn join(manifest: &Manifest, have: impl Fn(&Digest) -> Option<Bytes>) -> Option<Bytes> {
    let mut pieces = Vec::with_capacity(manifest.chunks.len());
    for chunk in &manifest.chunks {
        pieces.push(have(&chunk.digest).filter(|piece| piece.len() == chunk.bytes as usize)?);
    }
    // The sizes come from a message: the buffer has the size of the actual bytes.
    let mut state = BytesMut::with_capacity(pieces.iter().map(Bytes::len).sum());
    pieces
        .iter()
        .for_each(|piece| state.extend_from_slice(piece));
    Some(state.freeze())
}

/// Assembles a σ from the stream. The caller must still compare the digest of the whole.
///
/// # Errors
/// As [`fetch`].
pub async fn assemble(broker: &Broker, manifest: &Manifest) -> Result<Bytes, BrokerError> {
    let mut held: HashMap<Digest, Bytes> = HashMap::new();
    let wanted = manifest.without(|_| false);
    let arrived = |chunk: Chunk, bytes| drop(held.insert(chunk.digest, bytes));
    fetch(broker, &wanted, arrived).await?;
    let whole = join(manifest, |digest| held.get(digest).cloned());
    whole.ok_or_else(|| BrokerError::Malformed {
        what: "list of a state's chunks".to_owned(),
        reason: "a chunk occurs with two lengths".to_owned(),
    })
}

async fn open(js: &Context) -> Result<Stream<()>, BrokerError> {
    let stream = js.get_stream_no_info(subjects::CHUNK_STREAM).await;
    stream.map_err(BrokerError::operation("open the stream of chunks"))
}

/// Returns whether more than half of the stream of chunks is used.
///
/// # Errors
/// When the broker does not answer.
pub async fn are_crowded(broker: &Broker) -> Result<bool, BrokerError> {
    let found = broker.js.get_stream(subjects::CHUNK_STREAM).await;
    let found = found.map_err(BrokerError::operation(
        "look how full the stream of chunks is",
    ))?;
    let info = found.cached_info();
    let limit = u64::try_from(info.config.max_bytes).unwrap_or(0);
    Ok(limit > 0 && info.state.bytes > limit / 2)
}

/// Deletes chunks by their sequences. A missing one is no error. The server marks each as deleted
/// without overwriting it, which would take longer.
///
/// # Errors
/// When the broker does not answer.
pub async fn drop_chunks(broker: &Broker, sequences: &[Sequence]) -> Result<(), BrokerError> {
    let subject = format!("STREAM.MSG.DELETE.{}", subjects::CHUNK_STREAM);
    stream::iter(sequences.to_vec())
        .map(|seq| {
            let (js, subject) = (broker.js.clone(), subject.clone());
            async move {
                let body = json!({ "seq": seq, "no_erase": true });
                let answer: Result<serde_json::Value, _> = js.request(subject, &body).await;
                answer.map(drop).map_err(BrokerError::operation(format!(
                    "drop chunk {seq} of {}",
                    subjects::CHUNK_STREAM
                )))
            }
            .boxed()
        })
        .buffer_unordered(AT_ONCE / 4)
        .try_collect()
        .await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize) -> Vec<u8> {
        let mut z = 0x9E37_79B9_7F4A_7C15_u64;
        let mut out = Vec::with_capacity(count * 8);
        for _ in 0..count {
            z ^= z << 13;
            z ^= z >> 7;
            z ^= z << 17;
            out.extend_from_slice(&((z >> 11) as f64).to_le_bytes());
        }
        out
    }

    fn stored(state: &[u8], previous: Option<&Manifest>) -> Manifest {
        let mut manifest = Manifest::of(&cut(state), previous, 100).unwrap();
        let first = previous.map_or(0, |m| m.chunks.iter().map(|c| c.seq).max().unwrap());
        let places = manifest.missing().map(|(_, c)| c.digest);
        let places = places.zip(first + 1..).collect();
        manifest.stored_at(&places);
        assert!(manifest.chunks.iter().all(|c| c.seq != 0));
        manifest
    }

    #[test]
    fn of_24_mb_in_which_one_per_cent_changed_at_most_five_per_cent_are_stored() {
        let before = numbers(3_000_000);
        let first = stored(&before, None);
        assert_eq!(first.bytes(), 24_000_000);
        assert_eq!(first.stored, 24_000_000);
        let share = |state: &[u8]| {
            let next = stored(state, Some(&first));
            let moved = next.stored + next.encode().len() as u64;
            moved as f64 / state.len() as f64
        };
        let mut changed = before.clone();
        changed[5_000_000..5_240_000]
            .iter_mut()
            .for_each(|b| *b ^= 0x5a);
        assert!(share(&changed) < 0.02, "{}", share(&changed));
        let mut spread = before.clone();
        for place in 0..30 {
            let at = place * 800_000;
            spread[at..at + 8_000].iter_mut().for_each(|b| *b ^= 0x5a);
        }
        assert!(share(&spread) < 0.05, "{}", share(&spread));
        let mut inserted = before.clone();
        inserted.splice(7_000_001..7_000_001, vec![9; 240_000]);
        assert!(share(&inserted) < 0.02, "{}", share(&inserted));
        assert!(share(&before) < 0.01, "unchanged: {}", share(&before));
    }

    #[test]
    fn a_manifest_survives_its_bytes_and_refuses_others() {
        let state = numbers(200_000);
        let manifest = stored(&state, None);
        let body = manifest.encode();
        assert_eq!(Manifest::decode(&body).unwrap(), manifest);
        assert!(Manifest::decode(&body[..body.len() - 1]).is_err());
        assert!(Manifest::decode(&state).is_err());
        let mut wrong = body.to_vec();
        wrong[12] ^= 1;
        assert!(Manifest::decode(&wrong).is_err());
    }

    #[test]
    fn what_a_later_commit_needs_is_never_beyond_it() {
        let before = numbers(300_000);
        let mut after = before.clone();
        after[1_000_000..1_100_000]
            .iter_mut()
            .for_each(|b| *b ^= 0x5a);
        let (first, old) = (stored(&before, None), before);
        let second = stored(&after, Some(&first));
        let gone = first.beyond(Some(&second));
        assert!(!gone.is_empty() && gone.len() < 40, "{}", gone.len());
        assert!(second.chunks.iter().all(|c| !gone.contains(&c.seq)));
        assert_eq!(first.beyond(None).len(), first.chunks.len());
        // A chunk that changed and came back is stored again, under a new sequence.
        let third = stored(&old, Some(&second));
        assert!(third.chunks.iter().all(|c| !gone.contains(&c.seq)));
        assert!(third.stored > 0);
    }

    #[test]
    fn a_chunk_is_stored_again_long_before_the_stream_forgets_it() {
        let state = numbers(200_000);
        let first = stored(&state, None);
        let later = Manifest::of(&cut(&state), Some(&first), 100 + REFRESH_HOURS).unwrap();
        assert_eq!(later.stored, first.stored);
        let soon = Manifest::of(&cut(&state), Some(&first), 99 + REFRESH_HOURS).unwrap();
        assert_eq!(soon.stored, 0);
    }
}
