//! Telemetry probes: the hardware vector H(t) and the substrate descriptor of a node.
//!
//! Everything here is synchronous and does not wait. A timer calls a [`Sampler`], which reads files
//! of the kernel that it keeps open. Only NVML is slow, so one thread polls it, and
//! [`device::DeviceProbe`] returns that thread's last facts.
//!
//! Invariants: A value lies in \[0, 1\], where 1 is exhausted. A missing measurement has no value
//! and states its reason (absent is not zero). A probe that fails logs that once and does not
//! affect others. Devices are never averaged. The caller passes times; no clock is read.

pub mod cgroup;
pub mod confinement;
pub mod conformance;
pub mod contention;
pub mod descriptor;
pub mod device;
pub mod devices;
pub mod energy;
pub mod envelope;
pub mod fake;
mod kernel_file;
pub mod latency;
pub mod memory;
pub mod numa;
mod nvml;
pub mod oom;
pub mod power;
pub mod profile;
mod reading;
pub mod recording;
pub mod sampler;
pub mod simulated;
pub mod stall;
pub mod tcp;
pub mod thermal;
mod tree;
pub mod trigger;
pub mod watch;

pub use cgroup::{CgroupError, NodeCgroup};
pub use memory::{MemoryLimit, MemoryProbe};
pub use sampler::{Sampler, SamplerConfig, changed};
pub use watch::Wake;

use fiec_schemas::hardware::Reading;
use fiec_schemas::ids::Timestamp;

/// Measures one or more components of H(t).
pub trait Probe: Send {
    /// Its name, for logs.
    fn name(&self) -> &'static str;

    /// Appends its readings with the time `now`. A failed measurement is appended with `missing`.
    /// Only if there is no device to measure, nothing is appended.
    fn read(&mut self, now: Timestamp, out: &mut Vec<Reading>);
}
