//! Loads that experiments, the demo and tests put on a node of this machine, each a process of its
//! own: `fiec pressure` takes memory, `fiec burn` takes processors or a device.

mod device;
pub mod memory;
pub mod processors;
