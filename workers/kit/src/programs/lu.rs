//! `lu@1`: P·A = L·U with partial pivoting, left-looking by block columns. Capsule k takes block
//! column k of A, exchanges its rows as all earlier panels did, updates it by each of the
//! finished block columns, and factors it; it becomes the output `lu-<k>`.
//!
//! `lu-<k>` is a `.npy` file of all rows: U on and above the diagonal, L below it, in the order of
//! rows that capsule k left. The last capsule also makes `pivots` (`.npy`, int64): row i was
//! exchanged with row `pivots[i]`, by ascending i, counted from 0, as in LAPACK's ipiv. Exchanges
//! behind block column k are still to be applied to its rows below its diagonal block:
//!
//! ```text
//! F = np.hstack([np.load(f"lu-{k}") for k in range(blocks)])
//! for i, p in enumerate(np.load("pivots")):
//!     done = i // block * block               # columns of the panels before
//!     F[[i, p], :done] = F[[p, i], :done]
//! ```
//!
//! A block column that this process does not hold is fetched by its digest. Each is checked when
//! it is made ([`fiec_kernels::dense::check::LuCheck`]).
//!
//! σ: magic `FIECLU_1`, n, block, columns done (`u64` each), the check's three sums (`f64` each),
//! then pivots (`u32`) and the check's vector (`f64`) of the columns done, and the digests of the
//! finished block columns (32 bytes each); little endian. So it grows to 12 bytes a column and 32
//! a block: 25 KB for n = 2,048, 99 KB for n = 8,192 with blocks of 256.

use fiec_kernels::dense::check::LuCheck;
use fiec_kernels::dense::{Mat, lu};
use fiec_kernels::npy;
use fiec_schemas::Digest;
use fiec_schemas::package::Grant;
use fiec_schemas::programs::LuParams;
use serde_json::{Value, json};

use super::dense::{Fields, Kept, Read, Source, Threads, chained, fetch_block};
use crate::program::{Capsule, Inputs, Program, ProgramError, Progress, State, Step};

const MAGIC: &[u8; 8] = b"FIECLU_1";

/// The program with its matrix.
pub struct Lu {
    a: Source,
    block: usize,
    threads: Threads,
    kept: Kept<Finished>,
}

/// A finished block column from its diagonal block on, and how many rows have been exchanged.
struct Finished {
    l: Mat,
    exchanged: usize,
}

/// σ.
#[derive(Debug, Clone, PartialEq)]
pub struct LuState {
    n: u64,
    block: u64,
    pivots: Vec<u32>,
    check: LuCheck,
    columns: Vec<Digest>,
}

impl State for LuState {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(MAGIC);
        let mut fields = Fields(out);
        fields.words(&[self.n, self.block, self.pivots.len() as u64]);
        fields.numbers(&[self.check.found, self.check.allowed, self.check.squares]);
        for pivot in &self.pivots {
            fields.0.extend_from_slice(&pivot.to_le_bytes());
        }
        fields.numbers(&self.check.sums);
        fields.digests(&self.columns);
    }

    fn decode(bytes: &[u8]) -> Result<Self, ProgramError> {
        let mut read = Read::new(bytes, MAGIC, "lu@1")?;
        let [n, block] = read.words()?;
        let done = read.count()?;
        let sums = read.numbers(3)?;
        let pivots = read.shorts(done)?;
        let mut check = LuCheck::new();
        check.sums = read.numbers(done)?;
        (check.found, check.allowed, check.squares) = (sums[0], sums[1], sums[2]);
        let width = usize::try_from(block).unwrap_or(0).max(1);
        let columns = read.digests(done.div_ceil(width))?;
        let whole = done % width == 0 || done as u64 == n;
        if !whole || done as u64 > n || pivots.iter().any(|p| u64::from(*p) >= n) {
            return Err(read.wrong());
        }
        read.end()?;
        Ok(Self {
            n,
            block,
            pivots,
            check,
            columns,
        })
    }
}

impl LuState {
    /// Pivots of the rows `from..to`, counted from row `from`.
    fn exchanges(&self, from: usize, to: usize) -> Vec<usize> {
        let pivots = &self.pivots[from..to];
        pivots.iter().map(|p| *p as usize - from).collect()
    }
}

impl Lu {
    fn n(&self) -> usize {
        self.a.cols()
    }

    /// Finished block column `index`, its rows in their present order.
    fn finished(
        &mut self,
        index: usize,
        state: &LuState,
        cx: &mut Capsule,
    ) -> Result<Mat, ProgramError> {
        let (digest, from) = (state.columns[index], index * self.block);
        let done = state.pivots.len();
        let Finished { mut l, exchanged } =
            match self.kept.take(index, digest, |f| f.exchanged <= done) {
                Some(finished) => finished,
                None => {
                    let (n, name) = (self.n(), format!("lu-{index}"));
                    let whole = fetch_block(cx, &name, digest, n, self.block)?;
                    Finished {
                        l: whole.view().part(from, n - from, 0, self.block).to_mat(),
                        exchanged: from + self.block,
                    }
                }
            };
        let (_, below) = l.view_mut().split_rows(exchanged - from);
        lu::exchange(below, &state.exchanges(exchanged, done));
        Ok(l)
    }

    fn keep(&mut self, index: usize, digest: Digest, l: Mat, exchanged: usize) {
        let bytes = 8 * (l.rows() * l.cols()) as u64;
        self.kept
            .put(index, digest, bytes, Finished { l, exchanged });
    }
}

impl Program for Lu {
    type State = LuState;

    fn start(params: &Value, inputs: &mut Inputs) -> Result<Self, ProgramError> {
        let params = LuParams::from_value(params).map_err(ProgramError::permanent)?;
        let a = Source::open("matrix", &params.matrix, inputs)?;
        if a.rows() != a.cols() {
            return Err(ProgramError::Permanent(format!(
                "params.matrix: must be square, but is {} x {}",
                a.rows(),
                a.cols()
            )));
        }
        Ok(Self {
            a,
            block: params.block as usize,
            threads: Threads::new(params.threads)?,
            kept: Kept::new(),
        })
    }

    fn initial(&mut self) -> Result<LuState, ProgramError> {
        Ok(LuState {
            n: self.n() as u64,
            block: self.block as u64,
            pivots: Vec::new(),
            check: LuCheck::new(),
            columns: Vec::new(),
        })
    }

    fn capsule(&mut self, state: &mut LuState, cx: &mut Capsule) -> Result<Step, ProgramError> {
        let (n, from) = (self.n(), state.pivots.len());
        if (state.n, state.block) != (n as u64, self.block as u64) || from >= n {
            return Err(ProgramError::Permanent(format!(
                "the state is that of a matrix of order {} in blocks of {}, not of {n} in {}",
                state.n, state.block, self.block
            )));
        }
        let (k, width) = (state.columns.len(), self.block.min(n - from));
        let a = self.a.columns(from, width);
        let mut x = a.clone();
        lu::exchange(x.view_mut(), &state.exchanges(0, from));
        for i in 0..k {
            let l = self.finished(i, state, cx)?;
            let (_, rows) = x.view_mut().split_rows(i * self.block);
            lu::update(&mut self.threads.engine, l.view(), rows);
            self.keep(i, state.columns[i], l, from);
        }
        let mut pivots = vec![0; width];
        let (_, own) = x.view_mut().split_rows(from);
        lu::panel(&mut self.threads.engine, own, &mut pivots)
            .map_err(|error| ProgramError::permanent(error.shifted(from)))?;
        let absolute = pivots.iter().map(|p| u32::try_from(p + from));
        let absolute: Result<Vec<u32>, _> = absolute.collect();
        state
            .pivots
            .extend(absolute.map_err(ProgramError::permanent)?);
        let mut row_of: Vec<usize> = (0..n).collect();
        for (row, pivot) in state.pivots.iter().enumerate() {
            row_of.swap(row, *pivot as usize);
        }
        let simd = self.threads.engine.simd();
        state
            .check
            .add(simd, a.view(), x.view(), &row_of)
            .map_err(|error| {
                ProgramError::Permanent(format!("block column {k} is not P·A = L·U: {error}"))
            })?;
        let digest = cx.output_digested(format!("lu-{k}"), npy::matrix(x.view()));
        state.columns.push(digest);
        if from + width < n {
            let l = x.view().part(from, n - from, 0, width).to_mat();
            self.keep(k, digest, l, from + width);
            return Ok(Step::Boundary);
        }
        let pivots: Vec<usize> = state.pivots.iter().map(|p| *p as usize).collect();
        let pivots = cx.output_digested("pivots", npy::integers(&pivots));
        let (residual, bound) = state.check.residual();
        Ok(Step::Complete {
            result: json!({
                "digest": chained(&[&state.columns[..], &[pivots]].concat()),
                "residual": residual,
                "bound": bound,
                "n": n,
                "block": self.block,
            }),
        })
    }

    fn progress(&self, state: &LuState) -> Progress {
        Progress {
            of: Some(self.n().div_ceil(self.block) as u64),
            note: Some(format!("residual {:.1e}", state.check.residual().0)),
        }
    }

    fn configure(&mut self, grant: &Grant) -> Result<(), ProgramError> {
        self.kept.configure(grant);
        self.threads.configure(grant)
    }
}
