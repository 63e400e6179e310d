//! σ that is too large for a ledger message: cut into chunks, of which a commit stores and a
//! handover sends only those that are not there yet; put together again from the pieces of an
//! earlier σ of the same execution that this node has kept, and from the stream.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::{BufMut, Bytes, BytesMut};
use fiec_broker::chunks::{self, Manifest, Piece};
use fiec_broker::{BrokerError, store};
use fiec_schemas::{BoundaryIndex, Digest, ExecutionId, StatePlace, Tenant};
use tokio::sync::OnceCell;

use crate::cache::{Fetched, Kind, NotCached};
use crate::job::Sigma;
use crate::runner::Runner;
use crate::shared::Shared;
use crate::uploads::{Hurry, Urgent};

/// Bytes of chunks that are unacknowledged at once. Little enough that what is more urgent finds
/// its way to the broker soon.
const WINDOW: usize = 2 << 20;
/// Earlier states that are held in memory for handovers that were announced, and for how long.
const WARM: usize = 4;
const WARM_BYTES: usize = 512 << 20;
const WARM_FOR: Duration = Duration::from_secs(60);

/// Chunks by their digests.
pub(crate) type Pieces = HashMap<Digest, Bytes>;

/// The pieces of a σ, cut once however many ask.
#[derive(Debug, Clone, Default)]
pub struct Cut(Arc<OnceCell<Arc<Vec<Piece>>>>);

impl Cut {
    async fn of(&self, state: &Bytes) -> Arc<Vec<Piece>> {
        let cut = || async {
            let bytes = state.clone();
            let cut = tokio::task::spawn_blocking(move || chunks::cut(&bytes)).await;
            Arc::new(cut.unwrap_or_else(|_| chunks::cut(state)))
        };
        Arc::clone(self.0.get_or_init(cut).await)
    }
}

/// The chunks of one execution's last commit, as far as this node knows them.
#[derive(Debug, Default)]
pub(crate) struct Known {
    last: Mutex<Option<(BoundaryIndex, Digest, Arc<Manifest>)>>,
    /// Whether the execution is leaving.
    pub(crate) hurry: Hurry,
}

impl Known {
    fn lock(&self) -> MutexGuard<'_, Option<(BoundaryIndex, Digest, Arc<Manifest>)>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has(&self, place: &StatePlace) -> bool {
        let known = self.lock();
        matches!(&*known, Some((index, digest, _)) if (*index, *digest) == (place.index, place.digest))
    }

    /// The chunks of this commit; none where it has none, or they cannot be read.
    pub(crate) async fn of(
        &self,
        shared: &Shared,
        place: Option<&StatePlace>,
    ) -> Option<Arc<Manifest>> {
        let place = place.filter(|place| store::is_large(place))?;
        let known = self.lock().clone();
        if let Some((index, digest, manifest)) = known
            && (index, digest) == (place.index, place.digest)
        {
            return Some(manifest);
        }
        match store::manifest(&shared.broker, place).await {
            Ok(manifest) => Some(self.learn(place.index, place.digest, manifest)),
            Err(error) => {
                // All of it will be stored again.
                tracing::warn!(%error, "cannot read which chunks are stored");
                None
            }
        }
    }

    fn learn(&self, index: BoundaryIndex, digest: Digest, manifest: Manifest) -> Arc<Manifest> {
        let manifest = Arc::new(manifest);
        *self.lock() = Some((index, digest, Arc::clone(&manifest)));
        manifest
    }
}

/// A commit of a large σ.
pub(crate) struct Commit {
    pub(crate) tenant: Tenant,
    pub(crate) execution: ExecutionId,
    pub(crate) index: BoundaryIndex,
    pub(crate) digest: Digest,
    pub(crate) state: Bytes,
    pub(crate) cut: Cut,
    /// The commit before.
    pub(crate) before: Option<StatePlace>,
    /// It belongs to a rebinding.
    pub(crate) urgent: bool,
}

impl Commit {
    /// Stores the chunks that are not stored yet, until they are; gives the message's body and the
    /// chunks, which count once that message is stored.
    ///
    /// # Errors
    /// When there are too many.
    pub(crate) async fn store(&self, shared: &Shared, known: &Known) -> Result<Ready, BrokerError> {
        let before = known.of(shared, self.before.as_ref()).await;
        let pieces = self.cut.of(&self.state).await;
        let mut manifest = Manifest::of(&pieces, before.as_deref(), chunks::hour_now())?;
        let metrics = &shared.metrics;
        metrics.chunked_bytes.inc_by(self.state.len() as u64);
        metrics.chunk_bytes.inc_by(manifest.stored);
        while let Err(error) = self.send(shared, known, &pieces, &mut manifest).await {
            tracing::warn!(%error, "cannot store a large state; trying again");
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        Ok(Ready {
            index: self.index,
            digest: self.digest,
            manifest,
            before,
        })
    }

    async fn send(
        &self,
        shared: &Shared,
        known: &Known,
        pieces: &[Piece],
        manifest: &mut Manifest,
    ) -> Result<(), BrokerError> {
        let missing: Vec<_> = manifest.missing().collect();
        let mut places = HashMap::new();
        let mut under_way = VecDeque::new();
        let mut bytes = 0;
        let mut failed = None;
        for (at, chunk) in missing {
            if !self.urgent {
                shared.uploads.turn(&known.hurry).await;
            }
            let piece = self.state.slice(pieces[at].range.clone());
            bytes += piece.len();
            match chunks::send(&shared.broker, &self.tenant, self.execution, piece).await {
                Ok(ack) => under_way.push_back((chunk, shared.broker.sent(ack))),
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
            while bytes > WINDOW
                && let Some((chunk, ack)) = under_way.pop_front()
            {
                bytes -= chunk.bytes as usize;
                match ack.settled().await {
                    Ok(ack) => drop(places.insert(chunk.digest, ack.sequence)),
                    Err(error) => failed = Some(not_stored(error)),
                }
            }
            if failed.is_some() {
                break;
            }
        }
        for (chunk, ack) in under_way {
            match ack.settled().await {
                Ok(ack) => drop(places.insert(chunk.digest, ack.sequence)),
                Err(error) => failed = Some(not_stored(error)),
            }
        }
        manifest.stored_at(&places);
        failed.map_or(Ok(()), Err)
    }
}

fn not_stored(error: async_nats::jetstream::context::PublishError) -> BrokerError {
    BrokerError::operation("store a chunk of a state")(error)
}

/// The chunks of a commit whose message is on its way.
pub(crate) struct Ready {
    index: BoundaryIndex,
    digest: Digest,
    manifest: Manifest,
    before: Option<Arc<Manifest>>,
}

impl Ready {
    /// The message's body.
    pub(crate) fn body(&self) -> Bytes {
        self.manifest.encode()
    }

    /// The message is stored: later commits build on it.
    pub(crate) fn committed(self, shared: &Shared, known: &Known) {
        let now = known.learn(self.index, self.digest, self.manifest);
        if let Some(before) = self.before {
            shared.supersede_chunks(before.beyond(Some(&now)));
        }
    }
}

impl Runner {
    /// σ as it was handed over; none where the durable one must be fetched.
    pub(crate) async fn received(&mut self, sigma: Sigma) -> Option<Bytes> {
        let delta = match sigma {
            Sigma::Whole(sigma) => return Some(sigma),
            Sigma::Delta(delta) => delta,
        };
        let state = &self.tip.state;
        let digest = state.boundary.as_ref()?.digest;
        let whole = Box::pin(from_handover(&self.shared, state.execution, digest, delta)).await;
        whole
            .inspect_err(|error| {
                tracing::warn!(%error, "σ that was handed over cannot be put together");
            })
            .ok()
    }

    /// The ledger has a message behind one whose σ was large.
    pub(crate) async fn gone_beyond(&mut self, before: StatePlace) {
        let state = &self.tip.state;
        let ended = state.phase.is_terminal();
        let now = state.boundary.clone().filter(store::is_large);
        if let Some(now) = now.filter(|_| !ended) {
            if self.known.has(&now) {
                return;
            }
            // Read before the next commit needs it.
            let (known, shared) = (self.known.clone(), self.shared.clone());
            tokio::spawn(async move { drop(known.of(&shared, Some(&now)).await) });
            return;
        }
        if let Some(chunks) = self.known.of(&self.shared, Some(&before)).await {
            self.shared.supersede_chunks(chunks.beyond(None));
        }
        if ended && let Some(held) = self.shared.cache.get(key(state.execution)) {
            // Nobody comes back for what was kept.
            held.discard();
        }
    }
}

/// What a handover sends of a large σ: the list of its chunks, and those that the commit before
/// does not have.
///
/// # Errors
/// When there are too many.
pub(crate) async fn delta(
    state: &Bytes,
    cut: &Cut,
    before: Option<&Manifest>,
) -> Result<Bytes, BrokerError> {
    let pieces = cut.of(state).await;
    let manifest = Manifest::of(&pieces, before, chunks::hour_now())?;
    let list = manifest.encode();
    let mut out = BytesMut::with_capacity(4 + list.len() + manifest.stored as usize);
    out.put_u32_le(list.len() as u32);
    out.extend_from_slice(&list);
    for (at, _) in manifest.missing() {
        out.extend_from_slice(&state[pieces[at].range.clone()]);
    }
    Ok(out.freeze())
}

/// Reads what [`delta`] made: the list, and the chunks that came along.
fn parts_of(mut delta: Bytes) -> Result<(Manifest, Pieces), BrokerError> {
    let short = || BrokerError::Malformed {
        what: "handover of a large state".to_owned(),
        reason: "it is shorter than it says".to_owned(),
    };
    if delta.len() < 4 {
        return Err(short());
    }
    let length = delta.split_to(4);
    let length = u32::from_le_bytes([length[0], length[1], length[2], length[3]]) as usize;
    if delta.len() < length {
        return Err(short());
    }
    let manifest = Manifest::decode(&delta.split_to(length))?;
    let mut sent = Pieces::new();
    for (_, chunk) in manifest.missing() {
        if delta.len() < chunk.bytes as usize {
            return Err(short());
        }
        let bytes = delta.split_to(chunk.bytes as usize);
        if Digest::of(&bytes) != chunk.digest {
            return Err(BrokerError::Digest {
                what: "chunk of a handover".to_owned(),
                found: Digest::of(&bytes).to_string(),
                expected: chunk.digest.to_string(),
            });
        }
        sent.insert(chunk.digest, bytes);
    }
    Ok((manifest, sent))
}

/// With the moment since when, and the bytes of each.
type Held = VecDeque<(Instant, ExecutionId, usize, Arc<Pieces>)>;

/// Earlier states of executions that were announced.
#[derive(Default)]
pub struct Warm(Mutex<Held>);

impl Warm {
    fn lock(&self) -> MutexGuard<'_, Held> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hold(&self, execution: ExecutionId, pieces: Arc<Pieces>) {
        let bytes: usize = pieces.values().map(Bytes::len).sum();
        let mut warm = self.lock();
        warm.retain(|(_, id, ..)| *id != execution);
        warm.push_back((Instant::now(), execution, bytes, pieces));
        while warm.len() > WARM || warm.iter().map(|w| w.2).sum::<usize>() > WARM_BYTES {
            warm.pop_front();
        }
    }

    fn take(&self, execution: ExecutionId) -> Option<Arc<Pieces>> {
        let mut warm = self.lock();
        let at = warm.iter().position(|(_, id, ..)| *id == execution)?;
        warm.remove(at).map(|(.., pieces)| pieces)
    }

    /// Lets go of those that did not come.
    pub(crate) fn sweep(&self) {
        self.lock().retain(|(at, ..)| at.elapsed() < WARM_FOR);
    }
}

fn key(execution: ExecutionId) -> (Kind, Digest) {
    (Kind::State, Digest::of(execution.0.as_bytes()))
}

/// The pieces of the σ that this node has kept of an execution, none where it has none. They are
/// what they are: cut and digested anew.
async fn kept(shared: &Shared, execution: ExecutionId) -> Option<Arc<Pieces>> {
    if let Some(pieces) = shared.warm.take(execution) {
        return Some(pieces);
    }
    let held = shared.cache.get(key(execution))?;
    let read = move || {
        let state = Bytes::from(std::fs::read(held.path())?);
        let pieces = chunks::cut(&state).into_iter();
        let pieces = pieces.map(|piece| (piece.digest, state.slice(piece.range)));
        Ok::<_, std::io::Error>(Arc::new(pieces.collect()))
    };
    match tokio::task::spawn_blocking(read).await {
        Ok(Ok(pieces)) => Some(pieces),
        Ok(Err(error)) => {
            tracing::warn!(%error, "a state that was kept cannot be read");
            None
        }
        Err(_) => None,
    }
}

/// Keeps σ on this node's disk, in place of an earlier one, for when the execution comes back.
pub(crate) async fn keep(shared: &Shared, execution: ExecutionId, state: Bytes) {
    if let Some(held) = shared.cache.get(key(execution)) {
        held.discard();
    }
    let (path, bytes) = (shared.cache.new_path(), state.len() as u64);
    let write = move || async move {
        let fetched = Fetched { path, bytes };
        tokio::fs::write(&fetched.path, state)
            .await
            .map_err(NotCached::because("cannot write into the node's cache"))?;
        Ok(fetched)
    };
    if let Err(error) = shared
        .cache
        .get_or_fetch(key(execution), bytes, write)
        .await
    {
        tracing::debug!(%execution, %error, "a state is not kept on this node");
    }
}

async fn assemble(
    shared: &Shared,
    execution: ExecutionId,
    digest: Digest,
    manifest: &Manifest,
    sent: &Pieces,
) -> Result<Bytes, BrokerError> {
    let all_sent = manifest.chunks.iter().all(|c| sent.contains_key(&c.digest));
    let kept = if all_sent {
        None
    } else {
        kept(shared, execution).await
    };
    let have = |digest: &Digest| {
        let kept = || kept.as_ref()?.get(digest);
        sent.get(digest).or_else(kept).cloned()
    };
    let assembled = chunks::assemble(&shared.broker, manifest, have).await?;
    shared.metrics.chunk_bytes_fetched.inc_by(assembled.fetched);
    let what = format!("state of {execution}");
    let state = assembled.state;
    let check = tokio::task::spawn_blocking(move || store::verify(&what, digest, state));
    check.await.unwrap_or_else(|error| {
        Err(BrokerError::operation("verify a state")(Box::<
            dyn std::error::Error + Send + Sync,
        >::from(
            error
        )))
    })
}

/// The σ of a handover.
///
/// # Errors
/// When it cannot be put together; the durable one can still be fetched later.
pub(crate) async fn from_handover(
    shared: &Shared,
    execution: ExecutionId,
    digest: Digest,
    delta: Bytes,
) -> Result<Bytes, BrokerError> {
    let (manifest, sent) = parts_of(delta)?;
    assemble(shared, execution, digest, &manifest, &sent).await
}

/// The σ of a commit.
///
/// # Errors
/// When it cannot be put together.
pub(crate) async fn fetch(
    shared: &Shared,
    execution: ExecutionId,
    place: &StatePlace,
) -> Result<Bytes, BrokerError> {
    let manifest = store::manifest(&shared.broker, place).await?;
    let state = assemble(shared, execution, place.digest, &manifest, &Pieces::new()).await?;
    Ok(state)
}

/// The execution will come here: what the last commit has is fetched ahead, and held ready.
pub(crate) async fn prepare(shared: &Shared, execution: ExecutionId, place: &StatePlace) {
    let state = match fetch(shared, execution, place).await {
        Ok(state) => state,
        Err(error) => {
            return tracing::debug!(%execution, %error, "a state was not fetched ahead");
        }
    };
    let cut = Cut::default().of(&state).await;
    let pieces = cut.iter();
    let pieces = pieces.map(|piece| (piece.digest, state.slice(piece.range.clone())));
    shared.warm.hold(execution, Arc::new(pieces.collect()));
}

/// Held while a rebinding's last message is under way; none for a routine commit.
pub type Priority = Option<Urgent>;
