//! Objects that are named by the digest of their bytes. The library's own `put` replaces an object
//! and purges the old chunks. So concurrent equal puts break readers and leave chunks behind. Here
//! the first writer wins by compare-and-set, and each later writer removes its own chunks. A
//! complete object is never replaced.
//!
//! The format is the object store's: chunks on `$O.<bucket>.C.<nuid>`, one message with the
//! object's description on `$O.<bucket>.M.<name>`.

use std::io::ErrorKind;
use std::time::Duration;

use async_nats::HeaderMap;
use async_nats::jetstream::object_store::{GetErrorKind, Object, ObjectInfo, ObjectOptions};
use async_nats::jetstream::stream::Stream;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE;
use bytes::{Bytes, BytesMut};
use fiec_schemas::Timestamp;
use fiec_schemas::subjects::INLINE_STATE_LIMIT;
use futures_util::TryStreamExt;
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncRead, AsyncReadExt};

use crate::collect::Store;
use crate::{Broker, BrokerError, leader};

/// Bytes of one read.
const COPY: usize = 256 * 1024;
/// Attempts of the write that makes an object visible. Each failed one has lost against another
/// writer.
const TRIES: usize = 5;
/// A put of an existing object that is older than this renews its description, so that the
/// collector keeps it. Far below any grace period of a collector, also in experiments with faster
/// time. Puts of one object write one description in this time, however many they are.
const RENEW_AFTER: Duration = Duration::from_secs(10);

/// A bucket of objects.
pub(crate) struct Bucket<'a> {
    broker: &'a Broker,
    name: &'a str,
}

/// The description of an object, and the sequence of the message that holds it.
pub(crate) struct Described {
    pub(crate) seq: u64,
    pub(crate) info: ObjectInfo,
    /// Age of the description by the broker's clock.
    pub(crate) age: Duration,
    /// Time of storage of the description in the broker.
    pub(crate) stored_at: Timestamp,
}

impl<'a> Bucket<'a> {
    pub(crate) fn new(broker: &'a Broker, name: &'a str) -> Self {
        Self { broker, name }
    }

    fn description(&self, object: &str) -> String {
        format!("$O.{}.M.{}", self.name, URL_SAFE.encode(object))
    }

    /// The subject of the descriptions of all objects.
    pub(crate) fn description_of_all(&self) -> String {
        format!("$O.{}.M.>", self.name)
    }

    /// The subject of the chunks of one put.
    pub(crate) fn chunks(&self, nuid: &str) -> String {
        format!("$O.{}.C.{nuid}", self.name)
    }

    async fn stream(&self) -> Result<Stream<()>, BrokerError> {
        let stream = format!("OBJ_{}", self.name);
        let opened = self.broker.js.get_stream_no_info(&stream).await;
        opened.map_err(BrokerError::operation(format!("open stream {stream}")))
    }

    /// Returns the last description of an object, including a deletion mark.
    pub(crate) async fn described(&self, object: &str) -> Result<Option<Described>, BrokerError> {
        self.described_on(&self.description(object)).await
    }

    /// Returns the last description on this subject.
    pub(crate) async fn described_on(
        &self,
        subject: &str,
    ) -> Result<Option<Described>, BrokerError> {
        let stream = self.stream().await?;
        let Some(message) = leader::last(&stream, subject).await? else {
            return Ok(None);
        };
        let unreadable = |error: serde_json::Error| BrokerError::Malformed {
            what: format!("the description of an object on {subject}"),
            reason: error.to_string(),
        };
        let info = serde_json::from_slice(&message.payload).map_err(unreadable)?;
        let stored = message.time.unix_timestamp_nanos() / 1_000;
        Ok(Some(Described {
            seq: message.sequence,
            info,
            age: self.broker.clock.age(message.time),
            stored_at: Timestamp::from_micros(i64::try_from(stored).unwrap_or(0)),
        }))
    }

    /// Whether all chunks of an object exist.
    async fn is_whole(&self, info: &ObjectInfo) -> Result<bool, BrokerError> {
        if info.deleted {
            return Ok(false);
        }
        let what = || format!("count the chunks of {} in {}", info.name, self.name);
        let subject = self.chunks(&info.nuid);
        let stream = self.stream().await?;
        let counts = stream.info_with_subjects(&subject).await;
        let counts: Vec<(String, usize)> = counts
            .map_err(BrokerError::operation(what()))?
            .try_collect()
            .await
            .map_err(BrokerError::operation(what()))?;
        Ok(counts.iter().map(|(_, count)| count).sum::<usize>() == info.chunks)
    }

    /// Removes the chunks of one put. On an error they are left to the collector.
    pub(crate) async fn discard(&self, nuid: &str) {
        let discarded = async {
            let purge = self.stream().await?.purge().filter(self.chunks(nuid));
            purge.await.map_err(BrokerError::operation(format!(
                "remove chunks from {}",
                self.name
            )))
        };
        if let Err(error) = discarded.await {
            tracing::debug!(%error, "chunks of an object stay until they are collected");
        }
    }

    /// Removes the description of an object, unless a newer one exists. Returns whether it was
    /// removed.
    pub(crate) async fn forget(&self, object: &str, seq: u64) -> Result<bool, BrokerError> {
        let what = format!("remove {object} from {}", self.name);
        let purge = self.stream().await?.purge();
        // Up to and including `seq`.
        let purge = purge.filter(self.description(object)).sequence(seq + 1);
        let purged = purge.await.map_err(BrokerError::operation(what))?;
        Ok(purged.purged > 0)
    }

    /// Writes a description if the last one is still `expected`. Returns whether it did.
    async fn describe(&self, info: &ObjectInfo, expected: u64) -> Result<bool, BrokerError> {
        let what = || format!("store {} in {}", info.name, self.name);
        let body = serde_json::to_vec(info).map_err(BrokerError::operation(what()))?;
        let mut headers = HeaderMap::new();
        headers.insert("Nats-Rollup", "sub");
        headers.insert("Nats-Expected-Last-Subject-Sequence", expected.to_string());
        let subject = self.description(&info.name);
        let js = &self.broker.js;
        let sent = js.publish_with_headers(subject, headers, body.into()).await;
        let ack = match sent {
            Ok(ack) => ack.await,
            Err(error) => Err(error),
        };
        match ack {
            Ok(_) => Ok(true),
            Err(error)
                if error.kind()
                    == async_nats::jetstream::context::PublishErrorKind::WrongLastSequence =>
            {
                Ok(false)
            }
            // It may be stored all the same: check.
            Err(error) => match self.described(&info.name).await? {
                Some(found) if found.seq > expected => Ok(found.info.nuid == info.nuid),
                _ => Err(BrokerError::operation(what())(error)),
            },
        }
    }

    /// Stores a reader's bytes, unless a complete object of this name exists. An old existing
    /// object is renewed.
    pub(crate) async fn put_once(
        &self,
        object: &str,
        reader: &mut (impl AsyncRead + Unpin),
    ) -> Result<(), BrokerError> {
        let mut written: Option<ObjectInfo> = None;
        for _ in 0..TRIES {
            let found = self.described(object).await?;
            if let Some(found) = &found
                && self.is_whole(&found.info).await?
            {
                if found.age > RENEW_AFTER && !self.describe(&found.info, found.seq).await? {
                    continue;
                }
                if let Some(own) = written.filter(|own| own.nuid != found.info.nuid) {
                    self.discard(&own.nuid).await;
                }
                return Ok(());
            }
            let info = match written.take() {
                Some(info) => info,
                None => self.write(object, reader).await?,
            };
            let expected = found.as_ref().map_or(0, |found| found.seq);
            if self.describe(&info, expected).await? {
                if let Some(before) = found.filter(|f| !f.info.deleted) {
                    self.discard(&before.info.nuid).await;
                }
                return Ok(());
            }
            written = Some(info);
        }
        if let Some(own) = written {
            self.discard(&own.nuid).await;
        }
        Err(BrokerError::Missing {
            what: format!("{object} in {}", self.name),
            hint: format!(": others stored and removed it at the same time, {TRIES} times"),
        })
    }

    /// Writes the chunks of an object that is not visible yet.
    async fn write(
        &self,
        object: &str,
        reader: &mut (impl AsyncRead + Unpin),
    ) -> Result<ObjectInfo, BrokerError> {
        let nuid = uuid::Uuid::new_v4().simple().to_string();
        let written = self.write_chunks(object, &nuid, reader).await;
        if written.is_err() {
            self.discard(&nuid).await;
        }
        let (chunks, size, digest) = written?;
        Ok(ObjectInfo {
            name: object.to_owned(),
            description: None,
            metadata: Default::default(),
            headers: None,
            options: Some(ObjectOptions {
                max_chunk_size: Some(INLINE_STATE_LIMIT),
                link: None,
            }),
            bucket: self.name.to_owned(),
            nuid,
            size,
            chunks,
            modified: None,
            digest: Some(digest),
            deleted: false,
        })
    }

    async fn write_chunks(
        &self,
        object: &str,
        nuid: &str,
        reader: &mut (impl AsyncRead + Unpin),
    ) -> Result<(usize, usize, String), BrokerError> {
        let what = || format!("store {object} in {}", self.name);
        let subject = self.chunks(nuid);
        let (mut chunks, mut size, mut hasher) = (0, 0, Sha256::new());
        loop {
            let mut chunk = BytesMut::with_capacity(INLINE_STATE_LIMIT);
            let mut part = (&mut *reader).take(INLINE_STATE_LIMIT as u64);
            while part
                .read_buf(&mut chunk)
                .await
                .map_err(BrokerError::operation(what()))?
                > 0
            {}
            if chunk.is_empty() {
                break;
            }
            hasher.update(&chunk);
            (chunks, size) = (chunks + 1, size + chunk.len());
            let sent = self
                .broker
                .js
                .publish(subject.clone(), chunk.freeze())
                .await;
            let ack = sent.map_err(BrokerError::operation(what()))?;
            ack.await.map_err(BrokerError::operation(what()))?;
        }
        let digest = format!("SHA-256={}", URL_SAFE.encode(hasher.finalize()));
        Ok((chunks, size, digest))
    }
}

/// Reads an object in pieces, each with a deadline.
pub(crate) struct Pieces {
    object: Object,
    what: String,
    buffer: Vec<u8>,
    copied: u64,
    silence: Duration,
}

impl Pieces {
    /// Opens an object. `what` names it in errors.
    pub(crate) async fn open(
        broker: &Broker,
        store: Store,
        name: &str,
        what: &str,
    ) -> Result<Self, BrokerError> {
        let failed = |error| BrokerError::operation(format!("fetch {what}"))(error);
        let bucket = broker.store(store).await?;
        for _ in 0..leader::LOOKS {
            let error = match bucket.get(name).await {
                Ok(object) if !object.info.deleted => {
                    return Ok(Self {
                        object,
                        what: what.to_owned(),
                        buffer: vec![0; COPY],
                        copied: 0,
                        silence: broker.silence(),
                    });
                }
                Ok(_) => GetErrorKind::NotFound.into(),
                Err(error) => error,
            };
            if error.kind() != GetErrorKind::NotFound {
                return Err(failed(error));
            }
            // A copy of the bucket that lags behind may have answered.
            let found = Bucket::new(broker, store.name()).described(name).await?;
            if found.is_none_or(|found| found.info.deleted) {
                return Err(BrokerError::Missing {
                    what: what.to_owned(),
                    hint: format!(" (the bucket has no object {name})"),
                });
            }
            tokio::time::sleep(leader::LOOK_AGAIN).await;
        }
        Err(failed(GetErrorKind::NotFound.into()))
    }

    /// Returns the next piece. It is empty at the end.
    pub(crate) async fn next(&mut self) -> Result<&[u8], BrokerError> {
        let read = self.object.read(&mut self.buffer);
        let read = match tokio::time::timeout(self.silence, read).await {
            Ok(read) => read,
            // It may exist: a retry may read it.
            Err(_) => {
                let what = format!("read {} after {} bytes", self.what, self.copied);
                let silent = format!("the broker sent nothing for {:?}", self.silence);
                let silent = std::io::Error::new(ErrorKind::TimedOut, silent);
                return Err(BrokerError::operation(what)(silent));
            }
        };
        let found = match read {
            // The object store's own check failed: the bytes differ from the stored ones.
            Err(error) if error.kind() == ErrorKind::InvalidData => {
                return Err(BrokerError::Digest {
                    what: self.what.clone(),
                    found: format!("unknown ({error})"),
                    expected: self.object.info.name.clone(),
                });
            }
            read => read.map_err(BrokerError::operation(format!("read {}", self.what)))?,
        };
        self.copied += found as u64;
        Ok(self.buffer.get(..found).unwrap_or_default())
    }

    /// Returns all pieces. Allocates `bytes` at first, up to a limit. `progress` receives the number
    /// of bytes after each piece.
    pub(crate) async fn all(
        mut self,
        bytes: u64,
        mut progress: impl FnMut(u64),
    ) -> Result<Bytes, BrokerError> {
        // The size comes from a message: the buffer grows with the actual bytes.
        let mut whole = Vec::with_capacity(usize::try_from(bytes.min(1 << 26)).unwrap_or(0));
        loop {
            let piece = self.next().await?;
            if piece.is_empty() {
                return Ok(whole.into());
            }
            whole.extend_from_slice(piece);
            progress(whole.len() as u64);
        }
    }
}
