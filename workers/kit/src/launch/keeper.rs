//! The keeper of a program that runs as its own process: a child of the worker, and the program's
//! parent. Whatever the program starts and leaves, also after `setsid` and two forks, becomes a child
//! of its keeper (`PR_SET_CHILD_SUBREAPER`). The keeper ends all of it when the program has ended, or
//! when its control socket is closed, as it is when the worker ends in any way.
//!
//! The keeper has the program's environment, folder and walls. Its standard input is the control
//! socket; it says there what became of the program, in lines of JSON.

use std::ffi::OsString;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process};
use serde::{Deserialize, Serialize};

use crate::frames::SOCKET_ENV;

/// The first argument of a process that is to be a keeper. The program's command follows.
pub const KEEPER: &str = "program-launch";

/// Longest time that a keeper needs to end what it keeps.
const SWEEP: Duration = Duration::from_secs(2);
const ROUND: Duration = Duration::from_millis(1);

/// What a keeper says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Said {
    /// The program runs.
    Started {
        /// Its process.
        pid: u32,
    },
    /// It cannot be started.
    NotStarted {
        /// The kernel's number of the error.
        errno: i32,
    },
    /// It has ended, with all that it started.
    Ended {
        /// Its exit status, if it ended by itself.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        status: Option<i32>,
        /// The signal that ended it. Neither, if it does not end.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        signal: Option<i32>,
    },
}

impl Said {
    /// Reads what a keeper says next.
    ///
    /// # Errors
    /// When it has ended without a word, or says nothing known.
    pub fn read(control: &UnixStream) -> io::Result<Self> {
        let mut line = String::new();
        // A byte at a time, so that nothing of a later line is taken.
        BufReader::with_capacity(1, control).read_line(&mut line)?;
        if line.is_empty() {
            return Err(io::Error::other("a program's keeper has ended"));
        }
        Ok(serde_json::from_str(&line)?)
    }

    fn say(&self, mut control: &UnixStream) {
        // Where nobody listens any more, the worker is gone.
        if let Ok(text) = serde_json::to_string(self) {
            let _ = control.write_all(format!("{text}\n").as_bytes());
        }
    }
}

/// Runs the keeper if this process is to be one. To be called before anything else is done.
pub fn keep_if_asked() -> Option<ExitCode> {
    let mut words = std::env::args_os().skip(1);
    (words.next()? == KEEPER).then(|| match keep(words.collect()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("fiec: the keeper of a program: {error}");
            ExitCode::FAILURE
        }
    })
}

fn keep(words: Vec<OsString>) -> io::Result<()> {
    let control = UnixStream::from(take(0)?);
    rustix::thread::set_name(c"fiec-keeper")?;
    // A signal to the worker's group, as from a terminal, is the worker's affair.
    let _ = rustix::process::setsid();
    mask(libc::SIG_BLOCK)?;
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    let (program, arguments) = words
        .split_first()
        .ok_or_else(|| io::Error::other("no command"))?;
    let mut command = Command::new(program);
    command
        .args(arguments)
        .stdin(Stdio::null())
        .process_group(0);
    end_with_this_thread(&mut command);
    let started = command.spawn();
    // The program's ends are its own: the worker notices when it closes them.
    if let Some(socket) = std::env::var(SOCKET_ENV)
        .ok()
        .and_then(|fd| fd.parse().ok())
    {
        drop(take(socket)?);
    }
    leave_output()?;
    let pid = match started {
        Ok(child) => {
            super::walls::expend(child.id());
            child.id()
        }
        Err(error) => {
            let errno = error.raw_os_error().unwrap_or_default();
            Said::NotStarted { errno }.say(&control);
            return Ok(());
        }
    };
    Said::Started { pid }.say(&control);
    let ended = Arc::new(Mutex::new(None));
    let waker = control.try_clone()?;
    let found = Arc::clone(&ended);
    let reaper = thread::Builder::new()
        .name("fiec-reap".to_owned())
        .spawn(move || {
            reap(pid, |status| {
                *found.lock().unwrap_or_else(PoisonError::into_inner) = Some(status);
                let _ = waker.shutdown(std::net::Shutdown::Read);
            });
        })?;
    // Until the worker closes it, or the program has ended.
    let _ = (&control).read(&mut [0]);
    if sweep() {
        // It ends, since no child is left.
        let _ = reaper.join();
    }
    let status = ended.lock().unwrap_or_else(PoisonError::into_inner).take();
    Said::Ended {
        status: status.and_then(|status: WaitStatus| status.exit_status()),
        signal: status.and_then(|status: WaitStatus| status.terminating_signal()),
    }
    .say(&control);
    Ok(())
}

/// Reaps all children, so that none stays a zombie. `on_end` is called when the program has ended.
fn reap(program: u32, mut on_end: impl FnMut(WaitStatus)) {
    loop {
        match rustix::process::wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid.as_raw_pid().unsigned_abs() == program => on_end(status),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            // No child is left.
            Err(_) => return,
        }
    }
}

/// Ends all that is left. Returns false if something does not end.
fn sweep() -> bool {
    let until = Instant::now() + SWEEP;
    loop {
        let left = children();
        if left.is_empty() || Instant::now() >= until {
            return left.is_empty();
        }
        for pid in left {
            if let Some(pid) = Pid::from_raw(pid.cast_signed()) {
                // Fails if it has ended meanwhile.
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        thread::sleep(ROUND);
    }
}

/// The children of this process. None, where the kernel does not list them.
pub fn children() -> Vec<u32> {
    children_of("self")
}

/// The children of all threads of a process: its number, or `self`.
fn children_of(process: &str) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{process}/task"));
    let threads = threads.into_iter().flatten().flatten();
    let texts = threads
        .map(|thread| std::fs::read_to_string(thread.path().join("children")).unwrap_or_default());
    texts
        .flat_map(|text| {
            let pids = text.split_whitespace().flat_map(str::parse::<u32>);
            pids.collect::<Vec<_>>()
        })
        .collect()
}

/// Whether a kept program has left processes: its own children, or what became its keeper's. Where the
/// kernel lists no children, it has not.
pub fn has_left_others(keeper: u32, program: u32) -> bool {
    // In this order: what leaves the program meanwhile is seen with the keeper.
    let of_program = children_of(&program.to_string());
    let of_keeper = children_of(&keeper.to_string());
    !of_program.is_empty() || of_keeper.iter().any(|pid| *pid != program)
}

#[allow(unsafe_code)]
fn take(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: the worker opened it for this process, and nothing else here uses it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)?;
    Ok(fd)
}

#[allow(unsafe_code)]
fn end_with_this_thread(command: &mut Command) {
    // SAFETY: between fork and exec only system calls are made.
    unsafe {
        command.pre_exec(|| {
            // The mask outlives an exec, and the forks of the program would inherit it: nobody could
            // end them by SIGTERM.
            mask(libc::SIG_UNBLOCK)?;
            Ok(rustix::process::set_parent_process_death_signal(Some(
                Signal::KILL,
            ))?)
        });
    }
}

/// The program's log ends with the program.
#[allow(unsafe_code)]
fn leave_output() -> io::Result<()> {
    let nothing = std::fs::OpenOptions::new().write(true).open("/dev/null")?;
    for fd in [1, 2] {
        // SAFETY: both are open; this process has no other use of them.
        if unsafe { libc::dup2(nothing.as_raw_fd(), fd) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Blocks or unblocks the signals that would end the keeper before its program.
#[allow(unsafe_code)]
fn mask(how: libc::c_int) -> io::Result<()> {
    // SAFETY: the set is initialised by the first call, and the calling thread is the only one.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
            libc::sigaddset(&raw mut set, signal);
        }
        match libc::sigprocmask(how, &raw const set, std::ptr::null_mut()) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}
