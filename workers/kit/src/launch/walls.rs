//! What a started process may do.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, RawFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command};

use rustix::process::{DumpableBehavior, Resource, Rlimit, Signal};
use rustix::thread::CapabilitySet;

use super::Rules;

/// How much sooner than its worker the kernel ends a program when memory is short, from 0 to 1,000.
const EXPENDABLE: i32 = 500;
/// The same for what starts programs and ends what they leave.
const LESS_EXPENDABLE: i32 = 250;
/// Most files that a program may have open.
const FILES: u64 = 65_536;

/// Whose code a process runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The worker's own. It ends with its socket, and its programs before it. It leads a group.
    Own,
    /// A container engine's. Engines may need privileges, for example to map the users of a container.
    /// It leads a group.
    Engine,
    /// A program's. It leads a session of its own.
    Program,
    /// That of a program's keeper, which outlives its parent to end the program. The program gets
    /// its walls.
    Keeper,
}

/// What the limits of a program are, computed before the fork.
#[derive(Debug, Clone, Copy)]
struct Limits {
    files: Rlimit,
    processes: Rlimit,
}

impl Limits {
    fn of(rules: &Rules) -> Self {
        let below = |resource, most: u64| {
            let now = rustix::process::getrlimit(resource);
            let least = |limit: Option<u64>| Some(limit.map_or(most, |limit| limit.min(most)));
            Rlimit {
                current: least(now.current),
                maximum: least(now.maximum),
            }
        };
        let processes = on_the_machine().map_or(u64::MAX, |there| {
            there.saturating_add(rules.processes.into())
        });
        Self {
            files: below(Resource::Nofile, FILES),
            processes: below(Resource::Nproc, processes),
        }
    }
}

/// Processes and threads on the machine. The kernel's limit counts those of a user, which are not
/// more.
fn on_the_machine() -> Option<u64> {
    // "0.20 0.18 0.12 1/80 11206": the second number of the fourth field.
    let text = std::fs::read_to_string("/proc/loadavg").ok()?;
    text.split(' ').nth(3)?.split('/').nth(1)?.parse().ok()
}

/// Starts a command. The process of a program or an engine ends with the thread that calls this, at
/// the latest. It inherits its standard descriptors and `socket`, and is ended before its worker when
/// memory is short. A program gains no privilege, writes no core file, and has limits of files and
/// processes.
///
/// # Errors
/// When it cannot be started.
#[allow(unsafe_code)]
pub fn spawn(
    command: &mut Command,
    rules: &Rules,
    kind: Kind,
    socket: Option<BorrowedFd<'_>>,
) -> io::Result<Child> {
    let parent = rustix::process::getpid();
    let socket = socket.map(|fd| fd.as_raw_fd());
    let ends_with_parent = matches!(kind, Kind::Engine | Kind::Program);
    let is_walled = matches!(kind, Kind::Program | Kind::Keeper);
    let limits = is_walled.then(|| Limits::of(rules));
    // SAFETY: between fork and exec only system calls are made, and nothing is allocated. `socket` is
    // borrowed until the process was started.
    unsafe {
        command.pre_exec(move || {
            if ends_with_parent {
                rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
                // The parent may have died before the call above.
                if rustix::process::getppid() != Some(parent) {
                    return Err(io::Error::from(io::ErrorKind::BrokenPipe));
                }
            }
            if kind == Kind::Program {
                // Its worker knows what it leaves by its session.
                rustix::process::setsid()?;
            }
            close_others(socket)?;
            if let Some(limits) = limits {
                confine(&limits)?;
            }
            Ok(())
        });
    }
    if matches!(kind, Kind::Own | Kind::Engine) {
        command.process_group(0);
    }
    let child = command.spawn()?;
    match kind {
        Kind::Own | Kind::Keeper => raise_score(child.id(), LESS_EXPENDABLE),
        Kind::Engine | Kind::Program => expend(child.id()),
    }
    Ok(child)
}

/// Lets the kernel end a program before its keeper and its worker. Only after its exec it belongs to
/// its user, if this process is hidden.
pub(super) fn expend(pid: u32) {
    raise_score(pid, EXPENDABLE);
}

fn raise_score(pid: u32, score: i32) {
    let file = format!("/proc/{pid}/oom_score_adj");
    let now = std::fs::read_to_string(&file).unwrap_or_default();
    // Refused only where it may not be raised, and then it is as high already.
    if now.trim().parse::<i32>().is_ok_and(|now| now < score) {
        let _ = std::fs::write(&file, score.to_string());
    }
}

/// Lets the next exec close all descriptors but the standard ones and `kept`.
#[allow(unsafe_code)]
fn close_others(kept: Option<RawFd>) -> io::Result<()> {
    // SAFETY: it only sets a flag of descriptors. They are closed by the exec, which ends all code of
    // this process.
    let done = unsafe { libc::close_range(3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC as i32) };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    if let Some(fd) = kept {
        // SAFETY: the caller of `spawn` keeps it open.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty())?;
    }
    Ok(())
}

fn confine(limits: &Limits) -> io::Result<()> {
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    rustix::process::setrlimit(Resource::Core, none)?;
    rustix::process::setrlimit(Resource::Nofile, limits.files)?;
    rustix::process::setrlimit(Resource::Nproc, limits.processes)?;
    // A worker of root could otherwise be read by its programs. Others may not drop, nor have, them.
    for capability in [
        CapabilitySet::SYS_PTRACE,
        CapabilitySet::SYS_ADMIN,
        CapabilitySet::PERFMON,
    ] {
        let _ = rustix::thread::remove_capability_from_bounding_set(capability);
    }
    rustix::thread::set_no_new_privs(true)?;
    Ok(())
}

/// Hides the memory and the environment of this process from other processes of its user: they may
/// not trace it.
///
/// # Errors
/// When the kernel refuses it.
pub fn hide() -> io::Result<()> {
    Ok(rustix::process::set_dumpable_behavior(
        DumpableBehavior::NotDumpable,
    )?)
}
