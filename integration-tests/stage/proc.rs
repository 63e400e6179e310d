//! Processes as the kernel lists them: whose children they are and whether they live.

use std::fs;
use std::time::Duration;

/// What the kernel says of a process from its state on, field 3.
fn fields(pid: u32) -> Option<Vec<String>> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name is in brackets and may hold anything.
    let (_, rest) = text.rsplit_once(')')?;
    Some(rest.split_whitespace().map(str::to_owned).collect())
}

/// State and parent of a process, if there is one of this id.
fn stat(pid: u32) -> Option<(char, u32)> {
    let fields = fields(pid)?;
    Some((
        fields.first()?.chars().next()?,
        fields.get(1)?.parse().ok()?,
    ))
}

/// Time for which these processes have computed so far, all together, to 10 ms.
pub fn cpu(pids: &[u32]) -> Duration {
    let ticks = |pid: &u32| -> Option<u64> {
        let fields = fields(*pid)?;
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        Some(field(14)? + field(15)?)
    };
    let sum: u64 = pids.iter().filter_map(ticks).sum();
    Duration::from_micros(sum * 1_000_000 / rustix::param::clock_ticks_per_second())
}

/// The living processes that name this text in their command line or environment.
pub fn naming(text: &str) -> Vec<u32> {
    let names = |pid: &u32| {
        ["cmdline", "environ"].iter().any(|file| {
            let bytes = fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
            String::from_utf8_lossy(&bytes).contains(text)
        })
    };
    let all = fs::read_dir("/proc").unwrap();
    let pids = all.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(|pid| is_alive(*pid) && names(pid)).collect()
}

/// Name of a process's program.
pub fn name(pid: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim().to_owned()
}

/// True while a process runs; one that has ended and was not reaped does not.
pub fn is_alive(pid: u32) -> bool {
    stat(pid).is_some_and(|(state, _)| !matches!(state, 'Z' | 'X'))
}

/// All processes with their parents, also those that have ended and that nobody has reaped.
fn all() -> impl Iterator<Item = (u32, u32)> {
    let entries = fs::read_dir("/proc").unwrap();
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter_map(|id: u32| stat(id).map(|(_, parent)| (id, parent)))
}

/// The children of a process, also those that nobody has reaped.
pub fn children(pid: u32) -> Vec<u32> {
    let children = all().filter(|(_, parent)| *parent == pid);
    children.map(|(id, _)| id).collect()
}

/// The living children of a process, and theirs.
pub fn descendants(pid: u32) -> Vec<u32> {
    let all: Vec<(u32, u32)> = all().filter(|(id, _)| is_alive(*id)).collect();
    let mut found = vec![pid];
    let mut next = 0;
    while let Some(parent) = found.get(next).copied() {
        found.extend(all.iter().filter(|(_, p)| *p == parent).map(|(id, _)| *id));
        next += 1;
    }
    found.split_off(1)
}

/// Ends a process at once, if it has not ended by itself.
pub fn kill_if_alive(pid: u32) {
    let pid = rustix::process::Pid::from_raw(pid.try_into().unwrap()).unwrap();
    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
}

/// Ends a process at once.
pub fn kill(pid: u32) {
    let pid = rustix::process::Pid::from_raw(pid.try_into().unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}
