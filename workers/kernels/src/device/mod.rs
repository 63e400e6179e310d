//! The seam to accelerators: what a device must be able to do for the programs to compute on it.
//!
//! A [`Device`] has memory of its own, counted in bytes against a budget, and runs the kernels of
//! this crate over parts of it. With [`Arithmetic::Chain512`] every result has the bits that the
//! CPU's kernels give; with [`Arithmetic::Vendor`] a vendor's library decides the order, and the
//! result is right within the usual bounds only. Which of them is a parameter of an execution;
//! whether there is a device, and how much of it, is a matter of where it runs.
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

/// Who decides the order of operations of a product, a solve or a panel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Arithmetic {
    /// This crate: the same bits everywhere.
    #[default]
    Chain512,
    /// The device's vendor: within error bounds.
    Vendor,
}

/// Why a device cannot do something.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum DeviceError {
    /// There is no such device, or none at all. The text says why.
    #[error("no device to compute on: {0}")]
    Absent(String),
    /// It would go beyond what was granted.
    #[error(
        "{wanted} bytes more of device memory do not fit: {held} of the granted {budget} bytes \
         are in use"
    )]
    Budget {
        /// Bytes asked for.
        wanted: u64,
        /// Bytes in use.
        held: u64,
        /// Bytes granted.
        budget: u64,
    },
    /// The device has no more, whatever was granted.
    #[error("the device has no {wanted} bytes of memory left: {why}")]
    Memory {
        /// Bytes asked for.
        wanted: u64,
        /// What its driver said.
        why: String,
    },
    /// A library that this arithmetic needs is not there.
    #[error("{0}")]
    Library(String),
    /// The driver refused.
    #[error("{call}: {why}")]
    Driver {
        /// What was called.
        call: &'static str,
        /// What it said.
        why: String,
    },
}

impl DeviceError {
    /// Whether less at once might do.
    #[must_use]
    pub fn is_memory(&self) -> bool {
        matches!(self, Self::Budget { .. } | Self::Memory { .. })
    }
}

/// What a device says of itself.
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
    /// What was granted.
    pub budget: u64,
    /// In use now, without what is given up on demand.
    pub held: u64,
    /// Most ever in use.
    pub peak: u64,
}

impl Usage {
    /// What may still be allocated.
    #[must_use]
    pub fn available(&self) -> u64 {
        self.budget.saturating_sub(self.held)
    }
}

/// What a solve may do before it is looked at again.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CgLimits {
    /// Iterations now.
    pub steps: u64,
    /// Relative residual that is enough.
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

/// Where a solve came to.
#[derive(Debug, Clone, PartialEq)]
pub enum CgStop {
    /// All iterations of the limit were made.
    Steps,
    /// The relative residual is at most the tolerance.
    Converged,
    /// There were as many iterations as there may be in all.
    Most,
    /// It broke down.
    Broken(CgError),
}

/// A device, or a part of one, with a budget of its memory. What it holds is given back when it is
/// dropped.
///
/// Shapes are the caller's affair: wrong ones are a mistake in a program and panic.
pub trait Device: Send {
    /// What it is.
    fn about(&self) -> &About;

    /// Its memory.
    fn usage(&self) -> Usage;

    /// Memory for so many f64, of any content.
    ///
    /// # Errors
    /// When the budget or the device has no more.
    fn allocate(&mut self, elements: usize) -> Result<Buffer, DeviceError>;

    /// Gives memory back.
    fn release(&mut self, buffer: Buffer);

    /// Copies from the host. `to` is not transposed.
    ///
    /// # Errors
    /// The driver's.
    fn write(&mut self, from: MatRef<'_>, to: Part) -> Result<(), DeviceError>;

    /// Copies to the host, after all that was started before. `from` is not transposed.
    ///
    /// # Errors
    /// The driver's, those of what was started before included.
    fn read(&mut self, from: Part, to: MatMut<'_>) -> Result<(), DeviceError>;

    /// As [`crate::dense::gemm()`]; of the three, only `a` may be transposed.
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

    /// Takes up a solve: its matrix and its state come to the device, in place of another's.
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
    /// If no solve was taken up.
    fn cg_advance(&mut self, limits: CgLimits) -> Result<(CgScalars, CgStop), DeviceError>;

    /// Reads x, r and p of the solve.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Panics
    /// If no solve was taken up.
    fn cg_read(&mut self, state: &mut CgState) -> Result<(), DeviceError>;

    /// Lets the solve go, if there is one, and gives its memory back.
    fn cg_end(&mut self);

    /// Waits until all is done that was started.
    ///
    /// # Errors
    /// The driver's, those of what was started before included.
    fn finish(&mut self) -> Result<(), DeviceError>;

    /// Gives everything back. `warm`: what takes long to make and belongs to no execution (a
    /// context) may be kept by whoever made this device, for the next one; else it goes, too.
    fn close(self: Box<Self>, warm: bool);
}

/// Where devices come from.
pub trait Devices: Send + Sync {
    /// The device of this UUID, with so much of its memory; none: all that is free.
    ///
    /// # Errors
    /// When it cannot be had; the text says why and what to do.
    fn open(&self, uuid: &str, memory_bytes: Option<u64>) -> Result<Box<dyn Device>, DeviceError>;

    /// Makes what takes long to make (a context) ahead of the first [`Devices::open`] of this
    /// device, and keeps it until then. Where nothing takes long, nothing is done.
    ///
    /// # Errors
    /// As [`Devices::open`].
    fn heat(&self, _uuid: &str) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Lets go of what is kept and used by nobody.
    fn cool(&self) {}
}

/// Where there are none, and why.
#[derive(Debug, Clone)]
pub struct NoDevices(pub &'static str);

impl Devices for NoDevices {
    fn open(&self, uuid: &str, _: Option<u64>) -> Result<Box<dyn Device>, DeviceError> {
        Err(DeviceError::Absent(format!("{uuid}: {}", self.0)))
    }
}
