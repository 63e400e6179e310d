//! The place that a submission wants: what it requires (`requires`), and what it can use beyond
//! that (`prefers`).

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ids::NodeId;
use crate::machine::MachineRequirement;
use crate::submission::{Contract, FieldError};
use crate::substrate::ComputeCapability;

/// Most labels and most nodes in one list.
const LIST_LIMIT: usize = 1_000;
/// Longest pattern of a device's name in bytes.
const PATTERN_LIMIT: usize = 128;

/// Requirements on a node. Only nodes that meet all of them are candidates.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Requirements {
    /// Only these nodes, if any are named.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<NodeId>,
    /// None of these nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exclude: Vec<NodeId>,
    /// At least this memory limit, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// At least this many free bytes under that limit, by the node's own reading when it is placed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free_memory_bytes: Option<u64>,
    /// At least this many logical processors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<u32>,
    /// At least this copy bandwidth of one thread in the node's fastest memory, in bytes per
    /// second, as measured when the node joined.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth_bytes_s: Option<u64>,
    /// Instruction sets, kernel, driver and memory tiers of its machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<MachineRequirement>,
    /// These labels with these values.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// A device to run on. Without it the host's processors are enough.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceRequirement>,
}

/// Whose readings decide whether an execution may stay on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ViableBy {
    /// The device's and its host's.
    #[default]
    DeviceAndHost,
    /// The device's alone.
    Device,
}

/// Requirements on a device. The execution has it alone, unless `share_bytes` says that a part of
/// its memory is enough.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DeviceRequirement {
    /// Pattern of its name, as `nvidia-smi -L` shows it. `*` stands for any characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// At least this compute capability, e.g. `"8.0"`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_capability: Option<ComputeCapability>,
    /// At least this many streaming multiprocessors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multiprocessors: Option<u32>,
    /// At least this much memory in total, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// At least this many free bytes, by the device's own reading when it is placed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free_memory_bytes: Option<u64>,
    /// At least this bandwidth of copies between host and device, in the slower direction, in bytes
    /// per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy_bytes_s: Option<u64>,
    /// Share the device with other executions that set this too. This many bytes of its memory are
    /// the execution's budget. Absent: no other execution runs there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_bytes: Option<u64>,
    /// Whose readings decide whether the execution may stay.
    #[serde(default, skip_serializing_if = "is_default")]
    pub viable_by: ViableBy,
}

/// Resources beyond the requirements that are useful. They exclude no place. Among the candidates,
/// places that come nearer to them are chosen first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Preferences {
    /// A memory limit, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Free bytes under that limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free_memory_bytes: Option<u64>,
    /// Logical processors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<u32>,
    /// Copy bandwidth of one thread, in bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth_bytes_s: Option<u64>,
    /// Instruction sets, kernel, driver and memory tiers of its machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<MachineRequirement>,
    /// A stronger numeric contract than the one that it requires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contract: Option<Contract>,
    /// Labels with values.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// A device. If `requires` names none, the execution gets a free device alone, or the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<DevicePreference>,
}

/// Properties of a device that are useful.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DevicePreference {
    /// Pattern of its name, with `*`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// A compute capability.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_capability: Option<ComputeCapability>,
    /// Streaming multiprocessors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multiprocessors: Option<u32>,
    /// Memory in total, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Bandwidth of copies between host and device, in the slower direction, in bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy_bytes_s: Option<u64>,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl Requirements {
    /// True if there are no requirements.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// True if placement needs a hardware vector as well as the descriptor.
    pub fn asks_of_vector(&self) -> bool {
        let device = self.device.as_ref();
        self.free_memory_bytes.is_some() || device.is_some_and(|d| d.free_memory_bytes.is_some())
    }

    /// Checks the rules that types cannot express.
    ///
    /// # Errors
    /// The field, below `requires`, and the rule that it breaks.
    pub(crate) fn check(&self) -> Result<(), FieldError> {
        at_most("requires.nodes", self.nodes.len())?;
        at_most("requires.exclude", self.exclude.len())?;
        at_most("requires.labels", self.labels.len())?;
        if let Some(both) = self.nodes.iter().find(|node| self.exclude.contains(node)) {
            let rule = format!("must not name {both}, which requires.nodes names");
            return Err(FieldError::new("requires.exclude", rule));
        }
        positive("requires.memory_bytes", self.memory_bytes)?;
        positive("requires.free_memory_bytes", self.free_memory_bytes)?;
        positive("requires.cores", self.cores.map(u64::from))?;
        positive("requires.bandwidth_bytes_s", self.bandwidth_bytes_s)?;
        within(
            "requires.free_memory_bytes",
            self.free_memory_bytes,
            "requires.memory_bytes",
            self.memory_bytes,
        )?;
        if let Some(machine) = &self.machine {
            machine.check("requires.machine")?;
        }
        let Some(device) = &self.device else {
            return Ok(());
        };
        pattern("requires.device.kind", device.kind.as_deref())?;
        let units = device.multiprocessors.map(u64::from);
        positive("requires.device.multiprocessors", units)?;
        positive("requires.device.memory_bytes", device.memory_bytes)?;
        positive(
            "requires.device.free_memory_bytes",
            device.free_memory_bytes,
        )?;
        positive("requires.device.copy_bytes_s", device.copy_bytes_s)?;
        positive("requires.device.share_bytes", device.share_bytes)?;
        within(
            "requires.device.free_memory_bytes",
            device.free_memory_bytes,
            "requires.device.memory_bytes",
            device.memory_bytes,
        )
    }
}

impl Preferences {
    /// True if there are no preferences.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Checks the rules that types cannot express, and that each preference exceeds its
    /// requirement.
    ///
    /// # Errors
    /// The field, below `prefers`, and the rule that it breaks.
    pub(crate) fn check(
        &self,
        requires: &Requirements,
        contract: Contract,
    ) -> Result<(), FieldError> {
        at_most("prefers.labels", self.labels.len())?;
        let cores = |n: Option<u32>| n.map(u64::from);
        for (name, wanted, least) in [
            ("memory_bytes", self.memory_bytes, requires.memory_bytes),
            (
                "free_memory_bytes",
                self.free_memory_bytes,
                requires.free_memory_bytes,
            ),
            ("cores", cores(self.cores), cores(requires.cores)),
            (
                "bandwidth_bytes_s",
                self.bandwidth_bytes_s,
                requires.bandwidth_bytes_s,
            ),
        ] {
            more(name, wanted, least)?;
        }
        if let Some(machine) = &self.machine {
            machine.check("prefers.machine")?;
        }
        if let Some(preferred) = self.contract
            && preferred.strength() <= contract.strength()
        {
            let rule = format!(
                "must be stronger than contract, but {} is not stronger than {}",
                preferred.as_str(),
                contract.as_str()
            );
            return Err(FieldError::new("prefers.contract", rule));
        }
        let Some(device) = &self.device else {
            return Ok(());
        };
        pattern("prefers.device.kind", device.kind.as_deref())?;
        let least = requires.device.clone().unwrap_or_default();
        for (name, wanted, least) in [
            (
                "device.multiprocessors",
                cores(device.multiprocessors),
                cores(least.multiprocessors),
            ),
            (
                "device.memory_bytes",
                device.memory_bytes,
                least.memory_bytes,
            ),
            (
                "device.copy_bytes_s",
                device.copy_bytes_s,
                least.copy_bytes_s,
            ),
        ] {
            more(name, wanted, least)?;
        }
        if let (Some(wanted), Some(least)) = (device.compute_capability, least.compute_capability)
            && wanted < least
        {
            let rule = format!(
                "must be at least requires.device.compute_capability, but {wanted} is below {least}"
            );
            return Err(FieldError::new("prefers.device.compute_capability", rule));
        }
        Ok(())
    }
}

fn at_most(field: &str, count: usize) -> Result<(), FieldError> {
    if count > LIST_LIMIT {
        let rule = format!("at most {LIST_LIMIT} are allowed, but there are {count}");
        return Err(FieldError::new(field, rule));
    }
    Ok(())
}

fn positive(field: &str, value: Option<u64>) -> Result<(), FieldError> {
    if value == Some(0) {
        return Err(FieldError::new(field, "must be above 0"));
    }
    Ok(())
}

fn within(field: &str, part: Option<u64>, of: &str, whole: Option<u64>) -> Result<(), FieldError> {
    if let (Some(part), Some(whole)) = (part, whole)
        && part > whole
    {
        let rule = format!("must be at most {of}, but {part} is above {whole}");
        return Err(FieldError::new(field, rule));
    }
    Ok(())
}

fn more(name: &str, wanted: Option<u64>, least: Option<u64>) -> Result<(), FieldError> {
    let field = format!("prefers.{name}");
    positive(&field, wanted)?;
    if let (Some(wanted), Some(least)) = (wanted, least)
        && wanted < least
    {
        let rule = format!("must be at least requires.{name}, but {wanted} is below {least}");
        return Err(FieldError::new(field, rule));
    }
    Ok(())
}

fn pattern(field: &str, pattern: Option<&str>) -> Result<(), FieldError> {
    let Some(pattern) = pattern else {
        return Ok(());
    };
    if pattern.is_empty() || pattern.len() > PATTERN_LIMIT || pattern.contains(char::is_control) {
        let rule = format!(
            "must be a name or a pattern with * of 1 to {PATTERN_LIMIT} bytes, e.g. \"NVIDIA H100*\""
        );
        return Err(FieldError::new(field, rule));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::submission::Submission;

    fn parse(rest: &str) -> Result<Submission, crate::FieldError> {
        Submission::parse(format!(r#"{{"program":"synthetic@1",{rest}}}"#).as_bytes())
    }

    #[test]
    fn requirements_and_preferences_are_read_and_canonical() {
        let text = r#""requires":{"memory_bytes":1,"free_memory_bytes":1,"cores":2,"bandwidth_bytes_s":3,"machine":{"isa":["avx512f"],"kernel":"6.1","driver":"550.54","memory_latency_ns":120,"far_memory_bytes":8},"device":{"kind":"NVIDIA H*","compute_capability":"8.0","multiprocessors":4,"memory_bytes":5,"free_memory_bytes":5,"copy_bytes_s":6,"share_bytes":7,"viable_by":"device"}},"prefers":{"memory_bytes":9,"cores":9,"machine":{"isa":["sve"]},"labels":{"rack":"1"},"device":{"compute_capability":"9.0"}}"#;
        let spec = parse(text).unwrap();
        assert_eq!(
            String::from_utf8(spec.to_json()).unwrap(),
            format!(r#"{{"program":"synthetic@1",{text}}}"#)
        );
        let plain = parse(r#""requires":{},"prefers":{}"#).unwrap();
        assert_eq!(plain.to_json(), br#"{"program":"synthetic@1"}"#);
    }

    #[test]
    fn the_example_with_devices_is_accepted() {
        let text = include_str!("../../examples/devices.jsonl");
        for line in text.lines() {
            let spec = Submission::parse(line.as_bytes()).unwrap();
            assert!(!spec.requires.is_empty(), "{line}");
        }
        assert_eq!(text.lines().count(), 3);
    }

    #[test]
    fn each_bad_requirement_is_named_with_its_rule() {
        for (text, field, word) in [
            (r#""requires":{"cores":0}"#, "requires.cores", "above 0"),
            (r#""requires":{"cores":-1}"#, "requires.cores", "-1"),
            (
                r#""requires":{"core":1}"#,
                "requires.core",
                "unknown field `core`",
            ),
            (
                r#""requires":{"nodes":["n1"],"exclude":["n1"]}"#,
                "requires.exclude",
                "n1",
            ),
            (
                r#""requires":{"memory_bytes":5,"free_memory_bytes":6}"#,
                "requires.free_memory_bytes",
                "at most requires.memory_bytes",
            ),
            (
                r#""requires":{"machine":{"isa":["avx2+fma"]}}"#,
                "requires.machine.isa",
                "one word of an instruction set",
            ),
            (
                r#""requires":{"machine":{"kernel":"6.1-rc1"}}"#,
                "requires.machine.kernel",
                "no release of one to four numbers",
            ),
            (
                r#""prefers":{"machine":{"far_memory_bytes":0}}"#,
                "prefers.machine.far_memory_bytes",
                "above 0",
            ),
            (
                r#""requires":{"device":{"kind":""}}"#,
                "requires.device.kind",
                "pattern",
            ),
            (
                r#""requires":{"device":{"compute_capability":"new"}}"#,
                "requires.device.compute_capability",
                "no compute capability such as \"8.0\"",
            ),
            (
                r#""requires":{"device":{"compute_capability":8.0}}"#,
                "requires.device.compute_capability",
                "string",
            ),
            (
                r#""requires":{"device":{"share_bytes":0}}"#,
                "requires.device.share_bytes",
                "above 0",
            ),
            (
                r#""requires":{"device":["NVIDIA"]}"#,
                "requires.device",
                "must be an object, but is a list",
            ),
            (
                r#""requires":{"device":true}"#,
                "requires.device",
                "must be an object, but is true",
            ),
            (
                r#""prefers":{"cores":2},"requires":{"cores":3}"#,
                "prefers.cores",
                "at least requires.cores, but 2 is below 3",
            ),
            (
                r#""prefers":{"device":{"compute_capability":"7.5"}},"requires":{"device":{"compute_capability":"8.0"}}"#,
                "prefers.device.compute_capability",
                "7.5 is below 8.0",
            ),
            (
                r#""prefers":{"contract":"bounded"}"#,
                "prefers.contract",
                "stronger",
            ),
            (
                r#""prefers":{"nodes":["n1"]}"#,
                "prefers.nodes",
                "unknown field `nodes`",
            ),
        ] {
            let error = parse(text).unwrap_err();
            assert_eq!(error.field, field, "{text}: {error:?}");
            assert!(error.reason.contains(word), "{text}: {error:?}");
        }
    }
}
