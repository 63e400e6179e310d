//! What a foreign program leaves behind is ended, whatever happens to this process.
//!
//! While this process lives it ends the process group of its program itself. Should it be killed,
//! a shell that waits for the end of a pipe carries out its last will: it ends the group, stops
//! the container, and removes the folders. Processes that left their group become children of
//! this process (`PR_SET_CHILD_SUBREAPER`) where it is a program child, and are ended too.

use std::io::{self, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

/// Keeps the last line that it is given, and does what it says once its input has ended.
const EXECUTOR: &str =
    "trap '' INT TERM HUP; w=:; while read -r l; do w=$l; done; eval \"$w\" >/dev/null 2>&1";

/// Rounds in which orphans of orphans are looked for.
const ROUNDS: usize = 100;

static OWNS_ORPHANS: AtomicBool = AtomicBool::new(false);
static GUARDS: Mutex<Vec<u32>> = Mutex::new(Vec::new());

/// Declares that every process that becomes a child of this one belongs to the program that it
/// runs. For processes that do nothing else than run programs.
pub fn own_orphans() {
    let this = rustix::process::getpid();
    match rustix::process::set_child_subreaper(Some(this)) {
        Ok(()) => OWNS_ORPHANS.store(true, Ordering::Relaxed),
        Err(error) => eprintln!("fiec child: orphans of programs will not be found: {error}"),
    }
}

fn children() -> Vec<u32> {
    let mut found = Vec::new();
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else {
        return found;
    };
    for thread in threads.flatten() {
        let text = std::fs::read_to_string(thread.path().join("children")).unwrap_or_default();
        found.extend(
            text.split_whitespace()
                .filter_map(|pid| pid.parse::<u32>().ok()),
        );
    }
    found
}

/// Ends the processes that a program left behind; called when its own processes were reaped.
pub fn end_orphans() {
    if !OWNS_ORPHANS.load(Ordering::Relaxed) {
        return;
    }
    for _ in 0..ROUNDS {
        let guards = GUARDS
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let orphans: Vec<Pid> = children()
            .into_iter()
            .filter(|pid| !guards.contains(pid))
            .filter_map(|pid| Pid::from_raw(pid as i32))
            .collect();
        if orphans.is_empty() {
            return;
        }
        for orphan in orphans {
            // Fails where it has ended meanwhile, and is reaped all the same.
            let _ = kill_process(orphan, Signal::KILL);
            let _ = waitpid(Some(orphan), WaitOptions::empty());
        }
    }
    eprintln!("fiec child: the program keeps leaving processes behind");
}

/// Carries out a last will.
pub struct Guard {
    shell: Child,
}

impl Guard {
    /// With nothing to do yet.
    ///
    /// # Errors
    /// When no shell can be started.
    pub fn new() -> io::Result<Self> {
        let shell = Command::new("/bin/sh")
            .args(["-c", EXECUTOR])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        GUARDS
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(shell.id());
        Ok(Self { shell })
    }

    /// What is to be done should this process end now: a line for a shell.
    pub fn will(&mut self, line: &str) {
        debug_assert!(!line.contains('\n'));
        if let Some(pipe) = &mut self.shell.stdin
            && let Err(error) = writeln!(pipe, "{line}")
        {
            eprintln!("fiec: the guard of a program's processes is gone: {error}");
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.will(":");
        // Its input ends, so it ends.
        drop(self.shell.stdin.take());
        let _ = self.shell.wait();
        GUARDS
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|pid| *pid != self.shell.id());
    }
}

/// A word for a shell.
pub fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}
