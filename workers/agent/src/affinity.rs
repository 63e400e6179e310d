//! The processors of a grant. The kernel confines a child, its threads and its descendants to them
//! (`sched_setaffinity`), in any language. Later descendants inherit it. Containers get them from
//! their engine, which starts their processes elsewhere.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::proc_stat::Stat;

/// Most walks: unconfined threads may start further threads during a walk.
const WALKS: usize = 8;

/// The processors that this worker may use itself, by the kernel's numbers.
///
/// # Errors
/// The kernel's error.
pub fn own() -> io::Result<Vec<u32>> {
    let set = sched_getaffinity(None)?;
    let numbers = 0..u32::try_from(CpuSet::MAX_CPU).unwrap_or(u32::MAX);
    Ok(numbers.filter(|cpu| set.is_set(*cpu as usize)).collect())
}

/// Confines a process, its threads and its descendants to these processors. An empty list means all
/// that this worker may use. Processes that end meanwhile are skipped.
///
/// # Errors
/// The kernel's refusal: none of the processors exists, or a process belongs to another user.
pub fn confine(pid: u32, cpus: &[u32]) -> io::Result<()> {
    let mut set = CpuSet::new();
    let all = if cpus.is_empty() { own()? } else { Vec::new() };
    for cpu in cpus.iter().chain(&all) {
        let cpu = *cpu as usize;
        if cpu >= CpuSet::MAX_CPU {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("there is no processor {cpu}"),
            ));
        }
        set.set(cpu);
    }
    let mut done = BTreeSet::new();
    for _ in 0..WALKS {
        let found = threads(pid);
        let new: Vec<u32> = found.difference(&done).copied().collect();
        if new.is_empty() {
            break;
        }
        for thread in new {
            match sched_setaffinity(Pid::from_raw(thread.cast_signed()), &set) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(error) => return Err(error.into()),
            }
            done.insert(thread);
        }
    }
    Ok(())
}

/// All threads of a process and of its descendants.
fn threads(root: u32) -> BTreeSet<u32> {
    let listed = Path::new("/proc/thread-self/children").exists();
    let parents = if listed { Vec::new() } else { parents() };
    let (mut found, mut seen, mut left) = (BTreeSet::new(), BTreeSet::new(), vec![root]);
    while let Some(pid) = left.pop() {
        if !seen.insert(pid) {
            continue;
        }
        for thread in numbers(&format!("/proc/{pid}/task")) {
            found.insert(thread);
            let children = format!("/proc/{pid}/task/{thread}/children");
            let children = std::fs::read_to_string(children).unwrap_or_default();
            left.extend(children.split_whitespace().flat_map(str::parse::<u32>));
        }
        let children = parents.iter().filter(|(_, parent)| *parent == pid);
        left.extend(children.map(|(child, _)| *child));
    }
    found
}

/// All processes with their parents, for kernels that do not list children.
fn parents() -> Vec<(u32, u32)> {
    let pids = numbers("/proc");
    pids.filter_map(|pid| Some((pid, Stat::of(pid)?.parent)))
        .collect()
}

/// The entries of a folder that are numbers.
fn numbers(folder: &str) -> impl Iterator<Item = u32> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::process::{Command, Stdio};

    /// A shell that prints, on request, the processors allowed for itself and for a process that it
    /// started before.
    const SHELL: &str = "sleep 1000 & while read -r _; do \
        grep -h Cpus_allowed_list /proc/$$/status /proc/$!/status; done; kill $!";

    #[test]
    fn a_process_and_what_it_has_started_are_confined_and_freed_again() {
        let all = own().unwrap();
        let first = *all.first().unwrap();
        let mut shell = Command::new("sh")
            .args(["-c", SHELL])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut asks = shell.stdin.take().unwrap();
        let mut lines = BufReader::new(shell.stdout.take().unwrap()).lines();
        let mut told = || {
            asks.write_all(b"?\n").unwrap();
            let mut next = || lines.next().unwrap().unwrap();
            [next(), next()].map(|l| l.split_whitespace().last().unwrap().to_owned())
        };
        let before = told();
        confine(shell.id(), &[first]).unwrap();
        assert_eq!(told(), [first.to_string(), first.to_string()]);
        confine(shell.id(), &[]).unwrap();
        assert_eq!(told(), before);
        assert!(confine(shell.id(), &[u32::MAX]).is_err());
        drop(asks);
        shell.wait().unwrap();
        // A process that is gone is no error.
        confine(shell.id(), &[first]).unwrap();
    }

    #[test]
    fn parents_are_found_where_the_kernel_lists_no_children() {
        let own = std::process::id();
        let parent = std::os::unix::process::parent_id();
        assert!(parents().contains(&(own, parent)));
    }
}
