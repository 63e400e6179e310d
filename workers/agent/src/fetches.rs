//! The large states that this node fetches, and what it has of them.
//!
//! One fetch of an execution's state runs at a time. A later one waits for its turn, and finds the
//! chunks of the earlier one, however that ended. After the last fetch they stay for a while: it
//! may have broken, its binding may have been overtaken, or the execution was only announced. The
//! hardware vector lists the fetches of executions that are bound here, so that the policy service
//! waits for a fetch that moves on.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use fiec_broker::chunks::Manifest;
use fiec_schemas::hardware::{ArrivingState, LISTED_LIMIT};
use fiec_schemas::{Digest, Epoch, ExecutionId, StatePlace};
use tokio::sync::OwnedMutexGuard;
use tokio::time::Instant;

/// How long chunks are kept that no fetch uses.
const KEPT_FOR: Duration = Duration::from_secs(120);
/// Bytes of such chunks, at least; otherwise a share of the memory that the node grants.
const KEPT_BYTES: u64 = 512 << 20;
const KEPT_SHARE: u64 = 4;

/// Chunks by their digests.
pub(crate) type Pieces = HashMap<Digest, Bytes>;

/// What this node has of one execution's state.
struct State {
    turn: Arc<tokio::sync::Mutex<()>>,
    /// Fetches that run or wait for their turn.
    users: usize,
    /// The bindings that they are for. A fetch ahead has none.
    bound: Vec<Epoch>,
    /// Bytes that are here of the state that is being fetched, and bytes of the whole.
    reached: (u64, u64),
    pieces: Pieces,
    /// A copy that does not consist of chunks.
    whole: Option<(Digest, Bytes)>,
    /// Bytes of both.
    bytes: u64,
    /// The chunks of the commit that was fetched ahead.
    list: Option<Arc<(StatePlace, Manifest)>>,
    /// End of the last fetch.
    idle_since: Instant,
}

impl State {
    fn new() -> Self {
        Self {
            turn: Arc::default(),
            users: 0,
            bound: Vec::new(),
            reached: (0, 0),
            pieces: Pieces::new(),
            whole: None,
            bytes: 0,
            list: None,
            idle_since: Instant::now(),
        }
    }

    fn forget_whole(&mut self) {
        if let Some((_, bytes)) = self.whole.take() {
            self.bytes -= bytes.len() as u64;
        }
    }

    /// Drops the whole and then pieces until this many bytes are free, or none is left. Returns the
    /// freed bytes.
    fn shrink(&mut self, by: u64) -> u64 {
        let before = self.bytes;
        self.forget_whole();
        let bytes = &mut self.bytes;
        self.pieces.retain(|_, piece| {
            let goes = before - *bytes < by;
            if goes {
                *bytes -= piece.len() as u64;
            }
            !goes
        });
        before - self.bytes
    }
}

type States = HashMap<ExecutionId, State>;

/// The states that are fetched, and those that are kept.
pub struct Fetches {
    states: Mutex<States>,
    /// Bytes that are kept while no fetch uses them.
    limit: u64,
}

/// A fetch that runs or waits.
struct User<'a> {
    all: &'a Fetches,
    execution: ExecutionId,
    bound: Option<Epoch>,
}

/// The right to fetch an execution's state. It ends when this is dropped; what has arrived is kept.
pub(crate) struct Turn<'a> {
    user: User<'a>,
    _turn: OwnedMutexGuard<()>,
}

impl Fetches {
    /// Nothing is here yet. `memory` is the memory in bytes that the node grants, if it is limited.
    pub fn new(memory: Option<u64>) -> Self {
        Self {
            states: Mutex::default(),
            limit: memory.map_or(0, |bytes| bytes / KEPT_SHARE).max(KEPT_BYTES),
        }
    }

    fn lock(&self) -> MutexGuard<'_, States> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn join(
        &self,
        states: &mut States,
        execution: ExecutionId,
        (bound, of): (Option<Epoch>, u64),
    ) -> (User<'_>, Arc<tokio::sync::Mutex<()>>) {
        let state = states.entry(execution).or_insert_with(State::new);
        if state.users == 0 {
            state.reached = (0, of);
        }
        state.users += 1;
        state.bound.extend(bound);
        let user = User {
            all: self,
            execution,
            bound,
        };
        (user, Arc::clone(&state.turn))
    }

    /// Waits until no other fetch of this execution's state runs. Each of them ends, since it fails
    /// when nothing arrives. The state has `of` bytes and is for the binding under this epoch.
    pub(crate) async fn turn(&self, execution: ExecutionId, epoch: Epoch, of: u64) -> Turn<'_> {
        let (user, turn) = self.join(&mut self.lock(), execution, (Some(epoch), of));
        let _turn = turn.lock_owned().await;
        Turn { user, _turn }
    }

    /// The turn of a fetch ahead, unless a fetch runs already.
    pub(crate) fn turn_ahead(&self, execution: ExecutionId, of: u64) -> Option<Turn<'_>> {
        let mut states = self.lock();
        let turn = match states.get(&execution) {
            Some(state) => Arc::clone(&state.turn),
            None => Arc::default(),
        };
        let _turn = turn.clone().try_lock_owned().ok()?;
        states.entry(execution).or_insert_with(State::new).turn = turn;
        let (user, _) = self.join(&mut states, execution, (None, of));
        Some(Turn { user, _turn })
    }

    /// Drops what is kept of an execution: its state is where it is needed.
    pub(crate) fn release(&self, execution: ExecutionId) {
        let mut states = self.lock();
        if states.get(&execution).is_some_and(|s| s.users == 0) {
            states.remove(&execution);
        }
    }

    /// Drops what nobody has used for long.
    pub(crate) fn sweep(&self) {
        let due = |state: &State| state.users == 0 && state.idle_since.elapsed() >= KEPT_FOR;
        self.lock().retain(|_, state| !due(state));
    }

    /// Bytes of the states that are being fetched or kept.
    pub fn bytes(&self) -> u64 {
        self.lock().values().map(|state| state.bytes).sum()
    }

    /// Drops pieces beyond the limit. Those that were idle for longest go first.
    fn enforce_limit(&self, states: &mut States) {
        let idle = states.iter_mut().filter(|(_, state)| state.users == 0);
        let mut idle: Vec<&mut State> = idle.map(|(_, state)| state).collect();
        idle.sort_by_key(|state| state.idle_since);
        let bytes: u64 = idle.iter().map(|state| state.bytes).sum();
        let mut beyond = bytes.saturating_sub(self.limit);
        for state in idle {
            if beyond == 0 {
                break;
            }
            beyond = beyond.saturating_sub(state.shrink(beyond));
        }
        states.retain(|_, state| state.users > 0 || state.bytes > 0);
    }

    /// Returns the fetches for bindings, those that lack the most bytes first, up to
    /// [`LISTED_LIMIT`]: only they take long. One that waits has the progress of the one that runs.
    pub fn list(&self) -> Vec<ArrivingState> {
        let states = self.lock();
        let mut listed = Vec::new();
        for (execution, state) in states.iter() {
            let (bytes, of) = state.reached;
            listed.extend(state.bound.iter().map(|epoch| ArrivingState {
                execution: *execution,
                epoch: *epoch,
                bytes,
                of,
            }));
        }
        drop(states);
        listed.sort_by_key(|a| Reverse(a.of.saturating_sub(a.bytes)));
        listed.truncate(LISTED_LIMIT);
        listed
    }
}

impl Drop for User<'_> {
    fn drop(&mut self) {
        let mut states = self.all.lock();
        if let Some(state) = states.get_mut(&self.execution) {
            state.users -= 1;
            state.idle_since = Instant::now();
            if let Some(at) = state.bound.iter().position(|e| Some(*e) == self.bound) {
                state.bound.swap_remove(at);
            }
        }
        self.all.enforce_limit(&mut states);
    }
}

impl Turn<'_> {
    /// The execution whose state is fetched.
    pub(crate) fn execution(&self) -> ExecutionId {
        self.user.execution
    }

    fn with<T: Default>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        let mut states = self.user.all.lock();
        let state = states.get_mut(&self.user.execution);
        state.map(act).unwrap_or_default()
    }

    /// Whether a chunk is here.
    pub(crate) fn has(&self, digest: &Digest) -> bool {
        self.with(|state| state.pieces.contains_key(digest))
    }

    /// Returns a chunk that is here.
    pub(crate) fn get(&self, digest: &Digest) -> Option<Bytes> {
        self.with(|state| state.pieces.get(digest).cloned())
    }

    /// Keeps a chunk whose digest was checked.
    pub(crate) fn put(&self, digest: Digest, piece: Bytes) {
        self.with(|state| {
            let bytes = piece.len() as u64;
            if state.pieces.insert(digest, piece).is_none() {
                state.bytes += bytes;
            }
        });
    }

    /// Drops all chunks that this state does not have.
    pub(crate) fn keep_only(&self, manifest: &Manifest) {
        let needed: HashSet<Digest> = manifest.chunks.iter().map(|c| c.digest).collect();
        self.with(|state| {
            let bytes = &mut state.bytes;
            state.pieces.retain(|digest, piece| {
                let stays = needed.contains(digest);
                if !stays {
                    *bytes -= piece.len() as u64;
                }
                stays
            });
        });
    }

    /// Returns the state if it is here as a whole.
    pub(crate) fn whole(&self, digest: Digest) -> Option<Bytes> {
        let is_it = |whole: &&(Digest, Bytes)| whole.0 == digest;
        self.with(|state| state.whole.as_ref().filter(is_it).map(|(_, b)| b.clone()))
    }

    /// Keeps a state whose digest was checked.
    pub(crate) fn put_whole(&self, digest: Digest, bytes: Bytes) {
        self.with(|state| {
            state.forget_whole();
            state.bytes += bytes.len() as u64;
            state.whole = Some((digest, bytes));
        });
    }

    /// The chunks of a commit that was fetched ahead, and its place.
    pub(crate) fn list(&self) -> Option<Arc<(StatePlace, Manifest)>> {
        self.with(|state| state.list.clone())
    }

    /// Notes the chunks of the commit that is fetched ahead.
    pub(crate) fn set_list(&self, place: StatePlace, manifest: Manifest) {
        self.with(|state| state.list = Some(Arc::new((place, manifest))));
    }

    /// Notes that `bytes` of `of` bytes are here.
    pub(crate) fn reached(&self, bytes: u64, of: u64) {
        self.with(|state| state.reached = (bytes, of));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id() -> ExecutionId {
        ExecutionId(uuid::Uuid::now_v7())
    }

    fn piece(byte: u8, bytes: usize) -> (Digest, Bytes) {
        let bytes = Bytes::from(vec![byte; bytes]);
        (Digest::of(&bytes), bytes)
    }

    fn put(turn: &Turn<'_>, byte: u8, bytes: usize) -> Digest {
        let (digest, bytes) = piece(byte, bytes);
        turn.put(digest, bytes);
        digest
    }

    /// Keeps no more than this.
    fn keeping(limit: u64) -> Fetches {
        Fetches {
            limit,
            ..Fetches::new(None)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_second_fetch_waits_however_long_and_finds_what_the_first_has_fetched() {
        let (fetches, execution) = (Arc::new(keeping(0)), id());
        let first = fetches.turn_ahead(execution, 20).unwrap();
        assert!(fetches.turn_ahead(execution, 20).is_none());
        let digest = put(&first, 1, 10);
        let second = tokio::spawn({
            let fetches = Arc::clone(&fetches);
            async move { fetches.turn(execution, 1, 20).await.get(&digest) }
        });
        // Another execution's fetch does not wait, nor does its end touch this one.
        drop(fetches.turn(id(), 1, 20).await);
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert!(!second.is_finished());
        // Dropped in the middle, as when its task ends. Nothing beyond the limit is kept, but
        // somebody waits.
        drop(first);
        assert_eq!(second.await.unwrap().unwrap().len(), 10);
        assert_eq!(fetches.bytes(), 0, "nobody waits any more");
    }

    #[tokio::test(start_paused = true)]
    async fn kept_chunks_are_bounded_and_the_oldest_go_first_and_no_more_than_needed() {
        let (fetches, old, new) = (keeping(100), id(), id());
        for execution in [old, new] {
            let turn = fetches.turn(execution, 1, 0).await;
            (0..7).for_each(|byte| _ = put(&turn, byte, 10));
            put(&turn, 0, 10);
            drop(turn);
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        assert_eq!(fetches.bytes(), 100);
        let here = async |execution| {
            let turn = fetches.turn(execution, 1, 0).await;
            let all = (0..30).filter(|byte| turn.get(&piece(*byte, 10).0).is_some());
            all.count()
        };
        assert_eq!(here(old).await, 3);
        assert_eq!(here(new).await, 7);
        tokio::time::advance(Duration::from_secs(1)).await;
        // The limit does not concern a fetch that runs.
        let turn = fetches.turn(new, 2, 0).await;
        (7..30).for_each(|byte| _ = put(&turn, byte, 10));
        assert_eq!(fetches.bytes(), 330);
        drop(turn);
        assert_eq!(fetches.bytes(), 100);
        assert_eq!(here(new).await, 10);
    }

    #[tokio::test(start_paused = true)]
    async fn kept_chunks_go_once_the_state_is_where_it_is_needed_or_after_a_while() {
        let (fetches, started, gone) = (keeping(100), id(), id());
        for execution in [started, gone] {
            let turn = fetches.turn(execution, 1, 0).await;
            put(&turn, 1, 10);
            turn.put_whole(Digest::of(b"whole"), Bytes::from_static(b"whole"));
        }
        fetches.release(started);
        assert_eq!(fetches.bytes(), 15);
        tokio::time::advance(KEPT_FOR - Duration::from_secs(1)).await;
        fetches.sweep();
        assert_eq!(fetches.bytes(), 15);
        let waits = fetches.turn(gone, 2, 0).await;
        tokio::time::advance(KEPT_FOR).await;
        fetches.sweep();
        fetches.release(gone);
        assert!(waits.whole(Digest::of(b"whole")).is_some(), "it is in use");
        drop(waits);
        tokio::time::advance(KEPT_FOR).await;
        fetches.sweep();
        assert_eq!(fetches.bytes(), 0);
    }

    #[tokio::test]
    async fn chunks_of_an_earlier_state_that_the_present_one_lacks_are_dropped() {
        let (fetches, execution) = (keeping(100), id());
        let turn = fetches.turn(execution, 1, 0).await;
        let (stays, goes) = (put(&turn, 1, 10), put(&turn, 2, 10));
        let pieces = [fiec_broker::chunks::Piece {
            digest: stays,
            range: 0..10,
        }];
        turn.keep_only(&Manifest::of(&pieces, None, 0).unwrap());
        assert!(turn.get(&stays).is_some() && turn.get(&goes).is_none());
        assert_eq!(fetches.bytes(), 10);
    }

    #[tokio::test]
    async fn a_binding_that_waits_is_listed_with_the_bytes_of_the_fetch_that_runs() {
        let (fetches, execution) = (Arc::new(keeping(0)), id());
        let ahead = fetches.turn_ahead(execution, 100).unwrap();
        ahead.reached(40, 90);
        assert_eq!(fetches.list(), [], "it is not bound here");
        let waits = tokio::spawn({
            let fetches = Arc::clone(&fetches);
            async move { drop(fetches.turn(execution, 3, 100).await) }
        });
        tokio::task::yield_now().await;
        let listed = ArrivingState {
            execution,
            epoch: 3,
            bytes: 40,
            of: 90,
        };
        assert_eq!(fetches.list(), [listed]);
        drop(ahead);
        waits.await.unwrap();
        assert_eq!(fetches.list(), []);
    }

    #[tokio::test]
    async fn those_that_lack_the_most_are_listed_and_no_more_than_the_limit() {
        let fetches = keeping(0);
        let mut all = Vec::new();
        for n in 0..=LISTED_LIMIT as u64 {
            all.push(fetches.turn(id(), 1, 1_000 - n).await);
        }
        let listed = fetches.list();
        assert_eq!(listed.len(), LISTED_LIMIT);
        assert_eq!(listed[0].of, 1_000);
        assert!(listed.iter().all(|a| a.of > 1_000 - LISTED_LIMIT as u64));
    }
}
