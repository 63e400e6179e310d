//! What a node says of the machine it is on: the places that execute, its memory, and what was
//! measured of both. All of it can be required or preferred by a submission, and is in SQL.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::ids::{Digest, Timestamp};
use crate::submission::Contract;

/// The id of the substrate that is the host's processors.
pub const HOST: &str = "host";

/// The word of a node's confinement that says that its worker may start containers.
pub const CONTAINERS: &str = "containers";

/// CUDA's version of what a device's units can do, e.g. `9.0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, JsonSchema)]
#[schemars(with = "String", extend("pattern" = "^[0-9]{1,3}\\.[0-9]{1,3}$"))]
pub struct ComputeCapability {
    /// Before the dot.
    pub major: u16,
    /// Behind it.
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

/// A place that can execute.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Substrate {
    /// `host`, or the UUID of a GPU or MIG slice.
    pub id: String,
    /// `cpu`, `gpu` or `mig`.
    pub kind: String,
    /// For people.
    pub name: String,
    /// Memory in bytes that belongs to it, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// What is known of it as a device; absent for the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceProfile>,
}

impl Substrate {
    /// Whether it is a device, which one execution has to itself or several share by a budget.
    pub fn is_device(&self) -> bool {
        self.kind != "cpu"
    }
}

/// What is known of a device. Absent is not measured, or not told by the driver.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceProfile {
    /// What its units can do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_capability: Option<ComputeCapability>,
    /// Streaming multiprocessors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multiprocessors: Option<u32>,
    /// Where it is on the host's bus, e.g. `0000:1b:00.0`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bus: Option<String>,
    /// UUID of the whole GPU that this is a slice of; absent where it is none. The slice draws from
    /// the same power and is cooled with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub whole: Option<String>,
    /// Numeric contracts that its kernels can keep.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub contracts: Vec<Contract>,
    /// Copies from the host's page-locked memory, in bytes a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to_device_bytes_s: Option<u64>,
    /// Copies to the host's page-locked memory, in bytes a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_device_bytes_s: Option<u64>,
    /// Why the copies were not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing: Option<String>,
}

impl DeviceProfile {
    /// The slower direction of its copies, in bytes a second.
    pub fn copy_bytes_s(&self) -> Option<u64> {
        Some(self.to_device_bytes_s?.min(self.from_device_bytes_s?))
    }
}

/// Where a memory node stands in the machine's hierarchy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MemoryTier {
    /// Memory with processors of its own.
    Local,
    /// Memory without processors: CXL, high-bandwidth or persistent memory appears so.
    Far,
}

/// A memory node (NUMA). What firmware says stands beside what was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MemoryNode {
    /// The kernel's number.
    pub id: u32,
    /// Where it stands.
    pub tier: MemoryTier,
    /// The kernel's list of its processors, e.g. `0-7,16-23`.
    pub cpus: String,
    /// Its size in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Reads by the nearest processors as firmware says, in bytes a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub firmware_read_bytes_s: Option<u64>,
    /// Their latency as firmware says, in nanoseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub firmware_read_ns: Option<u64>,
    /// What one thread copies, in bytes a second: each is read once and written once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy_bytes_s: Option<u64>,
    /// A read that depends on the one before, in nanoseconds, over `sample_bytes`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency_ns: Option<f64>,
    /// Size of the array that was measured. Where it is not far larger than the last cache, the
    /// figures are partly the cache's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample_bytes: Option<u64>,
    /// Why it was not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing: Option<String>,
}

/// What a node knows of its machine beyond the places that execute.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NodeProfile {
    /// Physical cores of the machine, where the kernel tells them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<u32>,
    /// The kernel, e.g. `Linux 6.1.0`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub kernel: String,
    /// Bytes of the last cache that the first processor sees, where the kernel tells them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_cache_bytes: Option<u64>,
    /// Numeric contracts that the host's kernels can keep.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub contracts: Vec<Contract>,
    /// `host` or `container`, then what the worker may put around programs: `users` (run them as
    /// other users), `cgroups` (control groups of their own), `containers` (start containers).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub confinement: Vec<String>,
    /// Versions of what the devices stand on: `nvidia_driver`, `cuda_driver`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub libraries: BTreeMap<String, String>,
    /// The memory nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory: Vec<MemoryNode>,
    /// When, and of what, the measurements were taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<Measured>,
}

impl NodeProfile {
    /// True where nothing is known.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// What one thread copies in the fastest memory node, in bytes a second.
    pub fn bandwidth_bytes_s(&self) -> Option<u64> {
        self.memory.iter().filter_map(|m| m.copy_bytes_s).max()
    }
}

/// A measurement of a machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Measured {
    /// When it was taken; a restart takes it from the disk again.
    pub at: Timestamp,
    /// How long it took, in milliseconds.
    pub took_ms: u64,
    /// Digest over what it depends on: processors, memory nodes, devices, driver.
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
