//! `gemm@1`: C = A·B. A capsule is one tile of C, which becomes the output `c-<i>-<j>`.
//!
//! Tiles are numbered row by row, and know nothing of each other: those of a range are the same
//! bits as in a run of all, so a batch may share them out. Each is checked when it is made
//! ([`fiec_kernels::dense::check::ProductCheck`]).
//!
//! σ: magic `FIECGEM1`, m, n, k, tile, first tile, tiles done (`u64` each), worst residual
//! (`f64`), and the digest of each tile done (32 bytes); little endian. So a grid of 32 × 32
//! tiles, as of n = 16,384, ends with 32 KiB.

use std::sync::Arc;

use fiec_kernels::dense::check::ProductCheck;
use fiec_kernels::dense::{Into, Mat, gemm};
use fiec_kernels::npy;
use fiec_schemas::Digest;
use fiec_schemas::package::Grant;
use fiec_schemas::programs::{GemmParams, TileRange};
use serde_json::{Value, json};

use super::dense::{Fields, Read, Source, Threads, chained};
use crate::program::{Capsule, Inputs, Program, ProgramError, Progress, State, Step};

const MAGIC: &[u8; 8] = b"FIECGEM1";

/// The program with its matrices.
pub struct Gemm {
    a: Arc<Mat>,
    b: Arc<Mat>,
    tile: usize,
    range: TileRange,
    threads: Threads,
    /// The tile row of the last tile, and the check for its rows of A.
    check: Option<(usize, ProductCheck)>,
}

/// σ.
#[derive(Debug, Clone, PartialEq)]
pub struct GemmState {
    /// m, n, k, tile, first tile.
    shape: [u64; 5],
    worst: f64,
    tiles: Vec<Digest>,
}

impl State for GemmState {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(MAGIC);
        let mut fields = Fields(out);
        fields.words(&self.shape);
        fields.words(&[self.tiles.len() as u64]);
        fields.numbers(&[self.worst]);
        fields.digests(&self.tiles);
    }

    fn decode(bytes: &[u8]) -> Result<Self, ProgramError> {
        let mut read = Read::new(bytes, MAGIC, "gemm@1")?;
        let shape = read.words()?;
        let done = read.count()?;
        let worst = read.numbers(1)?[0];
        let tiles = read.digests(done)?;
        read.end()?;
        Ok(Self {
            shape,
            worst,
            tiles,
        })
    }
}

impl Gemm {
    fn shape(&self) -> [u64; 5] {
        let (m, n, k) = (self.a.rows(), self.b.cols(), self.a.cols());
        let [m, n, k, tile] = [m, n, k, self.tile].map(|v| v as u64);
        [m, n, k, tile, self.range.from]
    }

    fn across(&self) -> usize {
        self.b.cols().div_ceil(self.tile)
    }

    /// Computes and checks a tile.
    fn make(&mut self, i: usize, j: usize) -> Result<(Mat, f64), ProgramError> {
        let simd = self.threads.engine.simd();
        let depth = self.a.cols();
        let (top, left) = (i * self.tile, j * self.tile);
        let (height, width) = (
            self.tile.min(self.a.rows() - top),
            self.tile.min(self.b.cols() - left),
        );
        let a = self.a.view().part(top, height, 0, depth);
        let b = self.b.view().part(0, depth, left, width);
        let (_, check) = match self.check.take().filter(|(at, _)| *at == i) {
            Some(check) => self.check.insert(check),
            None => self.check.insert((i, ProductCheck::new(simd, a))),
        };
        let mut c = Mat::zeros(height, width);
        gemm(&mut self.threads.engine, a, b, Into::Replace, c.view_mut());
        let found = check.check(simd, b, c.view()).map_err(|error| {
            ProgramError::Permanent(format!("tile c-{i}-{j} is not A·B: {error}"))
        })?;
        Ok((c, found))
    }
}

impl Program for Gemm {
    type State = GemmState;

    fn start(params: &Value, inputs: &mut Inputs) -> Result<Self, ProgramError> {
        let params = GemmParams::from_value(params).map_err(ProgramError::permanent)?;
        let a = Source::open("a", &params.a, inputs)?.whole(inputs)?;
        let b = Source::open("b", &params.b, inputs)?.whole(inputs)?;
        if a.cols() != b.rows() {
            return Err(ProgramError::Permanent(format!(
                "params.b: must have as many rows as a has columns ({}), but has {}",
                a.cols(),
                b.rows()
            )));
        }
        let tile = params.tile as usize;
        let all = (a.rows().div_ceil(tile) * b.cols().div_ceil(tile)) as u64;
        let range = params.tiles.unwrap_or(TileRange { from: 0, to: all });
        if range.to > all {
            return Err(ProgramError::Permanent(format!(
                "params.tiles.to: must be at most the number of tiles, {all}, but is {}",
                range.to
            )));
        }
        Ok(Self {
            a,
            b,
            tile,
            range,
            threads: Threads::new(params.threads)?,
            check: None,
        })
    }

    fn initial(&mut self) -> Result<GemmState, ProgramError> {
        Ok(GemmState {
            shape: self.shape(),
            worst: 0.0,
            tiles: Vec::new(),
        })
    }

    fn capsule(&mut self, state: &mut GemmState, cx: &mut Capsule) -> Result<Step, ProgramError> {
        let count = self.range.to - self.range.from;
        if state.shape != self.shape() || state.tiles.len() as u64 >= count {
            return Err(ProgramError::Permanent(
                "the state is that of another product".to_owned(),
            ));
        }
        let at = self.range.from as usize + state.tiles.len();
        let (i, j) = (at / self.across(), at % self.across());
        let (c, found) = self.make(i, j)?;
        state.worst = state.worst.max(found);
        let digest = cx.output_digested(format!("c-{i}-{j}"), npy::matrix(c.view()));
        state.tiles.push(digest);
        if (state.tiles.len() as u64) < count {
            return Ok(Step::Boundary);
        }
        let [m, n, k, tile, _] = state.shape;
        let bound = self.check.as_ref().map_or(0.0, |(_, check)| check.bound());
        Ok(Step::Complete {
            result: json!({
                "digest": chained(&state.tiles),
                "residual": state.worst,
                "bound": bound,
                "m": m,
                "n": n,
                "k": k,
                "tile": tile,
                "tiles": self.range,
            }),
        })
    }

    fn progress(&self, state: &GemmState) -> Progress {
        Progress {
            of: Some(self.range.to - self.range.from),
            note: Some(format!("residual {:.1e}", state.worst)),
        }
    }

    fn configure(&mut self, grant: &Grant) -> Result<(), ProgramError> {
        self.threads.configure(grant)
    }
}
