//! NVIDIA devices for the programs, in the binary that runs everywhere: driver and libraries are
//! loaded at run time, and where they are missing that is a sentence, never a panic.
//!
//! [`CudaDevices`] opens devices for [`fiec_kernels::device`]. Their own kernels
//! (`kernels/kernels.cu`, with the PTX made from it committed beside) compute in the order of
//! [`fiec_kernels`] and give its bits; [`fiec_kernels::device::Arithmetic::Vendor`] stands for
//! cuBLAS and cuSOLVER. [`suite`] is what `fiec device test` runs.
//!
//! All device memory is counted against the grant, taken by `cuMemAlloc` and given back by
//! `cuMemFree`: no pool of our own holds it.

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

/// The PTX of the kernels, as the driver takes it.
pub const PTX: &str = include_str!("../kernels/kernels.ptx");
/// The source that it was made from.
pub const SOURCE: &str = include_str!("../kernels/kernels.cu");
