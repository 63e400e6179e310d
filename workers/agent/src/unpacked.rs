//! The files of each unpacked package as they were unpacked, so that a change of one is noticed.
//! Files that a program adds to the folder are not: interpreters keep their caches there.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fiec_schemas::Digest;
use fiec_schemas::package::Manifest;
use serde::{Deserialize, Serialize};

use crate::cache::{Cache, Fetched, Kind};

/// Packages with more files than this are checked at most once in [`PAUSE`]. A check takes 1.4 µs a
/// file.
const FILES: usize = 32;
/// Pause between two checks of a large package.
const PAUSE: Duration = Duration::from_secs(10);
/// Listings that are remembered.
const LISTINGS: usize = 1_024;

/// What changes with each change of a file. A program without privileges cannot set `changed`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Mark {
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Mark {
    fn of(file: &Path) -> io::Result<Self> {
        let meta = std::fs::symlink_metadata(file)?;
        Ok(Self {
            inode: meta.ino(),
            bytes: meta.size(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
        })
    }
}

/// The files of an unpacked package.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unpacked {
    /// Its manifest.
    pub manifest: Manifest,
    files: Vec<(OsString, Mark)>,
}

impl Unpacked {
    /// The files of a folder that was just unpacked.
    ///
    /// # Errors
    /// When one is not there.
    pub fn new(folder: &Path, files: Vec<PathBuf>, manifest: Manifest) -> io::Result<Self> {
        let mark =
            |file: PathBuf| Ok((file.clone().into_os_string(), Mark::of(&folder.join(file))?));
        Ok(Self {
            manifest,
            files: files.into_iter().map(mark).collect::<io::Result<_>>()?,
        })
    }

    fn is_changed(folder: &Path, (file, mark): &(OsString, Mark)) -> bool {
        Mark::of(&folder.join(file)).ok() != Some(*mark)
    }

    /// The first file that is not as it was unpacked.
    pub fn first_changed(&self, folder: &Path) -> Option<PathBuf> {
        let changed = self.files.iter().find(|f| Self::is_changed(folder, f));
        changed.map(|(file, _)| PathBuf::from(file))
    }

    /// Whether a check of all files takes long.
    pub fn is_large(&self) -> bool {
        self.files.len() > FILES
    }

    /// Replaces each changed file by that of a fresh folder. The folder stays, because programs may
    /// run in it.
    ///
    /// # Errors
    /// When a file cannot be replaced.
    pub fn restore(&mut self, folder: &Path, fresh: &Path) -> io::Result<()> {
        for entry in &mut self.files {
            if !Self::is_changed(folder, entry) {
                continue;
            }
            let target = folder.join(&entry.0);
            if let Some(parent) = target.parent() {
                std::fs::create_dir_all(parent)?;
            }
            std::fs::rename(fresh.join(&entry.0), &target)?;
            // To rename a file is a change of it.
            entry.1 = Mark::of(&target)?;
        }
        Ok(())
    }
}

/// The listing of an artifact.
pub struct Listing {
    /// Its files.
    pub unpacked: Arc<Unpacked>,
    /// It is large, and was checked a moment ago.
    pub is_checked: bool,
}

/// A listing in memory.
struct Known {
    unpacked: Arc<Unpacked>,
    checked: Option<Instant>,
}

/// The listings of a node's packages, in its cache and in memory.
pub struct Listings {
    cache: Arc<Cache>,
    known: Mutex<HashMap<Digest, Known>>,
}

impl Listings {
    /// Those of this cache.
    pub fn new(cache: Arc<Cache>) -> Self {
        Self {
            cache,
            known: Mutex::default(),
        }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<Digest, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remember(&self, artifact: Digest, unpacked: Arc<Unpacked>) {
        let mut known = self.known();
        if known.len() >= LISTINGS {
            known.clear();
        }
        let checked = None;
        known.insert(artifact, Known { unpacked, checked });
    }

    /// The listing of an artifact, if this node has it.
    pub async fn get(&self, artifact: Digest) -> Option<Listing> {
        if let Some(known) = self.known().get(&artifact) {
            let is_recent = known.checked.is_some_and(|at| at.elapsed() < PAUSE);
            return Some(Listing {
                unpacked: Arc::clone(&known.unpacked),
                is_checked: is_recent && known.unpacked.is_large(),
            });
        }
        let held = self.cache.get((Kind::Listing, artifact))?;
        let text = tokio::fs::read(held.path()).await.ok()?;
        let unpacked: Arc<Unpacked> = Arc::new(serde_json::from_slice(&text).ok()?);
        self.remember(artifact, Arc::clone(&unpacked));
        Some(Listing {
            unpacked,
            is_checked: false,
        })
    }

    /// Notes that an artifact's files are as they were unpacked.
    pub fn note_checked(&self, artifact: Digest) {
        if let Some(known) = self.known().get_mut(&artifact) {
            known.checked = Some(Instant::now());
        }
    }

    /// Keeps the listing of an artifact, also for the node's next life.
    ///
    /// # Errors
    /// When it cannot be written.
    pub async fn put(&self, artifact: Digest, unpacked: Unpacked) -> io::Result<()> {
        let (path, text) = (self.cache.new_path(), serde_json::to_vec(&unpacked)?);
        let bytes = text.len() as u64;
        tokio::fs::write(&path, text).await?;
        let listing = Fetched { path, bytes };
        self.cache.replace((Kind::Listing, artifact), &listing)?;
        self.remember(artifact, Arc::new(unpacked));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn manifest() -> Manifest {
        Manifest::parse(br#"{"entry":["./run.sh"],"protocol":"state_dir"}"#).unwrap()
    }

    #[test]
    fn each_kind_of_change_is_noticed_and_restored() {
        let dir = tempfile::tempdir().unwrap();
        let (folder, fresh) = (dir.path().join("used"), dir.path().join("fresh"));
        for folder in [&folder, &fresh] {
            std::fs::create_dir_all(folder.join("lib")).unwrap();
            std::fs::write(folder.join("run.sh"), "one").unwrap();
            std::fs::write(folder.join("lib/a.py"), "two").unwrap();
        }
        let files = vec!["run.sh".into(), "lib/a.py".into()];
        let mut unpacked = Unpacked::new(&folder, files, manifest()).unwrap();
        assert_eq!(unpacked.first_changed(&folder), None);
        std::fs::write(folder.join("lib/a.pyc"), "a cache").unwrap();
        assert_eq!(unpacked.first_changed(&folder), None);

        let script = folder.join("run.sh");
        let time = std::fs::metadata(&script).unwrap().modified().unwrap();
        let same_size_and_time = || {
            std::fs::write(&script, "bad").unwrap();
            let file = std::fs::File::options().write(true).open(&script).unwrap();
            file.set_modified(time).unwrap();
        };
        let changes: [&dyn Fn(); 4] = [
            &same_size_and_time,
            &|| std::fs::set_permissions(&script, PermissionsExt::from_mode(0o600)).unwrap(),
            &|| std::fs::remove_file(&script).unwrap(),
            &|| {
                std::fs::remove_file(&script).unwrap();
                std::os::unix::fs::symlink(dir.path().join("fresh/run.sh"), &script).unwrap();
            },
        ];
        for change in changes {
            // The clock of a file system may stand still for some milliseconds.
            while Mark::of(&script).unwrap().changed == now_of(dir.path()) {}
            change();
            assert_eq!(unpacked.first_changed(&folder), Some("run.sh".into()));
            std::fs::write(fresh.join("run.sh"), "one").unwrap();
            unpacked.restore(&folder, &fresh).unwrap();
            assert_eq!(unpacked.first_changed(&folder), None);
            assert_eq!(std::fs::read(&script).unwrap(), b"one");
        }
        std::fs::remove_dir_all(folder.join("lib")).unwrap();
        unpacked.restore(&folder, &fresh).unwrap();
        assert_eq!(std::fs::read(folder.join("lib/a.py")).unwrap(), b"two");
    }

    /// The file system's time.
    fn now_of(folder: &Path) -> (i64, i64) {
        let file = folder.join("clock");
        std::fs::write(&file, "x").unwrap();
        Mark::of(&file).unwrap().changed
    }

    #[tokio::test]
    async fn a_listing_is_found_again_by_the_next_life() {
        let dir = tempfile::tempdir().unwrap();
        let open = || Cache::open(&dir.path().join("cache"), 10_000, Default::default()).unwrap();
        std::fs::write(dir.path().join("a"), "x").unwrap();
        let artifact = Digest::of(b"x");
        let unpacked = Unpacked::new(dir.path(), vec!["a".into()], manifest()).unwrap();
        let listings = Listings::new(open());
        assert!(listings.get(artifact).await.is_none());
        for _ in 0..2 {
            listings.put(artifact, unpacked.clone()).await.unwrap();
        }
        let next = Listings::new(open());
        assert_eq!(*next.get(artifact).await.unwrap().unpacked, unpacked);
    }
}
