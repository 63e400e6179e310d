//! Triggers of memory cgroups.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::event::{EventfdFlags, PollFlags, eventfd};

use super::{Trigger, drain};

/// Wakes whenever a cgroup's usage crosses a number of bytes, upwards or downwards (v1).
///
/// The kernel checks while it charges pages, so the wake comes during the crossing allocation.
/// Usage is gross: it includes reclaimable file pages.
pub struct UsageThreshold {
    dir: PathBuf,
    bytes: u64,
    counter: OwnedFd,
}

impl UsageThreshold {
    /// Registers with `<dir>/cgroup.event_control`.
    ///
    /// # Errors
    /// No such cgroup, or it may not be written by this process.
    pub fn new(dir: &Path, bytes: u64) -> io::Result<Self> {
        let counter = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let usage = File::open(dir.join("memory.usage_in_bytes"))?;
        let order = format!("{} {} {bytes}", counter.as_raw_fd(), usage.as_raw_fd());
        // The registration lasts as long as the counter is open.
        fs::OpenOptions::new()
            .write(true)
            .open(dir.join("cgroup.event_control"))?
            .write_at(order.as_bytes(), 0)?;
        Ok(Self {
            dir: dir.to_owned(),
            bytes,
            counter,
        })
    }
}

impl Trigger for UsageThreshold {
    fn describe(&self) -> String {
        format!("{} crosses {} bytes", self.dir.display(), self.bytes)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.counter.as_fd()
    }

    fn readiness(&self) -> PollFlags {
        PollFlags::IN
    }

    fn take(&mut self) -> io::Result<()> {
        drain(&self.counter)?;
        if self.dir.exists() {
            Ok(())
        } else {
            Err(io::Error::new(
                io::ErrorKind::NotFound,
                "the cgroup is gone",
            ))
        }
    }
}

/// Wakes whenever a cgroup met its own limit (v2): throttled at `memory.high`, reclaimed at
/// `memory.max`, or the OOM killer acted.
pub struct MemoryEvents {
    path: PathBuf,
    file: File,
}

impl MemoryEvents {
    /// A trigger on `<dir>/memory.events`.
    ///
    /// # Errors
    /// No such file.
    pub fn new(dir: &Path) -> io::Result<Self> {
        let path = dir.join("memory.events");
        let mut made = Self {
            file: File::open(&path)?,
            path,
        };
        // Otherwise earlier events would count as new.
        made.take()?;
        Ok(made)
    }
}

impl Trigger for MemoryEvents {
    fn describe(&self) -> String {
        format!("{} changes", self.path.display())
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn readiness(&self) -> PollFlags {
        PollFlags::PRI
    }

    fn take(&mut self) -> io::Result<()> {
        self.file.read_at(&mut [0u8; 512], 0).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cgroup_that_is_not_there_is_an_error_and_no_trigger() {
        assert!(UsageThreshold::new(Path::new("/nonexistent"), 1).is_err());
        assert!(MemoryEvents::new(Path::new("/nonexistent")).is_err());
    }
}
