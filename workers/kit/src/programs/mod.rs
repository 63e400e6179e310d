//! The built-in programs, and a trait for programs whose type is not known at compile time.

pub mod canary;
pub mod cg;
mod dense;
pub mod gemm;
pub mod lu;
mod place;
pub mod qr;
pub mod synthetic;

use std::time::Duration;

use fiec_schemas::package::Grant;
use fiec_schemas::programs::{BUILT_IN, CANARY, CG, GEMM, LU, QR, SYNTHETIC, TileRange};
use serde_json::Value;

use crate::foreign::{self, Package};
use crate::frames::Shares;
use crate::program::{
    Capsule, Inputs, Program, ProgramError, Progress, State, Step, does_not_spread,
};

/// A program with its state.
pub trait Instance: Send {
    /// Resumes from a state, or starts from the initial one.
    ///
    /// # Errors
    /// When the bytes are no state of this program.
    fn resume(&mut self, state: Option<&[u8]>) -> Result<(), ProgramError>;
    /// Computes from one boundary to the next.
    ///
    /// # Errors
    /// When the next boundary cannot be reached.
    fn capsule(&mut self, cx: &mut Capsule) -> Result<Step, ProgramError>;
    /// Appends σ. Outputs that appear only now are declared to `cx`.
    ///
    /// # Errors
    /// When a foreign program does not deliver it.
    fn encode(&mut self, out: &mut Vec<u8>, cx: &mut Capsule) -> Result<(), ProgramError>;
    /// Approximate bytes of a large σ, else 0.
    fn size_hint(&self) -> usize {
        0
    }
    /// The progress.
    fn progress(&self) -> Progress;
    /// Applies a grant: before the first capsule, and at a boundary after the grant has changed.
    ///
    /// # Errors
    /// When it cannot continue with this grant.
    fn configure(&mut self, grant: &Grant) -> Result<(), ProgramError>;
    /// Says that its limit is near. `left`: the time that it may still compute.
    fn near_limit(&mut self, _left: Duration) {}
    /// States how the range is shared, before the first capsule.
    fn share(&mut self, _shares: Shares) {}
    /// Gives away the last half of its remaining tiles. Returns none if less than two are left, or
    /// if it cannot split.
    ///
    /// # Errors
    /// When a foreign program does not answer.
    fn split(&mut self, _cx: &Capsule) -> Result<Option<TileRange>, ProgramError> {
        Ok(None)
    }
    /// Merges a range that it gave away, with the part's σ if there is one. It is a capsule.
    ///
    /// # Errors
    /// Permanent if that is impossible.
    fn merge(
        &mut self,
        _range: TileRange,
        _part: Option<&[u8]>,
        _cx: &mut Capsule,
    ) -> Result<Step, ProgramError> {
        Err(does_not_spread())
    }
    /// Notes that an order ends the run at this boundary. No capsule follows.
    fn end_run(&mut self, _end: RunEnd<'_>) {}
}

/// The order that ends a run at a boundary, in the form that a program receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunEnd<'a> {
    /// A yield: the boundary is committed, and the execution continues elsewhere or later.
    Yield {
        /// The cause, in a few words.
        cause: &'a str,
    },
    /// A cancel.
    Cancel,
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
        let Some(state) = &mut self.state else {
            return Err(ProgramError::Transient("no state was taken up".to_owned()));
        };
        let step = self.program.capsule(state, cx)?;
        if matches!(step, Step::Complete { .. }) {
            self.program.let_go(true);
        }
        Ok(step)
    }

    fn encode(&mut self, out: &mut Vec<u8>, cx: &mut Capsule) -> Result<(), ProgramError> {
        if let Some(state) = &mut self.state {
            self.program.read_back(state)?;
            state.settle(cx)?;
            state.encode(out);
        }
        Ok(())
    }

    fn size_hint(&self) -> usize {
        self.state.as_ref().map_or(0, State::size_hint)
    }

    fn progress(&self) -> Progress {
        self.state
            .as_ref()
            .map(|state| self.program.progress(state))
            .unwrap_or_default()
    }

    fn configure(&mut self, grant: &Grant) -> Result<(), ProgramError> {
        if let Some(state) = &mut self.state {
            self.program.read_back(state)?;
        }
        self.program.configure(grant)
    }

    fn near_limit(&mut self, left: Duration) {
        self.program.near_limit(left);
    }

    fn split(&mut self, _: &Capsule) -> Result<Option<TileRange>, ProgramError> {
        let state = self.state.as_mut();
        Ok(state.and_then(|state| self.program.split(state)))
    }

    fn merge(
        &mut self,
        range: TileRange,
        part: Option<&[u8]>,
        cx: &mut Capsule,
    ) -> Result<Step, ProgramError> {
        let Some(state) = &mut self.state else {
            return Err(ProgramError::Transient("no state was taken up".to_owned()));
        };
        let part = part.map(P::State::decode).transpose()?;
        let step = self.program.merge(state, range, part, cx)?;
        if matches!(step, Step::Complete { .. }) {
            self.program.let_go(true);
        }
        Ok(step)
    }

    fn end_run(&mut self, _: RunEnd<'_>) {
        self.program.let_go(false);
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

/// Starts a program by its name, or that of a package.
///
/// # Errors
/// When there is no such program, or parameters or inputs break a rule.
pub fn start(
    name: &str,
    package: Option<&Package>,
    params: &Value,
    inputs: &mut Inputs,
) -> Result<Box<dyn Instance>, ProgramError> {
    if let Some(package) = package {
        return foreign::start(package, params, inputs);
    }
    match name {
        CANARY => with::<canary::Canary>(params, inputs),
        CG => with::<cg::Cg>(params, inputs),
        GEMM => with::<gemm::Gemm>(params, inputs),
        LU => with::<lu::Lu>(params, inputs),
        QR => with::<qr::Qr>(params, inputs),
        SYNTHETIC => with::<synthetic::Synthetic>(params, inputs),
        _ => Err(ProgramError::Permanent(format!(
            "program {name:?} does not exist here; known programs are {}",
            BUILT_IN.join(", ")
        ))),
    }
}
