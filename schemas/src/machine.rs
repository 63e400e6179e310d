//! Requirements on a node's machine: instruction sets, kernel, driver, and memory tiers. They are
//! compared with the node's descriptor.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::hardware::NodeDescriptor;
use crate::submission::FieldError;
use crate::substrate::MemoryTier;

/// Most instruction sets in one list.
const ISA_LIMIT: usize = 32;
/// Longest name of an instruction set, in bytes.
const ISA_NAME_LIMIT: usize = 32;
/// The library whose version is the NVIDIA driver's.
pub const NVIDIA_DRIVER: &str = "nvidia_driver";

/// A release as one to four numbers with dots, e.g. `6.1` or `550.54.15`. Missing numbers are 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, JsonSchema)]
#[schemars(with = "String", extend("pattern" = "^[0-9]{1,9}(\\.[0-9]{1,9}){0,3}$"))]
pub struct Release {
    parts: [u32; 4],
    count: u8,
}

impl Release {
    /// True if this is `other` or a later release.
    pub fn is_at_least(self, other: Self) -> bool {
        self.parts >= other.parts
    }

    /// The release in the name of a system or driver, e.g. 6.1.0 in `Linux 6.1.0-28-amd64`. It is
    /// the beginning of the first word that starts with a digit, up to four numbers.
    pub fn told_by(name: &str) -> Option<Self> {
        let word = name
            .split_whitespace()
            .find(|word| word.starts_with(|c: char| c.is_ascii_digit()))?;
        let mut release = Self {
            parts: [0; 4],
            count: 0,
        };
        let mut rest = word;
        for part in &mut release.parts {
            let end = rest.find(|c: char| !c.is_ascii_digit());
            let (digits, after) = rest.split_at(end.unwrap_or(rest.len()));
            let Ok(number) = digits.parse() else { break };
            *part = number;
            release.count += 1;
            let Some(after) = after.strip_prefix('.') else {
                break;
            };
            rest = after;
        }
        (release.count > 0).then_some(release)
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, part) in self.parts.iter().take(usize::from(self.count)).enumerate() {
            let dot = if i == 0 { "" } else { "." };
            write!(f, "{dot}{part}")?;
        }
        Ok(())
    }
}

impl FromStr for Release {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let plain = |part: &str| {
            (1..=9).contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_digit())
        };
        let parts = text.split('.').count();
        Self::told_by(text)
            .filter(|_| parts <= 4 && text.split('.').all(plain))
            .ok_or_else(|| {
                format!("{text:?} is no release of one to four numbers with dots, such as \"6.1\"")
            })
    }
}

impl Serialize for Release {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Release {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// Properties that a machine must have (`requires`) or that are useful (`prefers`). A machine lacks
/// a property that its node does not know.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MachineRequirement {
    /// Instruction sets: `x86_64`, `avx2`, `fma`, `avx512f`, `aarch64`, `neon`, `sve`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub isa: Vec<String>,
    /// This release of the kernel or a later one, e.g. `"6.1"`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<Release>,
    /// This version of NVIDIA's driver or a later one, e.g. `"550.54"`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<Release>,
    /// At most this latency of a read in the fastest memory, in ns, as measured when the node
    /// joined.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_latency_ns: Option<u64>,
    /// At least this many bytes in memory nodes without their own processors (CXL).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub far_memory_bytes: Option<u64>,
}

/// The properties of a node's machine.
#[derive(Debug, Clone, Copy)]
pub struct Machine<'a> {
    descriptor: &'a NodeDescriptor,
}

impl<'a> Machine<'a> {
    /// Takes the properties from a descriptor.
    pub fn of(descriptor: &'a NodeDescriptor) -> Self {
        Self { descriptor }
    }

    /// True if it has this instruction set.
    pub fn has_isa(self, word: &str) -> bool {
        self.descriptor.isa.split('+').any(|has| has == word)
    }

    /// Its instruction sets, joined by `+`.
    pub fn isa(self) -> &'a str {
        &self.descriptor.isa
    }

    /// The release of its kernel.
    pub fn kernel(self) -> Option<Release> {
        Release::told_by(&self.descriptor.profile.kernel)
    }

    /// The version of NVIDIA's driver.
    pub fn driver(self) -> Option<Release> {
        Release::told_by(self.descriptor.profile.libraries.get(NVIDIA_DRIVER)?)
    }

    /// The lowest latency of its memory nodes, in whole ns.
    pub fn memory_latency_ns(self) -> Option<u64> {
        let nodes = self.descriptor.profile.memory.iter();
        let least = nodes.filter_map(|m| m.latency_ns).min_by(f64::total_cmp)?;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "float casts saturate"
        )]
        Some(least.ceil() as u64)
    }

    /// Bytes of its far memory nodes, 0 if it has none.
    pub fn far_memory_bytes(self) -> u64 {
        let nodes = self.descriptor.profile.memory.iter();
        let far = nodes.filter(|m| m.tier == MemoryTier::Far);
        far.filter_map(|m| m.memory_bytes).sum()
    }
}

/// A requirement that a machine does not meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unmet<'a> {
    /// It lacks an instruction set.
    Isa {
        /// The instruction sets that it has.
        has: &'a str,
        /// The missing one.
        needs: &'a str,
    },
    /// Its kernel is older, or unknown.
    Kernel {
        /// Its release.
        has: Option<Release>,
        /// The oldest sufficient one.
        needs: Release,
    },
    /// Its NVIDIA driver is older, or there is none.
    Driver {
        /// Its version.
        has: Option<Release>,
        /// The oldest sufficient one.
        needs: Release,
    },
    /// Its memory is slower, or was not measured.
    MemoryLatency {
        /// Latency of a read in ns.
        has: Option<u64>,
        /// The highest sufficient one.
        needs: u64,
    },
    /// It has less far memory.
    FarMemory {
        /// Bytes of far memory.
        has: u64,
        /// The least sufficient number.
        needs: u64,
    },
}

impl fmt::Display for Unmet<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let told = |has: Option<Release>| has.map_or("not known".to_owned(), |r| r.to_string());
        match *self {
            Unmet::Isa { has, needs } => {
                write!(f, "its instruction set is {has}, {needs} is required")
            }
            Unmet::Kernel { has, needs } => {
                write!(f, "its kernel is {}, {needs} is required", told(has))
            }
            Unmet::Driver { has, needs } => write!(
                f,
                "its version of NVIDIA's driver is {}, {needs} is required",
                told(has)
            ),
            Unmet::MemoryLatency { has, needs } => {
                let has = has.map_or("not measured".to_owned(), |ns| format!("{ns} ns"));
                write!(
                    f,
                    "the latency of its memory is {has}, {needs} ns at most are required"
                )
            }
            Unmet::FarMemory { has, needs } => {
                write!(f, "it has {has} bytes of far memory, {needs} are required")
            }
        }
    }
}

impl MachineRequirement {
    /// The first requirement that a node does not meet.
    pub fn unmet<'a>(&'a self, descriptor: &'a NodeDescriptor) -> Option<Unmet<'a>> {
        let machine = Machine::of(descriptor);
        if let Some(needs) = self.isa.iter().find(|word| !machine.has_isa(word)) {
            let has = machine.isa();
            return Some(Unmet::Isa { has, needs });
        }
        let older =
            |has: Option<Release>, needs: Release| !has.is_some_and(|has| has.is_at_least(needs));
        if let Some(needs) = self.kernel {
            let has = machine.kernel();
            if older(has, needs) {
                return Some(Unmet::Kernel { has, needs });
            }
        }
        if let Some(needs) = self.driver {
            let has = machine.driver();
            if older(has, needs) {
                return Some(Unmet::Driver { has, needs });
            }
        }
        if let Some(needs) = self.memory_latency_ns {
            let has = machine.memory_latency_ns();
            if has.is_none_or(|has| has > needs) {
                return Some(Unmet::MemoryLatency { has, needs });
            }
        }
        let needs = self.far_memory_bytes?;
        let has = machine.far_memory_bytes();
        (has < needs).then_some(Unmet::FarMemory { has, needs })
    }

    /// Checks the rules that types cannot express.
    ///
    /// # Errors
    /// The field, below `at`, and the rule that it breaks.
    pub(crate) fn check(&self, at: &str) -> Result<(), FieldError> {
        let wrong = |field: &str, rule: String| Err(FieldError::new(format!("{at}.{field}"), rule));
        if self.isa.len() > ISA_LIMIT {
            let count = self.isa.len();
            return wrong(
                "isa",
                format!("at most {ISA_LIMIT} are allowed, but there are {count}"),
            );
        }
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-');
        let good =
            |word: &str| (1..=ISA_NAME_LIMIT).contains(&word.len()) && word.bytes().all(plain);
        if let Some(word) = self.isa.iter().find(|word| !good(word)) {
            let rule = format!("{word:?} must be one word of an instruction set, e.g. \"avx512f\"");
            return wrong("isa", rule);
        }
        for (field, value) in [
            ("memory_latency_ns", self.memory_latency_ns),
            ("far_memory_bytes", self.far_memory_bytes),
        ] {
            if value == Some(0) {
                return wrong(field, "must be above 0".to_owned());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::substrate::MemoryNode;
    use serde_json::json;

    fn release(text: &str) -> Release {
        text.parse().unwrap()
    }

    fn node() -> NodeDescriptor {
        let memory = |id: u32, tier, bytes: u64, latency_ns| MemoryNode {
            id,
            tier,
            cpus: String::new(),
            memory_bytes: Some(bytes),
            firmware_read_bytes_s: None,
            firmware_read_ns: None,
            copy_bytes_s: None,
            latency_ns,
            sample_bytes: None,
            missing: None,
        };
        let mut node: NodeDescriptor = serde_json::from_value(json!({
            "v": 1, "node": "n", "instance": "00000000-0000-0000-0000-000000000001",
            "host": "h", "pid": 1, "version": "0", "started_at": "2026-01-01T00:00:00.000000Z",
            "shard": 0, "slots": 1, "cpus": 1, "isa": "x86_64+avx2+fma", "memory_limit_bytes": 1,
            "memory_limit_source": "host", "substrates": [], "programs": [], "thresholds": {},
        }))
        .unwrap();
        node.profile.kernel = "Linux 6.1.0-28-amd64".into();
        node.profile.libraries = [(NVIDIA_DRIVER.to_owned(), "550.54.15".to_owned())].into();
        node.profile.memory = vec![
            memory(0, MemoryTier::Local, 64, Some(90.2)),
            memory(1, MemoryTier::Far, 256, Some(250.0)),
        ];
        node
    }

    #[test]
    fn releases_are_read_compared_by_their_numbers_and_written_as_they_were() {
        assert!(release("6.10").is_at_least(release("6.9.5")));
        assert!(release("6.1").is_at_least(release("6.1.0")));
        assert!(!release("6.1").is_at_least(release("6.1.1")));
        assert_eq!(release("550.54.15").to_string(), "550.54.15");
        assert_eq!(
            Release::told_by("Linux 6.18.44-fc-v657"),
            Some(release("6.18.44"))
        );
        assert_eq!(Release::told_by("Linux"), None);
        for bad in ["", "6.", ".6", "6.1-rc1", "v6", "1.2.3.4.5", "1234567890"] {
            assert!(bad.parse::<Release>().is_err(), "{bad}");
        }
    }

    #[test]
    fn what_a_machine_does_not_meet_is_said_in_words() {
        let node = node();
        for (wants, words) in [
            (json!({"isa": ["avx2", "x86_64"]}), None),
            (
                json!({"isa": ["avx2", "avx512f"]}),
                Some("its instruction set is x86_64+avx2+fma, avx512f is required"),
            ),
            (json!({"kernel": "6.1", "driver": "550.54.15"}), None),
            (
                json!({"kernel": "6.1.1"}),
                Some("its kernel is 6.1.0, 6.1.1 is required"),
            ),
            (
                json!({"driver": "560"}),
                Some("its version of NVIDIA's driver is 550.54.15, 560 is required"),
            ),
            (json!({"memory_latency_ns": 91}), None),
            (
                json!({"memory_latency_ns": 90}),
                Some("the latency of its memory is 91 ns, 90 ns at most are required"),
            ),
            (json!({"far_memory_bytes": 256}), None),
            (
                json!({"far_memory_bytes": 257}),
                Some("it has 256 bytes of far memory, 257 are required"),
            ),
        ] {
            let wants: MachineRequirement = serde_json::from_value(wants).unwrap();
            let unmet = wants.unmet(&node).map(|u| u.to_string());
            assert_eq!(unmet.as_deref(), words, "{wants:?}");
        }
    }

    #[test]
    fn what_a_node_does_not_know_of_itself_it_does_not_have() {
        let mut node = node();
        node.profile = crate::substrate::NodeProfile::default();
        for wants in [
            json!({"kernel": "1"}),
            json!({"driver": "1"}),
            json!({"memory_latency_ns": 1_000_000}),
            json!({"far_memory_bytes": 1}),
        ] {
            let wants: MachineRequirement = serde_json::from_value(wants).unwrap();
            assert!(wants.unmet(&node).is_some(), "{wants:?}");
        }
    }
}
