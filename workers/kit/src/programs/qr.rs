//! `qr@1`: A = Q·R by Householder reflectors in compact WY form, left-looking by block columns.
//! Capsule k takes block column k of A, applies the reflectors of each finished block column to it,
//! and factors it. The result is the output `qr-<k>`.
//!
//! `qr-<k>` is a `.npy` file of m + w rows and w columns; w is the block's width. Its first m rows
//! have R on and above the diagonal, and the reflectors V below it. The ones on the diagonal of V
//! are not stored, as with LAPACK's geqrf. Its last w rows are T, upper triangular. `I − V·T·Vᵀ` is
//! the product of the block's reflectors, and Q the product of the blocks in order.
//!
//! On a device, the reflectors stay there as far as memory allows, and the device applies them. The
//! host factors the panel, or cuSOLVER with vendor arithmetic. A block column leaves the device
//! once, as an output.
//!
//! A block column that this process does not hold is fetched by its digest. Each is checked when it
//! is made ([`fiec_kernels::dense::check::QrCheck`]).
//!
//! σ: magic `FIECQR_1`, m, n, block, columns done (`u64` each), the check's three sums and its
//! vector of m elements (`f64` each). Then the digests of the finished block columns (32 bytes
//! each). Little endian. 17 KB for m = n = 2,048, 68 KB for 8,192 with blocks of 128.

use fiec_kernels::dense::check::QrCheck;
use fiec_kernels::dense::qr::Reflectors;
use fiec_kernels::dense::{Into, Mat, qr};
use fiec_kernels::device::dense::{apply, triangle};
use fiec_kernels::device::{self, Buffer, Device, DeviceError, Part};
use fiec_kernels::npy;
use fiec_schemas::Digest;
use fiec_schemas::package::Grant;
use fiec_schemas::programs::QrParams;
use serde_json::{Value, json};

use super::dense::{Fields, Kept, Read, Source, Threads, chained, fetch_block};
use super::place::{Place, Resident, arithmetic, failed, reserve, too_small};
use crate::program::{Capsule, Inputs, Program, ProgramError, Progress, State, Step};

const MAGIC: &[u8; 8] = b"FIECQR_1";

/// The program with its matrix.
pub struct Qr {
    a: Source,
    block: usize,
    threads: Threads,
    kept: Kept<Reflectors>,
    place: Place,
    arithmetic: device::Arithmetic,
    resident: Resident<OnDevice>,
}

/// Reflectors on the device.
struct OnDevice {
    v: Buffer,
    t: Buffer,
}

/// Least columns of a strip to which reflectors are applied at once.
const STRIP: usize = 8;

fn upload(device: &mut dyn Device, made: &Reflectors) -> Result<OnDevice, DeviceError> {
    let v = device.allocate(made.v.data().len())?;
    let t = device.allocate(made.t.data().len())?;
    device.write(made.v.view(), v.matrix(made.v.rows(), made.v.cols()))?;
    device.write(made.t.view(), t.matrix(made.t.rows(), made.t.cols()))?;
    Ok(OnDevice { v, t })
}

fn release(device: &mut dyn Device, held: OnDevice) {
    device.release(held.v);
    device.release(held.t);
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

/// Extracts the reflectors of a finished block column whose diagonal starts at row `from`.
fn reflectors(whole: &Mat, rows: usize, from: usize) -> Reflectors {
    let (view, width) = (whole.view(), whole.cols());
    Reflectors {
        v: lower(whole, rows, from),
        t: view.part(rows, width, 0, width).to_mat(),
    }
}

/// Extracts V, which lies below the diagonal that starts at row `from`.
fn lower(whole: &Mat, rows: usize, from: usize) -> Mat {
    let view = whole.view();
    Mat::from_fn(rows - from, whole.cols(), |i, j| match i.cmp(&j) {
        std::cmp::Ordering::Less => 0.0,
        std::cmp::Ordering::Equal => 1.0,
        std::cmp::Ordering::Greater => view.at(from + i, j),
    })
}

/// Encodes a finished block column and its T as one file.
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

impl Qr {
    /// Returns the number of columns that reflectors are applied to at once on the device. It
    /// evicts blocks from the device to make room, the last ones first, because all are used in
    /// ascending order.
    fn strip(
        &mut self,
        device: &mut dyn Device,
        width: usize,
        blocks: usize,
    ) -> Result<usize, ProgramError> {
        let (rows, block) = (self.a.rows(), self.block.min(self.a.cols()));
        let mut strip = width;
        loop {
            let passing = match self.resident.misses(blocks) {
                true => (rows + block) * block,
                false => 0,
            };
            let wanted = (rows + 2 * block) * strip + passing;
            let free = device.usage().available();
            if 8 * wanted as u64 + reserve(self.arithmetic, 0) <= free {
                return Ok(strip);
            }
            if let Some((index, (digest, held))) = self.resident.blocks.pop_last() {
                self.keep_resident(device, index, digest, held)?;
            } else if strip > STRIP {
                strip = strip.div_ceil(2);
            } else {
                return Err(too_small(device, "an update of a block column", wanted));
            }
        }
    }

    /// Moves reflectors from the device to the host, if the host has room.
    fn keep_resident(
        &mut self,
        device: &mut dyn Device,
        index: usize,
        digest: Digest,
        held: OnDevice,
    ) -> Result<(), ProgramError> {
        let (rows, width) = (self.a.rows() - index * self.block, self.block);
        let mut made = Reflectors {
            v: Mat::zeros(rows, width),
            t: Mat::zeros(width, width),
        };
        device
            .read(held.v.matrix(rows, width), made.v.view_mut())
            .and_then(|()| device.read(held.t.matrix(width, width), made.t.view_mut()))
            .map_err(failed)?;
        release(device, held);
        self.keep(index, digest, made);
        Ok(())
    }

    /// Applies all finished reflectors to a block column. If the vendor's library factors the
    /// panel, too, returns its reflectors.
    fn apply_on(
        &mut self,
        device: &mut dyn Device,
        x: &mut Mat,
        state: &QrState,
        cx: &mut Capsule,
    ) -> Result<Option<Reflectors>, ProgramError> {
        let (rows, width, from) = (x.rows(), x.cols(), state.check.columns);
        let (kind, blocks, block) = (self.arithmetic, state.columns.len(), self.block);
        for held in self.resident.strangers(&state.columns) {
            release(device, held);
        }
        let strip = self.strip(device, width, blocks)?;
        let mut factored = None;
        for col in (0..width).step_by(strip) {
            let count = strip.min(width - col);
            let buffer = device.allocate(rows * count).map_err(failed)?;
            let whole = buffer.matrix(rows, count);
            device
                .write(x.view().part(0, rows, col, count), whole)
                .map_err(failed)?;
            let scratch = device
                .allocate(2 * self.block.min(rows) * count)
                .map_err(failed)?;
            for i in 0..blocks {
                let (_, below) = whole.split_rows(i * self.block);
                let parts = |held: &OnDevice| -> (Part, Part) {
                    let v = held.v.matrix(rows - i * block, block);
                    (v, held.t.matrix(block, block))
                };
                if let Some((_, held)) = self.resident.blocks.get(&i) {
                    apply(device, kind, parts(held), below, &scratch).map_err(failed)?;
                    continue;
                }
                let made = self.finished(i, state, cx)?;
                let held = upload(device, &made).map_err(failed)?;
                apply(device, kind, parts(&held), below, &scratch)
                    .and_then(|()| device.finish())
                    .map_err(failed)?;
                let digest = state.columns[i];
                if self.has_room(device) {
                    self.resident.blocks.insert(i, (digest, held));
                } else {
                    release(device, held);
                    self.keep(i, digest, made);
                }
            }
            device.release(scratch);
            if kind == device::Arithmetic::Vendor && count == width {
                let (_, panel) = whole.split_rows(from);
                match vendor_panel(device, panel) {
                    Ok(made) => factored = Some(made),
                    // The host can factor it instead, while the panel is unchanged.
                    Err((error, false)) if error.is_memory() => {}
                    Err((error, _)) => return Err(failed(error)),
                }
            }
            let (_, right) = x.view_mut().split_cols(col);
            let (to, _) = right.split_cols(count);
            device.read(whole, to).map_err(failed)?;
            device.release(buffer);
        }
        Ok(factored)
    }

    /// Whether the device has room for another block beside the needs of the next update.
    fn has_room(&self, device: &dyn Device) -> bool {
        let block = self.block.min(self.a.cols());
        let column = 8 * ((self.a.rows() + 2 * block) * block) as u64;
        device.usage().available() >= 2 * column + reserve(self.arithmetic, 0)
    }

    /// Keeps new reflectors, on the device if there is room.
    fn keep_finished(
        &mut self,
        k: usize,
        digest: Digest,
        made: Reflectors,
    ) -> Result<(), ProgramError> {
        if let Some(mut device) = self.place.take() {
            if self.has_room(device.as_ref()) {
                let held = upload(device.as_mut(), &made).map_err(failed)?;
                self.resident.blocks.insert(k, (digest, held));
                self.place.put(device);
                return Ok(());
            }
            self.place.put(device);
        }
        self.keep(k, digest, made);
        Ok(())
    }
}

/// Factors a panel with the vendor's library. An error states whether the panel was changed.
fn vendor_panel(device: &mut dyn Device, panel: Part) -> Result<Reflectors, (DeviceError, bool)> {
    let (rows, width) = (panel.rows(), panel.cols());
    let tau = device.vendor_qr(panel).map_err(|error| (error, false))?;
    let mut whole = Mat::zeros(rows, width);
    let after = |error| (error, true);
    device.read(panel, whole.view_mut()).map_err(after)?;
    let v = lower(&whole, rows, 0);
    let mut cross = Mat::zeros(width, width);
    let held = device.allocate(rows * width).map_err(after)?;
    let square = device.allocate(width * width).map_err(after)?;
    let (on, product) = (held.matrix(rows, width), square.matrix(width, width));
    device
        .write(v.view(), on)
        .and_then(|()| {
            let kind = device::Arithmetic::Vendor;
            device.gemm(kind, on.t(), on, Into::Replace, product)
        })
        .and_then(|()| device.read(product, cross.view_mut()))
        .map_err(after)?;
    device.release(held);
    device.release(square);
    let t = triangle(&tau, &cross);
    Ok(Reflectors { v, t })
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
            place: Place::new(inputs),
            arithmetic: arithmetic(params.arithmetic),
            resident: Resident::new(),
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
        let mut factored = None;
        if let Some(mut device) = self.place.take() {
            factored = self.apply_on(device.as_mut(), &mut x, state, cx)?;
            self.place.put(device);
        } else {
            for i in 0..k {
                let made = self.finished(i, state, cx)?;
                let (_, part) = x.view_mut().split_rows(i * self.block);
                qr::apply(&mut self.threads.engine, made.v.view(), made.t.view(), part);
                self.keep(i, state.columns[i], made);
            }
        }
        let made = match factored {
            Some(made) => made,
            None => {
                let (_, own) = x.view_mut().split_rows(from);
                qr::panel(&mut self.threads.engine, own)
                    .map_err(|error| ProgramError::permanent(error.shifted(from)))?
            }
        };
        state
            .check
            .add(&mut self.threads.engine, a.view(), x.view(), &made)
            .map_err(|error| {
                ProgramError::Permanent(format!("block column {k} is not A = Q·R: {error}"))
            })?;
        let digest = cx.output_digested(format!("qr-{k}"), file(&x, &made.t));
        state.columns.push(digest);
        if from + width < cols {
            self.keep_finished(k, digest, made)?;
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
        if self.place.changes(grant) {
            // Keep the reflectors before the device is closed.
            if let Some(mut device) = self.place.take() {
                while let Some((index, (digest, held))) = self.resident.blocks.pop_first() {
                    self.keep_resident(device.as_mut(), index, digest, held)?;
                }
                self.place.put(device);
            }
            self.place.go(grant)?;
        }
        self.threads.configure(grant)
    }

    fn let_go(&mut self, warm: bool) {
        // The reflectors are freed with their device.
        self.resident = Resident::new();
        self.place.let_go(warm);
    }
}
