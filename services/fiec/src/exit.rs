//! Exit codes, with the same meaning for every sub-command.

use std::process::ExitCode;

/// Result of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// 0: done; with `--wait`, the execution completed.
    Done,
    /// 1: the command failed; with `--wait`, an execution failed.
    Failed,
    /// 2: the input or the command line is wrong. Nothing was done, or only the valid lines.
    BadInput,
    /// 3: with `--wait`, an execution was cancelled.
    Cancelled,
    /// 4: a server could not be reached or did not answer in time.
    Unreachable,
    /// 5: this machine has no device to compute on.
    NoDevice,
}

impl Outcome {
    /// The exit code.
    pub fn code(self) -> u8 {
        match self {
            Outcome::Done => 0,
            Outcome::Failed => 1,
            Outcome::BadInput => 2,
            Outcome::Cancelled => 3,
            Outcome::Unreachable => 4,
            Outcome::NoDevice => 5,
        }
    }

    /// The worse of two outcomes. From worst to best: unreachable, no device, bad input, failed,
    /// cancelled, done.
    pub fn worse(self, other: Self) -> Self {
        let rank = |o: Self| match o {
            Outcome::Done => 0,
            Outcome::Cancelled => 1,
            Outcome::Failed => 2,
            Outcome::BadInput => 3,
            Outcome::NoDevice => 4,
            Outcome::Unreachable => 5,
        };
        if rank(other) > rank(self) {
            other
        } else {
            self
        }
    }
}

impl From<Outcome> for ExitCode {
    fn from(outcome: Outcome) -> Self {
        ExitCode::from(outcome.code())
    }
}

/// Text for `--help`.
pub const HELP: &str = "Exit codes: 0 done (with --wait: completed); 1 failed; 2 bad input or \
command line; 3 cancelled; 4 a server could not be reached or did not answer in time; \
5 there is no device to compute on.";
