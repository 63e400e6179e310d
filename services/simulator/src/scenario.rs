//! A scenario: nodes, loads, workloads, faults, a network, and settings of the policy. Times are in
//! ms of virtual time from the start unless a name says otherwise.

use std::collections::BTreeMap;

use fiec_schemas::spread::Spread;
use fiec_schemas::{FieldError, NodeId, Signal, Submission, Tenant, Threshold};
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde::{Deserialize, Serialize};

use crate::check_scenario;
pub use crate::demands::{After, CannotStart, Drain, Kills, QuotaChange, Revocation};
use crate::settings::Settings;

/// A world to play.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// Its purpose, in words.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub about: String,
    /// Seed of everything that is drawn.
    #[serde(default)]
    pub seed: u64,
    /// Length of the run: workloads arrive and faults happen within this time.
    pub duration_ms: u64,
    /// Time for the remaining executions after that, until the run ends.
    #[serde(default = "default_drain")]
    pub drain_ms: u64,
    /// Number of policy services that share the work.
    #[serde(default = "one")]
    pub policies: u32,
    /// Their settings that differ from the defaults.
    #[serde(default, skip_serializing_if = "Settings::is_default")]
    pub policy: Settings,
    /// Interval between two ticks of a policy service.
    #[serde(default = "default_tick")]
    pub tick_ms: u64,
    /// Longest time for which a policy service holds a submission that finds no free slot. 0: it
    /// holds none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub hold_ms: u64,
    /// Times at which nodes send their vectors.
    #[serde(default)]
    pub telemetry: Telemetry,
    /// Delays and losses of messages.
    #[serde(default)]
    pub network: Network,
    /// Groups of equal nodes.
    pub nodes: Vec<NodeGroup>,
    /// The submitted workloads.
    pub workloads: Vec<Workload>,
    /// The quotas of tenants, and their changes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub quotas: Vec<QuotaChange>,
    /// The faults.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<Fault>,
}

fn default_drain() -> u64 {
    600_000
}
fn one() -> u32 {
    1
}
fn default_tick() -> u64 {
    50
}

/// Times at which nodes send their vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Telemetry {
    /// Interval between two samples of a node. A change of more than its signal's step is sent at
    /// once.
    #[serde(default = "default_sample")]
    pub sample_ms: u64,
    /// Longest time between two vectors.
    #[serde(default = "default_heartbeat")]
    pub heartbeat_ms: u64,
}

fn default_sample() -> u64 {
    250
}
fn default_heartbeat() -> u64 {
    1_000
}

impl Default for Telemetry {
    fn default() -> Self {
        Self {
            sample_ms: default_sample(),
            heartbeat_ms: default_heartbeat(),
        }
    }
}

/// Delays and losses of messages. Ledger feeds may be late or doubled but stay in order, as the
/// broker promises. All other messages may also be lost or overtaken.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// Mean delay of a message, in microseconds. A tenth of it is exponentially distributed.
    #[serde(default = "default_delay")]
    pub delay_us: u64,
    /// Share of lost messages: vectors, probes, orders, capsules. Of lost appends, half lose the
    /// message and half the acknowledgement.
    #[serde(default)]
    pub loss: f64,
    /// Share of messages that arrive twice.
    #[serde(default)]
    pub duplicate: f64,
}

fn default_delay() -> u64 {
    300
}

impl Default for Network {
    fn default() -> Self {
        Self {
            delay_us: default_delay(),
            loss: 0.0,
            duplicate: 0.0,
        }
    }
}

/// A group of equal nodes, named `<name>-0`, `<name>-1`, …; a single one is named `<name>`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NodeGroup {
    /// The name of the group.
    pub name: String,
    /// Number of nodes.
    #[serde(default = "one")]
    pub count: u32,
    /// Number of executions that a node runs at once.
    #[serde(default = "default_slots")]
    pub slots: u32,
    /// Memory limit, in bytes.
    #[serde(default = "default_memory")]
    pub memory_bytes: u64,
    /// Logical processors.
    #[serde(default = "default_cpus")]
    pub cpus: u32,
    /// Time to start an execution on a node, in ms: its process, its inputs, σ.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub start_ms: u64,
    /// Number of executions that a node can park with their processes alive, beside its slots.
    #[serde(default, skip_serializing_if = "is_none")]
    pub parks: u32,
    /// Computing speed; each node draws its own.
    #[serde(default = "default_speed")]
    pub speed: Quantity,
    /// The operator's labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Thresholds; a worker's defaults if none are given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thresholds: Option<BTreeMap<Signal, Threshold>>,
    /// External loads by signal, as shares of the limit. Memory without an entry is 0.2.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub load: BTreeMap<Signal, Load>,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}
fn is_none(n: &u32) -> bool {
    *n == 0
}
fn default_slots() -> u32 {
    4
}
fn default_memory() -> u64 {
    64 << 30
}
fn default_cpus() -> u32 {
    8
}
fn default_speed() -> Quantity {
    Quantity::Fixed(1.0)
}

/// A number, or its distribution.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Quantity {
    /// Always this number.
    Fixed(f64),
    /// Uniform from `low` to `high`.
    Uniform {
        /// The smallest value.
        low: f64,
        /// The largest value.
        high: f64,
    },
    /// Exponentially distributed.
    Exponential {
        /// Its mean.
        mean: f64,
    },
    /// Log-normal, as the lengths of jobs often are.
    Lognormal {
        /// The median.
        median: f64,
        /// Standard deviation of the logarithm.
        sigma: f64,
    },
    /// Bounded Pareto: a heavy tail.
    Pareto {
        /// The smallest value.
        low: f64,
        /// The largest value.
        high: f64,
        /// The tail's exponent; the smaller, the heavier.
        alpha: f64,
    },
}

/// A load over time, in [0, 1].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Load {
    /// Always this load.
    Constant(f64),
    /// This load from each moment on: `[ms, value]`, ordered by time.
    Steps(Vec<(u64, f64)>),
    /// `mean + amplitude · sin(2π (t + phase) / period)`; each node draws a phase if none is given.
    Sine {
        /// The mean.
        mean: f64,
        /// The largest distance from the mean.
        amplitude: f64,
        /// The period.
        period_ms: u64,
        /// The phase at the start.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        phase_ms: Option<u64>,
    },
    /// A random walk that returns to its mean (Ornstein–Uhlenbeck).
    Walk {
        /// Its start and its mean.
        mean: f64,
        /// Standard deviation in the long run.
        deviation: f64,
        /// Its correlation time.
        memory_ms: u64,
    },
    /// Bursts of exponential length at exponential distances.
    Bursts {
        /// The load outside of bursts.
        calm: f64,
        /// The load in bursts.
        burst: f64,
        /// Mean time between bursts.
        every_ms: u64,
        /// Mean length of a burst.
        for_ms: u64,
    },
}

/// One template of a submission, and its arrivals.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// Its name, for people.
    pub name: String,
    /// Arrivals of its executions.
    pub arrivals: Arrivals,
    /// Computing time of an execution on a node of speed 1, in ms.
    pub work_ms: Quantity,
    /// Computing time of one capsule there, in ms.
    #[serde(default = "default_capsule")]
    pub capsule_ms: Quantity,
    /// Size of σ, in bytes.
    #[serde(default = "default_state")]
    pub state_bytes: Quantity,
    /// Memory of its node that a running execution uses, in bytes.
    #[serde(default = "default_none")]
    pub memory_bytes: Quantity,
    /// Its tenant; `sim` by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<Tenant>,
    /// Dependencies of each execution.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub after: Vec<After>,
    /// This many consecutive executions start together or not at all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gang: Option<u32>,
    /// Its capsules are the tiles of a range that at most this many nodes compute at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spread: Option<u32>,
    /// Share of executions whose program fails at its end.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub fails: f64,
    /// The submission: requirements, preferences, thresholds, commit policy, batch, and a gang that
    /// it shares with other workloads of the tenant. The fields `after`, `gang` and `spread` above
    /// replace those of the submission.
    #[serde(default = "default_submission")]
    pub submission: Submission,
}

impl Workload {
    /// The size of its gang, if it has one: its own, or one that it shares by name.
    pub fn gang_size(&self) -> Option<u32> {
        let named = self.submission.gang.as_ref();
        self.gang.or(named.map(|gang| gang.size))
    }
}

/// The submission of a range of `tiles` tiles that up to `up_to` nodes compute at once.
pub fn spread_over(submission: &Submission, up_to: u32, tiles: u64) -> Submission {
    let mut spread = submission.clone();
    spread.spread = Some(Spread { up_to });
    let range = serde_json::json!({ "from": 0, "to": tiles });
    match spread.params.as_object_mut() {
        Some(params) => {
            params.insert("tiles".to_owned(), range);
        }
        None => spread.params = serde_json::json!({ "tiles": range }),
    }
    spread
}

fn is_nothing(share: &f64) -> bool {
    *share == 0.0
}

fn default_capsule() -> Quantity {
    Quantity::Fixed(100.0)
}
fn default_state() -> Quantity {
    Quantity::Fixed(32_768.0)
}
fn default_none() -> Quantity {
    Quantity::Fixed(0.0)
}

/// A submission of the built-in program that computes for a given time, with all defaults.
pub fn default_submission() -> Submission {
    Submission::of("synthetic@1")
}

/// Arrival times of executions. They end at the scenario's `duration_ms`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Arrivals {
    /// A number of executions at once.
    AtOnce {
        /// Number of executions.
        count: u64,
        /// Time of the arrival.
        #[serde(default)]
        at_ms: u64,
    },
    /// Independent arrivals at a mean rate per second.
    Poisson {
        /// Mean arrivals per second.
        per_s: f64,
        /// Time of the first possible arrival.
        #[serde(default)]
        from_ms: u64,
        /// Most executions.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        count: Option<u64>,
    },
    /// Batches of one size, Poisson distributed.
    Batches {
        /// Executions in a batch.
        size: u64,
        /// Mean time between two batches.
        every_ms: u64,
        /// Most executions.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        count: Option<u64>,
    },
    /// At these moments, ordered by time.
    Listed(Vec<u64>),
}

/// A fault.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Fault {
    /// A node dies with its executions. It returns as a new instance, or never.
    Loss(NodeFault),
    /// A node computes on, but no message passes in either direction.
    Silence(NodeFault),
    /// A node stalls: it neither computes nor sends; messages wait for it.
    Stall(NodeFault),
    /// An operator drains a node, and ends the drain.
    Drain(Drain),
    /// A node announces that it will disappear, and does.
    Revoke(Revocation),
    /// An operator cordons a node, and ends the cordon.
    Cordon(NodeFault),
    /// A node cannot start a program, or any program.
    CannotStart(CannotStart),
    /// A program ends its workers.
    Kills(Kills),
    /// A policy service stalls; messages wait for it.
    PolicyStall(PolicyFault),
    /// A policy service dies. After a while a new one takes over the ledgers.
    PolicyLoss(PolicyFault),
    /// Random faults of nodes, independent of each other, each on one node.
    Random {
        /// The kind of fault.
        what: Drawn,
        /// Mean time between two faults in the whole cluster.
        every_ms: u64,
        /// Mean length of a fault.
        for_ms: u64,
        /// Notice of a revoked node before its end, or the deadline of a drained one. By default 30
        /// s for a revoked node, and no deadline for a drained one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        notice_ms: Option<u64>,
    },
}

/// A kind of random fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Drawn {
    /// Nodes die and return.
    Loss,
    /// Nodes are partitioned.
    Silence,
    /// Nodes stall.
    Stall,
    /// Nodes are drained.
    Drain,
    /// Nodes are revoked, and return.
    Revoke,
}

/// A fault of one node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NodeFault {
    /// The node.
    pub node: NodeId,
    /// Start of the fault.
    pub at_ms: u64,
    /// Length of the fault; forever by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub for_ms: Option<u64>,
}

/// A fault of one policy service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PolicyFault {
    /// The policy service, from 0.
    pub policy: u32,
    /// Start of the fault.
    pub at_ms: u64,
    /// Length of the fault.
    pub for_ms: u64,
}

impl Scenario {
    /// Reads and checks a scenario.
    ///
    /// # Errors
    /// The field and the rule that it breaks. For invalid JSON, the position of the error.
    pub fn parse(text: &[u8]) -> Result<Self, FieldError> {
        let scenario: Self = match serde_json::from_slice(text) {
            Ok(scenario) => scenario,
            Err(plain) => return Err(check_scenario::locate(text, &plain)),
        };
        // The first reader accepts a list for an object; the strict second reading refuses it.
        check_scenario::objects_are_objects(text)?;
        scenario.check()?;
        Ok(scenario)
    }

    /// Checks the rules that types cannot express.
    ///
    /// # Errors
    /// The field and the rule that it breaks.
    pub fn check(&self) -> Result<(), FieldError> {
        check_scenario::check(self)
    }

    /// The scenario as JSON for people, with a line feed at the end.
    pub fn to_json(&self) -> String {
        // This fails only for maps with keys that are not strings, and there are none.
        let mut text = serde_json::to_string_pretty(self).unwrap_or_default();
        text.push('\n');
        text
    }

    /// Number of nodes.
    pub fn node_count(&self) -> usize {
        self.nodes.iter().map(|g| g.count as usize).sum()
    }
}

/// The JSON Schema of a scenario.
pub fn schema() -> serde_json::Value {
    SchemaSettings::draft2020_12()
        .into_generator()
        .into_root_schema_for::<Scenario>()
        .to_value()
}

/// The names of a group's nodes, in order.
pub fn node_names(group: &NodeGroup) -> impl Iterator<Item = String> + '_ {
    (0..group.count).map(|n| match group.count {
        1 => group.name.clone(),
        _ => format!("{}-{n}", group.name),
    })
}
