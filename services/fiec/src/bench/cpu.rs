//! Processor time and memory of processes with all their descendants, from /proc.

use std::collections::BTreeMap;

/// Seconds of processor time and resident bytes of a tree of processes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Usage {
    /// User and system time, ended children included.
    pub seconds: f64,
    /// Resident bytes now, shared pages counted in each process.
    pub resident: u64,
}

/// Usage of a process and all its descendants now; zero for one that is gone.
pub fn tree(root: u32) -> Usage {
    let processes = snapshot();
    let mut usage = Usage::default();
    let mut open = vec![root];
    while let Some(pid) = open.pop() {
        if let Some(process) = processes.get(&pid) {
            usage.seconds += process.seconds;
            usage.resident += process.resident;
        }
        open.extend(
            processes
                .iter()
                .filter(|(_, p)| p.parent == pid)
                .map(|(pid, _)| *pid),
        );
    }
    usage
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
