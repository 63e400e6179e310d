//! One process of a foreign program, with all its descendants.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::time::Duration;

use fiec_schemas::Fault;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use super::guard;
use crate::launch::{self, Kind, Rules};
use crate::program::ProgramError;
use crate::start::NotStarted;

/// A process that SIGKILL has not ended after this time is the kernel's: frozen, or in a call that
/// does not return.
pub const DIES_WITHIN: Duration = Duration::from_secs(2);

/// Longest wait for a container engine that is to end a container.
const ENGINE_ENDS_WITHIN: Duration = Duration::from_secs(10);

/// How a process ended, if it has within this time.
fn status_within(child: &mut Child, within: Duration) -> io::Result<Option<ExitStatus>> {
    if let Some(status) = child.try_wait()? {
        return Ok(Some(status));
    }
    let fd = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    let within = Timespec::try_from(within).map_err(io::Error::other)?;
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    while matches!(poll(&mut fds, Some(&within)), Err(rustix::io::Errno::INTR)) {}
    child.try_wait()
}

/// A running process, the leader of its group.
pub struct Process {
    child: Child,
    fd: OwnedFd,
    group: Pid,
    /// A command that ends a process out of reach of signals, such as a container.
    ender: Option<Vec<String>>,
    ended: bool,
}

impl Process {
    /// Starts it under these rules. `folder`: of the package whose file the command may be.
    ///
    /// # Errors
    /// When it cannot be run.
    pub fn spawn(
        mut command: Command,
        rules: &Rules,
        folder: Option<&Path>,
        ender: Option<Vec<String>>,
    ) -> Result<Self, ProgramError> {
        command.stdin(Stdio::null());
        let kind = match ender {
            // A container engine.
            Some(_) => Kind::Engine,
            None => Kind::Program,
        };
        let child = launch::spawn(&mut command, rules, kind, None).map_err(|error| {
            let program = command.get_program().to_string_lossy();
            NotStarted::of(&program, folder, &error)
        })?;
        let group = Pid::from_child(&child);
        let fd = pidfd_open(group, PidfdFlags::empty()).map_err(ProgramError::transient)?;
        Ok(Self {
            child,
            fd,
            group,
            ender,
            ended: false,
        })
    }

    /// A descriptor that is readable once the process has ended.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// It is the command of a container engine.
    pub fn is_container(&self) -> bool {
        self.ender.is_some()
    }

    /// Its standard error, if it was piped.
    pub fn take_stderr(&mut self) -> Option<ChildStderr> {
        self.child.stderr.take()
    }

    /// Sends SIGTERM to the group.
    pub fn term(&self) {
        // Fails only if the group is gone.
        let _ = kill_process_group(self.group, Signal::TERM);
    }

    /// Kills the group.
    pub fn kill(&self) {
        self.end_container();
        let _ = kill_process_group(self.group, Signal::KILL);
    }

    /// Removes the container, if it is one.
    fn end_container(&self) {
        if let Some([program, arguments @ ..]) = self.ender.as_deref() {
            let started = Command::new(program)
                .args(arguments)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn();
            match started.and_then(|mut ender| status_within(&mut ender, ENGINE_ENDS_WITHIN)) {
                Ok(Some(_)) => {}
                Ok(None) => eprintln!("fiec: {program} has not ended a container yet"),
                Err(error) => eprintln!("fiec: cannot run {program} to end a container: {error}"),
            }
        }
    }

    /// Ends the rest of the group and returns how the process ended. Call it once [`Process::fd`]
    /// is readable, or after [`Process::kill`].
    ///
    /// # Errors
    /// When it does not end: that is the node's fault.
    pub fn end(&mut self) -> Result<ExitStatus, ProgramError> {
        // It is not reaped yet, so its process id and its group's id are still its own.
        if !self.ended {
            let _ = kill_process_group(self.group, Signal::KILL);
        }
        self.ended = true;
        let status = status_within(&mut self.child, DIES_WITHIN);
        // An engine's command that was killed has left its container.
        if !matches!(&status, Ok(Some(status)) if status.code().is_some()) {
            self.end_container();
        }
        guard::end_orphans();
        match status {
            Ok(Some(status)) => Ok(status),
            Ok(None) => Err(self.does_not_end()),
            Err(error) => Err(ProgramError::transient(error)),
        }
    }

    /// The error of a process that SIGKILL does not end. This process serves no further run.
    pub fn does_not_end(&self) -> ProgramError {
        guard::serve_no_more();
        ProgramError::Faulty {
            fault: Box::new(Fault::Frozen),
            words: format!("SIGKILL does not end process {}", self.child.id()),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.ended {
            self.kill();
            // Fails only if it was reaped already.
            let _ = self.end();
        }
    }
}

/// Describes an exit status.
pub fn in_words(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "unknown exit".to_owned(),
    }
}
