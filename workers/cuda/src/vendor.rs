//! cuBLAS and cuSOLVER: fast, and correct within bounds. With one stream, our own workspace and the
//! deterministic mode, one version on one kind of device also repeats its bits.
#![allow(unsafe_code)] // calls of the libraries, argued one by one

use cudarc::cublas::sys as blas;
use cudarc::cusolver::sys as solver;
use fiec_kernels::dense::Into;
use fiec_kernels::dense::lu::LuError;
use fiec_kernels::device::{DeviceError, Part};

use crate::context::Memory;
use crate::device::{CudaDevice, int, to_host};
use crate::found::caught;

/// Sizes of cuBLAS workspaces to try, the largest first: the recommended ones for Hopper and for
/// other devices, then a minimal one.
const WORKSPACES: [u64; 3] = [32 << 20, 4 << 20, 64 << 10];

/// Handles of the libraries.
pub(crate) struct Vendor {
    blas: blas::cublasHandle_t,
    /// Made on first use.
    solver: std::cell::Cell<solver::cusolverDnHandle_t>,
    workspace: Memory,
}

// SAFETY: handles may be used from any thread, one at a time; `CudaDevice` owns them.
unsafe impl Send for Vendor {}

fn missing(library: &str) -> DeviceError {
    DeviceError::Library(format!(
        "vendor arithmetic needs {library}, which cannot be loaded here: install NVIDIA's CUDA \
         libraries (and put them on LD_LIBRARY_PATH), or use chain512 arithmetic"
    ))
}

fn blas_done(
    call: &'static str,
    f: impl FnOnce() -> blas::cublasStatus_t,
) -> Result<(), DeviceError> {
    match caught(f) {
        Ok(blas::cublasStatus_t::CUBLAS_STATUS_SUCCESS) => Ok(()),
        Ok(status) => Err(DeviceError::Driver {
            call,
            why: format!("{status:?}"),
        }),
        Err(why) => Err(DeviceError::Driver { call, why }),
    }
}

fn solver_done(
    call: &'static str,
    f: impl FnOnce() -> solver::cusolverStatus_t,
) -> Result<(), DeviceError> {
    match caught(f) {
        Ok(solver::cusolverStatus_t::CUSOLVER_STATUS_SUCCESS) => Ok(()),
        Ok(status) => Err(DeviceError::Driver {
            call,
            why: format!("{status:?}"),
        }),
        Err(why) => Err(DeviceError::Driver { call, why }),
    }
}

fn size(value: usize) -> Result<i32, DeviceError> {
    int("a dimension", value as u64).map(u32::cast_signed)
}

impl Vendor {
    pub fn new(device: &mut CudaDevice) -> Result<Self, DeviceError> {
        // SAFETY: tries to load the library by name.
        if !caught(|| unsafe { blas::is_culib_present() }).unwrap_or(false) {
            return Err(missing("cuBLAS"));
        }
        let mut workspace = None;
        for bytes in WORKSPACES {
            match device.take(bytes) {
                Ok(memory) => {
                    workspace = Some(memory);
                    break;
                }
                Err(error) if error.is_memory() => {}
                Err(error) => return Err(error),
            }
        }
        let workspace = match workspace {
            Some(memory) => memory,
            None => device.take(WORKSPACES[2])?,
        };
        let mut handle = std::ptr::null_mut();
        // SAFETY: the context is current; writes one handle.
        let made = blas_done("cublasCreate", || unsafe {
            blas::cublasCreate_v2(&raw mut handle)
        });
        if let Err(error) = made {
            device.give(workspace);
            return Err(error);
        }
        let vendor = Self {
            blas: handle,
            solver: std::cell::Cell::new(std::ptr::null_mut()),
            workspace,
        };
        let stream = device.context()?.stream();
        // SAFETY: the handle was made above; stream and workspace live as long as it.
        let set = blas_done("cublasSetStream", || unsafe {
            blas::cublasSetStream_v2(handle, stream.cast())
        })
        .and_then(|()| {
            blas_done("cublasSetWorkspace", || unsafe {
                blas::cublasSetWorkspace_v2(
                    handle,
                    workspace.at as *mut _,
                    usize::try_from(workspace.bytes).unwrap_or(0),
                )
            })
        });
        if let Err(error) = set {
            if let Some(memory) = vendor.end(true) {
                device.give(memory);
            }
            return Err(error);
        }
        Ok(vendor)
    }

    /// Destroys the handles and returns the workspace.
    pub fn end(self, bound: bool) -> Option<Memory> {
        if bound {
            let solver = self.solver.get();
            if !solver.is_null() {
                // SAFETY: made by `solver`, destroyed here.
                let _ = solver_done("cusolverDnDestroy", || unsafe {
                    solver::cusolverDnDestroy(solver)
                });
            }
            // SAFETY: made by `new`, destroyed here.
            let _ = blas_done("cublasDestroy", || unsafe {
                blas::cublasDestroy_v2(self.blas)
            });
        }
        Some(self.workspace)
    }

    fn solver(&self, device: &CudaDevice) -> Result<solver::cusolverDnHandle_t, DeviceError> {
        if !self.solver.get().is_null() {
            return Ok(self.solver.get());
        }
        // SAFETY: tries to load the library by name.
        if !caught(|| unsafe { solver::is_culib_present() }).unwrap_or(false) {
            return Err(missing("cuSOLVER"));
        }
        let mut handle = std::ptr::null_mut();
        // SAFETY: the context is current; writes one handle.
        solver_done("cusolverDnCreate", || unsafe {
            solver::cusolverDnCreate(&raw mut handle)
        })?;
        self.solver.set(handle);
        let stream = device.context()?.stream();
        // SAFETY: the handle was made above, and the stream outlives it.
        solver_done("cusolverDnSetStream", || unsafe {
            solver::cusolverDnSetStream(handle, stream.cast())
        })?;
        // SAFETY: as above.
        solver_done("cusolverDnSetDeterministicMode", || unsafe {
            solver::cusolverDnSetDeterministicMode(
                handle,
                solver::cusolverDeterministicMode_t::CUSOLVER_DETERMINISTIC_RESULTS,
            )
        })?;
        Ok(handle)
    }

    pub fn gemm(
        &self,
        device: &CudaDevice,
        a: Part,
        b: Part,
        into: Into,
        c: Part,
    ) -> Result<(), DeviceError> {
        let (m, n, k) = (c.rows(), c.cols(), a.cols());
        assert_eq!((a.rows(), b.rows(), b.cols()), (m, k, n), "shapes of gemm");
        assert!(
            !b.is_transposed() && !c.is_transposed(),
            "only A is transposed"
        );
        if m == 0 || n == 0 {
            return Ok(());
        }
        let (left, right, to) = (device.address(a)?, device.address(b)?, device.address(c)?);
        if k == 0 {
            if into == Into::Replace {
                device.context()?.clear(to, c.stride(), (m, n))?;
            }
            return Ok(());
        }
        let (alpha, beta) = match into {
            Into::Replace => (1.0, 0.0),
            Into::Add => (1.0, 1.0),
            Into::Subtract => (-1.0, 1.0),
        };
        let turned = match a.is_transposed() {
            true => blas::cublasOperation_t::CUBLAS_OP_T,
            false => blas::cublasOperation_t::CUBLAS_OP_N,
        };
        let (m, n, k) = (size(m)?, size(n)?, size(k)?);
        let (lda, ldb, ldc) = (size(a.stride())?, size(b.stride())?, size(c.stride())?);
        // SAFETY: the parts lie in live buffers of this device. alpha and beta are read before the
        // call returns, since the handle's pointer mode is that of the host.
        blas_done("cublasDgemm", || unsafe {
            blas::cublasDgemm_v2(
                self.blas,
                turned,
                blas::cublasOperation_t::CUBLAS_OP_N,
                m,
                n,
                k,
                &raw const alpha,
                left as *const f64,
                lda,
                right as *const f64,
                ldb,
                &raw const beta,
                to as *mut f64,
                ldc,
            )
        })
    }

    pub fn solve(&self, device: &CudaDevice, l: Part, x: Part) -> Result<(), DeviceError> {
        if x.rows() == 0 || x.cols() == 0 {
            return Ok(());
        }
        let (left, to) = (device.address(l)?, device.address(x)?);
        let (m, n) = (size(x.rows())?, size(x.cols())?);
        let (ldl, ldx) = (size(l.stride())?, size(x.stride())?);
        let alpha = 1.0f64;
        // SAFETY: as in `gemm`.
        blas_done("cublasDtrsm", || unsafe {
            blas::cublasDtrsm_v2(
                self.blas,
                blas::cublasSideMode_t::CUBLAS_SIDE_LEFT,
                blas::cublasFillMode_t::CUBLAS_FILL_MODE_LOWER,
                blas::cublasOperation_t::CUBLAS_OP_N,
                blas::cublasDiagType_t::CUBLAS_DIAG_UNIT,
                m,
                n,
                &raw const alpha,
                left as *const f64,
                ldl,
                to as *mut f64,
                ldx,
            )
        })
    }

    pub fn lu(
        &self,
        device: &mut CudaDevice,
        a: Part,
    ) -> Result<Result<Vec<usize>, LuError>, DeviceError> {
        let handle = self.solver(device)?;
        let at = device.address(a)? as *mut f64;
        let (m, n, lda) = (size(a.rows())?, size(a.cols())?, size(a.stride())?);
        let mut words = 0;
        // SAFETY: requests a size only.
        solver_done("cusolverDnDgetrf_bufferSize", || unsafe {
            solver::cusolverDnDgetrf_bufferSize(handle, m, n, at, lda, &raw mut words)
        })?;
        let work = device.take(8 * words.max(1).cast_unsigned() as u64)?;
        let list = match device.take(4 * (a.cols() as u64 + 1)) {
            Ok(memory) => memory,
            Err(error) => {
                device.give(work);
                return Err(error);
            }
        };
        let info = list.at + 4 * a.cols() as u64;
        // SAFETY: work has the requested number of elements. The list has one int for each column
        // and one for `info`. The part lies in a live buffer.
        let done = solver_done("cusolverDnDgetrf", || unsafe {
            solver::cusolverDnDgetrf(
                handle,
                m,
                n,
                at,
                lda,
                work.at as *mut f64,
                list.at as *mut i32,
                info as *mut i32,
            )
        })
        .and_then(|()| {
            let mut found = vec![0i32; a.cols() + 1];
            device.context()?.get(list.at, &mut found)?;
            Ok(found)
        });
        device.give(list);
        device.give(work);
        let mut found = done?;
        let info = found.pop().unwrap_or(0);
        if info > 0 {
            let column = info.cast_unsigned() as usize - 1;
            return Ok(Err(LuError::Singular { column }));
        }
        // Counted from 1, as LAPACK does.
        let pivots = found.iter().map(|p| p.max(&1).cast_unsigned() as usize - 1);
        Ok(Ok(pivots.collect()))
    }

    pub fn qr(&self, device: &mut CudaDevice, a: Part) -> Result<Vec<f64>, DeviceError> {
        let handle = self.solver(device)?;
        let at = device.address(a)? as *mut f64;
        let (m, n, lda) = (size(a.rows())?, size(a.cols())?, size(a.stride())?);
        let mut words = 0;
        // SAFETY: requests a size only.
        solver_done("cusolverDnDgeqrf_bufferSize", || unsafe {
            solver::cusolverDnDgeqrf_bufferSize(handle, m, n, at, lda, &raw mut words)
        })?;
        // τ, then the int of `info`, then the workspace.
        let whole = device.take(8 * (a.cols() as u64 + 1 + words.max(1).cast_unsigned() as u64))?;
        let info = whole.at + 8 * a.cols() as u64;
        // SAFETY: the three lie in sequence in `whole`. The part lies in a live buffer.
        let done = solver_done("cusolverDnDgeqrf", || unsafe {
            solver::cusolverDnDgeqrf(
                handle,
                m,
                n,
                at,
                lda,
                whole.at as *mut f64,
                (info + 8) as *mut f64,
                words,
                info as *mut i32,
            )
        })
        .and_then(|()| {
            let mut tau = vec![0.0f64; a.cols()];
            device.context()?.get(whole.at, &mut tau)?;
            Ok(tau)
        });
        device.give(whole);
        let tau = done?;
        if tau.iter().any(|t| !t.is_finite()) {
            let panel = to_host(device, a)?;
            let column = (0..a.cols()).find(|j| panel.col(*j).iter().any(|v| !v.is_finite()));
            return Err(DeviceError::Driver {
                call: "cusolverDnDgeqrf",
                why: format!("column {} overflowed", column.unwrap_or(0)),
            });
        }
        Ok(tau)
    }
}
