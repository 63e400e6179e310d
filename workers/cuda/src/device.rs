//! One open device: memory by budget, and the kernels of `kernels.cu` over parts of it.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use fiec_kernels::cg::{CgProblem, CgState};
use fiec_kernels::dense::gemm::DEPTH;
use fiec_kernels::dense::lu::LuError;
use fiec_kernels::dense::{Into, Mat, MatMut, MatRef};
use fiec_kernels::device::dense::{Triangular, halve};
use fiec_kernels::device::{
    About, Arithmetic, Buffer, CgLimits, CgScalars, CgStop, Device, DeviceError, Part, Usage,
};

use crate::cg::Solve;
use crate::context::{Arguments, Context, Kernel, Memory};
use crate::devices::Warm;
use crate::vendor::Vendor;

/// Elements of a product per block of threads.
const TILE: (usize, usize) = (128, 64);
/// Most bytes for chains of a product that are computed side by side.
const APART_BYTES: u64 = 64 << 20;
/// Threads per block by default.
pub(crate) const THREADS: u32 = 256;
const SOLVE_THREADS: u32 = 128;

/// An open device.
pub(crate) struct CudaDevice {
    about: About,
    usage: Usage,
    /// None while it is being closed.
    context: Option<Context>,
    warm: Warm,
    buffers: BTreeMap<u64, Memory>,
    next: u64,
    /// For products. Freed when memory is short.
    scratch: Option<Memory>,
    vendor: Option<Vendor>,
    solve: Option<Solve>,
}

pub(crate) fn blocks(elements: u64, threads: u32) -> Result<u32, DeviceError> {
    int("number of blocks", elements.div_ceil(u64::from(threads)))
}

pub(crate) fn int(what: &'static str, value: u64) -> Result<u32, DeviceError> {
    // Signed, because the vendor's libraries take signed numbers.
    let fits = i32::try_from(value).ok().map(i32::cast_unsigned);
    fits.ok_or_else(|| DeviceError::Driver {
        call: "launch",
        why: format!("{what} {value} is more than a kernel takes"),
    })
}

impl CudaDevice {
    pub fn new(context: Context, budget: u64, warm: Warm) -> Self {
        Self {
            about: About {
                uuid: context.found.uuid.clone(),
                name: context.found.name.clone(),
                memory_bytes: context.found.memory_bytes,
            },
            usage: Usage {
                budget,
                ..Usage::default()
            },
            context: Some(context),
            warm,
            buffers: BTreeMap::new(),
            next: 0,
            scratch: None,
            vendor: None,
            solve: None,
        }
    }

    pub fn context(&self) -> Result<&Context, DeviceError> {
        let open = self.context.as_ref();
        open.ok_or_else(|| DeviceError::Absent(format!("{} was closed", self.about.uuid)))
    }

    /// Allocates memory within the budget. Memory that only serves speed is freed for it.
    pub fn take(&mut self, bytes: u64) -> Result<Memory, DeviceError> {
        let bytes = bytes.max(8);
        if bytes > self.usage.available() {
            return Err(DeviceError::Budget {
                wanted: bytes,
                held: self.usage.held,
                budget: self.usage.budget,
            });
        }
        let scratch = self.scratch.map_or(0, |memory| memory.bytes);
        if bytes + scratch > self.usage.available() {
            self.drop_scratch();
        }
        self.context()?.bind()?;
        let mut made = self.context()?.allocate(bytes);
        if matches!(made, Err(DeviceError::Memory { .. })) && self.scratch.is_some() {
            self.drop_scratch();
            made = self.context()?.allocate(bytes);
        }
        let memory = made?;
        self.usage.held += bytes;
        self.note_peak();
        Ok(memory)
    }

    pub fn give(&mut self, memory: Memory) {
        if let Ok(context) = self.context()
            && context.bind().is_ok()
        {
            context.free(memory);
        }
        self.usage.held -= memory.bytes;
    }

    fn note_peak(&mut self) {
        let scratch = self.scratch.map_or(0, |memory| memory.bytes);
        self.usage.peak = self.usage.peak.max(self.usage.held + scratch);
    }

    fn drop_scratch(&mut self) {
        if let Some(memory) = self.scratch.take()
            && let Ok(context) = self.context()
        {
            context.free(memory);
        }
    }

    /// Returns scratch of this many bytes, if there is room for it.
    fn scratch(&mut self, bytes: u64) -> Option<Memory> {
        if let Some(memory) = self.scratch
            && memory.bytes >= bytes
        {
            return Some(memory);
        }
        self.drop_scratch();
        if bytes > APART_BYTES || bytes > self.usage.available() {
            return None;
        }
        self.scratch = self.context().ok()?.allocate(bytes).ok();
        self.note_peak();
        self.scratch
    }

    /// Returns the address of a part on the device.
    pub fn address(&self, part: Part) -> Result<u64, DeviceError> {
        let memory = self.buffers.get(&part.buffer());
        let Some(memory) = memory else {
            return Err(DeviceError::Driver {
                call: "address",
                why: format!("buffer {} was given back", part.buffer()),
            });
        };
        Ok(memory.at + 8 * part.at() as u64)
    }

    fn chain512(&mut self, a: Part, b: Part, into: Into, c: Part) -> Result<(), DeviceError> {
        let (m, n, k) = (c.rows(), c.cols(), a.cols());
        assert_eq!((a.rows(), b.rows(), b.cols()), (m, k, n), "shapes of gemm");
        assert!(
            !b.is_transposed() && !c.is_transposed(),
            "only A is transposed"
        );
        if m == 0 || n == 0 {
            return Ok(());
        }
        let (left, right, to) = (self.address(a)?, self.address(b)?, self.address(c)?);
        if k == 0 {
            if into == Into::Replace {
                self.context()?.clear(to, c.stride(), (m, n))?;
            }
            return Ok(());
        }
        let of = |value: usize| int("a dimension", value as u64);
        let factors = Arguments::default()
            .int(of(m)?)
            .int(of(n)?)
            .int(of(k)?)
            .long(left)
            .int(of(a.stride())?)
            .long(right)
            .int(of(b.stride())?);
        let how = match into {
            Into::Replace => 0,
            Into::Add => 1,
            Into::Subtract => 2,
        };
        let grid = (m.div_ceil(TILE.0), n.div_ceil(TILE.1), k.div_ceil(DEPTH));
        let (across, down, deep) = (of(grid.0)?, of(grid.1)?, of(grid.2)?);
        let multiprocessors = self.context()?.found.multiprocessors as usize;
        // With fewer tiles than multiprocessors, the chains of an element are computed side by
        // side.
        let side_by_side = grid.2 > 1 && grid.0 * grid.1 < multiprocessors && grid.2 <= 65_535;
        let bytes = 8 * (grid.2 * m * n) as u64;
        let scratch = side_by_side.then(|| self.scratch(bytes)).flatten();
        let context = self.context()?;
        let Some(apart) = scratch else {
            let kernel = match a.is_transposed() {
                false => Kernel::Gemm,
                true => Kernel::GemmT,
            };
            let all = factors.int(how).long(to).int(of(c.stride())?);
            return context.launch(kernel, (across, down, 1), THREADS, all);
        };
        let kernel = match a.is_transposed() {
            false => Kernel::GemmApart,
            true => Kernel::GemmTApart,
        };
        let all = factors.long(apart.at);
        context.launch(kernel, (across, down, deep), THREADS, all)?;
        let elements = (m * n) as u64;
        let take = Arguments::default()
            .long(m as u64)
            .long(n as u64)
            .long(grid.2 as u64)
            .long(apart.at)
            .int(how)
            .long(to)
            .long(c.stride() as u64);
        let grid = (blocks(elements, THREADS)?, 1, 1);
        context.launch(Kernel::GemmTake, grid, THREADS, take)
    }

    /// Calls `f` with the vendor's libraries, which are loaded on first use.
    fn with_vendor<T>(
        &mut self,
        f: impl FnOnce(&Vendor, &mut Self) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        self.context()?.bind()?;
        let vendor = match self.vendor.take() {
            Some(vendor) => vendor,
            None => Vendor::new(self)?,
        };
        let done = f(&vendor, self);
        self.vendor = Some(vendor);
        done
    }

    /// Frees all memory.
    fn empty(&mut self) {
        self.cg_end();
        let bound = self.context().is_ok_and(|context| context.bind().is_ok());
        if let Some(vendor) = self.vendor.take() {
            let workspace = vendor.end(bound);
            if let Some(memory) = workspace {
                self.give(memory);
            }
        }
        for (_, memory) in std::mem::take(&mut self.buffers) {
            self.give(memory);
        }
        self.drop_scratch();
        if let Ok(context) = self.context()
            && bound
        {
            context.trim();
        }
    }
}

impl Triangular for CudaDevice {
    fn leaf(&mut self, l: Part, x: Part) -> Result<(), DeviceError> {
        if x.cols() == 0 || x.rows() == 0 {
            return Ok(());
        }
        let arguments = Arguments::default()
            .int(int("rows", l.rows() as u64)?)
            .long(x.cols() as u64)
            .long(self.address(l)?)
            .long(l.stride() as u64)
            .long(self.address(x)?)
            .long(x.stride() as u64);
        let grid = (blocks(x.cols() as u64, SOLVE_THREADS)?, 1, 1);
        self.context()?
            .launch(Kernel::SolveLeaf, grid, SOLVE_THREADS, arguments)
    }

    fn product(&mut self, l: Part, top: Part, below: Part) -> Result<(), DeviceError> {
        self.chain512(l, top, Into::Subtract, below)
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        self.empty();
    }
}

#[allow(unsafe_code)] // copies between strides
impl Device for CudaDevice {
    fn about(&self) -> &About {
        &self.about
    }

    fn usage(&self) -> Usage {
        self.usage
    }

    fn allocate(&mut self, elements: usize) -> Result<Buffer, DeviceError> {
        let memory = self.take(8 * elements as u64)?;
        self.next += 1;
        self.buffers.insert(self.next, memory);
        Ok(Buffer::new(self.next, elements))
    }

    fn release(&mut self, buffer: Buffer) {
        if let Some(memory) = self.buffers.remove(&buffer.id()) {
            self.give(memory);
        }
    }

    fn write(&mut self, from: MatRef<'_>, to: Part) -> Result<(), DeviceError> {
        let shape = (to.rows(), to.cols());
        assert!(!to.is_transposed() && (from.rows(), from.cols()) == shape);
        let (row, stride) = from.strides();
        if row != 1 {
            let straight = from.to_mat();
            return self.write(straight.view(), to);
        }
        self.context()?.bind()?;
        let (host, device) = (from.as_ptr().cast_mut(), self.address(to)?);
        // SAFETY: the view is such a matrix and is only read. The part lies in its buffer: parts
        // are made from buffers and only become smaller.
        unsafe {
            self.context()?
                .copy(shape, (host, stride), (device, to.stride()), true)
        }
    }

    fn read(&mut self, from: Part, mut to: MatMut<'_>) -> Result<(), DeviceError> {
        let shape = (from.rows(), from.cols());
        assert!(!from.is_transposed() && (to.rows(), to.cols()) == shape);
        self.context()?.bind()?;
        let (device, stride) = (self.address(from)?, to.stride());
        let host = to.as_mut_ptr();
        // SAFETY: as in `write`; the view is borrowed exclusively.
        unsafe {
            self.context()?
                .copy(shape, (host, stride), (device, from.stride()), false)
        }
    }

    fn gemm(
        &mut self,
        arithmetic: Arithmetic,
        a: Part,
        b: Part,
        into: Into,
        c: Part,
    ) -> Result<(), DeviceError> {
        self.context()?.bind()?;
        match arithmetic {
            Arithmetic::Chain512 => self.chain512(a, b, into, c),
            Arithmetic::Vendor => {
                self.with_vendor(|vendor, device| vendor.gemm(device, a, b, into, c))
            }
        }
    }

    fn solve_unit_lower(
        &mut self,
        arithmetic: Arithmetic,
        l: Part,
        x: Part,
    ) -> Result<(), DeviceError> {
        assert_eq!((l.rows(), l.cols()), (x.rows(), x.rows()), "shapes");
        self.context()?.bind()?;
        match arithmetic {
            Arithmetic::Chain512 => halve(self, l, x),
            Arithmetic::Vendor => self.with_vendor(|vendor, device| vendor.solve(device, l, x)),
        }
    }

    fn exchange(&mut self, x: Part, pivots: &[usize]) -> Result<(), DeviceError> {
        assert!(pivots.iter().all(|p| *p < x.rows()) && pivots.len() <= x.rows());
        if pivots.is_empty() || x.cols() == 0 {
            return Ok(());
        }
        let small: Result<Vec<u32>, _> = pivots.iter().map(|p| int("a row", *p as u64)).collect();
        let small = small?;
        let list = self.take(4 * small.len() as u64)?;
        let done = self.context()?.put(&small, list.at).and_then(|()| {
            let arguments = Arguments::default()
                .long(x.cols() as u64)
                .long(small.len() as u64)
                .long(list.at)
                .long(self.address(x)?)
                .long(x.stride() as u64);
            let grid = (blocks(x.cols() as u64, THREADS)?, 1, 1);
            let context = self.context()?;
            context.launch(Kernel::Exchange, grid, THREADS, arguments)?;
            // The list is freed below.
            context.synchronize()
        });
        self.give(list);
        done
    }

    fn vendor_lu(&mut self, a: Part) -> Result<Result<Vec<usize>, LuError>, DeviceError> {
        self.with_vendor(|vendor, device| vendor.lu(device, a))
    }

    fn vendor_qr(&mut self, a: Part) -> Result<Vec<f64>, DeviceError> {
        self.with_vendor(|vendor, device| vendor.qr(device, a))
    }

    fn cg_begin(&mut self, problem: &CgProblem, state: &CgState) -> Result<(), DeviceError> {
        self.cg_end();
        let solve = Solve::begin(self, problem, state)?;
        self.solve = Some(solve);
        Ok(())
    }

    fn cg_advance(&mut self, limits: CgLimits) -> Result<(CgScalars, CgStop), DeviceError> {
        self.context()?.bind()?;
        assert!(self.solve.is_some(), "no solve was taken up");
        match &self.solve {
            Some(solve) => solve.advance(self.context()?, limits),
            None => Err(DeviceError::Absent("no solve".to_owned())),
        }
    }

    fn cg_read(&mut self, state: &mut CgState) -> Result<(), DeviceError> {
        self.context()?.bind()?;
        assert!(self.solve.is_some(), "no solve was taken up");
        match &self.solve {
            Some(solve) => solve.read(self.context()?, state),
            None => Err(DeviceError::Absent("no solve".to_owned())),
        }
    }

    fn cg_end(&mut self) {
        if let Some(solve) = self.solve.take() {
            solve.end(self);
        }
    }

    fn finish(&mut self) -> Result<(), DeviceError> {
        self.context()?.bind()?;
        self.context()?.synchronize()
    }

    fn close(mut self: Box<Self>, warm: bool) {
        // A failure may have damaged the context.
        let sound = self.finish().is_ok();
        self.empty();
        if warm
            && sound
            && let Some(context) = self.context.take()
        {
            let mut kept = self.warm.lock().unwrap_or_else(PoisonError::into_inner);
            *kept = Some(context);
        }
    }
}

/// Copies a part of a device's memory to the host.
pub(crate) fn to_host(device: &mut CudaDevice, part: Part) -> Result<Mat, DeviceError> {
    let mut copy = Mat::zeros(part.rows(), part.cols());
    device.read(part, copy.view_mut())?;
    Ok(copy)
}
