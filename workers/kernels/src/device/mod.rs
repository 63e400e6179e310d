//! The interface to accelerators: the operations that a device must have for the programs.
//!
//! A [`Device`] has its own memory, counted in bytes against a budget, and runs this crate's
//! kernels over parts of it. With [`Arithmetic::Chain512`] every result has the bits of the CPU's
//! kernels. With [`Arithmetic::Vendor`] a vendor's library decides the order, and the result is
//! correct only within the usual bounds. The arithmetic is a parameter of an execution. Whether
//! there is a device, and how much of it, depends on the node.
//!
//! [`HostDevice`] is a device in the host's memory: for tests, and for machines without one.

pub mod dense;
mod host;
mod parts;

use crate::cg::{CgError, CgProblem, CgState};
use crate::dense::lu::LuError;
use crate::dense::{Into, MatMut, MatRef};

pub use host::{ContextEvent, Contexts, HostDevice, HostDevices, Ledger};
pub use parts::{Buffer, Part};

/// The owner of the order of operations in a product, a solve or a panel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Arithmetic {
    /// This crate: the same bits everywhere.
    #[default]
    Chain512,
    /// The device's vendor: within error bounds.
    Vendor,
}

/// The reason why a device cannot do an operation.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum DeviceError {
    /// There is no such device, or none at all. The text has the reason.
    #[error("no device to compute on: {0}")]
    Absent(String),
    /// It would exceed the grant.
    #[error(
        "{wanted} bytes more of device memory do not fit: {held} of the granted {budget} bytes \
         are in use"
    )]
    Budget {
        /// Requested bytes.
        wanted: u64,
        /// Bytes in use.
        held: u64,
        /// Bytes granted.
        budget: u64,
    },
    /// The device has no more memory, even within the grant.
    #[error("the device has no {wanted} bytes of memory left: {why}")]
    Memory {
        /// Requested bytes.
        wanted: u64,
        /// Its driver's error.
        why: String,
    },
    /// A library that this arithmetic needs is missing.
    #[error("{0}")]
    Library(String),
    /// The device has failed, or its driver, whatever was asked of it.
    #[error("the device has failed: {call}: {why}")]
    Failed {
        /// The call.
        call: &'static str,
        /// The driver's error.
        why: String,
    },
    /// The driver refused.
    #[error("{call}: {why}")]
    Driver {
        /// The call.
        call: &'static str,
        /// The driver's error.
        why: String,
    },
}

impl DeviceError {
    /// Whether a smaller request might succeed.
    #[must_use]
    pub fn is_memory(&self) -> bool {
        matches!(self, Self::Budget { .. } | Self::Memory { .. })
    }
}

/// The description of a device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct About {
    /// Its UUID, e.g. `GPU-…`.
    pub uuid: String,
    /// Its name.
    pub name: String,
    /// Memory in bytes.
    pub memory_bytes: u64,
}

/// Device memory in bytes, as it is counted against a grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// The grant.
    pub budget: u64,
    /// In use now, without memory that is freed on demand.
    pub held: u64,
    /// Most ever in use.
    pub peak: u64,
}

impl Usage {
    /// Bytes that may still be allocated.
    #[must_use]
    pub fn available(&self) -> u64 {
        self.budget.saturating_sub(self.held)
    }
}

/// The limits of a solve until its scalars are read again.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CgLimits {
    /// Iterations now.
    pub steps: u64,
    /// The relative residual at which it stops.
    pub tolerance: f64,
    /// Iterations in all.
    pub most: u64,
}

/// The scalars of a [`CgState`], whose vectors are on a device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CgScalars {
    /// `r·D⁻¹r`.
    pub rz: f64,
    /// `r·r`.
    pub rr: f64,
    /// Iterations done.
    pub iteration: u64,
}

/// The reason why a solve stopped.
#[derive(Debug, Clone, PartialEq)]
pub enum CgStop {
    /// It made all iterations of `steps`.
    Steps,
    /// The relative residual is at most the tolerance.
    Converged,
    /// It reached the limit of iterations in all.
    Most,
    /// It broke down.
    Broken(CgError),
}

/// A device, or a part of one, with a budget of its memory. Dropping it frees its memory.
///
/// The caller is responsible for shapes: wrong ones are a mistake in a program and panic.
pub trait Device: Send {
    /// Its description.
    fn about(&self) -> &About;

    /// Its memory.
    fn usage(&self) -> Usage;

    /// Allocates memory for this many f64, with undefined content.
    ///
    /// # Errors
    /// When the budget or the device has no more.
    fn allocate(&mut self, elements: usize) -> Result<Buffer, DeviceError>;

    /// Frees memory.
    fn release(&mut self, buffer: Buffer);

    /// Copies from the host. `to` is not transposed.
    ///
    /// # Errors
    /// The driver's.
    fn write(&mut self, from: MatRef<'_>, to: Part) -> Result<(), DeviceError>;

    /// Copies to the host, after all earlier operations. `from` is not transposed.
    ///
    /// # Errors
    /// The driver's, including those of earlier operations.
    fn read(&mut self, from: Part, to: MatMut<'_>) -> Result<(), DeviceError>;

    /// As [`crate::dense::gemm()`]. Only `a` may be transposed.
    ///
    /// # Errors
    /// The driver's; a library that is missing.
    fn gemm(
        &mut self,
        arithmetic: Arithmetic,
        a: Part,
        b: Part,
        into: Into,
        c: Part,
    ) -> Result<(), DeviceError>;

    /// As [`crate::dense::triangular::solve_unit_lower`].
    ///
    /// # Errors
    /// The driver's; a library that is missing.
    fn solve_unit_lower(
        &mut self,
        arithmetic: Arithmetic,
        l: Part,
        x: Part,
    ) -> Result<(), DeviceError>;

    /// As [`crate::dense::lu::exchange`].
    ///
    /// # Errors
    /// The driver's.
    fn exchange(&mut self, x: Part, pivots: &[usize]) -> Result<(), DeviceError>;

    /// As [`crate::dense::lu::panel`], by the vendor's library.
    ///
    /// # Errors
    /// The driver's; a library that is missing. Inside: see [`LuError`].
    fn vendor_lu(&mut self, a: Part) -> Result<Result<Vec<usize>, LuError>, DeviceError>;

    /// Factors a panel in place by the vendor's library: R on and above the diagonal, the
    /// reflectors below it. Returns τ of each reflector `I − τ·v·vᵀ`.
    ///
    /// # Errors
    /// The driver's; a library that is missing.
    fn vendor_qr(&mut self, a: Part) -> Result<Vec<f64>, DeviceError>;

    /// Starts a solve: copies its matrix and its state to the device, in place of an earlier solve.
    ///
    /// # Errors
    /// When they do not fit.
    fn cg_begin(&mut self, problem: &CgProblem, state: &CgState) -> Result<(), DeviceError>;

    /// Iterates as [`crate::cg::step`] does, while the relative residual is above the tolerance.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Panics
    /// If no solve was started.
    fn cg_advance(&mut self, limits: CgLimits) -> Result<(CgScalars, CgStop), DeviceError>;

    /// Reads x, r and p of the solve.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Panics
    /// If no solve was started.
    fn cg_read(&mut self, state: &mut CgState) -> Result<(), DeviceError>;

    /// Ends the solve, if there is one, and frees its memory.
    fn cg_end(&mut self);

    /// Waits for all operations.
    ///
    /// # Errors
    /// The driver's, including those of earlier operations.
    fn finish(&mut self) -> Result<(), DeviceError>;

    /// Releases everything. With `warm` a context, which takes long to make and belongs to no
    /// execution, may be kept for the next device. Otherwise it is released, too.
    fn close(self: Box<Self>, warm: bool);
}

/// The source of devices.
pub trait Devices: Send + Sync {
    /// Opens the device with this UUID, with a budget of memory. None means all that is free.
    ///
    /// # Errors
    /// When it cannot be opened. The text has the reason and the remedy.
    fn open(&self, uuid: &str, memory_bytes: Option<u64>) -> Result<Box<dyn Device>, DeviceError>;

    /// Makes a context, which takes long, before the first [`Devices::open`] of this device, and
    /// keeps it until then. Does nothing if opening is fast.
    ///
    /// # Errors
    /// As [`Devices::open`].
    fn heat(&self, _uuid: &str) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Releases contexts that are kept without a user.
    fn cool(&self) {}
}

/// A source without devices, with the reason.
#[derive(Debug, Clone)]
pub struct NoDevices(pub &'static str);

impl Devices for NoDevices {
    fn open(&self, uuid: &str, _: Option<u64>) -> Result<Box<dyn Device>, DeviceError> {
        Err(DeviceError::Absent(format!("{uuid}: {}", self.0)))
    }
}
