//! A node's description of its machine: the substrates, the memory, and the measurements of both. A
//! submission can require or prefer all of it, and SQL has it.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::ids::{Digest, Timestamp};
use crate::named::named;
use crate::submission::Contract;

/// The id of the substrate that is the host's processors.
pub const HOST: &str = "host";

named! {
    /// Where a worker runs, and the isolation that it can give its programs.
    pub enum Confinement {
        /// The worker runs inside a container.
        Container,
        /// The worker runs on the host itself.
        Host,
        /// It can run programs as other users: it has `CAP_SETUID` and `CAP_SETGID`.
        Users,
        /// It can create control groups: the folder of its own memory group is writable.
        Cgroups,
        /// It can start containers: `podman` or `docker` is in the PATH. Inside a container the
        /// engine may still refuse; this is tried when a program asks for one.
        Containers,
    }
}

/// CUDA's version of a device's features, e.g. `9.0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, JsonSchema)]
#[schemars(with = "String", extend("pattern" = "^[0-9]{1,3}\\.[0-9]{1,3}$"))]
pub struct ComputeCapability {
    /// Number before the dot.
    pub major: u16,
    /// Number after the dot.
    pub minor: u16,
}

impl fmt::Display for ComputeCapability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl FromStr for ComputeCapability {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let part = |digits: &str| {
            let plain =
                (1..=3).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit());
            plain.then(|| digits.parse().ok()).flatten()
        };
        text.split_once('.')
            .and_then(|(major, minor)| {
                Some(Self {
                    major: part(major)?,
                    minor: part(minor)?,
                })
            })
            .ok_or_else(|| format!("{text:?} is no compute capability such as \"8.0\""))
    }
}

impl Serialize for ComputeCapability {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ComputeCapability {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

named! {
    /// What a place that can execute is.
    pub enum SubstrateKind {
        /// The host's processors.
        Cpu,
        /// A whole GPU.
        Gpu,
        /// A MIG slice of a GPU.
        Mig,
    }
}

/// A substrate: a place that executes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Substrate {
    /// `host`, or the UUID of a GPU or MIG slice.
    pub id: String,
    /// The kind of the substrate.
    pub kind: SubstrateKind,
    /// Name for people.
    pub name: String,
    /// Its own memory in bytes, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Its properties as a device. Absent for the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceProfile>,
}

impl Substrate {
    /// True for a device, which one execution has alone or several share by a budget.
    pub fn is_device(&self) -> bool {
        match self.kind {
            SubstrateKind::Cpu => false,
            SubstrateKind::Gpu | SubstrateKind::Mig => true,
        }
    }
}

/// Properties of a device. An absent one was not measured, or the driver does not report it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceProfile {
    /// Its compute capability.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_capability: Option<ComputeCapability>,
    /// Streaming multiprocessors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multiprocessors: Option<u32>,
    /// Its address on the host's bus, e.g. `0000:1b:00.0`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bus: Option<String>,
    /// UUID of the whole GPU, if this is a slice. A slice shares power and cooling with the whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub whole: Option<String>,
    /// Numeric contracts that its kernels can keep.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub contracts: Vec<Contract>,
    /// Bandwidth of copies from the host's page-locked memory, in bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to_device_bytes_s: Option<u64>,
    /// Bandwidth of copies to the host's page-locked memory, in bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_device_bytes_s: Option<u64>,
    /// Why the bandwidth was not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing: Option<String>,
}

impl DeviceProfile {
    /// The slower direction of its copies, in bytes per second.
    pub fn copy_bytes_s(&self) -> Option<u64> {
        Some(self.to_device_bytes_s?.min(self.from_device_bytes_s?))
    }
}

/// Tier of a memory node in the machine's hierarchy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MemoryTier {
    /// Memory with its own processors.
    Local,
    /// Memory without processors. CXL, high-bandwidth and persistent memory appear so.
    Far,
}

/// A memory node (NUMA), with the firmware's figures and the measured ones.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MemoryNode {
    /// The kernel's number.
    pub id: u32,
    /// Its tier.
    pub tier: MemoryTier,
    /// The kernel's list of its processors, e.g. `0-7,16-23`.
    pub cpus: String,
    /// Its size in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Read bandwidth from the nearest processors by the firmware's table, in bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub firmware_read_bytes_s: Option<u64>,
    /// Read latency from the nearest processors by the firmware's table, in ns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub firmware_read_ns: Option<u64>,
    /// Copy bandwidth of one thread, in bytes per second. Each byte is read once and written once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy_bytes_s: Option<u64>,
    /// Latency of a read that depends on the read before, in ns, over `sample_bytes`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency_ns: Option<f64>,
    /// Size of the measured array. If it is not far larger than the last cache, the figures are
    /// partly those of the cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample_bytes: Option<u64>,
    /// Why the node was not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing: Option<String>,
}

/// A node's knowledge of its machine besides the substrates.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NodeProfile {
    /// Physical cores of the machine, if the kernel reports them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<u32>,
    /// The kernel, e.g. `Linux 6.1.0`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub kernel: String,
    /// Bytes of the last cache of the first processor, if the kernel reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_cache_bytes: Option<u64>,
    /// Numeric contracts that the host's kernels can keep.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub contracts: Vec<Contract>,
    /// Where its worker runs, then the isolation that it can give programs. Empty: not known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub confinement: Vec<Confinement>,
    /// Versions of the libraries that the devices need: `nvidia_driver`, `cuda_driver`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub libraries: BTreeMap<String, String>,
    /// The memory nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory: Vec<MemoryNode>,
    /// When and on which machine the measurements were made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<Measured>,
}

impl NodeProfile {
    /// True if nothing is known.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Copy bandwidth of one thread in the fastest memory node, in bytes per second.
    pub fn bandwidth_bytes_s(&self) -> Option<u64> {
        self.memory.iter().filter_map(|m| m.copy_bytes_s).max()
    }
}

/// A measurement of a machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Measured {
    /// When it was made. A restart reads it from the disk again.
    pub at: Timestamp,
    /// Its duration in ms.
    pub took_ms: u64,
    /// Digest over the parts that it depends on: processors, memory nodes, devices, driver.
    pub machine: Digest,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_compute_capability_is_read_as_two_numbers_and_ordered_by_them() {
        let read = |text: &str| text.parse::<ComputeCapability>();
        assert!(read("9.0").unwrap() > read("8.9").unwrap());
        assert!(read("10.0").unwrap() > read("9.0").unwrap());
        assert_eq!(read("8.6").unwrap().to_string(), "8.6");
        for bad in [
            "9", "", "9.", ".0", "9.0.1", "-1.0", "+9.0", "a.b", "1000.0",
        ] {
            assert!(read(bad).unwrap_err().contains("such as"), "{bad}");
        }
    }

    #[test]
    fn the_slower_direction_of_copies_counts_and_half_a_measurement_is_none() {
        let mut device = DeviceProfile {
            to_device_bytes_s: Some(50),
            ..DeviceProfile::default()
        };
        assert_eq!(device.copy_bytes_s(), None);
        device.from_device_bytes_s = Some(40);
        assert_eq!(device.copy_bytes_s(), Some(40));
    }
}
