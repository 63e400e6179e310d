//! The memory of a node's processes, if no cgroup counts it: the agent, its descendants, and the
//! trees registered in `<run_dir>/tree/*.pid`.
//!
//! Anonymous memory counts: resident pages without shared ones (`statm`), and swap. Pss would also
//! divide shared pages, but reading it walks every page table, which takes milliseconds for a large
//! process. A counted process stays counted until it ends, even if its parent ends first.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use fiec_schemas::ids::Timestamp;

use crate::kernel_file::{KernelFile, field, invalid, meminfo};

/// Most counted processes: each keeps a file open.
const MOST: usize = 512;
/// Interval of the walks of the tree if the kernel lists children, in microseconds.
const WALK_US: i64 = 100_000;
/// The interval if every process of the host must be examined, in microseconds.
const SCAN_US: i64 = 1_000_000;

struct Member {
    statm: KernelFile,
    swap: u64,
}

/// A registered root: the version of its file, its process, and whether that was counted.
struct Registered {
    modified: Option<SystemTime>,
    pid: u32,
    counted: bool,
}

pub(crate) struct ProcessTree {
    root: u32,
    registry: Option<PathBuf>,
    registered: BTreeMap<PathBuf, Registered>,
    members: BTreeMap<u32, Member>,
    walked: Option<Timestamp>,
    lists_children: bool,
    has_swap: bool,
    page: u64,
}

impl ProcessTree {
    pub(crate) fn new(root: u32, run_dir: Option<&Path>) -> Self {
        let swap = fs::read_to_string("/proc/meminfo")
            .ok()
            .and_then(|text| meminfo(&text, "SwapTotal:"))
            .unwrap_or(0);
        Self {
            root,
            registry: run_dir.map(|d| d.join("tree")),
            registered: BTreeMap::new(),
            members: BTreeMap::new(),
            walked: None,
            lists_children: Path::new("/proc/thread-self/children").exists(),
            has_swap: swap > 0,
            page: rustix::param::page_size() as u64,
        }
    }

    /// Returns the bytes in use by the tree. Fails when the root has ended.
    pub(crate) fn usage(&mut self, now: Timestamp) -> io::Result<u64> {
        let every = if self.lists_children {
            WALK_US
        } else {
            SCAN_US
        };
        let due = self
            .walked
            .is_none_or(|at| !(0..every).contains(&(now.micros() - at.micros())));
        // Known members first: ended processes leave the map before the walk. Otherwise the walk
        // could follow a reused number.
        let page = self.page;
        let mut bytes = 0;
        self.members
            .retain(|_, member| match private_pages(&mut member.statm) {
                Ok(pages) => {
                    bytes += pages * page + member.swap;
                    true
                }
                Err(_) => false,
            });
        if due {
            bytes += self.walk();
            self.walked = Some(now);
        }
        if self.members.contains_key(&self.root) {
            Ok(bytes)
        } else {
            Err(io::Error::new(
                io::ErrorKind::NotFound,
                format!("process {}, the root of the budget, has ended", self.root),
            ))
        }
    }

    /// Adds new members, and returns the bytes that they use.
    fn walk(&mut self) -> u64 {
        let known: BTreeSet<u32> = self.members.keys().copied().collect();
        let mut todo = self.registered_roots();
        // The root is opened once: after it ends, its number may be reused.
        if self.walked.is_none() {
            todo.push(self.root);
        }
        todo.extend(self.members.keys());
        let parents = if self.lists_children {
            None
        } else {
            Some(parents_of_all())
        };
        let mut seen = BTreeSet::new();
        while let Some(pid) = todo.pop() {
            if !seen.insert(pid) || !self.admit(pid) {
                continue;
            }
            match &parents {
                None => children(pid, &mut todo),
                Some(of) => todo.extend(of.iter().filter(|(_, p)| *p == pid).map(|(c, _)| *c)),
            }
        }
        for registered in self.registered.values_mut() {
            registered.counted |= self.members.contains_key(&registered.pid);
        }
        if self.has_swap {
            for (pid, member) in &mut self.members {
                member.swap = fs::read_to_string(format!("/proc/{pid}/status"))
                    .ok()
                    .and_then(|text| field(&text, "VmSwap:"))
                    .unwrap_or(0)
                    * 1024;
            }
        }
        let page = self.page;
        self.members
            .iter_mut()
            .filter(|(pid, _)| !known.contains(pid))
            .map(|(_, m)| private_pages(&mut m.statm).unwrap_or(0) * page + m.swap)
            .sum()
    }

    fn admit(&mut self, pid: u32) -> bool {
        if self.members.contains_key(&pid) {
            return true;
        }
        if self.members.len() >= MOST {
            return false;
        }
        match KernelFile::pinned(format!("/proc/{pid}/statm")) {
            Ok(statm) => self
                .members
                .insert(pid, Member { statm, swap: 0 })
                .is_none(),
            Err(_) => false,
        }
    }

    /// Returns the roots in `*.pid` files. A counted root that has ended is not added again until
    /// its file is rewritten, since its number may be reused.
    fn registered_roots(&mut self) -> Vec<u32> {
        let Some(entries) = self
            .registry
            .as_ref()
            .and_then(|dir| fs::read_dir(dir).ok())
        else {
            self.registered.clear();
            return Vec::new();
        };
        let mut found = BTreeMap::new();
        for path in entries.flatten().map(|e| e.path()).take(MOST) {
            if path.extension().is_none_or(|e| e != "pid") {
                continue;
            }
            let modified = fs::metadata(&path).and_then(|m| m.modified()).ok();
            let known = self
                .registered
                .remove(&path)
                .filter(|r| r.modified == modified);
            let pid = fs::read_to_string(&path)
                .ok()
                .and_then(|t| t.trim().parse().ok());
            match (known, pid) {
                (Some(known), Some(pid)) if known.pid == pid => found.insert(path, known),
                (_, Some(pid)) => found.insert(
                    path,
                    Registered {
                        modified,
                        pid,
                        counted: false,
                    },
                ),
                (_, None) => None,
            };
        }
        self.registered = found;
        self.registered
            .values()
            .filter(|r| !r.counted)
            .map(|r| r.pid)
            .collect()
    }
}

/// Returns resident pages without shared ones. A zombie has no memory, which is an error and not
/// zero.
fn private_pages(statm: &mut KernelFile) -> io::Result<u64> {
    let text = statm.read_up_to(128)?;
    let mut words = text.split_ascii_whitespace().map(str::parse::<u64>);
    match (words.next(), words.next(), words.next()) {
        (Some(Ok(0)), ..) => Err(io::Error::new(io::ErrorKind::NotFound, "it has ended")),
        (_, Some(Ok(resident)), Some(Ok(shared))) => Ok(resident.saturating_sub(shared)),
        _ => Err(invalid(format!("unexpected statm {text:?}"))),
    }
}

/// The kernel lists children under the thread that created them.
fn children(pid: u32, out: &mut Vec<u32>) {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return;
    };
    for task in tasks.flatten() {
        if let Ok(text) = fs::read_to_string(task.path().join("children")) {
            out.extend(
                text.split_ascii_whitespace()
                    .filter_map(|w| w.parse::<u32>().ok()),
            );
        }
    }
}

/// Returns (process, parent) of every process of the host.
fn parents_of_all() -> Vec<(u32, u32)> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok())
        .filter_map(|pid| Some((pid, parent_of(pid)?)))
        .collect()
}

/// Returns the parent of a process. The command in `stat` may contain spaces and parentheses.
pub(crate) fn parent_of(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};

    fn sleeper() -> Child {
        Command::new("sleep")
            .arg("60")
            .stdin(Stdio::null())
            .spawn()
            .unwrap()
    }

    fn at(ms: i64) -> Timestamp {
        Timestamp::from_micros(ms * 1000)
    }

    #[test]
    fn children_are_counted_by_both_ways_of_finding_them() {
        let mut child = sleeper();
        let me = std::process::id();
        for lists_children in [true, false] {
            let mut tree = ProcessTree::new(me, None);
            if lists_children && !tree.lists_children {
                println!("skipped: this kernel does not list children");
                continue;
            }
            tree.lists_children = lists_children;
            assert!(tree.usage(at(0)).unwrap() > 0);
            assert!(
                tree.members.contains_key(&child.id()),
                "lists_children {lists_children}"
            );
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_registered_root_counts_until_it_ends_and_its_number_is_not_taken_up_again() {
        let mut root = sleeper();
        let mut extra = sleeper();
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("tree")).unwrap();
        let mut tree = ProcessTree::new(root.id(), Some(dir.path()));
        let alone = tree.usage(at(0)).unwrap();
        assert_eq!(tree.members.len(), 1);
        fs::write(dir.path().join("tree/hog.pid"), format!("{}\n", extra.id())).unwrap();
        fs::write(dir.path().join("tree/bad.pid"), "not a number").unwrap();
        assert!(tree.usage(at(100)).unwrap() > alone);
        assert_eq!(tree.members.len(), 2);
        extra.kill().unwrap();
        extra.wait().unwrap();
        tree.usage(at(200)).unwrap();
        assert_eq!(tree.members.len(), 1);
        assert!(tree.registered_roots().is_empty());
        root.kill().unwrap();
        let mut zombie = 300;
        while tree.usage(at(zombie)).is_ok() {
            zombie += 1; // Until the kernel has taken its memory away; it is not waited for yet.
            assert!(zombie < 1_000_000, "a process that has ended still counts");
            std::thread::yield_now();
        }
        root.wait().unwrap();
        assert!(
            tree.usage(at(300))
                .unwrap_err()
                .to_string()
                .contains("has ended")
        );
        assert!(tree.usage(at(5_000)).is_err());
    }

    #[test]
    fn the_parent_is_found_whatever_the_command_is_called() {
        assert_eq!(
            parent_of(std::process::id()),
            Some(std::os::unix::process::parent_id())
        );
    }
}
