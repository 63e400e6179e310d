//! Ends the processes that a foreign program leaves behind, even if this process is killed.
//!
//! While this process lives it ends its program's process group itself. A shell waits for the end
//! of a pipe, and acts if this process is killed: it ends the group, stops the container, and
//! removes the folders. A process that left its group becomes a child of this process
//! (`PR_SET_CHILD_SUBREAPER`) if this process is a program child. Such processes are ended, too.

use std::io::{self, Write as _};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use super::process::DIES_WITHIN;
use crate::launch::children;

/// A shell that keeps the last line of its input and executes it when the input ends.
const EXECUTOR: &str =
    "trap '' INT TERM HUP; w=:; while read -r l; do w=$l; done; eval \"$w\" >/dev/null 2>&1";

/// Time for a process without an agent to end itself.
const ENDS_ITSELF: Duration = Duration::from_millis(200);
/// Between two rounds of the search for orphans of orphans.
const ROUND: Duration = Duration::from_millis(1);

/// This process is about to end, with all processes of its program: wills are to be executed as they are.
static ENDS: AtomicBool = AtomicBool::new(false);
static OWNS_ORPHANS: AtomicBool = AtomicBool::new(false);
static SERVES_NO_MORE: AtomicBool = AtomicBool::new(false);
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

/// Ends this process, and all processes of its program, when the other end of its socket is closed:
/// its agent has ended, or has no use for it. That happens while it computes, too. Only for processes
/// that [own their orphans](own_orphans).
///
/// # Errors
/// When the thread cannot be started.
#[allow(unsafe_code)]
pub fn end_with_socket(socket: UnixStream) -> io::Result<()> {
    let watch = move || {
        let mut fds = [PollFd::new(&socket, PollFlags::RDHUP)];
        while matches!(poll(&mut fds, None), Err(rustix::io::Errno::INTR)) {}
        ENDS.store(true, Ordering::Relaxed);
        end_orphans();
        // If the others only wait for orders or for the program, they end this process themselves, and
        // remove its files.
        thread::sleep(ENDS_ITSELF);
        end_orphans();
        // SAFETY: it ends this process and runs nothing of it. Other threads may still compute, or
        // hold locks that a usual exit would wait for.
        unsafe { libc::_exit(0) }
    };
    thread::Builder::new()
        .name("fiec-watch".to_owned())
        .spawn(watch)
        .map(drop)
}

/// The children of this process but for guards.
fn orphans() -> Vec<Pid> {
    let guards = GUARDS.lock().unwrap_or_else(PoisonError::into_inner);
    children()
        .into_iter()
        .filter(|pid| !guards.contains(pid))
        .filter_map(|pid| Pid::from_raw(pid.cast_signed()))
        .collect()
}

/// Whether this process is to end after its present run, since a process of its program does not.
pub fn serves_no_more() -> bool {
    SERVES_NO_MORE.load(Ordering::Relaxed)
}

/// Lets this process end after its present run.
pub fn serve_no_more() {
    SERVES_NO_MORE.store(true, Ordering::Relaxed);
}

/// Ends the processes that a program left behind. Called after its own processes were reaped. One
/// that does not end is left to the agent, with this process.
pub fn end_orphans() {
    if !OWNS_ORPHANS.load(Ordering::Relaxed) {
        return;
    }
    let until = Instant::now() + DIES_WITHIN;
    loop {
        let orphans = orphans();
        if orphans.is_empty() {
            return;
        }
        if Instant::now() >= until {
            break;
        }
        let mut dying = 0;
        for orphan in orphans {
            // Fails if it has ended meanwhile. It is reaped all the same.
            let _ = kill_process(orphan, Signal::KILL);
            if matches!(waitpid(Some(orphan), WaitOptions::NOHANG), Ok(None)) {
                dying += 1;
            }
        }
        if dying > 0 {
            thread::sleep(ROUND);
        }
    }
    eprintln!("fiec child: the program left processes that do not end");
    serve_no_more();
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
        if ENDS.load(Ordering::Relaxed) {
            return;
        }
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
