//! The unpacked packages of a node: fetched once, and restored when a file was changed.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use fiec_broker::{Broker, store};
use fiec_schemas::package::{ARTIFACT_LIMIT, MANIFEST_FILE, Manifest, ProgramRecord};
use tokio::sync::Mutex;

use crate::cache::{Cache, Fetched, Held, Kind, NotCached};
use crate::unpack::unpack;
use crate::unpacked::{Listings, Unpacked};

/// Pause before a failed fetch is retried once: a push may have been replacing the artifact.
const AGAIN: Duration = Duration::from_millis(500);

/// The packages in a node's cache.
pub struct PackageStore {
    broker: Broker,
    cache: Arc<Cache>,
    listings: Arc<Listings>,
    /// Held while a changed package is restored.
    restoring: Mutex<()>,
}

impl PackageStore {
    /// The packages in this cache.
    pub fn new(broker: &Broker, cache: Arc<Cache>) -> Self {
        Self {
            broker: broker.clone(),
            listings: Arc::new(Listings::new(Arc::clone(&cache))),
            cache,
            restoring: Mutex::default(),
        }
    }

    /// Returns the unpacked artifact of a record, with the files that were in it. Fetches it if it
    /// is not here.
    ///
    /// # Errors
    /// The reason why it cannot be used, for people.
    pub async fn get(&self, record: &ProgramRecord) -> Result<Held, NotCached> {
        let held = match self.fetch(record).await {
            Ok(held) => held,
            Err(first) => {
                let program = &record.program;
                tracing::warn!(program, %first, "cannot have a package; trying once more");
                tokio::time::sleep(AGAIN).await;
                self.fetch(record).await?
            }
        };
        self.check(record, &held).await?;
        Ok(held)
    }

    /// Checks that the files of a package are as they were unpacked. Replaces those that are not.
    async fn check(&self, record: &ProgramRecord, held: &Held) -> Result<(), NotCached> {
        if !self.is_unchanged(record, held).await? {
            let _turn = self.restoring.lock().await;
            // Another execution may have had it restored meanwhile.
            if !self.is_unchanged(record, held).await? {
                self.restore(record, held).await?;
            }
        }
        Ok(())
    }

    async fn is_unchanged(&self, record: &ProgramRecord, held: &Held) -> Result<bool, NotCached> {
        let (program, folder) = (&record.program, held.path());
        let Some(listing) = self.listings.get(record.artifact).await else {
            tracing::info!(
                program,
                "the files of a package were not listed; it is fetched again"
            );
            return Ok(false);
        };
        if listing.unpacked.manifest != record.manifest {
            return Err(NotCached(format!(
                "{program}: its {MANIFEST_FILE} is not the registered one"
            )));
        }
        if listing.is_checked {
            return Ok(true);
        }
        let changed = match listing.unpacked.is_large() {
            false => listing.unpacked.first_changed(&folder),
            true => {
                let first = move || listing.unpacked.first_changed(&folder);
                let checked = tokio::task::spawn_blocking(first).await;
                checked.map_err(NotCached::because(
                    "the files of a package cannot be checked",
                ))?
            }
        };
        match changed {
            None => self.listings.note_checked(record.artifact),
            Some(file) => {
                let file = held.path().join(file);
                tracing::warn!(
                    program, file = %file.display(),
                    "a file of a package was changed on this node; the package is fetched again"
                );
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn restore(&self, record: &ProgramRecord, held: &Held) -> Result<(), NotCached> {
        let _room = self.cache.room(room_for(record))?;
        let (tar, fresh, folder) = (self.cache.new_path(), self.cache.new_path(), held.path());
        let known = self.listings.get(record.artifact).await;
        let fetched = fetch_to(&self.broker, record, &tar, &fresh).await;
        let restored = match fetched {
            Err(error) => Err(error),
            Ok((_, listed)) => {
                let mut unpacked = known.map_or(listed, |known| (*known.unpacked).clone());
                let from = fresh.clone();
                let restore = move || unpacked.restore(&folder, &from).map(|()| unpacked);
                let restored = tokio::task::spawn_blocking(restore).await;
                match restored.map_err(std::io::Error::other).flatten() {
                    Ok(unpacked) => self.listings.put(record.artifact, unpacked).await,
                    Err(error) => Err(error),
                }
                .map_err(NotCached::because("its changed files cannot be replaced"))
            }
        };
        let _ = tokio::fs::remove_file(&tar).await;
        let _ = tokio::fs::remove_dir_all(&fresh).await;
        restored
    }

    async fn fetch(&self, record: &ProgramRecord) -> Result<Held, NotCached> {
        let key = (Kind::Program, record.artifact);
        let (broker, cache, listings) = (&self.broker, &self.cache, &self.listings);
        let from = (broker.clone(), Arc::clone(cache), Arc::clone(listings));
        let fetched = record.clone();
        let fetch = move || fetch(from, fetched);
        let wanted = room_for(record);
        self.cache.get_or_fetch(key, wanted, fetch).await
    }
}

/// Bytes of a package while it is fetched: the tar and its contents.
const fn room_for(record: &ProgramRecord) -> u64 {
    record.bytes.saturating_mul(2)
}

async fn fetch(
    (broker, cache, listings): (Broker, Arc<Cache>, Arc<Listings>),
    record: ProgramRecord,
) -> Result<Fetched, NotCached> {
    let (tar, folder) = (cache.new_path(), cache.new_path());
    let result = match fetch_to(&broker, &record, &tar, &folder).await {
        Ok((fetched, unpacked)) => listings
            .put(record.artifact, unpacked)
            .await
            .map(|()| fetched)
            .map_err(NotCached::because("cannot list the files of a package")),
        Err(error) => Err(error),
    };
    // The leftovers of a failed fetch are removed with the agent's temporary folder at the latest.
    let _ = tokio::fs::remove_file(&tar).await;
    if result.is_err() {
        let _ = tokio::fs::remove_dir_all(&folder).await;
    }
    result
}

async fn fetch_to(
    broker: &Broker,
    record: &ProgramRecord,
    tar: &Path,
    folder: &Path,
) -> Result<(Fetched, Unpacked), NotCached> {
    let program = &record.program;
    let limit = record.bytes.min(ARTIFACT_LIMIT);
    let what = format!("the artifact of {program} cannot be fetched");
    let because = || NotCached::because(&what);
    let mut file = tokio::fs::File::create(tar).await.map_err(because())?;
    store::get_data_to(broker, record.artifact, limit, &mut file, |_| {})
        .await
        .map_err(NotCached::because(&what))?;
    drop(file);
    let (tar, folder, record) = (tar.to_owned(), folder.to_owned(), record.clone());
    let unpacked = tokio::task::spawn_blocking(move || {
        let artifact = BufReader::new(File::open(tar).map_err(|e| e.to_string())?);
        let contents = unpack(artifact, &folder, record.bytes).map_err(|e| e.to_string())?;
        let file = File::open(folder.join(MANIFEST_FILE))
            .map_err(|error| format!("{MANIFEST_FILE}: {error}"))?;
        match Manifest::read(file) {
            Ok(manifest) if manifest == record.manifest => {
                let bytes = contents.bytes;
                let unpacked = Unpacked::new(&folder, contents.files, manifest);
                let unpacked = unpacked.map_err(|error| error.to_string())?;
                let path = folder;
                Ok((Fetched { path, bytes }, unpacked))
            }
            Ok(_) => Err(format!("its {MANIFEST_FILE} is not the registered one")),
            Err(error) => Err(format!("{MANIFEST_FILE}: {error}")),
        }
    });
    let what = format!("the artifact of {program} cannot be used");
    unpacked
        .await
        .map_err(NotCached::because(&what))?
        .map_err(NotCached::because(&what))
}
