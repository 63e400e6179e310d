//! The chunks that the broker has of one execution, without their bytes. A worker compares them
//! with its own list after the broker was started again. The recorder's collector looks for chunks
//! that no commit names.

use std::collections::HashMap;
use std::time::Duration;

use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, pull};
use fiec_schemas::{Digest, Sequence, Timestamp, subjects};

use crate::chunks::Manifest;
use crate::reader::{Delivered, next_fetched};
use crate::{Broker, BrokerError};

/// Messages of one request.
const BATCH: usize = 1_000;

/// A message on an execution's subject in `FIEC_CHUNK`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredChunk {
    /// Its sequence.
    pub seq: Sequence,
    /// The digest of a piece of σ. None for emitted messages, and for chunks of earlier versions.
    pub digest: Option<Digest>,
    /// Time of storage in the broker.
    pub stored_at: Timestamp,
}

/// Lists the chunks on this subject: one small message for each, without its bytes.
///
/// # Errors
/// When the broker does not answer.
pub async fn stored(broker: &Broker, subject: &str) -> Result<Vec<StoredChunk>, BrokerError> {
    let what = format!("list the chunks on {subject}");
    let config = pull::Config {
        ack_policy: AckPolicy::None,
        headers_only: true,
        deliver_policy: DeliverPolicy::All,
        filter_subject: subject.to_owned(),
        inactive_threshold: Duration::from_secs(10),
        ..Default::default()
    };
    let consumer = broker
        .js
        .create_consumer_on_stream(config, subjects::CHUNK_STREAM)
        .await
        .map_err(BrokerError::operation(&what))?;
    let mut left = consumer.cached_info().num_pending;
    let mut stored = Vec::new();
    while left > 0 {
        let fetched = consumer.fetch().max_messages(BATCH).messages().await;
        let mut fetched = fetched.map_err(BrokerError::operation(&what))?;
        // A fetch without a message: the rest has been deleted meanwhile.
        left = 0;
        while let Some(message) = next_fetched(&mut fetched, &what).await? {
            let delivered = Delivered::new(message, &what)?;
            left = delivered.pending;
            let headers = delivered.message.headers.as_ref();
            let digest = headers.and_then(|h| h.get(subjects::CHUNK_HEADER));
            stored.push(StoredChunk {
                seq: delivered.seq,
                digest: digest.and_then(|digest| digest.as_str().parse().ok()),
                stored_at: delivered.stored_at,
            });
        }
    }
    Ok(stored)
}

impl Manifest {
    /// Marks the chunks that are not among the stored ones as not stored. The bytes of a chunk
    /// decide: a broker that lost messages uses their sequences again.
    ///
    /// Returns the number of lost chunks.
    pub fn keep_stored(&mut self, stored: &[StoredChunk]) -> usize {
        let stored: HashMap<Sequence, Option<Digest>> = stored
            .iter()
            .map(|chunk| (chunk.seq, chunk.digest))
            .collect();
        let mut lost = 0;
        for chunk in self.chunks.iter_mut().filter(|chunk| chunk.seq != 0) {
            if stored.get(&chunk.seq) != Some(&Some(chunk.digest)) {
                chunk.seq = 0;
                lost += 1;
            }
        }
        lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunks::Chunk;

    #[test]
    fn a_chunk_whose_sequence_was_given_out_again_counts_as_lost() {
        let chunk = |seq: Sequence, of: &[u8]| Chunk {
            digest: Digest::of(of),
            seq,
            bytes: 1,
            hour: 0,
        };
        let stored = |seq: Sequence, of: Option<&[u8]>| StoredChunk {
            seq,
            digest: of.map(Digest::of),
            stored_at: Timestamp::from_micros(0),
        };
        let mut manifest = Manifest {
            chunks: vec![
                chunk(1, b"a"),
                chunk(2, b"b"),
                chunk(3, b"c"),
                chunk(4, b"d"),
            ],
            stored: 0,
        };
        let found = [
            stored(1, Some(b"a")),
            stored(2, Some(b"other")),
            stored(3, None),
        ];
        assert_eq!(manifest.keep_stored(&found), 3);
        let left: Vec<Sequence> = manifest.chunks.iter().map(|chunk| chunk.seq).collect();
        assert_eq!(left, [1, 0, 0, 0]);
        assert_eq!(manifest.beyond(None), [1]);
    }
}
