//! NVIDIA devices for the programs, in the binary that runs everywhere. Driver and libraries are
//! loaded at run time. If they are missing, the result is an error message, never a panic.
//!
//! [`CudaDevices`] opens devices for [`fiec_kernels::device`]. The crate's own kernels
//! (`kernels/kernels.cu`, with its PTX committed beside it) compute in the order of
//! [`fiec_kernels`] and give its bits. [`fiec_kernels::device::Arithmetic::Vendor`] selects cuBLAS
//! and cuSOLVER. `fiec device test` runs [`suite`].
//!
//! All device memory counts against the grant. It is allocated by `cuMemAlloc` and freed by
//! `cuMemFree`, without a pool of our own.

mod cg;
mod context;
mod device;
mod devices;
mod found;
mod nvml;
mod peak;
pub mod suite;
mod vendor;

pub use devices::CudaDevices;
pub use found::{Found, list};
pub use nvml::used_bytes;
pub use peak::fp64_peak;

/// The PTX of the kernels, as the driver loads it.
pub const PTX: &str = include_str!("../kernels/kernels.ptx");
/// The source of the PTX.
pub const SOURCE: &str = include_str!("../kernels/kernels.cu");
