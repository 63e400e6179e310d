//! A context with its stream and its kernels. It takes long to make and belongs to no execution, so
//! it may be kept warm. All unsafe calls of the driver are here, except those of vendor libraries.
#![allow(unsafe_code)] // calls of the driver, argued one by one

use std::ffi::{CString, c_void};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use fiec_kernels::device::DeviceError;

use crate::PTX;
use crate::found::{Found, caught, failed, guarded};

/// The kernels, in the order of [`NAMES`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kernel {
    Gemm,
    GemmT,
    GemmApart,
    GemmTApart,
    GemmTake,
    SolveLeaf,
    Exchange,
    CgProduct,
    CgAlpha,
    CgResidual,
    CgBeta,
    CgDirection,
}

const NAMES: [&str; 12] = [
    "fiec_gemm",
    "fiec_gemm_t",
    "fiec_gemm_apart",
    "fiec_gemm_t_apart",
    "fiec_gemm_take",
    "fiec_solve_leaf",
    "fiec_exchange",
    "fiec_cg_product",
    "fiec_cg_alpha",
    "fiec_cg_residual",
    "fiec_cg_beta",
    "fiec_cg_direction",
];

/// Memory of the device. Only [`Context::free`] frees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Memory {
    pub at: sys::CUdeviceptr,
    pub bytes: u64,
}

/// Arguments of a launch, each in its own word. A kernel reads as many of its low bytes as its
/// parameter has.
#[derive(Default)]
pub(crate) struct Arguments(Vec<u64>);

impl Arguments {
    pub fn int(mut self, value: u32) -> Self {
        self.0.push(u64::from(value).to_le());
        self
    }

    pub fn long(mut self, value: u64) -> Self {
        self.0.push(value);
        self
    }

    pub fn number(mut self, value: f64) -> Self {
        self.0.push(value.to_bits());
        self
    }
}

/// A device's primary context, a stream, and the kernels.
pub(crate) struct Context {
    pub found: Found,
    device: sys::CUdevice,
    raw: sys::CUcontext,
    stream: sys::CUstream,
    module: sys::CUmodule,
    functions: Vec<sys::CUfunction>,
}

// SAFETY: the driver's handles may be used from any thread where the context is current. `bind`
// makes it current before each use, and ownership keeps it to one thread at a time.
unsafe impl Send for Context {}

impl Context {
    /// Makes a context. The driver compiles the kernels' PTX for this device, or takes it from its
    /// cache.
    pub fn new(found: Found) -> Result<Self, DeviceError> {
        let device = guarded("cuDeviceGet", || result::device::get(found.ordinal))?;
        // SAFETY: the device was given by the driver; released in `drop`.
        let raw = guarded("cuDevicePrimaryCtxRetain", || unsafe {
            result::primary_ctx::retain(device)
        })?;
        // From here on `drop` releases these resources.
        let mut context = Self {
            found,
            device,
            raw,
            stream: std::ptr::null_mut(),
            module: std::ptr::null_mut(),
            functions: Vec::new(),
        };
        context.bind()?;
        context.stream = guarded("cuStreamCreate", || {
            result::stream::create(result::stream::StreamKind::NonBlocking)
        })?;
        let text = CString::new(PTX).map_err(|_| DeviceError::Driver {
            call: "cuModuleLoadData",
            why: "the PTX has a zero byte".to_owned(),
        })?;
        // SAFETY: PTX text that ends with a zero byte.
        context.module = guarded("cuModuleLoadData", || unsafe {
            result::module::load_data(text.as_ptr().cast())
        })?;
        for name in NAMES {
            let name = CString::new(name).unwrap_or_default();
            // SAFETY: the module was loaded just now and lives as long as the function.
            let function = guarded("cuModuleGetFunction", || unsafe {
                result::module::get_function(context.module, name)
            })?;
            context.functions.push(function);
        }
        Ok(context)
    }

    /// Makes the context current on this thread.
    pub fn bind(&self) -> Result<(), DeviceError> {
        // SAFETY: retained in `new`, released in `drop` only.
        guarded("cuCtxSetCurrent", || unsafe {
            result::ctx::set_current(self.raw)
        })
    }

    pub fn stream(&self) -> sys::CUstream {
        self.stream
    }

    /// Allocates memory from the device itself, not from a pool. `bytes` is not 0.
    pub fn allocate(&self, bytes: u64) -> Result<Memory, DeviceError> {
        let size = usize::try_from(bytes).unwrap_or(usize::MAX);
        // SAFETY: given back by `free`.
        match caught(|| unsafe { result::malloc_sync(size) }) {
            Ok(Ok(at)) => Ok(Memory { at, bytes }),
            Ok(Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY))) => {
                Err(DeviceError::Memory {
                    wanted: bytes,
                    why: "CUDA_ERROR_OUT_OF_MEMORY".to_owned(),
                })
            }
            Ok(Err(error)) => Err(failed("cuMemAlloc", error)),
            Err(why) => Err(DeviceError::Driver {
                call: "cuMemAlloc",
                why,
            }),
        }
    }

    /// Frees memory. Errors belong to earlier work, which reports them elsewhere.
    pub fn free(&self, memory: Memory) {
        // SAFETY: made by `allocate`, and the caller gives up ownership.
        let _ = guarded("cuMemFree", || unsafe { result::free_sync(memory.at) });
    }

    /// Waits for all work on the stream.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        // SAFETY: made in `new`.
        guarded("cuStreamSynchronize", || unsafe {
            result::stream::synchronize(self.stream)
        })
    }

    /// Copies bytes to the device and waits.
    pub fn put<T: Copy>(&self, from: &[T], to: sys::CUdeviceptr) -> Result<(), DeviceError> {
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller's memory is as large as `from`; waited for below.
        guarded("cuMemcpyHtoD", || unsafe {
            result::memcpy_htod_async(to, from, self.stream)
        })?;
        self.synchronize()
    }

    /// Copies bytes to the host and waits. Every bit pattern is a valid `T`.
    pub fn get<T: Copy>(&self, from: sys::CUdeviceptr, to: &mut [T]) -> Result<(), DeviceError> {
        if to.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller's memory is as large as `to`; waited for below.
        guarded("cuMemcpyDtoH", || unsafe {
            result::memcpy_dtoh_async(to, from, self.stream)
        })?;
        self.synchronize()
    }

    /// Copies `rows × cols` elements between host and device, each with its stride, and waits.
    ///
    /// # Safety
    /// Both sides hold such a matrix, and the host's is borrowed as the direction needs.
    pub unsafe fn copy(
        &self,
        (rows, cols): (usize, usize),
        host: (*mut f64, usize),
        device: (sys::CUdeviceptr, usize),
        to_device: bool,
    ) -> Result<(), DeviceError> {
        if rows == 0 || cols == 0 {
            return Ok(());
        }
        use sys::CUmemorytype_enum::{CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_HOST};
        // A stride may be 0, but the pitch must not be less than one column.
        let pitch = |stride: usize| 8 * stride.max(rows);
        let (from, to) = match to_device {
            true => (CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE),
            false => (CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_HOST),
        };
        let (from_pitch, to_pitch) = match to_device {
            true => (pitch(host.1), pitch(device.1)),
            false => (pitch(device.1), pitch(host.1)),
        };
        // The driver reads, for each side, the address that its memory type selects.
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: from,
            srcHost: host.0.cast_const().cast(),
            srcDevice: device.0,
            srcArray: std::ptr::null_mut(),
            srcPitch: from_pitch,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: to,
            dstHost: host.0.cast(),
            dstDevice: device.0,
            dstArray: std::ptr::null_mut(),
            dstPitch: to_pitch,
            WidthInBytes: 8 * rows,
            Height: cols,
        };
        // SAFETY: the caller's promise; waited for below.
        guarded("cuMemcpy2D", || {
            unsafe { sys::cuMemcpy2DAsync_v2(&raw const copy, self.stream) }.result()
        })?;
        self.synchronize()
    }

    /// Sets `rows × cols` elements of the device to 0.
    pub fn clear(
        &self,
        at: sys::CUdeviceptr,
        stride: usize,
        (rows, cols): (usize, usize),
    ) -> Result<(), DeviceError> {
        if rows == 0 || cols == 0 {
            return Ok(());
        }
        // SAFETY: the caller's part of device memory.
        guarded("cuMemsetD2D32", || {
            unsafe { sys::cuMemsetD2D32Async(at, 8 * stride, 0, 2 * rows, cols, self.stream) }
                .result()
        })
    }

    /// Starts a kernel. The arguments match its declaration in `kernels.cu`, and their memory is as
    /// large as declared there.
    pub fn launch(
        &self,
        kernel: Kernel,
        grid: (u32, u32, u32),
        block: u32,
        arguments: Arguments,
    ) -> Result<(), DeviceError> {
        let mut words = arguments.0;
        let mut pointers: Vec<*mut c_void> = words
            .iter_mut()
            .map(|word| std::ptr::from_mut(word).cast())
            .collect();
        let function = self.functions[kernel as usize];
        // SAFETY: the function belongs to this context; the driver reads each argument's bytes
        // before it returns, and none is larger than a word.
        guarded(NAMES[kernel as usize], || unsafe {
            result::launch_kernel(function, grid, (block, 1, 1), 0, self.stream, &mut pointers)
        })
    }

    /// Returns free and total memory of the device in bytes, from its driver.
    pub fn free_bytes(&self) -> Result<(u64, u64), DeviceError> {
        let (free, total) = guarded("cuMemGetInfo", result::mem_get_info)?;
        Ok((free as u64, total as u64))
    }

    /// Returns memory to the device that libraries took from its pool and have freed.
    pub fn trim(&self) {
        let _ = guarded("cuMemPoolTrimTo", || {
            // SAFETY: the device was given by the driver; its default pool lives as long as it.
            unsafe {
                let pool = result::device::get_default_mem_pool(self.device)?;
                result::mem_pool::trim_to(pool, 0)
            }
        });
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.bind().is_err() {
            return;
        }
        // SAFETY: each was made in `new`, has no other user, and is released here.
        unsafe {
            if !self.stream.is_null() {
                let _ = guarded("cuStreamDestroy", || result::stream::destroy(self.stream));
            }
            if !self.module.is_null() {
                let _ = guarded("cuModuleUnload", || result::module::unload(self.module));
            }
            let _ = guarded("cuCtxSetCurrent", || {
                result::ctx::set_current(std::ptr::null_mut())
            });
            let _ = guarded("cuDevicePrimaryCtxRelease", || {
                result::primary_ctx::release(self.device)
            });
        }
    }
}
