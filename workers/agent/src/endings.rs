//! How a child ended, and whose fault that is.

use std::fmt;

use fiec_probes::oom::{OomKills, OutOf};
use fiec_schemas::{Event, Fault, OnFailure, StartError, Submission};
use rustix::process::{Signal, WaitIdStatus};

/// How a child ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Exit {
    /// By itself, with this status.
    Status(i32),
    /// By this signal.
    Signal(i32),
    /// It closed its socket, and had to be killed.
    Killed,
    /// The kernel does not say it, for this reason.
    Unknown(String),
}

impl Exit {
    /// The fault of a program that ended so before it had completed.
    pub fn fault(&self) -> Fault {
        match self {
            Self::Status(status) => Fault::Exited { status: *status },
            Self::Signal(signal) => Fault::Signalled { signal: *signal },
            Self::Killed | Self::Unknown(_) => Fault::Unexplained,
        }
    }

    /// What `env` means by the status with which it ends in place of a program that it cannot execute
    /// (POSIX, `env`, exit status).
    pub fn start_error(&self) -> Option<StartError> {
        match self {
            Self::Status(126) => Some(StartError::NotExecutable),
            Self::Status(127) => Some(StartError::NotFound),
            _ => None,
        }
    }
}

impl From<&WaitIdStatus> for Exit {
    fn from(status: &WaitIdStatus) -> Self {
        match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Self::Status(code),
            (None, Some(signal)) => Self::Signal(signal),
            (None, None) => Self::Unknown("unknown exit".to_owned()),
        }
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // It ends by a report, not by its exit.
            Self::Status(0) => f.write_str("exit status 0, but it has not said that it completed"),
            Self::Status(code) => write!(f, "exit status {code}"),
            Self::Signal(signal) => write!(f, "signal {signal}"),
            Self::Killed => f.write_str("closed its socket and had to be killed"),
            Self::Unknown(reason) => f.write_str(reason),
        }
    }
}

/// Why a child left its runner without a report that ends the run.
#[derive(Debug)]
pub(crate) enum Loss {
    /// It ended.
    Ended,
    /// It sent something that cannot be read, for this reason.
    Unreadable(String),
    /// It sent a report that cannot be used.
    Unusable,
    /// It was stopped from outside, and ended for that.
    Frozen(String),
}

impl Loss {
    /// The fault and its words. `exit`: how the child ended then, or was ended.
    pub fn of(self, exit: &Exit) -> (Fault, String) {
        match self {
            Self::Ended => (exit.fault(), exit.to_string()),
            Self::Unreadable(error) => (Fault::WrongAnswer, format!("{error}; {exit}")),
            Self::Unusable => (
                Fault::WrongAnswer,
                format!("its report cannot be used; {exit}"),
            ),
            Self::Frozen(reason) => (Fault::Frozen, format!("{reason}; {exit}")),
        }
    }
}

/// The event that an execution has failed: it ends with it, or is held if its submission wishes.
pub(crate) fn failure(spec: &Submission, fault: Fault, reason: String, stderr: String) -> Event {
    let fault = Some(Box::new(fault));
    match spec.on_failure {
        OnFailure::Fail => Event::Failed {
            reason,
            stderr,
            fault,
        },
        OnFailure::Hold => Event::Held {
            reason,
            stderr,
            fault,
        },
    }
}

/// Names a SIGKILL by the kernel for want of memory. Other faults stay as they are.
pub(crate) fn killed(fault: Fault, words: String, kills: &OomKills) -> (Fault, String) {
    match fault {
        Fault::Signalled { signal } if signal == Signal::KILL.as_raw() => {}
        Fault::OutOfMemory { .. } => {
            // It is known already, and its kill explains nothing else.
            let _ = kills.explain();
            return (fault, words);
        }
        _ => return (fault, words),
    }
    let mib = |bytes: u64| format!("{} MiB", bytes.div_ceil(1 << 20));
    match kills.explain() {
        None => (fault, words),
        Some(OutOf::Machine) => (
            Fault::MachineOutOfMemory,
            format!("{words}: killed by the kernel, the machine is out of memory"),
        ),
        Some(OutOf::Group {
            limit_bytes,
            peak_bytes,
        }) => {
            let peak = peak_bytes.map_or_else(String::new, |peak| format!(", peak {}", mib(peak)));
            let limit = mib(limit_bytes);
            (
                Fault::OutOfMemory {
                    limit_bytes,
                    peak_bytes,
                },
                format!("{words}: killed by the kernel, out of memory (limit {limit}{peak})"),
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fiec_schemas::FaultKind;

    #[test]
    fn the_status_of_env_that_finds_no_program_is_told_apart() {
        let env = |name: &str| {
            let status = std::process::Command::new("env").arg(name).status();
            Exit::Status(status.unwrap().code().unwrap())
        };
        let missing = env("no-such-command-of-fiec");
        assert_eq!(missing.start_error(), Some(StartError::NotFound));
        assert_eq!(env("/").start_error(), Some(StartError::NotExecutable));
        assert_eq!(env("false").start_error(), None);
        assert_eq!(missing.fault().kind(), FaultKind::Exited);
    }
}
