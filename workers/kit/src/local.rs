//! Runs a program in this process, without server, child or commit. Tests compare its digests with
//! moved runs, and benches compare its rate with a worker's.

use std::time::{Duration, Instant};

use fiec_schemas::{BoundaryIndex, Digest};
use serde_json::Value;

use crate::frames::Emit;
use crate::program::{Capsule, Inputs, OutputData, ProgramError, Step};
use crate::programs;

/// The outcome of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct LocalOutcome {
    /// The program's result.
    pub result: Value,
    /// `digest` of the result, if it has one.
    pub digest: Option<Digest>,
    /// Capsules in all.
    pub capsules: BoundaryIndex,
    /// Time from the start of the first capsule to the end of the last one.
    pub computed: Duration,
    /// The same in seconds.
    pub seconds: f64,
    /// Outputs.
    pub outputs: Vec<OutputData>,
    /// Emitted messages.
    pub emits: Vec<Emit>,
}

/// Runs a program to its end for the user who runs this process. Its parameters may name any file.
/// Relative names start at the current folder.
///
/// # Errors
/// The program's errors.
pub fn run_local(program: &str, params: &Value) -> Result<LocalOutcome, ProgramError> {
    run_cut(program, params, &mut Inputs::anywhere(), |_| false)
}

/// Runs a program to its end. If `cut` returns true at a boundary, the program is dropped and
/// resumed from the bytes of its state, as by a move.
///
/// # Errors
/// The program's errors.
pub fn run_cut(
    program: &str,
    params: &Value,
    inputs: &mut Inputs,
    mut cut: impl FnMut(BoundaryIndex) -> bool,
) -> Result<LocalOutcome, ProgramError> {
    let mut instance = programs::start(program, None, params, inputs)?;
    instance.resume(None)?;
    let mut cx = Capsule::default();
    let start = Instant::now();
    loop {
        let step = instance.capsule(&mut cx)?;
        cx.advance();
        match step {
            Step::Boundary if cut(cx.index()) => {
                let mut state = Vec::new();
                instance.encode(&mut state, &mut cx)?;
                instance = programs::start(program, None, params, inputs)?;
                instance.resume(Some(&state))?;
            }
            Step::Boundary => {}
            Step::Complete { result } => {
                let computed = start.elapsed();
                let digest = result
                    .get("digest")
                    .and_then(Value::as_str)
                    .and_then(|d| d.parse().ok());
                return Ok(LocalOutcome {
                    result,
                    digest,
                    capsules: cx.index(),
                    computed,
                    seconds: computed.as_secs_f64(),
                    outputs: cx.outputs,
                    emits: cx.emits,
                });
            }
        }
    }
}
