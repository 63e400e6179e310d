//! Telemetry probes: the hardware vector H(t) and the substrate descriptor of a node.
//!
//! Everything here is synchronous and does no waiting of its own: a [`Sampler`] is called from a
//! timer and answers from files of the kernel that it keeps open. Only NVML is slow, so one
//! thread polls it and [`device::DeviceProbe`] hands out what that thread saw last.
//!
//! Invariants: a value lies in \[0, 1\] where 1 is exhausted; what could not be measured has no
//! value and says why (absent is not zero); a probe that fails says so once in the log and takes
//! no other along; devices are never averaged; times are handed in, never read.

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

/// Something that measures one or more components of H(t).
pub trait Probe: Send {
    /// Its name, for logs.
    fn name(&self) -> &'static str;

    /// Appends what it measures, stamped `now`. What cannot be measured is appended with
    /// `missing`; nothing is appended only where there is nothing to measure (no device).
    fn read(&mut self, now: Timestamp, out: &mut Vec<Reading>);
}
