//! The memory of the emulated devices, from the files in which the jobs' processes note their use
//! (see `job.py`).

use std::fs::{File, TryLockError};
use std::path::Path;

use anyhow::Context as _;
use serde::Deserialize;

#[derive(Debug, Deserialize)]
struct Holding {
    /// GiB in use out of those held.
    used: u64,
}

/// Number of held devices with less than half of their memory in use.
///
/// # Errors
/// If a folder of a device cannot be read.
pub(super) fn partly_used(devices: &Path) -> anyhow::Result<u32> {
    let mut partly = 0;
    for folder in std::fs::read_dir(devices)? {
        let folder = folder?.path();
        let memory = std::fs::read_to_string(folder.join("memory"))?;
        let memory: u64 = memory.trim().parse().context("a device without memory")?;
        if let Some(used) = used(&folder)?
            && used * 2 < memory
        {
            partly += 1;
        }
    }
    Ok(partly)
}

/// GiB in use on a device. None if no process holds it.
fn used(folder: &Path) -> anyhow::Result<Option<u64>> {
    let lock = folder.join("lock");
    let lock = File::options().create(true).append(true).open(lock)?;
    // A reader or writer holds the lock for microseconds.
    lock.lock()?;
    let mut all = None;
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        if !entry.file_name().to_string_lossy().starts_with("of-") {
            continue;
        }
        // It has disappeared since it was listed.
        let Ok(file) = File::open(entry.path()) else {
            continue;
        };
        match file.try_lock_shared() {
            // Its process has ended.
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let holding: Holding = serde_json::from_reader(file)
                    .with_context(|| format!("what {} says", entry.path().display()))?;
                *all.get_or_insert(0) += holding.used;
            }
            Err(TryLockError::Error(error)) => return Err(error.into()),
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_living_processes_hold_is_in_use() {
        let folder = tempfile::tempdir().unwrap();
        let device = folder.path().join("d");
        std::fs::create_dir(&device).unwrap();
        std::fs::write(device.join("memory"), "40").unwrap();
        assert_eq!(partly_used(folder.path()).unwrap(), 0);
        std::fs::write(device.join("of-1"), r#"{"held": 30, "used": 10}"#).unwrap();
        assert_eq!(
            partly_used(folder.path()).unwrap(),
            0,
            "its process is gone"
        );
        let holds = File::open(device.join("of-1")).unwrap();
        holds.lock().unwrap();
        assert_eq!(partly_used(folder.path()).unwrap(), 1);
        std::fs::write(device.join("of-2"), r#"{"held": 10, "used": 10}"#).unwrap();
        let more = File::open(device.join("of-2")).unwrap();
        more.lock().unwrap();
        assert_eq!(partly_used(folder.path()).unwrap(), 0);
    }
}
