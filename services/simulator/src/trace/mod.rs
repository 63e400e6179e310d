//! Traces of the policy: each input, each call of `act`, and each action that came out, as text.
//!
//! A change that leaves all decisions as they are leaves every trace as it is. The digests of the
//! traces are committed, so a test notices each difference. `diff` shows the first step that
//! differs.
//!
//! ```text
//! 40 p0 in tick 86402000 2026-01-01T00:00:02.000000Z
//! 41 p0 in act 86402000 2026-01-01T00:00:02.000000Z
//! 41 p0 out append {"events":[{"cause":{"kind":"initial"},…}],"execution":"…","expected":7,…}
//! ```
//!
//! A line has the number of the step, the policy, the direction, the kind and its JSON. An input
//! has both clocks before the JSON. The answer to `in submission` is the line after its actions: `out
//! append`, which begins the ledger, or `out hold`. A trace begins each policy with `in new`, which has the settings
//! that differ from their defaults. All lines of a step have its number, so a step with one action
//! more moves no later number.
//!
//! | file | contents |
//! |---|---|
//! | `record` | [`Recorder`] and [`Traced`], which wraps a policy |
//! | `form` | inputs, actions and settings in a trace |
//! | `text` | lines, and JSON without sentences |
//! | `replay` | a recorded trace, given to today's policy |
//! | `committed` | the files of digests |
//! | `sources` | scenarios and drawn seeds |
//!
//! A trace has no sentences: [`text::MARK`] stands for each, so a rewording changes no trace. All
//! that is decided is there: ids, nodes, epochs, sequences, kinds, causes, numbers.
//!
//! # If a trace differs
//!
//! ```text
//! fiec trace seed:7 > old.txt                  # in a tree of the commit before
//! fiec trace seed:7 > new.txt                  # in the changed tree
//! diff old.txt new.txt | head                  # the first step that differs
//! fiec trace --replay old.txt | diff old.txt - # each step that differs on the same inputs
//! ```
//!
//! In a run, a difference changes the inputs that follow. The replay gives the policy the inputs of
//! the old trace, so one difference does not hide the rest. `FIEC_TRACES=DIR cargo test -p
//! fiec-policy` writes the traces of the policy's own tests, which replay in the same way. If the
//! difference is meant, `FIEC_UPDATE=1 cargo test -p fiec-policy -p fiec-simulator` rewrites the
//! digests. The commit says why.
//!
//! # Limits
//!
//! The wording of a sentence is in no trace. Questions to the policy (`why`, `duties`, `foresee`) are
//! not recorded. Runs of the simulator have no `record` of executions that wait, since [`Settings`]
//! turns them off.
//!
//! [`Settings`]: crate::settings::Settings

pub mod committed;
mod form;
mod record;
mod replay;
pub mod sources;
pub mod text;

pub use record::{Digested, Recorder, Traced};
pub use replay::replay;

/// Why a trace cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The field of a scenario, and the rule that it breaks.
    #[error(transparent)]
    Scenario(#[from] fiec_schemas::FieldError),
    /// The disk, or a pipe that was closed.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// A value that JSON cannot hold.
    #[error("step {step} cannot be written as JSON: {error}")]
    Unwritable {
        /// The step.
        step: u64,
        /// The first value that failed.
        error: serde_json::Error,
    },
    /// A line of another form.
    #[error(
        "line {line} of the trace cannot be read: {problem}; record it again with this version"
    )]
    Unreadable {
        /// The line, from 1.
        line: u64,
        /// The rule that it breaks.
        problem: String,
    },
}
