//! The node's own memory cgroup, if this process may create one.
//!
//! The group is created *below* the one of this process, so that no limit of others is ever
//! escaped. v1: `<memory mount>/<own path>/fiec-<node>-<pid>` with `memory.limit_in_bytes`;
//! `memory.memsw.*` is unchanged. v2 allows a controller in children only if the group itself has
//! no processes. So processes of this executable, with their descendants, are first moved into
//! `fiec-home` beside the new group. If the group has any other process, it does not belong to us,
//! and nothing is changed. On hybrid machines the v1 memory controller counts.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use fiec_schemas::ids::NodeId;

use crate::memory::MemoryLimit;
use crate::tree::parent_of;

const HOME: &str = "fiec-home";
/// From this value on, a v1 limit means "no limit".
const NO_LIMIT: u64 = 1 << 60;

/// The reason why a node has no cgroup.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// There is no memory controller.
    #[error("no memory controller for this process: {0}")]
    NoController(String),
    /// The kernel or the mount refused.
    #[error("may not {doing} {}: {source}", path.display())]
    Refused {
        /// The operation.
        doing: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// cgroup v2 with foreign processes in the group.
    #[error(
        "{} holds {others} processes that are not of this program, and cgroup v2 limits only \
         groups without processes beside them: start it in a scope of its own, e.g. \
         `systemd-run --scope --property=Delegate=yes`", path.display()
    )]
    Occupied {
        /// The group.
        path: PathBuf,
        /// Number of foreign processes.
        others: usize,
    },
    /// A limit of zero would end all processes in the group at once.
    #[error("a memory limit of 0 bytes cannot hold a process")]
    ZeroLimit,
}

/// The cgroup version with the memory controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// One hierarchy per controller.
    V1,
    /// The unified hierarchy.
    V2,
}

impl Version {
    pub(crate) fn limit_file(self) -> &'static str {
        match self {
            Self::V1 => "memory.limit_in_bytes",
            Self::V2 => "memory.max",
        }
    }

    pub(crate) fn usage_file(self) -> &'static str {
        match self {
            Self::V1 => "memory.usage_in_bytes",
            Self::V2 => "memory.current",
        }
    }
}

/// The memory cgroup of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Located {
    /// Its kind.
    pub version: Version,
    /// Its directory.
    pub dir: PathBuf,
}

/// Parses a limit of the kernel. `max` and very large values mean none.
pub(crate) fn parse_limit(text: &str) -> Option<u64> {
    text.trim().parse().ok().filter(|l| *l < NO_LIMIT)
}

/// Finds the memory cgroup of this process.
///
/// # Errors
/// No mounted hierarchy has the memory controller.
pub fn locate_own() -> Result<Located, CgroupError> {
    let read = |path: &str| {
        fs::read_to_string(path).map_err(|e| CgroupError::NoController(format!("{path}: {e}")))
    };
    locate(&read("/proc/self/cgroup")?, &read("/proc/self/mountinfo")?)
}

fn locate(own: &str, mountinfo: &str) -> Result<Located, CgroupError> {
    let mut unified = None;
    for line in own.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(id), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        if controllers.split(',').any(|c| c == "memory") {
            let (root, point) = mount(mountinfo, "cgroup", "memory").ok_or_else(|| {
                CgroupError::NoController("the v1 memory hierarchy is not mounted here".into())
            })?;
            return Ok(Located {
                version: Version::V1,
                dir: resolve(&root, &point, path),
            });
        }
        if id == "0" && controllers.is_empty() {
            unified = Some(path);
        }
    }
    let path = unified
        .ok_or_else(|| CgroupError::NoController("/proc/self/cgroup names no group".into()))?;
    let (root, point) = mount(mountinfo, "cgroup2", "")
        .ok_or_else(|| CgroupError::NoController("cgroup v2 is not mounted here".into()))?;
    Ok(Located {
        version: Version::V2,
        dir: resolve(&root, &point, path),
    })
}

/// Returns (root within the hierarchy, mount point) of the first mount with this type and option.
fn mount(mountinfo: &str, fstype: &str, option: &str) -> Option<(String, PathBuf)> {
    mountinfo.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let mut right = right.split(' ');
        let matches = right.next()? == fstype
            && (option.is_empty() || right.nth(1)?.split(',').any(|o| o == option));
        let mut left = left.split(' ').skip(3);
        matches.then_some(())?;
        Some((
            unescape(left.next()?),
            PathBuf::from(unescape(left.next()?)),
        ))
    })
}

/// Decodes a path of mountinfo, which has space, tab, newline and backslash in octal.
fn unescape(text: &str) -> String {
    [
        ("\\040", " "),
        ("\\011", "\t"),
        ("\\012", "\n"),
        ("\\134", "\\"),
    ]
    .iter()
    .fold(text.to_owned(), |t, (from, to)| t.replace(from, to))
}

/// Returns the directory of a cgroup path. In a container the path may be invisible. Then the
/// topmost visible directory encloses it.
fn resolve(root: &str, point: &Path, path: &str) -> PathBuf {
    let below = Path::new(path).strip_prefix(root).unwrap_or(Path::new(""));
    let inside = below
        .components()
        .all(|c| matches!(c, std::path::Component::Normal(_)));
    let dir = point.join(below);
    // Joined with an empty path, the mount point would end in a slash.
    if inside && below != Path::new("") && dir.is_dir() {
        dir
    } else {
        point.to_owned()
    }
}

/// The node's own memory cgroup. On drop this process leaves it, and it is removed if it is empty.
/// Otherwise a later [`NodeCgroup::create`] removes it.
#[derive(Debug)]
pub struct NodeCgroup {
    version: Version,
    dir: PathBuf,
    /// The group for a process that leaves.
    outside: PathBuf,
    owner: u32,
}

impl NodeCgroup {
    /// Creates the group with its limit and without a process (see [`NodeCgroup::enter`]). Removes
    /// empty groups of agents that have ended.
    ///
    /// # Errors
    /// The reason. The caller then uses a declared budget.
    pub fn create(node: &NodeId, limit_bytes: u64) -> Result<Self, CgroupError> {
        if limit_bytes == 0 {
            return Err(CgroupError::ZeroLimit);
        }
        let own = locate_own()?;
        let (base, outside) = match own.version {
            Version::V1 => (own.dir.clone(), own.dir),
            Version::V2 => arrange_v2(&own.dir)?,
        };
        sweep(&base);
        let pid = std::process::id();
        let dir = base.join(format!("fiec-{node}-{pid}"));
        match fs::create_dir(&dir) {
            // The same process may create the same node's group again.
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                return Err(refused("make a cgroup", dir)(e));
            }
            _ => {}
        }
        let made = Self {
            version: own.version,
            dir,
            outside,
            owner: pid,
        };
        // On failure `made` is dropped here and removes the directory.
        let limit = made.dir.join(own.version.limit_file());
        fs::write(&limit, limit_bytes.to_string()).map_err(refused("limit", limit))?;
        Ok(made)
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// The limit that M uses for a node in this group.
    pub fn limit(&self) -> MemoryLimit {
        match self.version {
            Version::V1 => MemoryLimit::CgroupV1(self.dir.clone()),
            Version::V2 => MemoryLimit::CgroupV2(self.dir.clone()),
        }
    }

    /// Moves a process in, with all its threads. Its later children start in the group. Memory that
    /// it already has stays charged to the old group (v1).
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn join(&self, pid: u32) -> Result<(), CgroupError> {
        move_to(&self.dir, pid)
    }

    /// Moves this process in.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn enter(&self) -> Result<(), CgroupError> {
        self.join(std::process::id())
    }

    /// Leaves and removes the group now.
    ///
    /// # Errors
    /// The kernel's refusal: usually another process is still in it.
    pub fn remove(mut self) -> Result<(), CgroupError> {
        let result = self.leave_and_remove();
        self.owner = 0; // The drop that follows has nothing left to do.
        result
    }

    fn leave_and_remove(&mut self) -> Result<(), CgroupError> {
        if members(&self.dir).contains(&self.owner) {
            move_to(&self.outside, self.owner)?;
        }
        match fs::remove_dir(&self.dir) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(refused("remove", self.dir.clone())(e))
            }
            _ => Ok(()),
        }
    }
}

impl Drop for NodeCgroup {
    fn drop(&mut self) {
        // A forked child that runs destructors must not remove its parent's group.
        if std::process::id() == self.owner
            && let Err(e) = self.leave_and_remove()
        {
            tracing::debug!("the node's cgroup stays until it is swept: {e}");
        }
    }
}

fn refused(doing: &'static str, path: PathBuf) -> impl FnOnce(io::Error) -> CgroupError {
    move |source| CgroupError::Refused {
        doing,
        path,
        source,
    }
}

fn move_to(dir: &Path, pid: u32) -> Result<(), CgroupError> {
    let procs = dir.join("cgroup.procs");
    fs::write(&procs, pid.to_string()).map_err(refused("move a process by", procs))
}

fn members(dir: &Path) -> BTreeSet<u32> {
    let text = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
    text.lines().filter_map(|l| l.parse().ok()).collect()
}

/// Removes groups of agents that have ended. The kernel refuses to remove one with processes.
fn sweep(base: &Path) {
    let Ok(entries) = fs::read_dir(base) else {
        return;
    };
    for path in entries.flatten().map(|e| e.path()) {
        let pid = path.file_name().and_then(|n| n.to_str()).and_then(owner_of);
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists())
            && fs::remove_dir(&path).is_ok()
        {
            tracing::debug!(path = %path.display(), "swept the cgroup of an agent that has ended");
        }
    }
}

/// Returns the process that created a group of this name, if the name is one of ours.
fn owner_of(name: &str) -> Option<u32> {
    name.strip_prefix("fiec-")?.rsplit_once('-')?.1.parse().ok()
}

/// Prepares a v2 group to limit its children. Returns (the parent of new groups, the group for
/// leavers).
fn arrange_v2(own: &Path) -> Result<(PathBuf, PathBuf), CgroupError> {
    let base = if own.ends_with(HOME) {
        own.parent().unwrap_or(own)
    } else {
        own
    };
    let has = |file: &str| {
        fs::read_to_string(base.join(file))
            .is_ok_and(|t| t.split_ascii_whitespace().any(|c| c == "memory"))
    };
    if !has("cgroup.controllers") {
        let why = format!(
            "{} does not list memory",
            base.join("cgroup.controllers").display()
        );
        return Err(CgroupError::NoController(why));
    }
    if has("cgroup.subtree_control") {
        return Ok((base.to_owned(), own.to_owned()));
    }
    let others = foreign(&members(base));
    if others > 0 {
        return Err(CgroupError::Occupied {
            path: base.to_owned(),
            others,
        });
    }
    let home = base.join(HOME);
    match fs::create_dir(&home) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
            return Err(refused("make a cgroup", home)(e));
        }
        _ => {}
    }
    let control = base.join("cgroup.subtree_control");
    // New children may still appear in the group: bounded attempts.
    let mut last = None;
    for _ in 0..8 {
        for pid in members(base) {
            match move_to(&home, pid) {
                Err(CgroupError::Refused { source, .. })
                    if source.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => {}
                other => other?,
            }
        }
        match fs::write(&control, "+memory") {
            Ok(()) => return Ok((base.to_owned(), home)),
            Err(e) => last = Some(e),
        }
    }
    let source = last.unwrap_or_else(|| io::ErrorKind::Other.into());
    Err(CgroupError::Refused {
        doing: "enable memory in",
        path: control,
        source,
    })
}

/// Counts the processes that neither run this executable nor descend from one that does.
fn foreign(pids: &BTreeSet<u32>) -> usize {
    let own = fs::read_link("/proc/self/exe");
    let is_like_this = |pid: u32| match (fs::read_link(format!("/proc/{pid}/exe")), &own) {
        (Ok(exe), Ok(own)) => exe == *own,
        // Services hide from other processes of their user, but not their name and owner.
        (Err(error), _) if error.kind() == io::ErrorKind::PermissionDenied => {
            let this = std::process::id();
            name_and_owner(pid).is_some_and(|found| Some(found) == name_and_owner(this))
        }
        _ => false,
    };
    let ours = |pid: u32| {
        std::iter::successors(Some(pid), |p| parent_of(*p).filter(|p| *p > 1))
            .take(64)
            .any(|p| p == std::process::id() || is_like_this(p))
    };
    pids.iter().filter(|pid| !ours(**pid)).count()
}

fn name_and_owner(pid: u32) -> Option<(String, u32)> {
    let folder = format!("/proc/{pid}");
    let name = fs::read_to_string(format!("{folder}/comm")).ok()?;
    Some((name, fs::metadata(folder).ok()?.uid()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const V1: &str = "30 25 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                      31 25 0:27 / /sys/fs/cgroup/mem\\040ory rw shared:9 - cgroup cgroup rw,memory\n\
                      32 25 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";

    #[test]
    fn on_a_hybrid_machine_the_v1_memory_controller_counts() {
        let own = locate("4:memory:/\n1:cpu:/\n0::/user\n", V1).unwrap();
        assert_eq!(own.version, Version::V1);
        assert_eq!(own.dir, Path::new("/sys/fs/cgroup/mem ory"));
        let own = locate("0::/user\n", V1).unwrap();
        assert_eq!(own.version, Version::V2);
        assert!(locate("1:cpu:/\n", V1).is_err());
        assert!(
            locate("4:memory:/\n", "")
                .unwrap_err()
                .to_string()
                .contains("not mounted")
        );
    }

    #[test]
    fn a_path_is_taken_relative_to_what_is_mounted() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("in")).unwrap();
        assert_eq!(resolve("/", dir.path(), "/in"), dir.path().join("in"));
        assert_eq!(
            resolve("/docker/1", dir.path(), "/docker/1/in"),
            dir.path().join("in")
        );
        let top = resolve("/docker/1", dir.path(), "/docker/1");
        assert_eq!(top.as_os_str(), dir.path().as_os_str());
        // As seen from a container without its own namespace, or from outside the namespace.
        assert_eq!(resolve("/", dir.path(), "/docker/1"), dir.path());
        assert_eq!(resolve("/", dir.path(), "/../in"), dir.path());
    }

    #[test]
    fn names_say_whose_they_are_and_limits_whether_there_is_one() {
        assert_eq!(owner_of("fiec-node-a-17"), Some(17));
        assert_eq!(owner_of(HOME), None);
        assert_eq!(owner_of("docker-17"), None);
        assert_eq!(parse_limit("1048576\n"), Some(1_048_576));
        assert_eq!(parse_limit("max\n"), None);
        assert_eq!(parse_limit("9223372036854771712\n"), None);
    }

    #[test]
    fn v2_is_arranged_only_where_all_processes_are_ours() {
        let dir = tempfile::tempdir().unwrap();
        let write = |f: &str, t: &str| fs::write(dir.path().join(f), t).unwrap();
        write("cgroup.controllers", "cpu pids\n");
        assert!(matches!(
            arrange_v2(dir.path()),
            Err(CgroupError::NoController(_))
        ));
        write("cgroup.controllers", "cpu memory\n");
        write("cgroup.subtree_control", "\n");
        write("cgroup.procs", &format!("1\n{}\n", std::process::id()));
        assert!(matches!(
            arrange_v2(dir.path()),
            Err(CgroupError::Occupied { others: 1, .. })
        ));
        write("cgroup.procs", &format!("{}\n", std::process::id()));
        let home = dir.path().join(HOME);
        assert_eq!(
            arrange_v2(dir.path()).unwrap(),
            (dir.path().to_owned(), home.clone())
        );
        assert_eq!(members(&home), BTreeSet::from([std::process::id()]));
        // A process that starts in home creates its group beside it, not below.
        write("cgroup.subtree_control", "memory\n");
        assert_eq!(arrange_v2(&home).unwrap(), (dir.path().to_owned(), home));
    }
}
