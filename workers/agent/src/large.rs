//! σ that is too large for a ledger message is cut into chunks. A commit stores, and a handover
//! sends, only chunks that are missing at the destination. The node assembles σ from the stream and
//! from pieces of an earlier σ of the same execution that it has kept.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::{BufMut, Bytes, BytesMut};
use fiec_broker::chunks::{self, Chunk, Manifest, Piece};
use fiec_broker::recut::{Earlier, cut_after};
use fiec_broker::{AppendError, BrokerError, chunk_list, lists, store};
use fiec_schemas::{
    BoundaryIndex, Digest, Epoch, ExecutionId, ExecutionState, Sequence, StatePlace, Tenant,
    subjects,
};
use tokio::sync::OnceCell;

use crate::cache::{Fetched, Kind, NotCached};
use crate::fetches::{Pieces, Turn};
use crate::job::Sigma;
use crate::runner::Runner;
use crate::shared::Shared;
use crate::uploads::{Hurry, Urgent};

/// Bytes of unacknowledged chunks at once. A small window lets urgent messages reach the broker
/// soon.
const WINDOW: usize = 2 << 20;
/// Tries to list an execution's chunks, and the pause after each. Then all count as lost.
const CHECKS: u32 = 10;
const CHECK_AGAIN: Duration = Duration::from_millis(500);

/// The pieces of a σ, cut once for all users.
#[derive(Debug, Clone, Default)]
pub struct Cut(Arc<OnceCell<Arc<Vec<Piece>>>>);

impl Cut {
    /// Cuts σ. Pieces that it shares with the σ that `known` cut last are not cut again.
    async fn of(&self, state: &Bytes, known: &Known) -> Arc<Vec<Piece>> {
        let cut = || async {
            let (bytes, earlier) = (state.clone(), known.cut().take());
            let cut = move || match earlier {
                Some((state, pieces)) => {
                    let (state, pieces) = (&state[..], &pieces[..]);
                    cut_after(&bytes, Earlier { state, pieces })
                }
                None => chunks::cut(&bytes),
            };
            let cut = tokio::task::spawn_blocking(cut).await;
            let pieces = Arc::new(cut.unwrap_or_else(|_| chunks::cut(state)));
            known.has_cut(state, &pieces);
            pieces
        };
        Arc::clone(self.0.get_or_init(cut).await)
    }
}

/// A σ with its pieces.
type Whole = (Bytes, Arc<Vec<Piece>>);

/// The chunks of one execution's last commit, as far as this node knows them.
#[derive(Debug, Default)]
pub(crate) struct Known {
    last: Mutex<Option<(BoundaryIndex, Digest, Arc<Manifest>)>>,
    /// Stored chunks that the next commit supersedes, beside those of the last commit.
    abandoned: Mutex<Vec<Sequence>>,
    /// The σ that was cut last. The next cut is then many times faster. It shares its memory with the
    /// link of the child, which keeps the bytes that it read last until it reads as many again.
    cut: Mutex<Option<Whole>>,
    /// Whether the execution is leaving.
    pub(crate) hurry: Hurry,
}

impl Known {
    fn lock(&self) -> MutexGuard<'_, Option<(BoundaryIndex, Digest, Arc<Manifest>)>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn cut(&self) -> MutexGuard<'_, Option<Whole>> {
        self.cut.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_cut(&self, state: &Bytes, pieces: &Arc<Vec<Piece>>) {
        *self.cut() = Some((state.clone(), Arc::clone(pieces)));
    }

    /// Returns the σ that was cut last, if there is one.
    pub(crate) fn whole(&self) -> Option<Bytes> {
        self.cut().as_ref().map(|(state, _)| state.clone())
    }

    fn has(&self, place: &StatePlace) -> bool {
        let known = self.lock();
        matches!(&*known, Some((index, digest, _)) if (*index, *digest) == (place.index, place.digest))
    }

    /// Returns the chunks of this commit, or none if it has none or they cannot be read.
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
                // All chunks will be stored again.
                tracing::warn!(%error, "cannot read which chunks are stored");
                None
            }
        }
    }

    /// Compares the chunks of this commit with the broker's, which may have lost some. The next
    /// commit stores only the lost ones again. Returns the chunks.
    pub(crate) async fn check(
        &self,
        shared: &Shared,
        state: &ExecutionState,
        place: &StatePlace,
    ) -> Arc<Manifest> {
        let subject = subjects::chunk(&state.tenant, state.execution);
        let mut tries = 0;
        let mut checked = Manifest::default();
        if let Some(manifest) = self.of(shared, Some(place)).await {
            while tries < CHECKS {
                match chunk_list::stored(&shared.broker, &subject).await {
                    Ok(stored) => {
                        checked = Manifest::clone(&manifest);
                        self.keep_abandoned(&stored);
                        let lost = checked.keep_stored(&stored);
                        tracing::debug!(execution = %state.execution, lost, "chunks were checked");
                        break;
                    }
                    // Without an answer all of them count as lost. The collector removes them.
                    Err(error) => tracing::warn!(%error, "cannot look which chunks are stored"),
                }
                tries += 1;
                tokio::time::sleep(CHECK_AGAIN).await;
            }
        }
        self.learn(place.index, place.digest, checked)
    }

    /// Notes stored chunks that no commit will name: the next commit supersedes them.
    pub(crate) fn abandon(&self, sequences: Vec<Sequence>) {
        self.abandoned().extend(sequences);
    }

    /// Forgets abandoned chunks that the broker has lost. Their sequences may be given out again.
    fn keep_abandoned(&self, stored: &[chunk_list::StoredChunk]) {
        let stored: HashSet<Sequence> = stored.iter().map(|chunk| chunk.seq).collect();
        self.abandoned().retain(|seq| stored.contains(seq));
    }

    fn abandoned(&self) -> MutexGuard<'_, Vec<Sequence>> {
        self.abandoned
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the stored chunks that `now` does not need, and will not return them again.
    fn take_abandoned(&self, now: Option<&Manifest>) -> Vec<Sequence> {
        let mut gone = std::mem::take(&mut *self.abandoned());
        let needed: HashSet<Sequence> = now.iter().flat_map(|m| &m.chunks).map(|c| c.seq).collect();
        gone.retain(|seq| !needed.contains(seq));
        gone
    }

    pub(crate) fn learn(
        &self,
        index: BoundaryIndex,
        digest: Digest,
        manifest: Manifest,
    ) -> Arc<Manifest> {
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
    /// The commit before this one.
    pub(crate) before: Option<StatePlace>,
    /// It belongs to a rebinding.
    pub(crate) urgent: bool,
}

impl Commit {
    /// Stores the missing chunks, with retries until it succeeds. Returns the message's body and
    /// the chunks, which count once that message is stored.
    ///
    /// # Errors
    /// When there are too many.
    pub(crate) async fn store(&self, shared: &Shared, known: &Known) -> Result<Ready, BrokerError> {
        let server = shared.broker.server();
        let before = known.of(shared, self.before.as_ref()).await;
        let pieces = self.cut.of(&self.state, known).await;
        let mut manifest = Manifest::of(&pieces, before.as_deref(), chunks::hour_now())?;
        let metrics = &shared.metrics;
        metrics.chunked_state_bytes.inc_by(self.state.len() as u64);
        metrics.chunk_bytes_stored.inc_by(manifest.stored);
        while let Err(error) = self.send(shared, known, &pieces, &mut manifest).await {
            tracing::warn!(%error, "cannot store a large state; trying again");
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        Ok(Ready {
            index: self.index,
            digest: self.digest,
            manifest,
            before,
            server,
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
            let (tenant, digest) = (&self.tenant, chunk.digest);
            match chunks::send_piece(&shared.broker, tenant, self.execution, digest, piece).await {
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

/// The chunks of a commit whose message is in flight.
pub(crate) struct Ready {
    index: BoundaryIndex,
    digest: Digest,
    manifest: Manifest,
    before: Option<Arc<Manifest>>,
    /// The server process in which the sequences were valid.
    server: String,
}

impl Ready {
    /// The message's body.
    pub(crate) fn body(&self) -> Bytes {
        self.manifest.encode()
    }

    /// Notes that the message is stored: later commits build on it.
    pub(crate) fn committed(self, shared: &Shared, known: &Known) {
        let now = known.learn(self.index, self.digest, self.manifest);
        let before = self.before.map(|before| before.beyond(Some(&now)));
        let mut gone = known.take_abandoned(Some(&now));
        gone.extend(before.into_iter().flatten());
        shared.superseded_chunks.note(self.server, gone);
    }

    /// Notes that another commit takes the place of this one, whose message was not stored.
    pub(crate) fn abandoned(self, known: &Known) {
        known.abandon(self.manifest.beyond(self.before.as_deref()));
    }
}

impl Runner {
    /// Returns σ as it was handed over, or none if the durable one must be fetched. If it came in
    /// chunks, the computation starts while the whole σ is being digested. Nothing is appended
    /// before the digest is known.
    pub(crate) async fn received(&mut self, sigma: Sigma) -> Option<Bytes> {
        let delta = match sigma {
            Sigma::Whole(sigma) => return Some(sigma),
            Sigma::Delta(delta) => delta,
        };
        let state = &self.tip.state;
        let (execution, place) = (state.execution, state.boundary.as_ref()?);
        let digest = place.digest;
        let bound = (execution, self.epoch);
        let whole = Box::pin(from_handover(&self.shared, bound, place, delta)).await;
        let (state, pieces) = whole
            .inspect_err(|error| {
                tracing::warn!(%error, "σ that was handed over cannot be put together");
            })
            .ok()?;
        self.known.has_cut(&state, &Arc::new(pieces));
        let check = verified(execution, digest, state.clone());
        let Some(flight) = self.flight.take() else {
            return Box::pin(check).await.ok().map(|()| state);
        };
        // Spawned, so that it runs even if nobody polls the flight.
        let check = tokio::spawn(check);
        self.flight = Some(Box::pin(async move {
            match check.await {
                Ok(Ok(())) => flight.await,
                Ok(Err(error)) => {
                    tracing::error!(%error, "σ that was handed over is not the one that was bound");
                    Err(AppendError::Broker(error))
                }
                Err(_) => Err(AppendError::Conflict),
            }
        }));
        Some(state)
    }

    /// Handles a message that supersedes one with a large σ.
    pub(crate) async fn gone_beyond(&mut self, before: StatePlace) {
        let state = &self.tip.state;
        let ended = !state.phase.kind().needs_state();
        let now = state.boundary.clone().filter(store::is_large);
        if let Some(now) = now.filter(|_| !ended) {
            if self.known.has(&now) {
                return;
            }
            // Read it before the next commit needs it.
            let (known, shared) = (self.known.clone(), self.shared.clone());
            tokio::spawn(async move { drop(known.of(&shared, Some(&now)).await) });
            return;
        }
        let mut gone = self.known.take_abandoned(None);
        if let Some(chunks) = self.known.of(&self.shared, Some(&before)).await {
            gone.extend(chunks.beyond(None));
        }
        self.shared.supersede_chunks(gone);
        if ended && let Some(held) = self.shared.cache.get(key(state.execution)) {
            // The kept σ of an ended execution is not needed again.
            held.discard();
        }
    }
}

/// Encodes a large σ for a handover: the list of its chunks, and those chunks that the commit
/// `before` does not have. The list is encoded relative to that commit's list, if there is one.
///
/// # Errors
/// When there are too many.
pub(crate) async fn delta(
    shared: &Shared,
    (state, cut): (&Bytes, &Cut),
    known: &Known,
    before: Option<&StatePlace>,
) -> Result<Bytes, BrokerError> {
    let earlier = known.of(shared, before).await;
    let pieces = cut.of(state, known).await;
    let manifest = Manifest::of(&pieces, earlier.as_deref(), chunks::hour_now())?;
    let list = match (&earlier, before) {
        (Some(earlier), Some(before)) => lists::encode(&manifest, earlier, before)?,
        _ => manifest.encode(),
    };
    let mut out = BytesMut::with_capacity(4 + list.len() + manifest.stored as usize);
    out.put_u32_le(list.len() as u32);
    out.extend_from_slice(&list);
    for (at, _) in manifest.missing() {
        out.extend_from_slice(&state[pieces[at].range.clone()]);
    }
    Ok(out.freeze())
}

fn short() -> BrokerError {
    BrokerError::Malformed {
        what: "handover of a large state".to_owned(),
        reason: "its length is less than its header states".to_owned(),
    }
}

/// Separates the list that [`delta`] made from the chunks behind it.
fn list_of(mut delta: Bytes) -> Result<(Bytes, Bytes), BrokerError> {
    let length = *delta.first_chunk().ok_or_else(short)?;
    let mut list = delta.split_off(4);
    let length = u32::from_le_bytes(length) as usize;
    if list.len() < length {
        return Err(short());
    }
    let chunks = list.split_off(length);
    Ok((list, chunks))
}

/// Returns the chunks that came with the list, by digest.
fn sent_with(manifest: &Manifest, mut chunks: Bytes) -> Result<Pieces, BrokerError> {
    let mut sent = Pieces::new();
    for (_, chunk) in manifest.missing() {
        if chunks.len() < chunk.bytes as usize {
            return Err(short());
        }
        let bytes = chunks.split_to(chunk.bytes as usize);
        if Digest::of(&bytes) != chunk.digest {
            return Err(BrokerError::Digest {
                what: "chunk of a handover".to_owned(),
                found: Digest::of(&bytes).to_string(),
                expected: chunk.digest.to_string(),
            });
        }
        sent.insert(chunk.digest, bytes);
    }
    Ok(sent)
}

fn key(execution: ExecutionId) -> (Kind, Digest) {
    (Kind::State, Digest::of(execution.0.as_bytes()))
}

/// Returns the pieces of the σ that this node has kept of an execution on its disk, if any. They
/// are cut and digested again, so damage cannot go unnoticed.
async fn kept(shared: &Shared, execution: ExecutionId) -> Pieces {
    let Some(held) = shared.cache.get(key(execution)) else {
        return Pieces::new();
    };
    let read = move || {
        let state = Bytes::from(std::fs::read(held.path())?);
        let pieces = chunks::cut(&state).into_iter();
        let pieces = pieces.map(|piece| (piece.digest, state.slice(piece.range)));
        Ok::<_, std::io::Error>(pieces.collect())
    };
    match tokio::task::spawn_blocking(read).await {
        Ok(Ok(pieces)) => pieces,
        Ok(Err(error)) => {
            tracing::warn!(%error, "a state that was kept cannot be read");
            Pieces::new()
        }
        Err(_) => Pieces::new(),
    }
}

/// Keeps σ on this node's disk, in place of an earlier one, in case the execution comes back.
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

/// Assembles a σ from chunks that match their digests: those that are here, those of the σ on this
/// node's disk, and those that it fetches. The caller must still compare the digest of the whole.
async fn assemble(
    shared: &Shared,
    turn: &Turn<'_>,
    manifest: &Manifest,
) -> Result<(Bytes, Vec<Piece>), BrokerError> {
    turn.keep_only(manifest);
    let mut wanted = manifest.without(|digest| turn.has(digest));
    if !wanted.is_empty() {
        let mut on_disk = kept(shared, turn.execution()).await;
        wanted.retain(|chunk| {
            let found = on_disk.remove(&chunk.digest);
            let is_missing = found.is_none();
            found
                .into_iter()
                .for_each(|piece| turn.put(chunk.digest, piece));
            is_missing
        });
    }
    let bytes = |chunks: &[Chunk]| chunks.iter().map(|c| u64::from(c.bytes)).sum::<u64>();
    let of = bytes(&manifest.without(|_| false));
    let mut here = of - bytes(&wanted);
    turn.reached(here, of);
    let arrived = |chunk: Chunk, piece: Bytes| {
        let bytes = piece.len() as u64;
        shared.metrics.chunk_bytes_fetched.inc_by(bytes);
        here += bytes;
        turn.put(chunk.digest, piece);
        turn.reached(here, of);
    };
    chunks::fetch(&shared.broker, &wanted, arrived).await?;
    let here = manifest.chunks.iter();
    let here = here.filter_map(|chunk| Some((chunk.digest, turn.get(&chunk.digest)?)));
    let (here, list): (Pieces, _) = (here.collect(), manifest.clone());
    // A gigabyte takes a second to copy.
    let join = move || chunks::join(&list, |digest| here.get(digest).cloned());
    let state = tokio::task::spawn_blocking(join).await.ok().flatten();
    let state = state.ok_or_else(short)?;
    let mut at = 0;
    let pieces = manifest.chunks.iter().map(|chunk| {
        let from = at;
        at += chunk.bytes as usize;
        Piece {
            digest: chunk.digest,
            range: from..at,
        }
    });
    let pieces: Vec<Piece> = pieces.collect();
    for piece in &pieces {
        // The kept pieces point into the assembled state, so that there are no two copies.
        turn.put(piece.digest, state.slice(piece.range.clone()));
    }
    Ok((state, pieces))
}

/// Compares the digest of the whole, on a blocking thread.
async fn verified(execution: ExecutionId, digest: Digest, state: Bytes) -> Result<(), BrokerError> {
    let what = format!("state of {execution}");
    let check = tokio::task::spawn_blocking(move || store::verify(&what, digest, state));
    check
        .await
        .map(|state| state.map(drop))
        .unwrap_or_else(|error| {
            let error: Box<dyn std::error::Error + Send + Sync> = error.into();
            Err(BrokerError::operation("verify a state")(error))
        })
}

/// Returns the σ of a handover with its pieces. The caller must still compare the digest of the
/// whole.
///
/// # Errors
/// When it cannot be assembled. The durable one can still be fetched later.
async fn from_handover(
    shared: &Shared,
    (execution, epoch): (ExecutionId, Epoch),
    place: &StatePlace,
    delta: Bytes,
) -> Result<(Bytes, Vec<Piece>), BrokerError> {
    let began = Instant::now();
    let (list, chunks) = list_of(delta)?;
    let turn = shared.fetches.turn(execution, epoch, place.bytes).await;
    let waited = began.elapsed();
    let manifest = match lists::earlier_of(&list)? {
        None => Manifest::decode(&list)?,
        Some(place) => match turn.list() {
            Some(ahead) if ahead.0 == place => lists::decode(&list, &ahead.1)?,
            _ => lists::decode(&list, &store::manifest(&shared.broker, &place).await?)?,
        },
    };
    for (digest, piece) in sent_with(&manifest, chunks)? {
        turn.put(digest, piece);
    }
    let (list, whole) = (list.len(), assemble(shared, &turn, &manifest).await?);
    tracing::debug!(?waited, took = ?began.elapsed(), list, "σ that was handed over is put together");
    Ok(whole)
}

/// Returns the σ of a commit, for an execution that is bound here under this epoch.
///
/// # Errors
/// When it cannot be assembled.
pub(crate) async fn fetch(
    shared: &Shared,
    (execution, epoch): (ExecutionId, Epoch),
    place: &StatePlace,
) -> Result<Bytes, BrokerError> {
    let turn = shared.fetches.turn(execution, epoch, place.bytes).await;
    let manifest = store::manifest(&shared.broker, place).await?;
    let (state, _) = assemble(shared, &turn, &manifest).await?;
    verified(execution, place.digest, state.clone()).await?;
    Ok(state)
}

/// Prepares for an execution that will come here: fetches the last commit's chunks early. They are
/// kept until it comes.
pub(crate) async fn prepare(shared: &Shared, execution: ExecutionId, place: &StatePlace) {
    let Some(turn) = shared.fetches.turn_ahead(execution, place.bytes) else {
        return;
    };
    let fetched = async {
        let manifest = store::manifest(&shared.broker, place).await?;
        turn.set_list(place.clone(), manifest.clone());
        assemble(shared, &turn, &manifest).await
    };
    if let Err(error) = fetched.await {
        tracing::debug!(%execution, %error, "a state was not fetched ahead");
    }
}

/// Held while a rebinding's last message is under way; none for a routine commit.
pub type Priority = Option<Urgent>;
