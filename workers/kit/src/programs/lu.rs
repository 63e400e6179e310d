//! `lu@1`: P·A = L·U with partial pivoting, left-looking by block columns. Capsule k takes block
//! column k of A and exchanges its rows as all earlier panels did. It updates the column by each
//! finished block column and factors it. The result is the output `lu-<k>`.
//!
//! `lu-<k>` is a `.npy` file of all rows: U on and above the diagonal, L below it, in the row order
//! after capsule k. The last capsule also makes `pivots` (`.npy`, int64): row i was exchanged with
//! row `pivots[i]`, by ascending i, counted from 0, as in LAPACK's ipiv. The exchanges after block
//! column k must still be applied to its rows below its diagonal block:
//!
//! ```text
//! F = np.hstack([np.load(f"lu-{k}") for k in range(blocks)])
//! for i, p in enumerate(np.load("pivots")):
//!     done = i // block * block               # columns of the panels before
//!     F[[i, p], :done] = F[[p, i], :done]
//! ```
//!
//! On a device, finished block columns stay there as far as memory allows, and the device computes
//! the updates. The host factors the panel, or cuSOLVER with vendor arithmetic. A block column
//! leaves the device once, as an output.
//!
//! A block column that this process does not hold is fetched by its digest. Each is checked when it
//! is made ([`fiec_kernels::dense::check::LuCheck`]).
//!
//! σ: magic `FIECLU_1`, n, block, columns done (`u64` each), the check's three sums (`f64` each).
//! Then pivots (`u32`) and the check's vector (`f64`) of the columns done, and the digests of the
//! finished block columns (32 bytes each). Little endian. It grows to 12 bytes per column and 32
//! per block. With blocks of 256 that is 25 KB for n = 2,048, and 99 KB for n = 8,192.

use fiec_kernels::dense::check::LuCheck;
use fiec_kernels::dense::{Mat, lu};
use fiec_kernels::device::dense::update;
use fiec_kernels::device::{self, Buffer, Device};
use fiec_kernels::npy;
use fiec_schemas::Digest;
use fiec_schemas::package::Grant;
use fiec_schemas::programs::LuParams;
use serde_json::{Value, json};

use super::dense::{Fields, Kept, Read, Source, Threads, chained, fetch_block};
use super::place::{Place, Resident, arithmetic, failed, reserve, too_small};
use crate::program::{Capsule, Inputs, Program, ProgramError, Progress, State, Step};

const MAGIC: &[u8; 8] = b"FIECLU_1";

/// The program with its matrix.
pub struct Lu {
    a: Source,
    block: usize,
    threads: Threads,
    kept: Kept<Finished>,
    place: Place,
    arithmetic: device::Arithmetic,
    resident: Resident<OnDevice>,
}

/// A finished block column on the device, like [`Finished`].
struct OnDevice {
    l: Buffer,
    exchanged: usize,
}

/// Least columns of a strip that is updated at once.
const STRIP: usize = 8;

/// A finished block column from its diagonal block down, and the number of rows exchanged.
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

    /// Returns finished block column `index` with its rows in their present order.
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

impl Lu {
    /// Returns the number of columns that are updated at once on the device. It evicts blocks from
    /// the device to make room, the last ones first, because all are used in ascending order.
    fn strip(
        &mut self,
        device: &mut dyn Device,
        width: usize,
        blocks: usize,
    ) -> Result<usize, ProgramError> {
        let n = self.n();
        let free = |device: &mut dyn Device| device.usage().available();
        let mut strip = width;
        loop {
            let passing = match self.resident.misses(blocks) {
                true => n * self.block.min(n),
                false => 0,
            };
            let wanted = n * strip + passing;
            if 8 * wanted as u64 + reserve(self.arithmetic, n) <= free(device) {
                return Ok(strip);
            }
            if let Some((index, (digest, block))) = self.resident.blocks.pop_last() {
                self.keep_resident(device, index, digest, block)?;
            } else if strip > STRIP {
                strip = strip.div_ceil(2);
            } else {
                return Err(too_small(device, "an update of a block column", wanted));
            }
        }
    }

    /// Moves a block from the device to the host, if the host has room.
    fn keep_resident(
        &mut self,
        device: &mut dyn Device,
        index: usize,
        digest: Digest,
        block: OnDevice,
    ) -> Result<(), ProgramError> {
        let rows = self.n() - index * self.block;
        let mut l = Mat::zeros(rows, self.block);
        device
            .read(block.l.matrix(rows, self.block), l.view_mut())
            .map_err(failed)?;
        device.release(block.l);
        self.keep(index, digest, l, block.exchanged);
        Ok(())
    }

    /// Updates a block column by all finished ones. If the vendor's library factors the panel, too,
    /// returns its pivots, counted from its first row.
    fn update_on(
        &mut self,
        device: &mut dyn Device,
        x: &mut Mat,
        state: &LuState,
        cx: &mut Capsule,
    ) -> Result<Option<Vec<usize>>, ProgramError> {
        let (n, width, done) = (x.rows(), x.cols(), state.pivots.len());
        let (kind, blocks) = (self.arithmetic, state.columns.len());
        for block in self.resident.strangers(&state.columns) {
            device.release(block.l);
        }
        let strip = self.strip(device, width, blocks)?;
        let exchange = |device: &mut dyn Device, index: usize, block: &mut OnDevice| {
            let (from, width) = (index * self.block, self.block);
            let whole = block.l.matrix(n - from, width);
            let (_, below) = whole.split_rows(block.exchanged - from);
            let pivots = state.exchanges(block.exchanged, done);
            block.exchanged = done;
            device.exchange(below, &pivots)
        };
        for (index, (_, block)) in &mut self.resident.blocks {
            exchange(device, *index, block).map_err(failed)?;
        }
        let mut pivots = None;
        for col in (0..width).step_by(strip) {
            let count = strip.min(width - col);
            let buffer = device.allocate(n * count).map_err(failed)?;
            let whole = buffer.matrix(n, count);
            device
                .write(x.view().part(0, n, col, count), whole)
                .map_err(failed)?;
            for i in 0..blocks {
                let from = i * self.block;
                let (_, rows) = whole.split_rows(from);
                if let Some((_, block)) = self.resident.blocks.get(&i) {
                    let l = block.l.matrix(n - from, self.block);
                    update(device, kind, l, rows).map_err(failed)?;
                    continue;
                }
                let l = self.finished(i, state, cx)?;
                let passing = device.allocate(l.rows() * l.cols()).map_err(failed)?;
                let part = passing.matrix(l.rows(), l.cols());
                device
                    .write(l.view(), part)
                    .and_then(|()| update(device, kind, part, rows))
                    .and_then(|()| device.finish())
                    .map_err(failed)?;
                let digest = state.columns[i];
                if self.has_room(device) {
                    let block = OnDevice {
                        l: passing,
                        exchanged: done,
                    };
                    self.resident.blocks.insert(i, (digest, block));
                } else {
                    device.release(passing);
                    self.keep(i, digest, l, done);
                }
            }
            if kind == device::Arithmetic::Vendor && count == width {
                let (_, panel) = whole.split_rows(done);
                match device.vendor_lu(panel) {
                    Ok(Ok(found)) => pivots = Some(found),
                    Ok(Err(error)) => return Err(ProgramError::permanent(error.shifted(done))),
                    // The host can factor it instead.
                    Err(error) if error.is_memory() => {}
                    Err(error) => return Err(failed(error)),
                }
            }
            let (_, right) = x.view_mut().split_cols(col);
            let (to, _) = right.split_cols(count);
            device.read(whole, to).map_err(failed)?;
            device.release(buffer);
        }
        Ok(pivots)
    }

    /// Whether the device has room for another block beside the needs of the next update.
    fn has_room(&self, device: &dyn Device) -> bool {
        let column = 8 * (self.n() * self.block.min(self.n())) as u64;
        device.usage().available() >= 2 * column + reserve(self.arithmetic, self.n())
    }

    /// Keeps a new block column, on the device if there is room.
    fn keep_finished(
        &mut self,
        k: usize,
        digest: Digest,
        l: Mat,
        exchanged: usize,
    ) -> Result<(), ProgramError> {
        if let Some(mut device) = self.place.take() {
            if self.has_room(device.as_ref()) {
                let buffer = device.allocate(l.rows() * l.cols()).map_err(failed)?;
                device
                    .write(l.view(), buffer.matrix(l.rows(), l.cols()))
                    .map_err(failed)?;
                let block = OnDevice {
                    l: buffer,
                    exchanged,
                };
                self.resident.blocks.insert(k, (digest, block));
                self.place.put(device);
                return Ok(());
            }
            self.place.put(device);
        }
        self.keep(k, digest, l, exchanged);
        Ok(())
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
            place: Place::new(inputs),
            arithmetic: arithmetic(params.arithmetic),
            resident: Resident::new(),
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
        let mut factored = None;
        if let Some(mut device) = self.place.take() {
            factored = self.update_on(device.as_mut(), &mut x, state, cx)?;
            self.place.put(device);
        } else {
            for i in 0..k {
                let l = self.finished(i, state, cx)?;
                let (_, rows) = x.view_mut().split_rows(i * self.block);
                lu::update(&mut self.threads.engine, l.view(), rows);
                self.keep(i, state.columns[i], l, from);
            }
        }
        let pivots = match factored {
            Some(pivots) => pivots,
            None => {
                let mut pivots = vec![0; width];
                let (_, own) = x.view_mut().split_rows(from);
                lu::panel(&mut self.threads.engine, own, &mut pivots)
                    .map_err(|error| ProgramError::permanent(error.shifted(from)))?;
                pivots
            }
        };
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
            self.keep_finished(k, digest, l, from + width)?;
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
        if self.place.changes(grant) {
            // Keep the blocks before the device is closed.
            if let Some(mut device) = self.place.take() {
                while let Some((index, (digest, block))) = self.resident.blocks.pop_first() {
                    self.keep_resident(device.as_mut(), index, digest, block)?;
                }
                self.place.put(device);
            }
            self.place.go(grant)?;
        }
        self.threads.configure(grant)
    }

    fn let_go(&mut self, warm: bool) {
        // The blocks are freed with their device.
        self.resident = Resident::new();
        self.place.let_go(warm);
    }
}
