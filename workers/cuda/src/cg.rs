//! A solve by conjugate gradients whose matrix and vectors stay on the device.

use fiec_kernels::cg::{CgError, CgProblem, CgState, EXHAUSTED};
use fiec_kernels::device::{CgLimits, CgScalars, CgStop, DeviceError};
use fiec_kernels::reduce::{LEAF, leaves};

use crate::context::{Arguments, Context, Kernel, Memory};
use crate::device::{CudaDevice, THREADS, blocks, int};

/// Iterations that are queued before the scalars are read.
const AT_ONCE: u64 = 64;

/// `CgScalars` of `kernels.cu`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
struct Scalars {
    rz: f64,
    rr: f64,
    bb: f64,
    tolerance: f64,
    alpha: f64,
    beta: f64,
    value: f64,
    iteration: u64,
    most: u64,
    status: u32,
    what: u32,
    exhausted: u32,
    unused: u32,
}

const RUNNING: u32 = 0;
const CONVERGED: u32 = 1;
const MAXED: u32 = 2;
const NOT_FINITE: u32 = 3;

/// The number that was not finite, by its code in `kernels.cu`, named as in
/// [`fiec_kernels::cg::step`].
const NUMBERS: [&str; 5] = ["p·Ap", "α", "r·z", "r·r", "β"];

/// The memory of a solve.
pub(crate) struct Solve {
    n: u64,
    bb: f64,
    row_ptr: Memory,
    col_idx: Memory,
    values: Memory,
    /// None: all rows share `constant`.
    inverse: Option<Memory>,
    constant: f64,
    x: Memory,
    r: Memory,
    p: Memory,
    q: Memory,
    /// Sums of leaves, in pairs, twice: the input and the output of a level.
    partial: Memory,
    scalars: Memory,
}

impl Solve {
    pub fn begin(
        device: &mut CudaDevice,
        problem: &CgProblem,
        state: &CgState,
    ) -> Result<Self, DeviceError> {
        let n = problem.n();
        let (row_ptr, col_idx, values) = problem.matrix().raw();
        let (constant, inverse) = match problem.inverse_diagonal() {
            Ok(constant) => (constant, None),
            Err(rows) => (0.0, Some(rows)),
        };
        let doubles = |count: usize| 8 * count as u64;
        let wanted = [
            4 * row_ptr.len() as u64,
            4 * col_idx.len() as u64,
            doubles(values.len()),
            doubles(n),
            doubles(n),
            doubles(n),
            doubles(n),
            doubles(4 * leaves(n)),
            size_of::<Scalars>() as u64,
            doubles(inverse.map_or(0, <[f64]>::len)),
        ];
        let mut held = Vec::with_capacity(wanted.len());
        let all = wanted.iter().take(9 + usize::from(inverse.is_some()));
        for bytes in all {
            match device.take(*bytes) {
                Ok(memory) => held.push(memory),
                Err(error) => {
                    held.into_iter().for_each(|memory| device.give(memory));
                    return Err(error);
                }
            }
        }
        let solve = Self {
            n: n as u64,
            bb: problem.squared_norm(),
            row_ptr: held[0],
            col_idx: held[1],
            values: held[2],
            x: held[3],
            r: held[4],
            p: held[5],
            q: held[6],
            partial: held[7],
            scalars: held[8],
            inverse: held.get(9).copied(),
            constant,
        };
        let filled = solve.fill(device.context(), (row_ptr, col_idx, values), inverse, state);
        if let Err(error) = filled {
            solve.end(device);
            return Err(error);
        }
        Ok(solve)
    }

    fn fill(
        &self,
        context: Result<&Context, DeviceError>,
        (row_ptr, col_idx, values): (&[u32], &[u32], &[f64]),
        inverse: Option<&[f64]>,
        state: &CgState,
    ) -> Result<(), DeviceError> {
        let context = context?;
        context.put(row_ptr, self.row_ptr.at)?;
        context.put(col_idx, self.col_idx.at)?;
        context.put(values, self.values.at)?;
        context.put(&state.x, self.x.at)?;
        context.put(&state.r, self.r.at)?;
        context.put(&state.p, self.p.at)?;
        if let (Some(memory), Some(rows)) = (self.inverse, inverse) {
            context.put(rows, memory.at)?;
        }
        let scalars = Scalars {
            rz: state.rz,
            rr: state.rr,
            iteration: state.iteration,
            ..Scalars::default()
        };
        context.put(&[scalars], self.scalars.at)
    }

    pub fn advance(
        &self,
        context: &Context,
        limits: CgLimits,
    ) -> Result<(CgScalars, CgStop), DeviceError> {
        let mut scalars = self.scalars(context)?;
        scalars.bb = self.bb;
        (scalars.tolerance, scalars.most) = (limits.tolerance, limits.most);
        scalars.status = RUNNING;
        context.put(&[scalars], self.scalars.at)?;
        let mut left = limits.steps;
        while left > 0 && scalars.status == RUNNING {
            let now = left.min(AT_ONCE);
            for _ in 0..now {
                self.start(context)?;
            }
            left -= now;
            scalars = self.scalars(context)?;
        }
        let relative = match self.bb {
            0.0 => 0.0,
            bb => (scalars.rr / bb).sqrt(),
        };
        let stop = match scalars.status {
            // The last iteration may have reached the tolerance.
            RUNNING | CONVERGED if relative <= limits.tolerance => CgStop::Converged,
            RUNNING | CONVERGED => CgStop::Steps,
            MAXED => CgStop::Most,
            NOT_FINITE => CgStop::Broken(CgError::NotFinite {
                what: NUMBERS.get(scalars.what as usize).unwrap_or(&"a number"),
                iteration: scalars.iteration + 1,
                value: scalars.value,
            }),
            _ => CgStop::Broken(CgError::NotPositiveDefinite {
                iteration: scalars.iteration + 1,
                value: scalars.value,
            }),
        };
        let found = CgScalars {
            rz: scalars.rz,
            rr: scalars.rr,
            iteration: scalars.iteration,
        };
        Ok((found, stop))
    }

    fn scalars(&self, context: &Context) -> Result<Scalars, DeviceError> {
        let mut scalars = [Scalars::default()];
        context.get(self.scalars.at, &mut scalars)?;
        Ok(scalars[0])
    }

    /// Starts one iteration.
    fn start(&self, context: &Context) -> Result<(), DeviceError> {
        let inverse = self.inverse.map_or(0, |memory| memory.at);
        let leaves = self.n.div_ceil(LEAF as u64);
        let a_leaf_each = (int("number of leaves", leaves.max(1))?, 1, 1);
        let one = (1, 1, 1);
        let product = Arguments::default()
            .long(self.n)
            .long(self.row_ptr.at)
            .long(self.col_idx.at)
            .long(self.values.at)
            .long(self.p.at)
            .long(self.q.at)
            .long(self.partial.at)
            .long(self.scalars.at);
        if leaves > 0 {
            context.launch(Kernel::CgProduct, a_leaf_each, THREADS, product)?;
        }
        let alpha = Arguments::default()
            .long(leaves)
            .long(self.partial.at)
            .number(EXHAUSTED)
            .long(self.scalars.at);
        context.launch(Kernel::CgAlpha, one, THREADS, alpha)?;
        if leaves == 0 {
            return Ok(());
        }
        let residual = Arguments::default()
            .long(self.n)
            .long(self.q.at)
            .long(self.r.at)
            .long(inverse)
            .number(self.constant)
            .long(self.partial.at)
            .long(self.scalars.at);
        context.launch(Kernel::CgResidual, a_leaf_each, THREADS, residual)?;
        let beta = Arguments::default()
            .long(leaves)
            .long(self.partial.at)
            .long(self.scalars.at);
        context.launch(Kernel::CgBeta, one, THREADS, beta)?;
        let direction = Arguments::default()
            .long(self.n)
            .long(self.r.at)
            .long(inverse)
            .number(self.constant)
            .long(self.x.at)
            .long(self.p.at)
            .long(self.scalars.at);
        let grid = (blocks(self.n, THREADS)?, 1, 1);
        context.launch(Kernel::CgDirection, grid, THREADS, direction)
    }

    pub fn read(&self, context: &Context, state: &mut CgState) -> Result<(), DeviceError> {
        for (memory, vector) in [
            (self.x, &mut state.x),
            (self.r, &mut state.r),
            (self.p, &mut state.p),
        ] {
            vector.resize(self.n as usize, 0.0);
            context.get(memory.at, vector)?;
        }
        let scalars = self.scalars(context)?;
        (state.rz, state.rr) = (scalars.rz, scalars.rr);
        state.iteration = scalars.iteration;
        Ok(())
    }

    pub fn end(self, device: &mut CudaDevice) {
        for memory in [
            self.row_ptr,
            self.col_idx,
            self.values,
            self.x,
            self.r,
            self.p,
            self.q,
            self.partial,
            self.scalars,
        ] {
            device.give(memory);
        }
        if let Some(memory) = self.inverse {
            device.give(memory);
        }
    }
}
