//! Faults: what ended an execution, or an attempt at it, and who it is charged to.
//!
//! A fault's kind alone says whose it is ([`FaultKind::owner`]). Only the program's own faults count
//! against `retries`. A fault of the node or of the infrastructure gives the binding back, and the
//! execution goes on elsewhere from its last commit.

use std::io;

use schemars::JsonSchema;

use crate::event::{Cause, Event, Phase};
use crate::ids::ExecutionId;
use crate::named::named;
use crate::tagged::tagged;

named! {
    /// Who a fault is charged to.
    pub enum Owner {
        /// The program. Its crashes count against `retries`.
        Program,
        /// The node. The execution goes on elsewhere.
        Node,
        /// What the nodes share: the broker, and what is stored in it.
        Infrastructure,
        /// The submission: its deadline, or an execution that it needs.
        Submission,
    }
}

named! {
    /// Why a node could not start a process.
    pub enum StartError {
        /// The command, or its interpreter, is not there.
        NotFound,
        /// The command may not be executed.
        NotExecutable,
        /// The command has no format that the kernel knows.
        NoFormat,
        /// No further process is allowed.
        NoProcesses,
        /// No further file may be opened.
        NoFiles,
        /// There is no memory for it.
        NoMemory,
        /// There is no space on a disk for it.
        NoSpace,
        /// Another error.
        Other,
    }
}

tagged! { "is", FaultKind,
    /// What ended an execution, or an attempt at it.
    #[derive(Debug, Clone, PartialEq, Eq, JsonSchema)]
    pub enum Fault {
        /// The program ended with a status before it had completed.
        Exited {
            /// The status.
            status: i32,
        },
        /// A signal ended the program.
        Signalled {
            /// Its number.
            signal: i32,
        },
        /// The kernel killed the program, because the control group of its worker had no memory left.
        OutOfMemory {
            /// The limit of the group.
            limit_bytes: u64,
            /// The most that the group ever held, if the kernel says so.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            peak_bytes: Option<u64>,
        },
        /// Nobody can say how the program ended: it closed its socket, and had to be killed.
        Unexplained,
        /// The program said that it failed.
        Reported,
        /// The program broke a limit of its manifest.
        Limit,
        /// What the program sent cannot be used.
        WrongAnswer,
        /// Its package has no file that can be started.
        BrokenPackage,
        /// The node cannot start the program.
        CannotStart {
            /// The command.
            command: String,
            /// The reason.
            error: StartError,
        },
        /// A disk of the node is full.
        DiskFull,
        /// A device is gone, or its driver failed.
        DeviceLost,
        /// The kernel killed the program, because the machine had no memory left.
        MachineOutOfMemory,
        /// The program was stopped from outside and did not run any more.
        Frozen,
        /// The worker's own code failed.
        WorkerPanicked,
        /// The worker went away while it computed.
        WorkerDied,
        /// A node computed wrong bits.
        Corrupt,
        /// The state, or the submission, is not stored any more.
        DataLost,
        /// The broker could not be reached.
        Broker,
        /// It has computed as long as the submission allows.
        ComputedLimit,
        /// The deadline of the submission has passed.
        Deadline,
        /// An execution that this one depends on has failed.
        Dependency {
            /// That execution.
            id: ExecutionId,
        },
        /// A part of its range has failed.
        Part {
            /// The part.
            id: ExecutionId,
        },
    }
}

impl FaultKind {
    /// Who it is charged to.
    pub const fn owner(self) -> Owner {
        match self {
            Self::Exited
            | Self::Signalled
            | Self::OutOfMemory
            | Self::Unexplained
            | Self::Reported
            | Self::Limit
            | Self::WrongAnswer
            | Self::BrokenPackage => Owner::Program,
            Self::CannotStart
            | Self::DiskFull
            | Self::DeviceLost
            | Self::MachineOutOfMemory
            | Self::Frozen
            | Self::WorkerPanicked
            | Self::WorkerDied
            | Self::Corrupt => Owner::Node,
            Self::DataLost | Self::Broker => Owner::Infrastructure,
            Self::ComputedLimit | Self::Deadline | Self::Dependency | Self::Part => {
                Owner::Submission
            }
        }
    }
}

impl FaultKind {
    /// True for a fault that ends a worker, or would have. A program can cause it.
    pub const fn is_death(self) -> bool {
        matches!(
            self,
            Self::WorkerDied | Self::WorkerPanicked | Self::MachineOutOfMemory
        )
    }
}

impl StartError {
    /// What an error of `fork` and `exec` means.
    pub fn of(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound => Self::NotFound,
            io::ErrorKind::PermissionDenied => Self::NotExecutable,
            io::ErrorKind::WouldBlock => Self::NoProcesses,
            io::ErrorKind::OutOfMemory => Self::NoMemory,
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::NoSpace,
            // No kind says that there are too many open files.
            _ => match error.raw_os_error() {
                Some(EMFILE | ENFILE) => Self::NoFiles,
                Some(ENOEXEC) => Self::NoFormat,
                _ => Self::Other,
            },
        }
    }
}

/// Linux's numbers, which are the same on every architecture.
const ENOEXEC: i32 = 8;
const ENFILE: i32 = 23;
const EMFILE: i32 = 24;

impl Event {
    /// The fault that the event tells, if an execution in the phase `before` has one by it. A fault
    /// is told once: the binding after a refusal repeats only its words.
    pub fn fault(&self, before: &Phase) -> Option<FaultKind> {
        let fault = match self {
            Self::Refused { fault, .. }
            | Self::Crashed { fault, .. }
            | Self::Failed { fault, .. }
            | Self::Held { fault, .. }
            | Self::Yielded {
                cause: Cause::NotTaken { fault, .. },
                ..
            } => fault,
            Self::Bound {
                cause: Cause::Lost { .. },
                ..
            }
            | Self::Yielded {
                cause: Cause::Lost { .. },
                ..
            } if matches!(before, Phase::Started(_)) => return Some(FaultKind::WorkerDied),
            _ => return None,
        };
        let kind = fault.as_deref().map(Fault::kind);
        // An end for several deaths tells the last of them, unless that was told before.
        let is_end = matches!(self, Self::Failed { .. } | Self::Held { .. });
        let was_told = is_end && !matches!(before, Phase::Started(_));
        kind.filter(|kind| !(was_told && kind.is_death()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_a_start_has_its_name() {
        for (number, error) in [
            (2, StartError::NotFound),
            (ENOEXEC, StartError::NoFormat),
            (11, StartError::NoProcesses),
            (12, StartError::NoMemory),
            (13, StartError::NotExecutable),
            (ENFILE, StartError::NoFiles),
            (EMFILE, StartError::NoFiles),
            (28, StartError::NoSpace),
            (5, StartError::Other),
        ] {
            assert_eq!(StartError::of(&io::Error::from_raw_os_error(number)), error);
        }
    }

    #[test]
    fn only_the_programs_own_faults_are_charged_to_it() {
        let of = |owner| {
            let kinds = FaultKind::ALL.iter().filter(move |k| k.owner() == owner);
            kinds
                .map(|kind| kind.as_str())
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(
            of(Owner::Program),
            "exited signalled out_of_memory unexplained reported limit wrong_answer broken_package"
        );
        assert_eq!(
            of(Owner::Node),
            "cannot_start disk_full device_lost machine_out_of_memory frozen worker_panicked \
             worker_died corrupt"
        );
        assert_eq!(of(Owner::Infrastructure), "data_lost broker");
        assert_eq!(
            of(Owner::Submission),
            "computed_limit deadline dependency part"
        );
    }
}
