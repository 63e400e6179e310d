//! `qr@1`: A = Q·R by Householder reflectors in compact WY form, left-looking by block columns.
//! Capsule k takes block column k of A, applies the reflectors of each finished block column to
//! it, and factors it; it becomes the output `qr-<k>`.
//!
//! `qr-<k>` is a `.npy` file of m + w rows and w columns, w being the block's width. Its first m
//! rows have R on and above the diagonal, and below it the reflectors V, whose diagonal of ones is
//! not stored (as LAPACK's geqrf leaves them); its last w rows are T, upper triangular, with
//! `I − V·T·Vᵀ` the product of the block's reflectors and Q the product of the blocks in order.
//!
//! A block column that this process does not hold is fetched by its digest. Each is checked when
//! it is made ([`fiec_kernels::dense::check::QrCheck`]).
//!
//! σ: magic `FIECQR_1`, m, n, block, columns done (`u64` each), the check's three sums and its
//! vector of m elements (`f64` each), and the digests of the finished block columns (32 bytes
//! each); little endian: 17 KB for m = n = 2,048, 68 KB for 8,192 with blocks of 128.

use fiec_kernels::dense::check::QrCheck;
use fiec_kernels::dense::qr::Reflectors;
use fiec_kernels::dense::{Mat, qr};
use fiec_kernels::npy;
use fiec_schemas::Digest;
use fiec_schemas::package::Grant;
use fiec_schemas::programs::QrParams;
use serde_json::{Value, json};

use super::dense::{Fields, Kept, Read, Source, Threads, chained, fetch_block};
use crate::program::{Capsule, Inputs, Program, ProgramError, Progress, State, Step};

const MAGIC: &[u8; 8] = b"FIECQR_1";

/// The program with its matrix.
pub struct Qr {
    a: Source,
    block: usize,
    threads: Threads,
    kept: Kept<Reflectors>,
}

/// σ.
#[derive(Debug, Clone, PartialEq)]
pub struct QrState {
    cols: u64,
    block: u64,
    check: QrCheck,
    columns: Vec<Digest>,
}

impl State for QrState {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(MAGIC);
        let check = &self.check;
        let mut fields = Fields(out);
        fields.words(&[check.turned.len() as u64, self.cols, self.block]);
        fields.words(&[check.columns as u64]);
        fields.numbers(&[check.found, check.squares, check.orthogonality]);
        fields.numbers(&check.turned);
        fields.digests(&self.columns);
    }

    fn decode(bytes: &[u8]) -> Result<Self, ProgramError> {
        let mut read = Read::new(bytes, MAGIC, "qr@1")?;
        let rows = read.count()?;
        let [cols, block] = read.words()?;
        let done = read.count()?;
        let sums = read.numbers(3)?;
        let turned = read.numbers(rows)?;
        let width = usize::try_from(block).unwrap_or(0).max(1);
        let columns = read.digests(done.div_ceil(width))?;
        let whole = done % width == 0 || done as u64 == cols;
        if !whole || done as u64 > cols || cols > rows as u64 {
            return Err(read.wrong());
        }
        read.end()?;
        Ok(Self {
            cols,
            block,
            check: QrCheck {
                turned,
                columns: done,
                found: sums[0],
                squares: sums[1],
                orthogonality: sums[2],
            },
            columns,
        })
    }
}

/// The reflectors of a finished block column whose diagonal begins at row `from`.
fn reflectors(whole: &Mat, rows: usize, from: usize) -> Reflectors {
    let (view, width) = (whole.view(), whole.cols());
    Reflectors {
        v: Mat::from_fn(rows - from, width, |i, j| match i.cmp(&j) {
            std::cmp::Ordering::Less => 0.0,
            std::cmp::Ordering::Equal => 1.0,
            std::cmp::Ordering::Greater => view.at(from + i, j),
        }),
        t: view.part(rows, width, 0, width).to_mat(),
    }
}

/// A finished block column and its T in one file.
fn file(x: &Mat, t: &Mat) -> Vec<u8> {
    let mut both = Mat::zeros(x.rows() + t.rows(), x.cols());
    let (mut top, mut below) = both.view_mut().split_rows(x.rows());
    top.copy_from(x.view());
    below.copy_from(t.view());
    npy::matrix(both.view())
}

impl Qr {
    fn finished(
        &mut self,
        index: usize,
        state: &QrState,
        cx: &mut Capsule,
    ) -> Result<Reflectors, ProgramError> {
        let digest = state.columns[index];
        if let Some(kept) = self.kept.take(index, digest, |_| true) {
            return Ok(kept);
        }
        let (rows, width) = (self.a.rows(), self.block);
        let name = format!("qr-{index}");
        let whole = fetch_block(cx, &name, digest, rows + width, width)?;
        Ok(reflectors(&whole, rows, index * width))
    }

    fn keep(&mut self, index: usize, digest: Digest, made: Reflectors) {
        let bytes = 8 * (made.v.data().len() + made.t.data().len()) as u64;
        self.kept.put(index, digest, bytes, made);
    }
}

impl Program for Qr {
    type State = QrState;

    fn start(params: &Value, inputs: &mut Inputs) -> Result<Self, ProgramError> {
        let params = QrParams::from_value(params).map_err(ProgramError::permanent)?;
        let a = Source::open("matrix", &params.matrix, inputs)?;
        if a.rows() < a.cols() {
            return Err(ProgramError::Permanent(format!(
                "params.matrix: must have at least as many rows as columns, but is {} x {}",
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

    fn initial(&mut self) -> Result<QrState, ProgramError> {
        Ok(QrState {
            cols: self.a.cols() as u64,
            block: self.block as u64,
            check: QrCheck::new(self.a.rows()),
            columns: Vec::new(),
        })
    }

    fn capsule(&mut self, state: &mut QrState, cx: &mut Capsule) -> Result<Step, ProgramError> {
        let (rows, cols, from) = (self.a.rows(), self.a.cols(), state.check.columns);
        let shape = (state.check.turned.len(), state.cols, state.block);
        if shape != (rows, cols as u64, self.block as u64) || from >= cols {
            return Err(ProgramError::Permanent(format!(
                "the state is that of {} x {} in blocks of {}, not of {rows} x {cols} in {}",
                shape.0, shape.1, shape.2, self.block
            )));
        }
        let (k, width) = (state.columns.len(), self.block.min(cols - from));
        let a = self.a.columns(from, width);
        let mut x = a.clone();
        for i in 0..k {
            let made = self.finished(i, state, cx)?;
            let (_, part) = x.view_mut().split_rows(i * self.block);
            qr::apply(&mut self.threads.engine, made.v.view(), made.t.view(), part);
            self.keep(i, state.columns[i], made);
        }
        let (_, own) = x.view_mut().split_rows(from);
        let made = qr::panel(&mut self.threads.engine, own)
            .map_err(|error| ProgramError::permanent(error.shifted(from)))?;
        state
            .check
            .add(&mut self.threads.engine, a.view(), x.view(), &made)
            .map_err(|error| {
                ProgramError::Permanent(format!("block column {k} is not A = Q·R: {error}"))
            })?;
        let digest = cx.output_digested(format!("qr-{k}"), file(&x, &made.t));
        state.columns.push(digest);
        if from + width < cols {
            self.keep(k, digest, made);
            return Ok(Step::Boundary);
        }
        Ok(Step::Complete {
            result: json!({
                "digest": chained(&state.columns),
                "residual": state.check.residual(),
                "orthogonality": state.check.orthogonality,
                "bound": state.check.bound(),
                "rows": rows,
                "cols": cols,
                "block": self.block,
            }),
        })
    }

    fn progress(&self, state: &QrState) -> Progress {
        Progress {
            of: Some(self.a.cols().div_ceil(self.block) as u64),
            note: Some(format!("residual {:.1e}", state.check.residual())),
        }
    }

    fn configure(&mut self, grant: &Grant) -> Result<(), ProgramError> {
        self.kept.configure(grant);
        self.threads.configure(grant)
    }
}
