//! `cg@1`: Jacobi-preconditioned conjugate gradients, one load case after the other. A capsule is a
//! declared number of iterations, or fewer at the end of a load case.
//!
//! On a device, the matrix and the vectors stay there between boundaries. x, r and p are read back
//! only when the state is encoded or the execution moves.
//!
//! σ: magic `FIECCGP1`, load case `u64`, iterations of the earlier cases `u64`. Then their worst
//! relative residual, true residual and backward error (`f64` each), and the chain of their
//! solutions' digests (32 bytes). Then the kernel's state (x, r, p and scalars). Little endian.

use std::sync::Arc;

use fiec_kernels::cg::{self, CgProblem, CgState, CgWork};
use fiec_kernels::device::{CgLimits, CgStop, Device};
use fiec_kernels::engine::Engine;
use fiec_kernels::sparse::Csr;
use fiec_kernels::{digest, matrix_market, npy, poisson, rhs};
use fiec_schemas::Digest;
use fiec_schemas::package::Grant;
use fiec_schemas::programs::{CgParams, MatrixSource};
use serde_json::{Value, json};

use super::place::{Place, failed};
use crate::program::{Capsule, Inputs, Program, ProgramError, Progress, State, Step};

const MAGIC: &[u8; 8] = b"FIECCGP1";
const HEADER: usize = 80;

/// The program with its matrix.
pub struct Cg {
    params: CgParams,
    matrix: Arc<Csr>,
    threads: u32,
    /// The current load case, built on its first use.
    case: Option<(u64, CgProblem, CgWork)>,
    place: Place,
    /// The load case whose vectors are on the device. The state's own vectors are then outdated.
    resident: Option<u64>,
}

/// σ.
#[derive(Debug, Clone, PartialEq)]
pub struct CgProgramState {
    case: u64,
    iterations: u64,
    worst: [f64; 3],
    chain: [u8; 32],
    solver: CgState,
}

impl State for CgProgramState {
    fn encode(&self, out: &mut Vec<u8>) {
        // The kernel's writer needs an empty buffer, so the header follows it.
        self.solver.write_bytes(out);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&self.case.to_le_bytes());
        out.extend_from_slice(&self.iterations.to_le_bytes());
        for value in self.worst {
            out.extend_from_slice(&value.to_le_bytes());
        }
        out.extend_from_slice(&self.chain);
    }

    fn size_hint(&self) -> usize {
        // x, r and p.
        3 * size_of::<f64>() * self.solver.x.len()
    }

    fn decode(bytes: &[u8]) -> Result<Self, ProgramError> {
        let wrong = || ProgramError::Permanent("not a state of cg@1".to_owned());
        let at = bytes.len().checked_sub(HEADER).ok_or_else(wrong)?;
        let (solver, rest) = bytes.split_at(at);
        let rest: &[u8; HEADER] = rest.try_into().map_err(|_| wrong())?;
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&rest[at..at + 8]);
            u64::from_le_bytes(word)
        };
        if &rest[..8] != MAGIC {
            return Err(wrong());
        }
        let mut chain = [0; 32];
        chain.copy_from_slice(&rest[48..]);
        Ok(Self {
            case: word(8),
            iterations: word(16),
            worst: [24, 32, 40].map(|at| f64::from_bits(word(at))),
            chain,
            solver: CgState::from_bytes(solver).map_err(ProgramError::permanent)?,
        })
    }
}

fn load(source: &MatrixSource, inputs: &mut Inputs) -> Result<Arc<Csr>, ProgramError> {
    match source {
        MatrixSource::File(name) => inputs.get_file("sparse", ("matrix.file", name), |bytes| {
            matrix_market::parse_candidate_bytes(name, bytes).map_err(ProgramError::permanent)
        }),
        MatrixSource::Object(digest) => inputs.get_object("sparse", *digest, |bytes| {
            matrix_market::parse_candidate_bytes(format!("object {digest}"), &bytes)
                .map_err(ProgramError::permanent)
        }),
        MatrixSource::Poisson2d { n } => inputs.get(&format!("poisson2d {n}"), None, || {
            poisson::poisson_2d(*n, *n).map_err(ProgramError::permanent)
        }),
        MatrixSource::Poisson3d { n } => inputs.get(&format!("poisson3d {n}"), None, || {
            poisson::poisson_3d(*n, *n, *n).map_err(ProgramError::permanent)
        }),
    }
}

impl Cg {
    fn case(&mut self, case: u64) -> Result<(&CgProblem, &mut CgWork), ProgramError> {
        if self.case.as_ref().is_none_or(|(at, ..)| *at != case) {
            let b = rhs::right_hand_side(&self.matrix, case, self.params.seed);
            let problem =
                CgProblem::new(Arc::clone(&self.matrix), b).map_err(ProgramError::permanent)?;
            let engine = Engine::new(self.threads as usize).map_err(ProgramError::transient)?;
            let work = CgWork::with_engine(&problem, engine);
            self.case = Some((case, problem, work));
        }
        match &mut self.case {
            Some((_, problem, work)) => Ok((problem, work)),
            None => Err(ProgramError::Transient("no load case".to_owned())),
        }
    }

    fn not_enough(&self, state: &CgProgramState, relative: f64) -> ProgramError {
        ProgramError::Permanent(format!(
            "load case {} has relative residual {relative:.3e} after {max} iterations \
             (max_iterations); tolerance is {tolerance:.3e}",
            state.case,
            max = self.params.max_iterations,
            tolerance = self.params.tolerance
        ))
    }

    /// Iterates on the device. Returns the relative residual.
    fn iterate_on(
        &mut self,
        device: &mut dyn Device,
        state: &mut CgProgramState,
    ) -> Result<f64, ProgramError> {
        let limits = CgLimits {
            steps: self.params.iterations_per_capsule,
            tolerance: self.params.tolerance,
            most: self.params.max_iterations,
        };
        let case = state.case;
        let resident = self.resident == Some(case);
        let (problem, _) = self.case(case)?;
        if !resident {
            device.cg_begin(problem, &state.solver).map_err(failed)?;
        }
        let (scalars, stop) = device.cg_advance(limits).map_err(failed)?;
        (state.solver.rz, state.solver.rr) = (scalars.rz, scalars.rr);
        state.solver.iteration = scalars.iteration;
        let relative = state.solver.relative_residual(problem);
        self.resident = Some(case);
        match stop {
            CgStop::Steps => {}
            CgStop::Converged => {
                device.cg_read(&mut state.solver).map_err(failed)?;
                device.cg_end();
                self.resident = None;
            }
            CgStop::Most => return Err(self.not_enough(state, relative)),
            CgStop::Broken(error) => return Err(ProgramError::permanent(error)),
        }
        Ok(relative)
    }

    /// Iterates on the host. Returns the relative residual.
    fn iterate(&mut self, state: &mut CgProgramState) -> Result<f64, ProgramError> {
        let (steps, tolerance, most) = (
            self.params.iterations_per_capsule,
            self.params.tolerance,
            self.params.max_iterations,
        );
        let (problem, work) = self.case(state.case)?;
        let mut relative = state.solver.relative_residual(problem);
        for _ in 0..steps {
            if relative <= tolerance {
                break;
            }
            if state.solver.iteration >= most {
                return Err(self.not_enough(state, relative));
            }
            cg::step(problem, &mut state.solver, work).map_err(ProgramError::permanent)?;
            relative = state.solver.relative_residual(problem);
        }
        Ok(relative)
    }

    fn finish_case(
        &mut self,
        state: &mut CgProgramState,
        relative: f64,
    ) -> Result<(), ProgramError> {
        let (problem, work) = self.case(state.case)?;
        let accuracy =
            cg::accuracy(problem, &state.solver.x, work).map_err(ProgramError::permanent)?;
        let found = [relative, accuracy.true_residual, accuracy.backward_error];
        for (worst, found) in state.worst.iter_mut().zip(found) {
            *worst = worst.max(found);
        }
        let mut chained = state.chain.to_vec();
        chained.extend_from_slice(&digest(&state.solver.x));
        state.chain = Digest::of(&chained).0;
        state.iterations += state.solver.iteration;
        state.case += 1;
        Ok(())
    }
}

impl Program for Cg {
    type State = CgProgramState;

    fn start(params: &Value, inputs: &mut Inputs) -> Result<Self, ProgramError> {
        let params = CgParams::from_value(params).map_err(ProgramError::permanent)?;
        let matrix = load(&params.matrix, inputs)?;
        let mut program = Self {
            threads: params.threads,
            params,
            matrix,
            case: None,
            place: Place::new(inputs),
            resident: None,
        };
        program.case(0)?;
        Ok(program)
    }

    fn initial(&mut self) -> Result<CgProgramState, ProgramError> {
        let (problem, _) = self.case(0)?;
        let solver = cg::init(problem);
        Ok(CgProgramState {
            case: 0,
            iterations: 0,
            worst: [0.0; 3],
            chain: [0; 32],
            solver,
        })
    }

    fn capsule(
        &mut self,
        state: &mut CgProgramState,
        cx: &mut Capsule,
    ) -> Result<Step, ProgramError> {
        let CgParams {
            tolerance,
            load_cases,
            ..
        } = self.params;
        let (problem, _) = self.case(state.case)?;
        if state.solver.x.len() != problem.n() {
            return Err(ProgramError::Permanent(format!(
                "the state has {} unknowns, the matrix {}",
                state.solver.x.len(),
                problem.n()
            )));
        }
        let relative = match self.place.take() {
            Some(mut device) => {
                let relative = self.iterate_on(device.as_mut(), state)?;
                self.place.put(device);
                relative
            }
            None => self.iterate(state)?,
        };
        cx.number("residual", relative)?;
        if relative > tolerance {
            return Ok(Step::Boundary);
        }
        self.finish_case(state, relative)?;
        if state.case < load_cases {
            let (problem, _) = self.case(state.case)?;
            state.solver = cg::init(problem);
            return Ok(Step::Boundary);
        }
        cx.output("solution", npy::vector(&state.solver.x));
        let [relative, true_residual, backward_error] = state.worst;
        Ok(Step::Complete {
            result: json!({
                "digest": Digest(state.chain),
                "iterations": state.iterations,
                "relative_residual": relative,
                "true_residual": true_residual,
                "backward_error": backward_error,
                "n": self.matrix.rows(),
                "nnz": self.matrix.entries(),
                "load_cases": load_cases,
            }),
        })
    }

    fn progress(&self, state: &CgProgramState) -> Progress {
        let residual = match &self.case {
            Some((at, problem, _)) if *at == state.case => state.solver.relative_residual(problem),
            _ => 1.0,
        };
        Progress {
            of: None,
            note: Some(format!(
                "case {}/{}, residual {residual:.1e}",
                state.case + 1,
                self.params.load_cases
            )),
        }
    }

    fn read_back(&mut self, state: &mut CgProgramState) -> Result<(), ProgramError> {
        if self.resident == Some(state.case)
            && let Some(mut device) = self.place.take()
        {
            device.cg_read(&mut state.solver).map_err(failed)?;
            self.place.put(device);
        }
        Ok(())
    }

    fn let_go(&mut self, warm: bool) {
        self.resident = None;
        self.place.let_go(warm);
    }

    fn configure(&mut self, grant: &Grant) -> Result<(), ProgramError> {
        if self.place.changes(grant) {
            self.resident = None;
            self.place.go(grant)?;
        }
        let threads = self.params.threads.min(grant.threads.unwrap_or(u32::MAX));
        if threads.max(1) != self.threads {
            self.threads = threads.max(1);
            if let Some((_, _, work)) = &mut self.case {
                *work.engine() =
                    Engine::new(self.threads as usize).map_err(ProgramError::transient)?;
            }
        }
        Ok(())
    }
}
