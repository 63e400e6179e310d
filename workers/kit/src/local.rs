//! Runs a program in this process, without server, child or commit: the undisturbed run that
//! digests are compared with, and the bare loop that rates are compared with.

use std::time::{Duration, Instant};

use fiec_schemas::{BoundaryIndex, Digest};
use serde_json::Value;

use crate::frames::Emit;
use crate::program::{Capsule, Inputs, OutputData, ProgramError, Step};
use crate::programs;

/// What a run gave.
#[derive(Debug, Clone, PartialEq)]
pub struct LocalOutcome {
    /// The program's words.
    pub result: Value,
    /// `digest` of the result, where it has one.
    pub digest: Option<Digest>,
    /// Capsules in all.
    pub capsules: BoundaryIndex,
    /// Time from the first capsule's beginning to the last one's end.
    pub computed: Duration,
    /// The same in seconds.
    pub seconds: f64,
    /// Outputs.
    pub outputs: Vec<OutputData>,
    /// What it emitted.
    pub emits: Vec<Emit>,
}

/// Runs a program to its end, for the user who runs this process: its parameters may name any
/// file, relative ones from the current folder.
///
/// # Errors
/// Those of the program.
pub fn run_local(program: &str, params: &Value) -> Result<LocalOutcome, ProgramError> {
    run_cut(program, params, &mut Inputs::anywhere(), |_| false)
}

/// Runs a program to its end; where `cut` says so at a boundary, the program is thrown away and
/// resumed from the bytes of its state, as a move would do.
///
/// # Errors
/// Those of the program.
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
