//! Room: the bytes that one report of a run may carry. Whoever reads reports checks the lengths that a
//! report announces before it reads a byte of them.

use fiec_schemas::package::Grant;

use crate::frames::{BODY_LIMIT, FrameError, Made, Package, Report};

/// Most bytes of the outputs of one report, and of the σ of a package that declares no
/// `limits.state_bytes`.
pub const UNDECLARED_LIMIT: u64 = 1 << 30;

/// The room of a run, by its program's manifest and its grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Most bytes of σ.
    state: u64,
    /// Whether the manifest says so.
    is_declared: bool,
    /// Most bytes of σ and outputs: the memory of the grant.
    memory: u64,
}

/// A report that announces more bytes than its run has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoRoom {
    /// More than its manifest declares.
    #[error(
        "limit state_bytes: σ has {bytes} bytes, over the manifest's limits.state_bytes of {limit}"
    )]
    State {
        /// Bytes of σ.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// More than a package may have without a declaration.
    #[error(
        "limit state_bytes: σ has {bytes} bytes, and a program without limits.state_bytes in its \
         manifest may have {limit}"
    )]
    Undeclared {
        /// Bytes of σ.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// Too many bytes of outputs at one boundary.
    #[error(
        "limit outputs: the outputs of one boundary have {bytes} bytes (limit {limit}): make some \
         at an earlier boundary"
    )]
    Outputs {
        /// Their bytes.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// More than the memory of the grant.
    #[error(
        "limit memory: σ and outputs have {bytes} bytes, and the node grants {limit} bytes of \
         memory: ask for more with requires.memory_bytes"
    )]
    Memory {
        /// Bytes of both.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
}

impl Room {
    /// No room: no report may have a body.
    pub const NONE: Self = Self {
        state: 0,
        is_declared: false,
        memory: 0,
    };

    /// The room of a program under a grant. Without a package it is built in, and limited only by the
    /// grant.
    pub fn of(package: Option<&Package>, grant: &Grant) -> Self {
        let declared = package.and_then(|package| package.manifest.limits.state_bytes);
        let undeclared = match package {
            Some(_) => UNDECLARED_LIMIT,
            None => BODY_LIMIT,
        };
        Self {
            state: declared.unwrap_or(undeclared),
            is_declared: declared.is_some(),
            memory: grant.memory_bytes.unwrap_or(BODY_LIMIT),
        }
    }

    /// This room under a later grant of the same run. It never shrinks: a report may be on its way.
    #[must_use]
    pub fn widened_to(self, grant: &Grant) -> Self {
        Self {
            memory: self.memory.max(grant.memory_bytes.unwrap_or(BODY_LIMIT)),
            ..self
        }
    }

    /// Checks the number of bytes of a σ and of outputs that come with it.
    ///
    /// # Errors
    /// The limit that they exceed.
    pub fn check(&self, state: u64, outputs: u64) -> Result<(), NoRoom> {
        if state > self.state {
            let (bytes, limit) = (state, self.state);
            return Err(match self.is_declared {
                true => NoRoom::State { bytes, limit },
                false => NoRoom::Undeclared { bytes, limit },
            });
        }
        if outputs > UNDECLARED_LIMIT {
            return Err(NoRoom::Outputs {
                bytes: outputs,
                limit: UNDECLARED_LIMIT,
            });
        }
        let (bytes, limit) = (state.saturating_add(outputs), self.memory);
        match bytes > limit {
            true => Err(NoRoom::Memory { bytes, limit }),
            false => Ok(()),
        }
    }

    /// Checks a report and the length of its body.
    ///
    /// # Errors
    /// If the body is not as long as σ and the outputs that the report describes, or has no room.
    pub fn admits(&self, report: &Report, body: u64) -> Result<(), FrameError> {
        let (state, outputs) = match report {
            Report::Boundary(boundary) => (boundary.bytes, of_all(&boundary.outputs)),
            Report::Completed { outputs, .. } => (0, of_all(outputs)),
            _ => (0, 0),
        };
        self.check(state, outputs)?;
        let described = state.saturating_add(outputs);
        match body == described {
            true => Ok(()),
            false => Err(FrameError::Body { body, described }),
        }
    }
}

fn of_all(outputs: &[Made]) -> u64 {
    outputs
        .iter()
        .fold(0, |sum, made| sum.saturating_add(made.bytes))
}
