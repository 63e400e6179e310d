//! The node's cache on disk: unpacked packages and data by digest, up to a limit in bytes. The
//! least recently used entry is evicted first, and never one in use.
//!
//! ```text
//! <cache>/programs/<digest>/   an unpacked artifact
//! <cache>/listings/<digest>    its files as they were unpacked
//! <cache>/versions/<program>   the digest of the artifact that has run here under a version
//! <cache>/data/<digest>        an input or an output
//! <cache>/states/<digest>      the large state of an execution that has left
//! <cache>/tmp-<pid>/           running fetches; renamed when complete
//! ```

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fiec_schemas::Digest;
use fiec_schemas::package::ProgramName;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// The kind of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// An unpacked package, by the digest of its artifact.
    Program,
    /// The listing of an unpacked package, by the same digest.
    Listing,
    /// Bytes by their digest.
    Data,
    /// The last large σ that this node has seen of an execution, by the digest of its id.
    State,
}

/// Names an entry.
pub type Key = (Kind, Digest);

/// The reason why an entry is missing, for people.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NotCached(pub String);

impl NotCached {
    /// For `map_err`.
    pub fn because<E: std::fmt::Display>(what: &str) -> impl FnOnce(E) -> Self {
        move |error| Self(format!("{what}: {error}"))
    }
}

/// The result of a fetch: a path in the temporary folder, and its bytes.
pub struct Fetched {
    /// A file or a folder.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
}

#[derive(Debug)]
struct Entry {
    bytes: u64,
    /// When it was last used, on a clock that counts uses.
    used: u64,
    holders: u32,
}

type Outcome = Option<Result<(), NotCached>>;

#[derive(Default)]
struct State {
    entries: HashMap<Key, Entry>,
    /// Bytes of all entries, and of running fetches.
    bytes: u64,
    clock: u64,
    under_way: HashMap<Key, watch::Receiver<Outcome>>,
}

/// The cache.
pub struct Cache {
    root: PathBuf,
    tmp: PathBuf,
    limit: u64,
    count: AtomicU64,
    stop: CancellationToken,
    state: Mutex<State>,
}

/// An entry in use: it stays while this lives.
pub struct Held {
    cache: Arc<Cache>,
    key: Key,
}

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Held").field(&self.path()).finish()
    }
}

impl Held {
    /// Its path.
    pub fn path(&self) -> PathBuf {
        self.cache.path(self.key)
    }

    /// Removes a damaged entry at once, so that it is fetched again.
    pub fn discard(self) {
        let gone = self.cache.take_out(&mut self.cache.lock(), self.key);
        if let Some(away) = gone {
            remove(&away);
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(entry) = self.cache.lock().entries.get_mut(&self.key) {
            entry.holders = entry.holders.saturating_sub(1);
        }
    }
}

/// Bytes reserved for a running fetch.
pub(crate) struct Room {
    cache: Arc<Cache>,
    bytes: u64,
}

impl Drop for Room {
    fn drop(&mut self) {
        self.cache.lock().bytes -= self.bytes;
    }
}

fn remove(path: &Path) {
    let gone = if path.is_dir() {
        std::fs::remove_dir_all(path)
    } else {
        std::fs::remove_file(path)
    };
    if let Err(error) = gone
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(%error, path = %path.display(), "cannot remove from the cache");
    }
}

/// Bytes of the files in a folder, or of a file.
fn size_of(path: &Path) -> io::Result<u64> {
    let meta = std::fs::symlink_metadata(path)?;
    if !meta.is_dir() {
        return Ok(meta.len());
    }
    let mut sum = 0;
    for entry in std::fs::read_dir(path)? {
        sum += size_of(&entry?.path())?;
    }
    Ok(sum)
}

fn folder(kind: Kind) -> &'static str {
    match kind {
        Kind::Program => "programs",
        Kind::Listing => "listings",
        Kind::Data => "data",
        Kind::State => "states",
    }
}

/// Removes temporary folders of agents that are gone.
fn sweep(root: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(root)?.flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|n| n.strip_prefix("tmp-"));
        if let Some(pid) = pid
            && !Path::new("/proc").join(pid).exists()
        {
            remove(&entry.path());
        }
    }
    Ok(())
}

impl Cache {
    /// Opens the cache in a folder, with the entries that an earlier agent of this node left.
    ///
    /// # Errors
    /// When the folder cannot be made or read.
    pub fn open(root: &Path, limit: u64, stop: CancellationToken) -> io::Result<Arc<Self>> {
        let mut builder = std::fs::DirBuilder::new();
        // Only this user may read the data of tenants' programs.
        builder.recursive(true).mode(0o700).create(root)?;
        let tmp = root.join(format!("tmp-{}", std::process::id()));
        // Left by an earlier process with the same number: the first process of each container has
        // it.
        remove(&tmp);
        std::fs::create_dir(&tmp)?;
        sweep(root)?;
        std::fs::create_dir_all(root.join("versions"))?;
        let mut found = Vec::new();
        for kind in [Kind::Program, Kind::Listing, Kind::Data, Kind::State] {
            let folder = root.join(folder(kind));
            std::fs::create_dir_all(&folder)?;
            for entry in std::fs::read_dir(folder)?.flatten() {
                let digest = entry.file_name().to_str().and_then(|n| n.parse().ok());
                match (digest, size_of(&entry.path())) {
                    (Some(digest), Ok(bytes)) => {
                        let since = entry.metadata().and_then(|m| m.modified()).ok();
                        found.push((since, (kind, digest), bytes));
                    }
                    _ => remove(&entry.path()),
                }
            }
        }
        found.sort_by_key(|(since, ..)| *since);
        let mut state = State::default();
        for (_, key, bytes) in found {
            state.clock += 1;
            state.bytes += bytes;
            let used = state.clock;
            let entry = Entry {
                bytes,
                used,
                holders: 0,
            };
            state.entries.insert(key, entry);
        }
        let cache = Arc::new(Self {
            root: root.to_owned(),
            tmp,
            limit,
            count: AtomicU64::new(0),
            stop,
            state: Mutex::new(state),
        });
        // The limit may be smaller than before.
        cache.evict(0);
        Ok(cache)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn path(&self, (kind, digest): Key) -> PathBuf {
        self.root.join(folder(kind)).join(digest.to_string())
    }

    /// The file that has the digest of the artifact that has run here under a version. It stays
    /// when the artifact is evicted. There are no more of them than versions in the registry.
    pub fn version(&self, program: &ProgramName) -> PathBuf {
        self.root.join("versions").join(program.to_string())
    }

    /// The limit in bytes.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Bytes of all entries and running fetches.
    pub fn bytes(&self) -> u64 {
        self.lock().bytes
    }

    /// Returns a new temporary path for a fetch.
    pub fn new_path(&self) -> PathBuf {
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        self.tmp.join(number.to_string())
    }

    /// Returns an entry that exists.
    pub fn get(self: &Arc<Self>, key: Key) -> Option<Held> {
        let mut state = self.lock();
        state.clock += 1;
        let now = state.clock;
        let entry = state.entries.get_mut(&key)?;
        entry.used = now;
        entry.holders += 1;
        Some(Held {
            cache: Arc::clone(self),
            key,
        })
    }

    /// Takes an entry out and returns the path to remove. The entry is moved there under the lock:
    /// a fetch of the same digest must not find it.
    fn take_out(&self, state: &mut State, key: Key) -> Option<PathBuf> {
        let entry = state.entries.remove(&key)?;
        state.bytes -= entry.bytes;
        let away = self.new_path();
        std::fs::rename(self.path(key), &away)
            .is_ok()
            .then_some(away)
    }

    /// Evicts the least recently used entries until `wanted` bytes are free. Returns false if
    /// entries in use leave too little.
    fn evict(&self, wanted: u64) -> bool {
        let mut gone = Vec::new();
        let mut state = self.lock();
        while state.bytes.saturating_add(wanted) > self.limit {
            let idle = state.entries.iter().filter(|(_, e)| e.holders == 0);
            let Some(oldest) = idle.min_by_key(|(_, e)| e.used).map(|(key, _)| *key) else {
                break;
            };
            gone.extend(self.take_out(&mut state, oldest));
        }
        let fits = state.bytes.saturating_add(wanted) <= self.limit;
        if fits {
            state.bytes += wanted;
        }
        drop(state);
        gone.iter().for_each(|path| remove(path));
        fits
    }

    /// Reserves room for a fetch.
    ///
    /// # Errors
    /// When what is in use leaves too little.
    pub(crate) fn room(self: &Arc<Self>, bytes: u64) -> Result<Room, NotCached> {
        if !self.evict(bytes) {
            return Err(NotCached(format!(
                "{bytes} bytes do not fit into the node's cache: its limit is {} bytes, and what \
                 is in use stays (`fiec worker --cache-limit`)",
                self.limit
            )));
        }
        Ok(Room {
            cache: Arc::clone(self),
            bytes,
        })
    }

    fn insert(&self, key: Key, fetched: &Fetched) -> io::Result<()> {
        let mut state = self.lock();
        if !state.entries.contains_key(&key) {
            if self.path(key).exists() {
                // The cache does not know it, so nobody uses it.
                remove(&self.path(key));
            }
            std::fs::rename(&fetched.path, self.path(key))?;
            state.clock += 1;
            state.bytes += fetched.bytes;
            let entry = Entry {
                bytes: fetched.bytes,
                used: state.clock,
                holders: 0,
            };
            state.entries.insert(key, entry);
        }
        Ok(())
    }

    /// Puts an entry in the place of an older one.
    pub(crate) fn replace(&self, key: Key, made: &Fetched) -> io::Result<()> {
        let away = self.take_out(&mut self.lock(), key);
        if let Some(away) = away {
            remove(&away);
        }
        self.insert(key, made)?;
        self.evict(0);
        Ok(())
    }

    /// Returns an entry, and fetches it if it is missing. Concurrent callers share one fetch, which
    /// goes on if they give up. `wanted` is the most bytes that the fetch may take.
    ///
    /// # Errors
    /// The fetch's error, or a lack of room.
    pub async fn get_or_fetch<F>(
        self: &Arc<Self>,
        key: Key,
        wanted: u64,
        fetch: impl FnOnce() -> F,
    ) -> Result<Held, NotCached>
    where
        F: Future<Output = Result<Fetched, NotCached>> + Send + 'static,
    {
        if let Some(held) = self.get(key) {
            return Ok(held);
        }
        let mut outcome = self.under_way(key, wanted, fetch);
        let ended = outcome.wait_for(Option::is_some).await;
        match ended.map(|outcome| outcome.clone()) {
            Ok(Some(Ok(()))) => self
                .get(key)
                .ok_or_else(|| NotCached("the cache evicted the object immediately".to_owned())),
            Ok(Some(Err(error))) => Err(error),
            Ok(None) | Err(_) => Err(NotCached("the worker is ending".to_owned())),
        }
    }

    fn under_way<F>(
        self: &Arc<Self>,
        key: Key,
        wanted: u64,
        fetch: impl FnOnce() -> F,
    ) -> watch::Receiver<Outcome>
    where
        F: Future<Output = Result<Fetched, NotCached>> + Send + 'static,
    {
        let mut state = self.lock();
        if let Some(outcome) = state.under_way.get(&key) {
            return outcome.clone();
        }
        let (tell, outcome) = watch::channel(None);
        if state.entries.contains_key(&key) {
            // It arrived between the caller's check and this one.
            tell.send_replace(Some(Ok(())));
            return outcome;
        }
        state.under_way.insert(key, outcome.clone());
        drop(state);
        let fetching = fetch();
        let cache = Arc::clone(self);
        tokio::spawn(async move {
            let stop = cache.stop.clone();
            let fetched = async {
                let _room = cache.room(wanted)?;
                fetching.await
            };
            let result = tokio::select! {
                biased;
                () = stop.cancelled() => Err(NotCached("the worker is ending".to_owned())),
                fetched = fetched => fetched,
            };
            let result = result.and_then(|fetched| {
                cache.insert(key, &fetched).map_err(|error| {
                    remove(&fetched.path);
                    NotCached(format!("cannot put it into the node's cache: {error}"))
                })
            });
            cache.lock().under_way.remove(&key);
            tell.send_replace(Some(result));
            // Other fetches reserved their room before this one's true size was known.
            cache.evict(0);
        });
        outcome
    }

    /// Closes the cache and removes unfinished fetches.
    pub fn close(&self) {
        self.stop.cancel();
        remove(&self.tmp);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;
    use std::time::Duration;

    fn key(text: &str) -> Key {
        (Kind::Data, Digest::of(text.as_bytes()))
    }

    async fn put(cache: &Arc<Cache>, text: &'static str) -> Result<Held, NotCached> {
        let (path, bytes) = (cache.new_path(), text.len() as u64);
        let fetch = || async move {
            std::fs::write(&path, text).unwrap();
            Ok(Fetched { path, bytes })
        };
        cache.get_or_fetch(key(text), bytes, fetch).await
    }

    #[tokio::test]
    async fn the_least_recently_used_goes_and_what_is_in_use_stays() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(dir.path(), 10, CancellationToken::new()).unwrap();
        let a = put(&cache, "aaaa").await.unwrap();
        drop(put(&cache, "bbbb").await.unwrap());
        drop(put(&cache, "cccc").await.unwrap());
        assert!(cache.get(key("bbbb")).is_none(), "idle, and the oldest");
        assert!(a.path().exists());
        let c = cache.get(key("cccc")).unwrap();
        let full = put(&cache, "dddd").await.unwrap_err();
        assert!(full.0.contains("--cache-limit"), "{full}");
        drop(a);
        put(&cache, "dddd").await.unwrap();
        assert!(cache.get(key("aaaa")).is_none());
        assert!(c.path().exists() && cache.bytes() <= 10);
    }

    #[tokio::test]
    async fn those_who_ask_at_once_share_one_fetch() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(dir.path(), 100, CancellationToken::new()).unwrap();
        let fetches = Arc::new(AtomicU32::new(0));
        let ask = || {
            let (fetches, cache) = (Arc::clone(&fetches), Arc::clone(&cache));
            async move {
                let path = cache.new_path();
                let fetch = || async move {
                    fetches.fetch_add(1, Ordering::SeqCst);
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    std::fs::write(&path, "x").unwrap();
                    Ok(Fetched { path, bytes: 1 })
                };
                cache.get_or_fetch(key("x"), 1, fetch).await.unwrap();
            }
        };
        tokio::join!(ask(), ask(), ask());
        assert_eq!(fetches.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn a_failed_fetch_leaves_nothing_and_is_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(dir.path(), 100, CancellationToken::new()).unwrap();
        let fail = || async { Err(NotCached("no".to_owned())) };
        let failed = cache.get_or_fetch(key("x"), 50, fail).await;
        assert_eq!(failed.unwrap_err().0, "no");
        assert_eq!(cache.bytes(), 0);
        put(&cache, "x").await.unwrap();
    }

    #[tokio::test]
    async fn what_was_there_is_found_again_and_half_fetched_things_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(dir.path(), 100, CancellationToken::new()).unwrap();
        put(&cache, "kept").await.unwrap();
        drop(cache);
        std::fs::create_dir(dir.path().join("tmp-0")).unwrap();
        std::fs::write(dir.path().join("data/nonsense"), "x").unwrap();
        let cache = Cache::open(dir.path(), 100, CancellationToken::new()).unwrap();
        assert!(cache.get(key("kept")).is_some());
        assert!(!dir.path().join("tmp-0").exists());
        assert!(!dir.path().join("data/nonsense").exists());
        assert_eq!(cache.bytes(), 4);
    }
}
