//! The hardware vector H(t), thresholds with hysteresis, and node descriptors.

use std::collections::BTreeMap;
use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::clock::ClockReading;
use crate::envelope::EnvelopeNow;
use crate::ids::{BoundaryIndex, Epoch, ExecutionId, InstanceId, NodeId, Timestamp};
use crate::subjects;
use crate::trust::NodeIdentity;

pub use crate::substrate::{
    ComputeCapability, DeviceProfile, Measured, MemoryNode, MemoryTier, NodeProfile, Substrate,
};

/// A component of H(t). Each is normalized to [0, 1], where 1 is exhausted.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Signal {
    /// M: memory in use on the host, or under the tightest limit of the node.
    Memory,
    /// M stall: time lost waiting for memory (pressure stall information).
    MemoryStall,
    /// P: power drawn against the enforced limit.
    Power,
    /// T: temperature between idle and slowdown.
    Thermal,
    /// L: round trips to the broker and to other nodes.
    Latency,
    /// C: contention for processors or a device's units.
    Contention,
    /// F: degradation of a device's links, or of a node's connection to the broker.
    Fabric,
    /// E: errors reported by a device.
    Errors,
}

impl Signal {
    /// Every signal, in the order in which it is shown.
    pub const ALL: [Signal; 8] = [
        Signal::Memory,
        Signal::MemoryStall,
        Signal::Power,
        Signal::Thermal,
        Signal::Latency,
        Signal::Contention,
        Signal::Fabric,
        Signal::Errors,
    ];

    /// The name in messages, SQL and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Signal::Memory => "memory",
            Signal::MemoryStall => "memory_stall",
            Signal::Power => "power",
            Signal::Thermal => "thermal",
            Signal::Latency => "latency",
            Signal::Contention => "contention",
            Signal::Fabric => "fabric",
            Signal::Errors => "errors",
        }
    }

    /// The declared step. A value that has changed by more since it was last published is published
    /// before the next heartbeat.
    pub fn step(self) -> f64 {
        match self {
            Signal::Memory => 0.02,
            Signal::MemoryStall | Signal::Power | Signal::Thermal | Signal::Fabric => 0.05,
            Signal::Latency | Signal::Contention => 0.10,
            // Every error counts.
            Signal::Errors => 0.0,
        }
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One component of H(t), measured at one place.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Reading {
    /// The component.
    pub signal: Signal,
    /// UUID of a GPU or MIG slice. Absent for the node itself. Devices are never averaged. It can
    /// also be a part of the host, which has no threshold: `machine` (the whole host, if a cgroup
    /// is tighter), `cgroup:<directory>`, `numa:<n>` (a memory node), `peer:<node>` (round trips to
    /// another node).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// The value, normalized to [0, 1]. Absent if it could not be measured, which is not zero.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
    /// The raw reading in `unit`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub raw: Option<f64>,
    /// The limit of the raw reading, in `unit`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<f64>,
    /// Unit of `raw` and `limit`: `bytes`, `percent`, `mW`, `celsius`, `us`, `ratio`, `event`.
    pub unit: String,
    /// Source of the reading: a file or a library call.
    pub source: String,
    /// When it was read.
    pub at: Timestamp,
    /// Why there is no value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing: Option<String>,
    /// The envelope in force, whose cap replaces `limit` in `value`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub envelope: Option<EnvelopeNow>,
}

impl Reading {
    /// True for a part of the host, which informs and has no threshold. The node's own reading of
    /// the signal includes it.
    pub fn is_part(&self) -> bool {
        self.device.as_deref().is_some_and(|place| {
            place == "machine"
                || ["cgroup:", "numa:", "peer:"]
                    .iter()
                    .any(|prefix| place.starts_with(prefix))
        })
    }
}

/// Progress of a running execution, as its agent knows it. It is not durable.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RunningProgress {
    /// The execution.
    pub execution: ExecutionId,
    /// The epoch of its binding.
    pub epoch: Epoch,
    /// Boundaries reached, committed or not.
    pub boundary: BoundaryIndex,
    /// Number of all boundaries, if the program knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of: Option<BoundaryIndex>,
    /// The program's short note on its progress, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// Most executions that a vector lists as running, and most that it lists as arriving.
pub const LISTED_LIMIT: usize = 64;

/// Progress of the fetch of a bound execution's state, before the execution starts. It is not
/// durable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ArrivingState {
    /// The execution.
    pub execution: ExecutionId,
    /// The epoch of its binding.
    pub epoch: Epoch,
    /// Bytes of the state that are on the node, those that it had before included.
    pub bytes: u64,
    /// Bytes of the whole state. A part that occurs several times counts once in both numbers.
    pub of: u64,
}

impl ArrivingState {
    /// Words for people: `fetching its state: 1.2 of 3.0 GiB`.
    pub fn in_words(&self) -> String {
        const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
        let (mut bytes, mut of, mut unit) = (self.bytes as f64, self.of as f64, "B");
        for next in UNITS {
            if of < 1024.0 {
                break;
            }
            (bytes, of, unit) = (bytes / 1024.0, of / 1024.0, next);
        }
        let digits = usize::from(unit != "B");
        format!("fetching its state: {bytes:.digits$} of {of:.digits$} {unit}")
    }
}

/// H(t) of one node, with its running executions. It is published on `fiec.telemetry.<node>` when a
/// component changes by more than its step, and as a slow heartbeat.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HardwareVector {
    /// Version of this message: 1.
    pub v: u8,
    /// The node.
    pub node: NodeId,
    /// The life of its agent.
    pub instance: InstanceId,
    /// Number of this vector in that life.
    pub count: u64,
    /// When the vector was made.
    pub at: Timestamp,
    /// Offset of the machine's clock from the broker's. If present, times in this vector and in the
    /// node's ledger messages are by the broker's clock. Absent before it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock: Option<ClockReading>,
    /// The components: one for each signal and place, missing ones included.
    pub readings: Vec<Reading>,
    /// True once the node accepts no more work and releases its executions.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub draining: bool,
    /// Executions that the node can run at once.
    pub slots: u32,
    /// Executions that run now.
    pub running_count: u32,
    /// Bindings that wait for a slot.
    pub queued_count: u32,
    /// The running executions (at most 64 are listed).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub running: Vec<RunningProgress>,
    /// The bound executions whose large state is being fetched (at most 64 are listed). While
    /// `bytes` grow, the policy service does not bind the execution elsewhere for being late.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub arriving: Vec<ArrivingState>,
    /// Processes of programs that do not end (at most 16 are listed). They take slots, which `slots`
    /// does not count.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stuck: Vec<StuckProcess>,
}

/// A process of a program that SIGKILL does not end, because the kernel does not let it run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StuckProcess {
    /// The process.
    pub pid: u32,
    /// Name of its program, at most 15 bytes.
    pub command: String,
    /// Its state by the kernel: `D` (in a call that does not return, or frozen), `T` (stopped).
    pub state: String,
    /// Seconds since SIGKILL.
    pub seconds: u64,
}

impl StuckProcess {
    /// Says it to a person.
    pub fn in_words(&self) -> String {
        let Self {
            pid,
            command,
            state,
            seconds,
        } = self;
        format!(
            "process {pid} ({command}) does not end {seconds} s after SIGKILL (state {state}); it \
             costs a slot until it ends, or the machine restarts"
        )
    }
}

impl HardwareVector {
    /// Reads a message on `fiec.telemetry.<node>`. A vector counts only for the node of its subject.
    /// So a permission to publish on that subject is a permission to speak for that node alone.
    ///
    /// # Errors
    /// When it is no vector, or a vector of another node.
    pub fn read(subject: &str, payload: &[u8]) -> Result<Self, serde_json::Error> {
        let vector: Self = serde_json::from_slice(payload)?;
        if subjects::parse_telemetry(subject).as_ref() != Some(&vector.node) {
            let node = &vector.node;
            let reason = format!("the vector is of node {node}, and its subject is {subject}");
            return Err(serde::de::Error::custom(reason));
        }
        Ok(vector)
    }

    /// The reading of a signal at the node itself (no device).
    pub fn host(&self, signal: Signal) -> Option<&Reading> {
        self.readings
            .iter()
            .find(|r| r.signal == signal && r.device.is_none())
    }
}

/// A threshold with hysteresis: unviable after `dwell_ms` at or above `high`, viable again after
/// `dwell_ms` below `low`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Threshold {
    /// The signal presses at or above this value; in (0, 1].
    pub high: f64,
    /// The signal recovers below this value; in [0, high).
    pub low: f64,
    /// How long either must last, in ms.
    pub dwell_ms: u32,
}

impl Threshold {
    /// Checks 0 ≤ low < high ≤ 1.
    ///
    /// # Errors
    /// The field (`high` or `low`) and the rule that it breaks.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        if !(self.high > 0.0 && self.high <= 1.0) {
            return Err((
                "high",
                format!("must be above 0 and at most 1, but is {}", self.high),
            ));
        }
        if !(self.low >= 0.0 && self.low <= 1.0) {
            return Err((
                "low",
                format!("must be at least 0 and at most 1, but is {}", self.low),
            ));
        }
        if self.low >= self.high {
            return Err((
                "low",
                format!(
                    "must be below high, but {} is not below {}",
                    self.low, self.high
                ),
            ));
        }
        Ok(())
    }
}

/// Thresholds by signal. A signal without a threshold is not judged.
pub type Thresholds = BTreeMap<Signal, Threshold>;

/// The thresholds of a node that declares none.
pub fn default_thresholds() -> Thresholds {
    let t = |high, low, dwell_ms| Threshold {
        high,
        low,
        dwell_ms,
    };
    BTreeMap::from([
        (Signal::Memory, t(0.90, 0.75, 10_000)),
        (Signal::MemoryStall, t(0.80, 0.30, 10_000)),
        (Signal::Power, t(1.00, 0.90, 30_000)),
        (Signal::Thermal, t(0.95, 0.80, 30_000)),
        (Signal::Latency, t(0.95, 0.50, 30_000)),
        (Signal::Fabric, t(0.75, 0.40, 30_000)),
        (Signal::Errors, t(0.50, 0.10, 0)),
    ])
}

/// A node's description of itself when it joins: the value of its key in `FIEC_NODES`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NodeDescriptor {
    /// Version of this message: 1.
    pub v: u8,
    /// The node.
    pub node: NodeId,
    /// The life of its agent, which holds the name.
    pub instance: InstanceId,
    /// The host's own name.
    pub host: String,
    /// Process id of the agent.
    pub pid: u32,
    /// Version of the worker.
    pub version: String,
    /// When the instance started.
    pub started_at: Timestamp,
    /// The `FIEC_CAPSULE_<shard>` that it pulls from.
    pub shard: u16,
    /// Executions that it runs at once.
    pub slots: u32,
    /// Most executions that it keeps parked in addition. 0: it does not park.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub parks: u32,
    /// Logical processors.
    pub cpus: u32,
    /// Instruction set and the extensions that numeric contracts depend on, e.g. `x86_64+avx2+fma`.
    pub isa: String,
    /// Memory limit in bytes for the signal M.
    pub memory_limit_bytes: u64,
    /// Source of that limit: `cgroup v1 …`, `cgroup v2 …`, `declared`, `host`.
    pub memory_limit_source: String,
    /// Its substrates.
    pub substrates: Vec<Substrate>,
    /// Description and measurements of the machine.
    #[serde(default, skip_serializing_if = "NodeProfile::is_empty")]
    pub profile: NodeProfile,
    /// Programs that it runs, as `name@version`.
    pub programs: Vec<String>,
    /// The operator's labels.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Thresholds in force, unless a submission overrides them.
    pub thresholds: Thresholds,
    /// Address of its `/metrics` and `/healthz`, if it serves them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http: Option<String>,
    /// Its key and its environment. Without them it can prove nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<NodeIdentity>,
}

/// An operator's flags on a node: the value of its flags key in `FIEC_NODES`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NodeFlags {
    /// No new execution is placed here.
    #[serde(default)]
    pub cordoned: bool,
    /// Executions move away at their next boundaries.
    #[serde(default)]
    pub draining: bool,
    /// Who set the flags.
    #[serde(default)]
    pub who: String,
    /// When.
    #[serde(default)]
    pub at: Timestamp,
    /// For a drain: executions without a boundary until then stop there, and continue elsewhere
    /// from their last commits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain_by: Option<Timestamp>,
    /// When the node goes away. Its executions leave before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked_at: Option<Timestamp>,
    /// The life of its agent that the revocation is for. Absent: every life.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked: Option<InstanceId>,
}

impl NodeFlags {
    /// True if they also hold for a later life of the node, until somebody lifts them.
    pub fn are_of_the_name(&self) -> bool {
        let revoked_for_ever = self.revoked_at.is_some() && self.revoked.is_none();
        self.cordoned || self.draining || revoked_for_ever
    }

    /// When this life of the node goes away, if that was announced.
    pub fn revocation_of(&self, life: InstanceId) -> Option<Timestamp> {
        self.revoked_at
            .filter(|_| self.revoked.is_none_or(|revoked| revoked == life))
    }
}

fn is_zero(n: &u32) -> bool {
    *n == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_thresholds_keep_their_own_rules() {
        for (signal, threshold) in default_thresholds() {
            assert!(threshold.check().is_ok(), "{signal}: {threshold:?}");
        }
    }

    #[test]
    fn a_low_that_is_not_below_high_is_named() {
        let (field, rule) = Threshold {
            high: 0.5,
            low: 0.5,
            dwell_ms: 1,
        }
        .check()
        .unwrap_err();
        assert_eq!(field, "low");
        assert!(rule.contains("below high"), "{rule}");
        assert_eq!(
            Threshold {
                high: -0.1,
                low: 0.0,
                dwell_ms: 1
            }
            .check()
            .unwrap_err()
            .0,
            "high"
        );
        assert!(
            Threshold {
                high: f64::NAN,
                low: 0.0,
                dwell_ms: 1
            }
            .check()
            .is_err()
        );
    }

    #[test]
    fn every_signal_is_named_as_it_is_serialized() {
        for signal in Signal::ALL {
            assert_eq!(serde_json::to_value(signal).unwrap(), signal.as_str());
        }
    }
}
