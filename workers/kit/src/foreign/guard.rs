//! Ends the processes that a foreign program leaves behind, even if this process is killed.
//!
//! While this process lives it ends its program's process group itself. A shell waits for the end
//! of a pipe, and acts if this process is killed: it ends the group, stops the container, and
//! removes the folders. A process that left its group becomes a child of this process
//! (`PR_SET_CHILD_SUBREAPER`) if this process is a program child. Such processes are ended, too.

use std::io::{self, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

/// A shell that keeps the last line of its input and executes it when the input ends.
const EXECUTOR: &str =
    "trap '' INT TERM HUP; w=:; while read -r l; do w=$l; done; eval \"$w\" >/dev/null 2>&1";

/// Most rounds of the search for orphans of orphans.
const ROUNDS: usize = 100;

static OWNS_ORPHANS: AtomicBool = AtomicBool::new(false);
static GUARDS: Mutex<Vec<u32>> = Mutex::new(Vec::new());

/// Declares that every process that becomes a child of this one belongs to its program. Only for
/// processes that do nothing but run programs.
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

/// Ends the processes that a program left behind. Called after its own processes were reaped.
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
            // Fails if it has ended meanwhile. It is reaped all the same.
            let _ = kill_process(orphan, Signal::KILL);
            let _ = waitpid(Some(orphan), WaitOptions::empty());
        }
    }
    eprintln!("fiec child: the program keeps leaving processes behind");
}

/// Executes a shell line after the end of this process.
pub struct Guard {
    shell: Child,
}

impl Guard {
    /// A guard with an empty line.
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

    /// Sets the shell line to execute if this process ends now.
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
        // Closing its input makes it end.
        drop(self.shell.stdin.take());
        let _ = self.shell.wait();
        GUARDS
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|pid| *pid != self.shell.id());
    }
}

/// Quotes a word for a shell.
pub fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}
