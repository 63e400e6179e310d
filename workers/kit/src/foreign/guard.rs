//! Ends the processes that a foreign program leaves behind, even if this process is killed.
//!
//! While this process lives it ends its program's process group itself. A shell waits for the end
//! of a pipe, and acts if this process is killed: it ends the group, stops the container, and
//! removes the folders. A process that left its group becomes a child of this process
//! (`PR_SET_CHILD_SUBREAPER`) if this process is a program child. Such processes are ended, too.

use std::io::{self, Write as _};
use std::os::fd::{AsRawFd, BorrowedFd};
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

    /// Lets a command set the will before it becomes its program: to end its process group, and then
    /// to execute this shell line. Were the will set after the start, a kill of this process in
    /// between would leave behind what the program has started by then.
    #[allow(unsafe_code)]
    pub fn will_of(&self, command: &mut Command, line: &str) {
        debug_assert!(!line.contains('\n'));
        let Some(pipe) = self.shell.stdin.as_ref().map(AsRawFd::as_raw_fd) else {
            return;
        };
        let mut will = format!("kill -s KILL -- -{:WIDTH$}; {line}\n", "").into_bytes();
        // SAFETY: between fork and exec only system calls are made, and nothing is allocated. The
        // pipe is open as long as this guard lives, and the command is started before that ends.
        unsafe {
            command.pre_exec(move || {
                write_number(&mut will[KILL..KILL + WIDTH], std::process::id());
                // A guard that is gone must not end the program.
                let before = libc::signal(libc::SIGPIPE, libc::SIG_IGN);
                let _ = rustix::io::write(BorrowedFd::borrow_raw(pipe), &will);
                libc::signal(libc::SIGPIPE, before);
                Ok(())
            });
        }
    }
}

/// Where the number of the group stands in a will, and its room. A shell skips the blanks behind it.
const KILL: usize = "kill -s KILL -- -".len();
const WIDTH: usize = 10;

/// Writes a number to the left of blanks.
fn write_number(into: &mut [u8], number: u32) {
    let mut divisor = 1;
    while number / divisor >= 10 {
        divisor *= 10;
    }
    for place in into {
        if divisor == 0 {
            return;
        }
        *place = b'0' + (number / divisor % 10) as u8;
        divisor /= 10;
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

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may end so")]
mod tests {
    use super::*;

    #[test]
    fn a_will_is_set_before_the_program_runs_and_ends_its_whole_group() {
        let folder = tempfile::tempdir().unwrap();
        let (started, done) = (folder.path().join("pid"), folder.path().join("done"));
        let mut guard = Guard::new().unwrap();
        let mut command = Command::new("/bin/sh");
        let program = format!("sleep 600 & echo $! >{}; wait", started.display());
        command.args(["-c", &program]).process_group(0);
        guard.will_of(
            &mut command,
            &format!("touch {}", quoted(&done.to_string_lossy())),
        );
        let mut child = command.spawn().unwrap();
        let until = Instant::now() + Duration::from_secs(30);
        let pid = loop {
            assert!(Instant::now() < until, "the program did not start");
            let text = std::fs::read_to_string(&started).unwrap_or_default();
            match text.strip_suffix('\n') {
                Some(text) => break text.parse::<i32>().unwrap(),
                None => thread::sleep(ROUND),
            }
        };
        // As when this process is killed: nothing has been told since the start.
        drop(guard.shell.stdin.take());
        guard.shell.wait().unwrap();
        assert!(!child.wait().unwrap().success());
        assert!(done.exists());
        let stat = format!("/proc/{pid}/stat");
        let runs = || std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z"));
        while runs() {
            assert!(Instant::now() < until, "what the program started runs on");
            thread::sleep(ROUND);
        }
    }

    #[test]
    fn numbers_are_written_to_the_left() {
        for number in [0, 7, 10, 4_194_304, u32::MAX] {
            let mut place = [b' '; WIDTH];
            write_number(&mut place, number);
            assert_eq!(
                String::from_utf8_lossy(&place).trim_end(),
                number.to_string()
            );
        }
    }
}
