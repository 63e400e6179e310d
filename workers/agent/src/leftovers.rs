//! Children that an agent notes in its run folder, so that a later agent of the same node can end
//! what an earlier one left. A process is known by its id and its start time, since ids are used
//! again.

use std::path::Path;

use rustix::process::{Pid, Signal};

fn start_time(pid: u32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Field 22; the second field may hold spaces and ends with the last parenthesis.
    stat.rsplit_once(')')?
        .1
        .split_whitespace()
        .nth(19)
        .map(str::to_owned)
}

/// Notes a child.
pub fn note(run_dir: &Path, pid: u32) {
    if let Some(start) = start_time(pid)
        && let Err(error) = std::fs::write(run_dir.join(format!("child-{pid}")), start)
    {
        tracing::warn!(%error, pid, "cannot note a child in the run folder");
    }
}

/// A child is gone.
pub fn forget(run_dir: &Path, pid: u32) {
    let _ = std::fs::remove_file(run_dir.join(format!("child-{pid}")));
}

/// Ends the children that an earlier agent left; returns how many there were.
pub fn sweep(run_dir: &Path) -> std::io::Result<usize> {
    std::fs::create_dir_all(run_dir)?;
    let mut ended = 0;
    for entry in std::fs::read_dir(run_dir)?.flatten() {
        let name = entry.file_name();
        let Some(pid) = name
            .to_str()
            .and_then(|n| n.strip_prefix("child-")?.parse::<u32>().ok())
        else {
            continue;
        };
        let noted = std::fs::read_to_string(entry.path()).ok();
        if noted.is_some()
            && noted == start_time(pid)
            && let Some(group) = Pid::from_raw(pid as i32)
        {
            tracing::warn!(
                pid,
                "ending a program that an earlier agent of this node left"
            );
            let _ = rustix::process::kill_process_group(group, Signal::KILL);
            ended += 1;
        }
        let _ = std::fs::remove_file(entry.path());
    }
    Ok(ended)
}
