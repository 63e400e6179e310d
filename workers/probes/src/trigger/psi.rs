//! Triggers of pressure stall information (Documentation/accounting/psi.rst).

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::fs::{Mode, OFlags, open};

use super::Trigger;

/// Without CAP_SYS_RESOURCE in the initial user namespace, windows must be multiples of 2 s.
const WINDOW: Duration = Duration::from_secs(2);

/// Wakes when tasks lost this share of a window to memory, at most once per window.
pub struct StallTrigger {
    path: PathBuf,
    file: File,
}

impl StallTrigger {
    /// A trigger on `/proc/pressure/memory` or a cgroup's `memory.pressure`, at this share of time
    /// in (0, 1].
    ///
    /// # Errors
    /// The kernel has no PSI, or refuses the trigger.
    pub fn some(path: &Path, share: f64) -> io::Result<Self> {
        // The kernel requires a stall of at least one microsecond and at most the window.
        let window = WINDOW.as_micros() as u64;
        let stall = ((window as f64 * share.clamp(0.0, 1.0)) as u64).clamp(1, window);
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let mut file = File::from(open(path, flags, Mode::empty())?);
        file.write_all(format!("some {stall} {window}\0").as_bytes())?;
        Ok(Self {
            path: path.to_owned(),
            file,
        })
    }
}

impl Trigger for StallTrigger {
    fn describe(&self) -> String {
        format!("stall in {}", self.path.display())
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn readiness(&self) -> PollFlags {
        PollFlags::PRI
    }

    fn take(&mut self) -> io::Result<()> {
        // The poll itself consumed the event. An error condition without an event means that the
        // trigger or its cgroup is gone.
        let mut now = [rustix::event::PollFd::new(&self.file, PollFlags::PRI)];
        let zero = rustix::event::Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        rustix::event::poll(&mut now, Some(&zero))?;
        if now[0].revents().contains(PollFlags::ERR) {
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                "the kernel has let go of the trigger",
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_takes_the_trigger_or_says_why_not() {
        match StallTrigger::some(Path::new("/proc/pressure/memory"), 0.1) {
            Ok(mut trigger) => assert!(trigger.take().is_ok()),
            Err(e) => eprintln!("SKIPPED: no PSI trigger on this machine: {e}"),
        }
        assert!(StallTrigger::some(Path::new("/nonexistent"), 0.1).is_err());
    }
}
