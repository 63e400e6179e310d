//! Processor time and memory of processes with all their descendants, from /proc.

use std::collections::BTreeMap;

use super::figures::Figures;
use crate::cluster::Cluster;

/// Seconds of processor time and resident bytes of a tree of processes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Usage {
    /// User and system time, ended children included.
    pub seconds: f64,
    /// Resident bytes now, shared pages counted in each process.
    pub resident: u64,
}

/// Usage of a process and all its descendants until now; zero if the process has ended.
pub fn tree(root: u32) -> Usage {
    let processes = snapshot();
    let mut usage = Usage::default();
    for process in family(&processes, root)
        .iter()
        .filter_map(|p| processes.get(p))
    {
        usage.seconds += process.seconds;
        usage.resident += process.resident;
    }
    usage
}

/// The most bytes that a process itself ever had in memory; zero if it has ended.
pub(super) fn peak(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// The ids of all descendants of a process, without its own.
pub fn descendants(root: u32) -> Vec<u32> {
    family(&snapshot(), root).split_off(1)
}

fn family(processes: &BTreeMap<u32, Process>, root: u32) -> Vec<u32> {
    let mut found = vec![root];
    let mut next = 0;
    while let Some(parent) = found.get(next).copied() {
        next += 1;
        let children = processes.iter().filter(|(_, p)| p.parent == parent);
        found.extend(children.map(|(pid, _)| *pid));
    }
    found
}

/// Usage of each part of a cluster until now, with its name. A worker includes its children.
pub(super) fn parts(cluster: &Cluster) -> Vec<(String, Usage)> {
    let mut all = vec![("nats-server".to_owned(), tree(cluster.servers.nats.pid()))];
    if let Some(postgres) = &cluster.servers.postgres {
        all.push(("PostgreSQL".to_owned(), tree(postgres.pid())));
    }
    let ours = cluster
        .policies
        .iter()
        .chain(&cluster.recorder)
        .chain(&cluster.workers);
    all.extend(ours.map(|p| (p.name.clone(), tree(p.pid()))));
    all
}

/// Processor time of each part of a cluster and the pieces of work it was spent on: name, seconds,
/// pieces. It is a sum over all rounds, because the system counts in hundredths of a second.
#[derive(Debug, Default)]
pub(super) struct Spent(Vec<(String, f64, usize)>);

impl Spent {
    /// Adds a round of `count` pieces between two looks at [`parts`].
    pub fn add(&mut self, then: &[(String, Usage)], now: &[(String, Usage)], count: usize) {
        for ((name, now), (_, then)) in now.iter().zip(then) {
            let seconds = now.seconds - then.seconds;
            match self.0.iter_mut().find(|(n, _, _)| n == name) {
                Some((_, sum, pieces)) => {
                    *sum += seconds;
                    *pieces += count;
                }
                None => self.0.push((name.clone(), seconds, count)),
            }
        }
    }

    /// Adds the mean of each part, in microseconds a piece, as the case `prefix` and its name.
    pub fn add_to(self, figures: &mut Figures, bench: &str, prefix: &str, metric: &str) {
        for (name, seconds, pieces) in self.0 {
            let case = format!("{prefix}{name}");
            let us = seconds * 1e6 / pieces.max(1) as f64;
            figures.add(bench, &case, metric, "us", us, None);
        }
    }
}

struct Process {
    parent: u32,
    seconds: f64,
    resident: u64,
}

fn snapshot() -> BTreeMap<u32, Process> {
    let ticks = rustix::param::clock_ticks_per_second() as f64;
    let page = rustix::param::page_size() as u64;
    let mut all = BTreeMap::new();
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return all;
    };
    for entry in entries.flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|n| n.parse::<u32>().ok())
        else {
            continue;
        };
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else {
            continue;
        };
        // The command's name may hold spaces and brackets: fields count from the last bracket.
        let Some((_, rest)) = stat.rsplit_once(')') else {
            continue;
        };
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let number = |i: usize| {
            fields
                .get(i)
                .and_then(|f| f.parse::<f64>().ok())
                .unwrap_or(0.0)
        };
        // proc(5): state, ppid, …; utime, stime, cutime, cstime are fields 14 to 17, rss is 24.
        all.insert(
            pid,
            Process {
                parent: number(1) as u32,
                seconds: (11..=14).map(number).sum::<f64>() / ticks,
                resident: number(21) as u64 * page,
            },
        );
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_uses_memory() {
        let usage = tree(std::process::id());
        assert!(usage.resident > 1 << 20, "{usage:?}");
    }
}
