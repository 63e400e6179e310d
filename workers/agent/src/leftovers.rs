//! Children that an agent notes in its run folder. So a later agent of the same node can end
//! orphans, and no child of a living agent. A process is identified by its id and its start time,
//! since ids are reused.

use std::path::Path;

use rustix::process::{Pid, Signal};

use crate::proc_stat::Stat;

/// Returns when a process started, or none if it does not exist or is a zombie.
fn start_time(pid: u32) -> Option<String> {
    let stat = Stat::of(pid).filter(|stat| !stat.is_dead())?;
    Some(stat.started.to_string())
}

/// Whether the agent of a noted child lives. None if the child itself is gone.
fn agent_lives(pid: u32, note: &str) -> Option<bool> {
    let mut words = note.split_whitespace();
    let (child, agent, since) = (words.next()?, words.next()?, words.next()?);
    if start_time(pid)? != child {
        return None;
    }
    Some(start_time(agent.parse().ok()?).is_some_and(|start| start == since))
}

/// Notes a child.
pub fn note(run_dir: &Path, pid: u32) {
    let agent = std::process::id();
    if let (Some(start), Some(since)) = (start_time(pid), start_time(agent))
        && let Err(error) = std::fs::write(
            run_dir.join(format!("child-{pid}")),
            format!("{start} {agent} {since}"),
        )
    {
        tracing::warn!(%error, pid, "cannot note a child in the run folder");
    }
}

/// Removes the note of a child that is gone.
pub fn forget(run_dir: &Path, pid: u32) {
    let _ = std::fs::remove_file(run_dir.join(format!("child-{pid}")));
}

/// Ends the orphans of an earlier agent and returns their number. The folder must be secure
/// ([`crate::run_dir::secure`]): a forged note would end a process of ours.
pub fn sweep(run_dir: &Path) -> std::io::Result<usize> {
    let mut ended = 0;
    for entry in std::fs::read_dir(run_dir)?.flatten() {
        let name = entry.file_name();
        let Some(pid) = name
            .to_str()
            .and_then(|n| n.strip_prefix("child-")?.parse::<u32>().ok())
        else {
            continue;
        };
        let note = std::fs::read_to_string(entry.path()).unwrap_or_default();
        match agent_lives(pid, &note) {
            Some(true) => continue,
            Some(false) => {
                tracing::warn!(
                    pid,
                    "ending a program that an earlier agent of this node left"
                );
                if let Some(group) = Pid::from_raw(pid as i32) {
                    let _ = rustix::process::kill_process_group(group, Signal::KILL);
                }
                ended += 1;
            }
            None => {}
        }
        let _ = std::fs::remove_file(entry.path());
    }
    Ok(ended)
}
