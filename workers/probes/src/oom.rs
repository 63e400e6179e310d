//! Processes that the kernel kills for memory. A kill is a SIGKILL like any other: only the counters
//! of the control group, or of the machine, tell them apart.
//!
//! * cgroup v1: `oom_kill` in `memory.oom_control` (since Linux 4.13), `memory.max_usage_in_bytes`.
//! * cgroup v2: `oom_kill` in `memory.events`, `memory.peak` (since Linux 5.19).
//! * Without a limit of a group: `oom_kill` in `/proc/vmstat`. It counts all kills of the machine, also
//!   those in the groups of others. One of these within two seconds of another SIGKILL is taken for it.
//!
//! The counters of a group count kills for the memory of the whole machine, too. A group whose peak
//! never came near its limit was not the reason.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::cgroup::{Version, parse_limit};
use crate::memory::MemoryLimit;

const VMSTAT: &str = "/proc/vmstat";
/// Age of a kill that can still explain the end of a process. Longer than it takes to notice the
/// end, shorter than the time between two kills that have nothing to do with each other.
const RECENT: Duration = Duration::from_secs(2);
/// Share of the limit that a peak must have come to for the group to be the reason: the kernel
/// charges pages in batches.
const NEAR: f64 = 0.98;

/// What ran out of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutOf {
    /// The node's control group.
    Group {
        /// Its limit.
        limit_bytes: u64,
        /// The most that it ever held, if the kernel says so.
        peak_bytes: Option<u64>,
    },
    /// The machine.
    Machine,
}

/// Looks for kills among the processes of a node.
#[derive(Debug)]
pub struct OomKills {
    limit: MemoryLimit,
    counter: PathBuf,
    seen: Mutex<Seen>,
}

/// The counter, as it was read before.
#[derive(Debug)]
struct Seen {
    /// Kills up to here are explained, or too old.
    explained: u64,
    last: u64,
    read_at: Instant,
    /// Kills that have explained no process's end.
    silent: u64,
}

impl OomKills {
    /// Kills under this limit from now on. A declared budget kills nobody: then the limit counts that
    /// the kernel knows.
    pub fn new(limit: MemoryLimit) -> Self {
        let limit = match limit {
            MemoryLimit::Declared { .. } => MemoryLimit::detect(),
            limit => limit,
        };
        let counter = match &limit {
            MemoryLimit::CgroupV1(dir) => dir.join("memory.oom_control"),
            MemoryLimit::CgroupV2(dir) => dir.join("memory.events"),
            MemoryLimit::Declared { .. } | MemoryLimit::Host => VMSTAT.into(),
        };
        let count = count(&counter).unwrap_or(0);
        Self {
            limit,
            counter,
            seen: Mutex::new(Seen {
                explained: count,
                last: count,
                read_at: Instant::now(),
                silent: 0,
            }),
        }
    }

    /// Notes that older kills explain nothing. Call it when a process begins to compute. It reads a
    /// file at most every two seconds.
    pub fn pass(&self) {
        self.pass_at(Instant::now());
    }

    fn pass_at(&self, now: Instant) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if now.saturating_duration_since(seen.read_at) < RECENT {
            return;
        }
        seen.silent += seen.last.saturating_sub(seen.explained);
        seen.explained = seen.last;
        if let Ok(count) = count(&self.counter) {
            seen.last = count;
        }
        seen.read_at = now;
    }

    /// Kills since the last call that have explained no process's end: of processes that programs had
    /// started themselves.
    pub fn take_silent(&self) -> u64 {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut seen.silent)
    }

    /// Says what a process ran out of that has just ended by SIGKILL. None if the kernel killed
    /// nobody for memory. Each kill explains one process.
    pub fn explain(&self) -> Option<OutOf> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let count = count(&self.counter).ok()?;
        if count <= seen.explained {
            return None;
        }
        seen.explained += 1;
        seen.last = seen.last.max(seen.explained);
        drop(seen);
        Some(self.reason())
    }

    fn reason(&self) -> OutOf {
        let (version, dir) = match &self.limit {
            MemoryLimit::CgroupV1(dir) => (Version::V1, dir),
            MemoryLimit::CgroupV2(dir) => (Version::V2, dir),
            MemoryLimit::Declared { .. } | MemoryLimit::Host => return OutOf::Machine,
        };
        let Ok(limit_bytes) = self.limit.bytes() else {
            return OutOf::Machine;
        };
        let peak_bytes = peak(version, dir);
        #[expect(clippy::cast_precision_loss, reason = "a share")]
        let was_near = peak_bytes.is_none_or(|peak| peak as f64 >= NEAR * limit_bytes as f64);
        match was_near {
            true => OutOf::Group {
                limit_bytes,
                peak_bytes,
            },
            false => OutOf::Machine,
        }
    }
}

/// The number after `oom_kill` in a file of counters.
fn count(path: &Path) -> io::Result<u64> {
    let text = fs::read_to_string(path)?;
    let mut lines = text.lines();
    let number = lines.find_map(|line| line.strip_prefix("oom_kill "));
    let number = number.and_then(|number| number.trim().parse().ok());
    number.ok_or_else(|| io::Error::other(format!("no oom_kill in {}", path.display())))
}

fn peak(version: Version, dir: &Path) -> Option<u64> {
    let file = match version {
        Version::V1 => "memory.max_usage_in_bytes",
        Version::V2 => "memory.peak",
    };
    parse_limit(&fs::read_to_string(dir.join(file)).ok()?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    const LIMIT: u64 = 300 << 20;

    struct Group {
        dir: TempDir,
        version: Version,
    }

    impl Group {
        fn new(version: Version) -> Self {
            let dir = TempDir::new().unwrap();
            let group = Self { dir, version };
            group.write("cgroup.procs", "");
            group.write(version.limit_file(), &LIMIT.to_string());
            group.has_killed(7);
            group
        }

        fn write(&self, file: &str, text: &str) {
            fs::write(self.dir.path().join(file), text).unwrap();
        }

        fn has_killed(&self, count: u64) {
            match self.version {
                Version::V1 => self.write(
                    "memory.oom_control",
                    &format!("oom_kill_disable 0\nunder_oom 0\noom_kill {count}\n"),
                ),
                Version::V2 => self.write(
                    "memory.events",
                    &format!("low 0\nhigh 0\nmax 3\noom 1\noom_kill {count}\noom_group_kill 0\n"),
                ),
            }
        }

        fn kills(&self) -> OomKills {
            let dir = self.dir.path().to_owned();
            OomKills::new(match self.version {
                Version::V1 => MemoryLimit::CgroupV1(dir),
                Version::V2 => MemoryLimit::CgroupV2(dir),
            })
        }
    }

    #[test]
    fn each_kill_explains_one_process() {
        for version in [Version::V1, Version::V2] {
            let group = Group::new(version);
            let kills = group.kills();
            assert_eq!(kills.explain(), None, "{version:?}: none is new");
            group.has_killed(9);
            for _ in 0..2 {
                let is_group = matches!(kills.explain(), Some(OutOf::Group { .. }));
                assert!(is_group, "{version:?}");
            }
            assert_eq!(kills.explain(), None, "{version:?}");
        }
    }

    #[test]
    fn a_kill_that_nobody_asks_for_is_told_once() {
        let group = Group::new(Version::V2);
        let kills = group.kills();
        group.has_killed(10);
        assert!(kills.explain().is_some());
        let later = Instant::now();
        for _ in 1..=3 {
            kills.pass_at(later + RECENT * 3);
        }
        assert_eq!(kills.take_silent(), 0, "it may still explain somebody");
        kills.pass_at(later + RECENT * 6);
        assert_eq!((kills.take_silent(), kills.take_silent()), (2, 0));
    }

    #[test]
    fn the_limit_and_the_peak_are_told() {
        let files = [
            (Version::V1, "memory.max_usage_in_bytes"),
            (Version::V2, "memory.peak"),
        ];
        for (version, file) in files {
            let group = Group::new(version);
            let kills = group.kills();
            group.has_killed(8);
            group.write(file, &(LIMIT - 4096).to_string());
            let expected = OutOf::Group {
                limit_bytes: LIMIT,
                peak_bytes: Some(LIMIT - 4096),
            };
            assert_eq!(kills.explain(), Some(expected));
            // The group had room: the machine had none.
            group.has_killed(9);
            group.write(file, &(LIMIT / 2).to_string());
            assert_eq!(kills.explain(), Some(OutOf::Machine));
        }
    }

    #[test]
    fn an_old_kill_explains_nothing() {
        let group = Group::new(Version::V1);
        let kills = group.kills();
        group.has_killed(8);
        let later = Instant::now() + RECENT;
        kills.pass_at(later);
        kills.pass_at(later + RECENT / 2);
        group.has_killed(9);
        kills.pass_at(later + RECENT);
        // The second is recent.
        assert!(kills.explain().is_some());
        assert_eq!(kills.explain(), None);
        group.has_killed(10);
        kills.pass_at(later + 2 * RECENT);
        kills.pass_at(later + 3 * RECENT);
        assert_eq!(kills.explain(), None);
    }

    #[test]
    fn without_a_group_the_machine_counts() {
        let kills = OomKills::new(MemoryLimit::Host);
        assert!(count(Path::new(VMSTAT)).is_ok());
        assert_eq!(kills.reason(), OutOf::Machine);
        assert!(
            OomKills::new(MemoryLimit::CgroupV1("/no/such".into()))
                .explain()
                .is_none()
        );
    }
}
