//! M: memory in use, of the host, of the tightest cgroup around the node, or of a budget.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fiec_schemas::hardware::{Reading, Signal};
use fiec_schemas::ids::Timestamp;

use crate::Probe;
use crate::cgroup::{self, Version};
use crate::kernel_file::{KernelFile, Once, field, invalid, meminfo};
use crate::reading::Make;
use crate::tree::ProcessTree;
use crate::watch::{GroupLevel, at_rest, next_look};

const MEMINFO: &str = "/proc/meminfo";
/// `MemTotal`, `MemFree` and `MemAvailable` are its first lines.
const MEMINFO_HEAD: usize = 256;
/// Limits rarely change: read them again after this time, in microseconds.
const LIMITS_US: i64 = 1_000_000;

/// The limit of M.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MemoryLimit {
    /// The directory of a cgroup v1 (memory controller) that contains the node, with all its
    /// ancestors.
    CgroupV1(PathBuf),
    /// The directory of a cgroup v2 that contains the node, with all its ancestors.
    CgroupV2(PathBuf),
    /// A budget without enforcement, for a process, its descendants, and the trees that are
    /// registered in the node's run directory.
    Declared {
        /// The budget.
        bytes: u64,
        /// The agent.
        root_pid: u32,
    },
    /// The host's memory only.
    Host,
}

impl MemoryLimit {
    /// Finds the limit of this process: its cgroup, if that or an ancestor has a limit below the
    /// host's memory, else the host.
    pub fn detect() -> Self {
        let Ok(own) = cgroup::locate_own() else {
            return Self::Host;
        };
        let limit = match own.version {
            Version::V1 => Self::CgroupV1(own.dir),
            Version::V2 => Self::CgroupV2(own.dir),
        };
        match limit.bytes() {
            Ok(bytes) if host_total().is_ok_and(|total| bytes < total) => limit,
            _ => Self::Host,
        }
    }

    /// Returns the limit in bytes: the smallest of the cgroups', and at most the host's memory. A
    /// declared budget is returned unchanged.
    ///
    /// # Errors
    /// The host's memory cannot be read.
    pub fn bytes(&self) -> io::Result<u64> {
        let (version, dir) = match self {
            Self::Declared { bytes, .. } => return Ok(*bytes),
            Self::Host => return host_total(),
            Self::CgroupV1(dir) => (Version::V1, dir),
            Self::CgroupV2(dir) => (Version::V2, dir),
        };
        let enclosing = enclosing(version, dir);
        Ok(enclosing
            .into_iter()
            .filter_map(|(_, l)| l)
            .fold(host_total()?, u64::min))
    }

    /// The source of the limit, in words.
    pub fn source(&self) -> String {
        match self {
            Self::CgroupV1(dir) => format!("cgroup v1 {}", dir.display()),
            Self::CgroupV2(dir) => format!("cgroup v2 {}", dir.display()),
            Self::Declared { .. } => "declared".into(),
            Self::Host => "host".into(),
        }
    }
}

fn host_total() -> io::Result<u64> {
    meminfo(&fs::read_to_string(MEMINFO)?, "MemTotal:")
        .ok_or_else(|| invalid("no MemTotal in /proc/meminfo".into()))
}

/// Returns a cgroup's directory and its ancestors, innermost first, each with its limit, if any.
fn enclosing(version: Version, dir: &Path) -> Vec<(PathBuf, Option<u64>)> {
    let file = version.limit_file();
    dir.ancestors()
        .take_while(|d| d.join("cgroup.procs").exists())
        .map(|d| {
            let text = fs::read_to_string(d.join(file)).ok();
            (d.to_owned(), text.and_then(|t| cgroup::parse_limit(&t)))
        })
        .collect()
}

/// One cgroup's usage and limit.
struct Group {
    version: Version,
    dir: PathBuf,
    usage: KernelFile,
    stat: KernelFile,
    keys: &'static FileKeys,
    limit: u64,
}

/// The lines of `memory.stat` about pages of files.
struct FileKeys {
    /// All of them, which the kernel can drop.
    pages: [&'static str; 2],
    /// Those that must be written first.
    unwritten: [&'static str; 2],
}

const KEYS_V1: FileKeys = FileKeys {
    pages: ["total_inactive_file ", "total_active_file "],
    unwritten: ["total_dirty ", "total_writeback "],
};
const KEYS_V2: FileKeys = FileKeys {
    pages: ["inactive_file ", "active_file "],
    unwritten: ["file_dirty ", "file_writeback "],
};

impl Group {
    fn new(version: Version, dir: &Path, limit: u64) -> Self {
        Self {
            version,
            dir: dir.to_owned(),
            usage: KernelFile::new(dir.join(version.usage_file())),
            stat: KernelFile::new(dir.join("memory.stat")),
            keys: match version {
                Version::V1 => &KEYS_V1,
                Version::V2 => &KEYS_V2,
            },
            limit,
        }
    }

    /// Returns the bytes in use without reclaimable file pages, if their share may exceed `floor`.
    /// Reading `memory.stat` makes the kernel sum counters of every processor, so it is skipped if
    /// the gross usage is below the floor.
    fn used_if_tighter(&mut self, floor: f64) -> io::Result<Option<u64>> {
        let usage = self.usage.number()?;
        if usage as f64 / self.limit as f64 <= floor {
            return Ok(None);
        }
        Ok(Some(usage.saturating_sub(self.cache()?)))
    }

    /// Bytes of file pages that the kernel gives back at once. A file that is read twice is active: the
    /// kernel drops it later, but drops it. What must be written first does not count, and what holds
    /// a file in memory for good, such as a tmpfs, is not among the file pages.
    fn cache(&mut self) -> io::Result<u64> {
        let [inactive, active] = self.keys.pages;
        let text = self.stat.read()?;
        let unwritten = self.keys.unwritten.iter();
        let unwritten: u64 = unwritten.filter_map(|key| field(text, key)).sum();
        let sum = field(text, inactive)
            .zip(field(text, active))
            .map(|(inactive, active)| inactive.saturating_add(active))
            .map(|pages| pages.saturating_sub(unwritten));
        sum.ok_or_else(|| {
            let file = self.stat.path().display();
            invalid(format!("no {inactive}or {active}in {file}"))
        })
    }

    fn tightest(&self, used: u64) -> Tightest {
        Tightest {
            used,
            limit: self.limit,
            source: self.usage.path().display().to_string(),
            group: Some(self.dir.clone()),
        }
    }
}

enum Held {
    /// The host, and the limited cgroups of (version, directory).
    Enclosing {
        host: KernelFile,
        cgroup: Option<(Version, PathBuf)>,
        groups: Vec<Group>,
    },
    Budget {
        tree: Box<ProcessTree>,
        bytes: u64,
        source: String,
    },
}

/// M = max of 1 − MemAvailable/MemTotal and, over enclosing cgroups, (usage − clean file pages)/limit.
/// With a declared budget: the process tree's anonymous memory and swap, divided by the budget.
pub struct MemoryProbe {
    held: Held,
    limits_read: Option<Timestamp>,
    /// The last levels: of the host if a cgroup may be tighter, and the tightest.
    seen: Vec<Tightest>,
    once: Once,
}

/// Memory in use at one place.
#[derive(Clone)]
struct Tightest {
    used: u64,
    limit: u64,
    source: String,
    /// The cgroup, if it is one.
    group: Option<PathBuf>,
}

impl MemoryProbe {
    /// `run_dir` is the folder where `tree/*.pid` registers further trees for a declared budget.
    pub fn new(limit: &MemoryLimit, run_dir: Option<&Path>) -> Self {
        let enclosing = |cgroup| Held::Enclosing {
            host: KernelFile::new(MEMINFO),
            cgroup,
            groups: Vec::new(),
        };
        let held = match limit {
            MemoryLimit::Host => enclosing(None),
            MemoryLimit::CgroupV1(dir) => enclosing(Some((Version::V1, dir.clone()))),
            MemoryLimit::CgroupV2(dir) => enclosing(Some((Version::V2, dir.clone()))),
            MemoryLimit::Declared { bytes, root_pid } => Held::Budget {
                tree: Box::new(ProcessTree::new(*root_pid, run_dir)),
                bytes: (*bytes).max(1),
                source: format!("/proc/{root_pid}/statm and its tree"),
            },
        };
        Self {
            held,
            limits_read: None,
            seen: Vec::new(),
            once: Once::default(),
        }
    }

    /// Reads the host's memory from this file instead of `/proc/meminfo`.
    #[must_use]
    pub fn with_meminfo(mut self, path: &Path) -> Self {
        if let Held::Enclosing { host, .. } = &mut self.held {
            *host = KernelFile::new(path);
        }
        self
    }

    /// Returns the present levels of the limited cgroups, for triggers. Empty for a host or a
    /// budget.
    pub fn levels(&mut self) -> Vec<GroupLevel> {
        let Held::Enclosing { groups, .. } = &mut self.held else {
            return Vec::new();
        };
        let level = |group: &mut Group| {
            Some(GroupLevel {
                version: group.version,
                dir: group.dir.clone(),
                limit: group.limit,
                cache: group.cache().ok()?,
            })
        };
        groups.iter_mut().filter_map(level).collect()
    }

    /// Returns the time until the next check. It is short enough to see a crossing of these shares
    /// soon, for places without a trigger.
    pub fn next_look(&self, shares: &[f64], covered: impl Fn(&Path) -> bool) -> Duration {
        self.seen
            .iter()
            .filter(|place| !place.group.as_deref().is_some_and(&covered))
            .map(|place| next_look(place.used, place.limit, shares))
            .fold(at_rest(), Duration::min)
    }

    /// Appends the whole host and each limited cgroup as separate parts, if a cgroup may be tighter
    /// than the host. Parts only inform.
    pub fn parts(&mut self, now: Timestamp, out: &mut Vec<Reading>) {
        let Held::Enclosing { host, groups, .. } = &mut self.held else {
            return;
        };
        if groups.is_empty() {
            return;
        }
        let mut push = |place: &str, source: String, level: io::Result<(u64, u64)>| {
            let make = Make {
                signal: Signal::Memory,
                device: Some(place),
                unit: "bytes",
                source: &source,
                at: now,
            };
            out.push(match level {
                Ok((used, limit)) => {
                    make.value(used as f64 / limit as f64, used as f64, Some(limit as f64))
                }
                Err(e) => make.missing(e.to_string()),
            });
        };
        let source = host.path().display().to_string();
        let level = host_usage(host).map(|t| (t.used, t.limit));
        push("machine", source, level);
        for group in groups {
            let place = format!("cgroup:{}", group.dir.display());
            // A floor below zero: read it in any case.
            let used = group.used_if_tighter(-1.0);
            let level = used.map(|used| (used.unwrap_or(0), group.limit));
            push(&place, group.usage.path().display().to_string(), level);
        }
    }

    /// Measures M.
    pub fn measure(&mut self, now: Timestamp) -> Reading {
        let make = |source| Make {
            signal: Signal::Memory,
            device: None,
            unit: "bytes",
            source,
            at: now,
        };
        match self.tightest(now) {
            Ok(t) => make(&t.source).value(
                t.used as f64 / t.limit as f64,
                t.used as f64,
                Some(t.limit as f64),
            ),
            Err((source, e)) => {
                self.once.warn("memory", &format!("{source}: {e}"));
                make(&source).missing(e.to_string())
            }
        }
    }

    fn tightest(&mut self, now: Timestamp) -> Result<Tightest, (String, io::Error)> {
        let due = self
            .limits_read
            .is_none_or(|at| !(0..LIMITS_US).contains(&(now.micros() - at.micros())));
        match &mut self.held {
            Held::Budget {
                tree,
                bytes,
                source,
            } => match tree.usage(now) {
                Ok(used) => {
                    let tightest = Tightest {
                        used,
                        limit: *bytes,
                        source: source.clone(),
                        group: None,
                    };
                    self.seen = vec![tightest.clone()];
                    Ok(tightest)
                }
                Err(e) => Err((source.clone(), e)),
            },
            Held::Enclosing {
                host,
                cgroup,
                groups,
            } => {
                if let Some((version, dir)) = cgroup
                    && due
                {
                    refresh(groups, *version, dir);
                    self.limits_read = Some(now);
                }
                let mut tightest = host_usage(host).map_err(|e| (MEMINFO.to_owned(), e))?;
                self.seen = vec![tightest.clone()];
                if let Some((_, dir)) = cgroup
                    && groups.is_empty()
                    && !dir.exists()
                {
                    let gone = io::Error::new(io::ErrorKind::NotFound, "the cgroup is gone");
                    return Err((dir.display().to_string(), gone));
                }
                for group in groups {
                    let floor = tightest.used as f64 / tightest.limit as f64;
                    match group.used_if_tighter(floor) {
                        Ok(Some(used)) if used as f64 / group.limit as f64 > floor => {
                            tightest = group.tightest(used);
                        }
                        Ok(_) => {}
                        // If one is unreadable the maximum is unknown. A lower one would be wrong.
                        Err(e) => return Err((group.usage.path().display().to_string(), e)),
                    }
                }
                if tightest.group.is_some() {
                    self.seen.push(tightest.clone());
                }
                Ok(tightest)
            }
        }
    }
}

impl Probe for MemoryProbe {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn read(&mut self, now: Timestamp, out: &mut Vec<Reading>) {
        out.push(self.measure(now));
        self.parts(now, out);
    }
}

fn host_usage(file: &mut KernelFile) -> io::Result<Tightest> {
    let text = file.read_up_to(MEMINFO_HEAD)?;
    let read = (meminfo(text, "MemTotal:"), meminfo(text, "MemAvailable:"));
    match read {
        (Some(total), Some(available)) if total > 0 => Ok(Tightest {
            used: total.saturating_sub(available),
            limit: total,
            source: file.path().display().to_string(),
            group: None,
        }),
        _ => Err(invalid("no MemTotal or MemAvailable".into())),
    }
}

/// Applies the present limits, and keeps files of unchanged groups open.
fn refresh(groups: &mut Vec<Group>, version: Version, dir: &Path) {
    let limited: Vec<_> = enclosing(version, dir)
        .into_iter()
        .filter_map(|(d, l)| Some((d, l?)))
        .collect();
    let same = groups.len() == limited.len()
        && groups
            .iter()
            .zip(&limited)
            .all(|(g, (d, _))| g.usage.path().parent() == Some(d));
    if same {
        for (group, (_, limit)) in groups.iter_mut().zip(limited) {
            group.limit = limit;
        }
    } else {
        *groups = limited
            .into_iter()
            .map(|(d, l)| Group::new(version, &d, l))
            .collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a tree of cgroup v2 as files: usage, file pages and limit of the inner and outer group.
    fn fake_v2(inner: (u64, u64, &str), outer: (u64, u64, &str)) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("inner")).unwrap();
        for (at, (usage, cache, max)) in [("inner", inner), (".", outer)] {
            let at = dir.path().join(at);
            fs::write(at.join("cgroup.procs"), "").unwrap();
            fs::write(at.join("memory.current"), format!("{usage}\n")).unwrap();
            fs::write(at.join("memory.max"), format!("{max}\n")).unwrap();
            // A file that is read twice is active.
            let active = cache - cache / 3;
            let stat = format!(
                "anon 1\ninactive_anon 9\nactive_file {}\ninactive_file {}\nfile_dirty 2\n\
                 file_writeback 3\n",
                active + 5,
                cache / 3
            );
            fs::write(at.join("memory.stat"), stat).unwrap();
        }
        dir
    }

    fn read_inner(dir: &Path) -> Reading {
        MemoryProbe::new(&MemoryLimit::CgroupV2(dir.join("inner")), None)
            .measure(Timestamp::from_micros(1))
    }

    #[test]
    fn the_tightest_enclosing_cgroup_is_reported_less_its_page_cache() {
        let outer_is_tighter = fake_v2((980, 30, "1000"), (4990, 0, "5000"));
        let r = read_inner(outer_is_tighter.path());
        assert_eq!((r.value, r.limit), (Some(0.998), Some(5000.0)));
        let inner_is_tighter = fake_v2((1000, 1, "1000"), (4990, 1000, "5000"));
        let r = read_inner(inner_is_tighter.path());
        assert_eq!((r.value, r.raw), (Some(0.999), Some(999.0)));
        assert!(r.source.ends_with("inner/memory.current"), "{}", r.source);
    }

    #[test]
    fn a_group_without_a_limit_does_not_count_and_one_over_its_limit_is_one() {
        let r = read_inner(fake_v2((u64::MAX / 4, 0, "max"), (1, 0, "max")).path());
        assert_eq!(r.source, MEMINFO);
        let r = read_inner(fake_v2((1100, 0, "1000"), (1, 0, "max")).path());
        assert_eq!((r.value, r.raw), (Some(1.0), Some(1100.0)));
    }

    #[test]
    fn a_limit_that_changes_is_taken_up_and_a_group_that_goes_is_missing_not_zero() {
        let dir = fake_v2((990, 0, "1000"), (1, 0, "max"));
        let mut probe = MemoryProbe::new(&MemoryLimit::CgroupV2(dir.path().join("inner")), None);
        assert_eq!(probe.measure(Timestamp::from_micros(0)).value, Some(0.99));
        fs::write(dir.path().join("inner/memory.max"), "991\n").unwrap();
        let at = Timestamp::from_micros(LIMITS_US);
        assert_eq!(probe.measure(at).limit, Some(991.0));
        fs::remove_dir_all(dir.path().join("inner")).unwrap();
        let r = probe.measure(Timestamp::from_micros(2 * LIMITS_US));
        assert!(r.value.is_none() && r.missing.unwrap().contains("gone"));
    }

    #[test]
    fn the_limit_in_words_and_bytes() {
        let total = host_total().unwrap();
        assert_eq!(MemoryLimit::Host.bytes().unwrap(), total);
        let declared = MemoryLimit::Declared {
            bytes: 7,
            root_pid: 1,
        };
        assert_eq!(
            (declared.bytes().unwrap(), declared.source()),
            (7, "declared".to_owned())
        );
        let dir = fake_v2((1, 0, "max"), (1, 0, "5000"));
        let limit = MemoryLimit::CgroupV2(dir.path().join("inner"));
        assert_eq!(limit.bytes().unwrap(), 5000);
        assert!(limit.source().starts_with("cgroup v2 /"));
        assert!(MemoryLimit::detect().bytes().unwrap() <= total);
    }
}
