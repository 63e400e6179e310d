//! The built-in programs, and programs whose type is not known where they run.

pub mod cg;
pub mod synthetic;

use fiec_schemas::programs::{BUILT_IN, CG, SYNTHETIC};
use serde_json::Value;

use crate::program::{Capsule, Inputs, Program, ProgramError, Progress, State, Step};

/// A program with its state.
pub trait Instance: Send {
    /// Takes up a state, or the initial one.
    ///
    /// # Errors
    /// When the bytes are no state of this program.
    fn resume(&mut self, state: Option<&[u8]>) -> Result<(), ProgramError>;
    /// From one boundary to the next.
    ///
    /// # Errors
    /// When it cannot be reached.
    fn capsule(&mut self, cx: &mut Capsule) -> Result<Step, ProgramError>;
    /// Appends σ.
    fn encode(&self, out: &mut Vec<u8>);
    /// Where it stands.
    fn progress(&self) -> Progress;
}

struct With<P: Program> {
    program: P,
    state: Option<P::State>,
}

impl<P: Program> Instance for With<P> {
    fn resume(&mut self, state: Option<&[u8]>) -> Result<(), ProgramError> {
        self.state = None;
        self.state = Some(match state {
            Some(bytes) => P::State::decode(bytes)?,
            None => self.program.initial()?,
        });
        Ok(())
    }

    fn capsule(&mut self, cx: &mut Capsule) -> Result<Step, ProgramError> {
        match &mut self.state {
            Some(state) => self.program.capsule(state, cx),
            None => Err(ProgramError::Transient("no state was taken up".to_owned())),
        }
    }

    fn encode(&self, out: &mut Vec<u8>) {
        if let Some(state) = &self.state {
            state.encode(out);
        }
    }

    fn progress(&self) -> Progress {
        self.state
            .as_ref()
            .map(|state| self.program.progress(state))
            .unwrap_or_default()
    }
}

fn with<P: Program + 'static>(
    params: &Value,
    inputs: &mut Inputs,
) -> Result<Box<dyn Instance>, ProgramError> {
    Ok(Box::new(With {
        program: P::start(params, inputs)?,
        state: None,
    }))
}

/// Starts a program by its name.
///
/// # Errors
/// When there is no such program, or parameters or inputs break a rule.
pub fn start(
    name: &str,
    params: &Value,
    inputs: &mut Inputs,
) -> Result<Box<dyn Instance>, ProgramError> {
    match name {
        CG => with::<cg::Cg>(params, inputs),
        SYNTHETIC => with::<synthetic::Synthetic>(params, inputs),
        _ => Err(ProgramError::Permanent(format!(
            "program {name:?} does not exist here; known programs are {}",
            BUILT_IN.join(", ")
        ))),
    }
}
