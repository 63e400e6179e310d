//! The list of a σ's chunks relative to the list of an earlier commit, for a reader that can get
//! that one. If a hundredth of σ changed, the list has a hundredth of its bytes.
//!
//! ```text
//! "FIECLST1" │ length of place u32 LE │ place, JSON │ run …
//! run: count·2 │ first          count chunks of the earlier list, starting at index first
//!      count·2+1 │ chunk …      new chunks; chunk: digest 32 bytes │ bytes
//! ```
//! Numbers without a size are LEB128. `place` is the commit that the earlier list belongs to.

use std::collections::HashMap;

use bytes::{BufMut, Bytes, BytesMut};
use fiec_schemas::{Digest, StatePlace};

use crate::BrokerError;
use crate::chunks::{CHUNKS_LIMIT, Chunk, Manifest};

const MAGIC: &[u8; 8] = b"FIECLST1";

fn malformed(reason: &str) -> BrokerError {
    BrokerError::Malformed {
        what: "list of a state's chunks after an earlier one".to_owned(),
        reason: reason.to_owned(),
    }
}

fn put_number(out: &mut BytesMut, mut number: u64) {
    while number >= 0x80 {
        out.put_u8(number as u8 | 0x80);
        number >>= 7;
    }
    out.put_u8(number as u8);
}

fn number(from: &mut &[u8]) -> Result<u64, BrokerError> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = from
            .split_first()
            .ok_or_else(|| malformed("it is cut off"))?;
        *from = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(number);
        }
    }
    Err(malformed("one of its numbers has no last byte"))
}

/// Encodes `manifest` relative to `earlier`, the list of the commit at `place`.
///
/// # Errors
/// Only if a place cannot be written as JSON.
pub fn encode(
    manifest: &Manifest,
    earlier: &Manifest,
    place: &StatePlace,
) -> Result<Bytes, BrokerError> {
    let place = serde_json::to_vec(place).map_err(|error| malformed(&error.to_string()))?;
    let mut out = BytesMut::with_capacity(1024);
    out.extend_from_slice(MAGIC);
    out.put_u32_le(place.len() as u32);
    out.extend_from_slice(&place);
    let known: HashMap<Chunk, usize> = earlier.chunks.iter().copied().zip(0..).collect();
    let mut rest = &manifest.chunks[..];
    while let Some(chunk) = rest.first() {
        // A chunk without a sequence must be sent, even if the earlier list has it.
        let first = known.get(chunk).filter(|_| chunk.seq != 0);
        let count = match first {
            Some(first) => {
                let both = rest.iter().zip(&earlier.chunks[*first..]);
                both.take_while(|(new, old)| new == old).count()
            }
            None => {
                let new = |c: &&Chunk| c.seq == 0 || !known.contains_key(c);
                rest.iter().take_while(new).count()
            }
        };
        let (run, others) = rest.split_at(count);
        rest = others;
        put_number(&mut out, 2 * count as u64 + u64::from(first.is_none()));
        match first {
            Some(first) => put_number(&mut out, *first as u64),
            None => {
                for chunk in run {
                    out.extend_from_slice(&chunk.digest.0);
                    put_number(&mut out, chunk.bytes.into());
                }
            }
        }
    }
    Ok(out.freeze())
}

/// Returns the commit whose list [`decode`] needs. Returns none if these bytes are no relative
/// list.
///
/// # Errors
/// When they are a relative list that cannot be read.
pub fn earlier_of(body: &[u8]) -> Result<Option<StatePlace>, BrokerError> {
    let Some(rest) = body.strip_prefix(MAGIC) else {
        return Ok(None);
    };
    let (place, _) = split(rest)?;
    let place = serde_json::from_slice(place).map_err(|error| malformed(&error.to_string()))?;
    Ok(Some(place))
}

fn split(rest: &[u8]) -> Result<(&[u8], &[u8]), BrokerError> {
    let cut_off = || malformed("it is cut off");
    let (length, rest) = rest.split_first_chunk().ok_or_else(cut_off)?;
    let length = u32::from_le_bytes(*length) as usize;
    rest.split_at_checked(length).ok_or_else(cut_off)
}

/// Decodes a list from [`encode`]. Chunks that `earlier` does not have get no sequence.
///
/// # Errors
/// When it cannot be read, or does not fit `earlier`.
pub fn decode(body: &[u8], earlier: &Manifest) -> Result<Manifest, BrokerError> {
    let rest = body
        .strip_prefix(MAGIC)
        .ok_or_else(|| malformed("the magic bytes at its start are missing"))?;
    let (_, mut rest) = split(rest)?;
    let mut manifest = Manifest::default();
    while !rest.is_empty() {
        let run = number(&mut rest)?;
        let count = usize::try_from(run / 2).unwrap_or(usize::MAX);
        if count == 0 || count > CHUNKS_LIMIT - manifest.chunks.len() {
            return Err(malformed("it has more chunks than a state"));
        }
        if run % 2 == 0 {
            let first = usize::try_from(number(&mut rest)?).unwrap_or(usize::MAX);
            let end = first.checked_add(count);
            let chunks = end.and_then(|end| earlier.chunks.get(first..end));
            let chunks = chunks.ok_or_else(|| malformed("the earlier one is shorter"))?;
            manifest.chunks.extend_from_slice(chunks);
        } else {
            for _ in 0..count {
                let Some((digest, others)) = rest.split_first_chunk() else {
                    return Err(malformed("it is cut off"));
                };
                rest = others;
                let bytes = u32::try_from(number(&mut rest)?)
                    .map_err(|_| malformed("one of its chunks is too long"))?;
                manifest.chunks.push(Chunk {
                    digest: Digest(*digest),
                    bytes,
                    seq: 0,
                    hour: 0,
                });
            }
        }
    }
    manifest.stored = manifest.missing().map(|(_, c)| u64::from(c.bytes)).sum();
    Ok(manifest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place() -> StatePlace {
        StatePlace {
            index: 7,
            digest: Digest::of(b"earlier"),
            bytes: 24_000_000,
            seq: Some(123_456),
            ordinal: 9,
        }
    }

    fn chunk(number: u64, seq: u64) -> Chunk {
        Chunk {
            digest: Digest::of(&number.to_le_bytes()),
            bytes: 8_000 + number as u32,
            seq,
            hour: 3,
        }
    }

    fn list(chunks: impl Iterator<Item = Chunk>) -> Manifest {
        Manifest {
            chunks: chunks.collect(),
            stored: 0,
        }
    }

    /// Returns the decoded list, and the encoded bytes. New chunks have no hour, since they are not
    /// stored yet.
    fn read(manifest: &Manifest, earlier: &Manifest) -> (Manifest, usize) {
        let body = encode(manifest, earlier, &place()).unwrap();
        assert_eq!(earlier_of(&body).unwrap(), Some(place()));
        (decode(&body, earlier).unwrap(), body.len())
    }

    #[test]
    fn a_list_of_which_little_is_new_takes_little_and_is_read_as_it_was() {
        let earlier = list((0..3_000).map(|n| chunk(n, n + 1)));
        let (same, bytes) = read(&earlier, &earlier);
        assert_eq!(same.chunks, earlier.chunks);
        assert!(bytes < 200, "{bytes}");
        // Two changes in each of sixty places, an insertion, a repetition, and a move to the end.
        let mut next = earlier.clone();
        for place in 0..60 {
            for at in [50 * place, 50 * place + 1] {
                next.chunks[at] = chunk(10_000 + at as u64, 0);
            }
        }
        next.chunks.splice(777..777, [chunk(20_000, 0); 2]);
        next.chunks.extend_from_slice(&earlier.chunks[5..9]);
        next.chunks
            .iter_mut()
            .filter(|c| c.seq == 0)
            .for_each(|c| c.hour = 0);
        let (found, bytes) = read(&next, &earlier);
        assert_eq!(found.chunks, next.chunks);
        let new: Vec<_> = next.missing().collect();
        assert_eq!(found.missing().collect::<Vec<_>>(), new);
        assert_eq!(new.len(), 121);
        assert!(bytes < 5_000, "{bytes}, of {}", next.encode().len());
        let (none, _) = read(&Manifest::default(), &earlier);
        assert_eq!(none.chunks, []);
    }

    #[test]
    fn a_chunk_that_is_to_be_stored_again_is_new() {
        let earlier = list((0..10).map(|n| chunk(n, n + 1)));
        let mut next = earlier.clone();
        (next.chunks[4].seq, next.chunks[4].hour) = (0, 0);
        let (found, _) = read(&next, &earlier);
        assert_eq!(found.chunks, next.chunks);
        assert_eq!(found.missing().count(), 1);
    }

    #[test]
    fn bytes_that_are_no_such_list_are_refused() {
        let earlier = list((0..10).map(|n| chunk(n, n + 1)));
        let next = list((5..20).map(|n| chunk(n, if n < 10 { n + 1 } else { 0 })));
        let body = encode(&next, &earlier, &place()).unwrap();
        for length in MAGIC.len()..body.len() {
            let cut = decode(&body[..length], &earlier);
            assert!(cut.is_err() || cut.unwrap().chunks.len() < 15, "{length}");
        }
        let short = list((0..7).map(|n| chunk(n, n + 1)));
        let error = decode(&body, &short).unwrap_err().to_string();
        assert!(error.contains("the earlier one is shorter"), "{error}");
        assert!(earlier_of(&earlier.encode()).unwrap().is_none());
        assert!(decode(&earlier.encode(), &earlier).is_err());
        let mut endless = body[..12 + serde_json::to_vec(&place()).unwrap().len()].to_vec();
        endless.extend_from_slice(&[0xff; 12]);
        assert!(decode(&endless, &earlier).is_err());
    }
}
