//! `gemm@1`: C = A·B. A capsule is one tile of C, which becomes the output `c-<i>-<j>`.
//!
//! On a device, the rows of A and columns of B of a tile stay there for later tiles, as far as
//! memory allows. If even those of one tile do not fit, they pass through it in pieces, in the same
//! order.
//!
//! Tiles are numbered row by row and are independent. A range of tiles has the same bits as in a
//! full run. So a batch may share the tiles, and a run may give away the end of its range and merge
//! it later ([`fiec_schemas::spread`]). Each tile is checked when it is made
//! ([`fiec_kernels::dense::check::ProductCheck`]).
//!
//! σ: magic `FIECGEM2`, then `u64` each: m, n, k, tile, first tile, the tile after the last one,
//! tiles done. Then the worst residual (`f64`), and the digest of each tile done (32 bytes). Little
//! endian. For a grid of 32 × 32 tiles, as with n = 16,384, σ grows to 32 KiB.

use std::collections::BTreeMap;
use std::sync::Arc;

use fiec_kernels::dense::check::{ProductCheck, product_bound};
use fiec_kernels::dense::gemm::DEPTH;
use fiec_kernels::dense::{Into, Mat, MatRef, gemm};
use fiec_kernels::device::{self, Buffer, Device, DeviceError, Part};
use fiec_kernels::npy;
use fiec_schemas::package::Grant;
use fiec_schemas::programs::{GemmParams, TileRange};
use fiec_schemas::{BoundaryIndex, Digest};
use serde_json::{Value, json};

use super::dense::{Fields, Read, Source, Threads, chained};
use super::place::{Place, arithmetic, failed, reserve, too_small};
use crate::program::{Capsule, Inputs, Program, ProgramError, Progress, State, Step};

const MAGIC: &[u8; 8] = b"FIECGEM2";

/// The program with its matrices.
pub struct Gemm {
    a: Arc<Mat>,
    b: Arc<Mat>,
    tile: usize,
    range: TileRange,
    threads: Threads,
    place: Place,
    arithmetic: device::Arithmetic,
    /// Rows of A and columns of B that are on the device, by tile row and tile column.
    rows: BTreeMap<usize, Buffer>,
    columns: BTreeMap<usize, Buffer>,
    /// The tile row of the last tile, and the check for its rows of A.
    check: Option<(usize, ProductCheck)>,
    /// Capsules completed.
    index: BoundaryIndex,
}

/// σ.
#[derive(Debug, Clone, PartialEq)]
pub struct GemmState {
    /// m, n, k, tile, first tile.
    shape: [u64; 5],
    /// The tile after the last one of its range. While parts are out it is smaller than at the
    /// start.
    end: u64,
    worst: f64,
    tiles: Vec<Digest>,
}

impl GemmState {
    /// The tiles of its range that are not done.
    fn left(&self) -> TileRange {
        TileRange {
            from: self.shape[4] + self.tiles.len() as u64,
            to: self.end,
        }
    }
}

impl State for GemmState {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(MAGIC);
        let mut fields = Fields(out);
        fields.words(&self.shape);
        fields.words(&[self.end, self.tiles.len() as u64]);
        fields.numbers(&[self.worst]);
        fields.digests(&self.tiles);
    }

    fn decode(bytes: &[u8]) -> Result<Self, ProgramError> {
        let mut read = Read::new(bytes, MAGIC, "gemm@1")?;
        let shape = read.words()?;
        let [end] = read.words()?;
        let done = read.count()?;
        let worst = read.numbers(1)?[0];
        let tiles = read.digests(done)?;
        // The finished tiles lie in the range.
        let next = shape[4].checked_add(tiles.len() as u64);
        if next.is_none_or(|next| next > end) {
            return Err(read.wrong());
        }
        read.end()?;
        Ok(Self {
            shape,
            end,
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

    /// Ends a capsule.
    fn reached(&mut self, state: &GemmState, cx: &Capsule) -> Step {
        self.index = cx.index() + 1;
        if state.left().count() > 0 {
            return Step::Boundary;
        }
        let [m, n, k, tile, _] = state.shape;
        Step::Complete {
            result: json!({
                "digest": chained(&state.tiles),
                "residual": state.worst,
                "bound": product_bound(self.a.cols()),
                "m": m,
                "n": n,
                "k": k,
                "tile": tile,
                "tiles": self.range,
            }),
        }
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
        if let Some(mut device) = self.place.take() {
            let device_mut = device.as_mut();
            let (rows, columns) = (&mut self.rows, &mut self.columns);
            let kind = self.arithmetic;
            on_device(device_mut, kind, (i, rows, a), (j, columns, b), &mut c)?;
            self.place.put(device);
        } else {
            gemm(&mut self.threads.engine, a, b, Into::Replace, c.view_mut());
        }
        let found = check.check(simd, b, c.view()).map_err(|error| {
            ProgramError::Permanent(format!("tile c-{i}-{j} is not A·B: {error}"))
        })?;
        Ok((c, found))
    }
}

fn upload(device: &mut dyn Device, from: MatRef<'_>) -> Result<Buffer, DeviceError> {
    let buffer = device.allocate(from.rows() * from.cols())?;
    device.write(from, buffer.matrix(from.rows(), from.cols()))?;
    Ok(buffer)
}

/// Returns the part held under `index`, and uploads it if it is missing.
fn held(
    device: &mut dyn Device,
    all: &mut BTreeMap<usize, Buffer>,
    index: usize,
    from: MatRef<'_>,
) -> Result<Part, ProgramError> {
    let (rows, cols) = (from.rows(), from.cols());
    if let Some(buffer) = all.get(&index) {
        return Ok(buffer.matrix(rows, cols));
    }
    let buffer = upload(device, from).map_err(failed)?;
    let part = buffer.matrix(rows, cols);
    all.insert(index, buffer);
    Ok(part)
}

/// A part of A or B that a tile needs: its index, the parts on the device, and its data.
type Needed<'a, 'b> = (usize, &'a mut BTreeMap<usize, Buffer>, MatRef<'b>);

/// Computes a tile on the device.
fn on_device(
    device: &mut dyn Device,
    kind: device::Arithmetic,
    (i, rows, a): Needed<'_, '_>,
    (j, columns, b): Needed<'_, '_>,
    c: &mut Mat,
) -> Result<(), ProgramError> {
    let (m, n, k) = (c.rows(), c.cols(), a.cols());
    loop {
        let missing = |held: bool, elements: usize| if held { 0 } else { elements };
        let wanted = m * n
            + missing(rows.contains_key(&i), m * k)
            + missing(columns.contains_key(&j), k * n);
        if 8 * wanted as u64 + reserve(kind, 0) <= device.usage().available() {
            break;
        }
        // Rows of A serve one row of tiles; columns of B are used again in the next row. So the
        // first columns stay: least-recently-used eviction would keep none.
        let other_row = rows.keys().copied().find(|row| *row != i);
        let other_column = columns.keys().copied().rfind(|column| *column != j);
        let evicted = match (other_row, other_column) {
            (Some(row), _) => rows.remove(&row),
            (None, Some(column)) => columns.remove(&column),
            (None, None) => break,
        };
        evicted.into_iter().for_each(|old| device.release(old));
    }
    let wanted = [
        (rows.contains_key(&i), m * k),
        (columns.contains_key(&j), k * n),
    ];
    let elements: usize = wanted.iter().filter(|(held, _)| !held).map(|w| w.1).sum();
    if 8 * (elements + m * n) as u64 + reserve(kind, 0) > device.usage().available() {
        for old in rows.remove(&i).into_iter().chain(columns.remove(&j)) {
            device.release(old);
        }
        return in_pieces(device, kind, a, b, c);
    }
    let left = held(device, rows, i, a)?;
    let right = held(device, columns, j, b)?;
    let to = device.allocate(m * n).map_err(failed)?;
    let part = to.matrix(m, n);
    device
        .gemm(kind, left, right, Into::Replace, part)
        .and_then(|()| device.read(part, c.view_mut()))
        .map_err(failed)?;
    device.release(to);
    Ok(())
}

/// Computes a tile in pieces that fit: parts of the tile, and whole chains of the inner dimension.
fn in_pieces(
    device: &mut dyn Device,
    kind: device::Arithmetic,
    a: MatRef<'_>,
    b: MatRef<'_>,
    c: &mut Mat,
) -> Result<(), ProgramError> {
    const LEAST: usize = 16;
    let (m, n, k) = (c.rows(), c.cols(), a.cols());
    let (mut high, mut wide) = (m, n);
    let depth = loop {
        let free = device.usage().available().saturating_sub(reserve(kind, 0)) / 8;
        let left = usize::try_from(free).unwrap_or(usize::MAX);
        let depth = left.saturating_sub(high * wide) / (high + wide);
        if depth >= k {
            break k;
        }
        if depth >= DEPTH {
            break depth / DEPTH * DEPTH;
        }
        if high.max(wide) <= LEAST {
            let least = high * wide + (high + wide) * DEPTH.min(k);
            return Err(too_small(device, "a piece of a tile", least));
        }
        if high >= wide {
            high = high.div_ceil(2);
        } else {
            wide = wide.div_ceil(2);
        }
    };
    for col in (0..n).step_by(wide) {
        let width = wide.min(n - col);
        let (_, right) = c.view_mut().split_cols(col);
        let (mut columns, _) = right.split_cols(width);
        for row in (0..m).step_by(high) {
            let height = high.min(m - row);
            let to = device.allocate(height * width).map_err(failed)?;
            let part = to.matrix(height, width);
            for from in (0..k).step_by(depth) {
                let deep = depth.min(k - from);
                let left = upload(device, a.part(row, height, from, deep)).map_err(failed)?;
                let right = upload(device, b.part(from, deep, col, width)).map_err(failed)?;
                let into = if from == 0 { Into::Replace } else { Into::Add };
                let factors = (left.matrix(height, deep), right.matrix(deep, width));
                device
                    .gemm(kind, factors.0, factors.1, into, part)
                    .and_then(|()| device.finish())
                    .map_err(failed)?;
                device.release(left);
                device.release(right);
            }
            let (_, below) = columns.reborrow().split_rows(row);
            let (own, _) = below.split_rows(height);
            device.read(part, own).map_err(failed)?;
            device.release(to);
        }
    }
    Ok(())
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
            place: Place::new(inputs),
            arithmetic: arithmetic(params.arithmetic),
            rows: BTreeMap::new(),
            columns: BTreeMap::new(),
            check: None,
            index: 0,
        })
    }

    fn initial(&mut self) -> Result<GemmState, ProgramError> {
        Ok(GemmState {
            shape: self.shape(),
            end: self.range.to,
            worst: 0.0,
            tiles: Vec::new(),
        })
    }

    fn capsule(&mut self, state: &mut GemmState, cx: &mut Capsule) -> Result<Step, ProgramError> {
        let next = state.left();
        if state.shape != self.shape() || next.count() == 0 || next.to > self.range.to {
            return Err(ProgramError::Permanent(
                "the state is that of another product".to_owned(),
            ));
        }
        let at = next.from as usize;
        let (i, j) = (at / self.across(), at % self.across());
        let (c, found) = self.make(i, j)?;
        state.worst = state.worst.max(found);
        let digest = cx.output_digested(format!("c-{i}-{j}"), npy::matrix(c.view()));
        state.tiles.push(digest);
        Ok(self.reached(state, cx))
    }

    fn split(&mut self, state: &mut GemmState) -> Option<TileRange> {
        let range = state.left().last_half()?;
        state.end = range.from;
        Some(range)
    }

    fn merge(
        &mut self,
        state: &mut GemmState,
        range: TileRange,
        part: Option<GemmState>,
        cx: &mut Capsule,
    ) -> Result<Step, ProgramError> {
        let TileRange { from, to } = range;
        let left = state.left();
        if state.shape != self.shape() || left.count() > 0 || left.to != from || to > self.range.to
        {
            return Err(ProgramError::Permanent(format!(
                "tiles {from} to {to} cannot be merged: {} to {} of this range are not done, and \
                 the next part must begin with {}",
                left.from, left.to, left.to
            )));
        }
        if let Some(part) = part {
            let [m, n, k, tile, _] = state.shape;
            if (part.shape, part.end) != ([m, n, k, tile, from], to) {
                return Err(ProgramError::Permanent(format!(
                    "the state of the part with tiles {from} to {to} is that of another range or \
                     product"
                )));
            }
            state.worst = state.worst.max(part.worst);
            state.tiles.extend(part.tiles);
        }
        state.end = to;
        Ok(self.reached(state, cx))
    }

    fn progress(&self, state: &GemmState) -> Progress {
        Progress {
            of: Some(self.index + state.left().count()),
            note: Some(format!("residual {:.1e}", state.worst)),
        }
    }

    fn configure(&mut self, grant: &Grant) -> Result<(), ProgramError> {
        if self.place.changes(grant) {
            self.let_go(false);
            self.place.go(grant)?;
        }
        self.threads.configure(grant)
    }

    fn let_go(&mut self, warm: bool) {
        // The buffers are freed with their device.
        self.rows.clear();
        self.columns.clear();
        self.place.let_go(warm);
    }
}
