//! Locks between processes: one process fetches, one process owns a data folder.
//!
//! The kernel releases a `flock` when its holder ends, so `kill -9` leaves no lock.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::error::{At, Error, Result};

/// An exclusive lock, held until it is dropped.
#[derive(Debug)]
pub(crate) struct FileLock {
    _file: File,
}

impl FileLock {
    /// Takes the lock. Returns `None` if another process holds it.
    pub(crate) fn try_take(path: &Path) -> Result<Option<Self>> {
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(path)
            .at("cannot open the lock file", path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Self { _file: file })),
            Err(Errno::WOULDBLOCK) => Ok(None),
            Err(e) => Err(e).at("cannot lock", path),
        }
    }

    /// Waits for the lock. Calls `waiting` once if another process holds it.
    pub(crate) async fn take(path: &Path, waiting: impl Fn()) -> Result<Self> {
        let mut told = false;
        loop {
            if let Some(lock) = Self::try_take(path)? {
                return Ok(lock);
            }
            if !told {
                waiting();
                told = true;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Takes the lock within `patience`, because a former owner may still be ending. Otherwise
    /// fails with the message that `owned` is in use.
    pub(crate) async fn own(path: &Path, owned: &Path, patience: Duration) -> Result<Self> {
        tokio::time::timeout(patience, Self::take(path, || ()))
            .await
            .unwrap_or_else(|_| {
                Err(Error::InUse {
                    path: owned.to_owned(),
                })
            })
    }
}
