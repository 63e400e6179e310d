//! What is played: nodes, loads, workloads, faults, a network, a policy's settings. Times are in
//! milliseconds of virtual time from the beginning unless a name says otherwise.

use std::collections::BTreeMap;

use fiec_schemas::spread::Spread;
use fiec_schemas::{FieldError, NodeId, Signal, Submission, Tenant, Threshold};
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde::{Deserialize, Serialize};

use crate::check_scenario;
pub use crate::demands::{After, Drain, QuotaChange, Revocation};
use crate::settings::Settings;

/// A world to play.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// What it is for, in words.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub about: String,
    /// Everything that is drawn follows from it.
    #[serde(default)]
    pub seed: u64,
    /// Workloads arrive and faults happen within this time.
    pub duration_ms: u64,
    /// How long what is left may take after that before the run ends.
    #[serde(default = "default_drain")]
    pub drain_ms: u64,
    /// Policy services that share the work.
    #[serde(default = "one")]
    pub policies: u32,
    /// Their settings, where they are not the defaults.
    #[serde(default, skip_serializing_if = "Settings::is_default")]
    pub policy: Settings,
    /// How often time passes for a policy service.
    #[serde(default = "default_tick")]
    pub tick_ms: u64,
    /// When nodes tell their vectors.
    #[serde(default)]
    pub telemetry: Telemetry,
    /// What the network does to messages.
    #[serde(default)]
    pub network: Network,
    /// Groups of nodes that are alike.
    pub nodes: Vec<NodeGroup>,
    /// What is submitted.
    pub workloads: Vec<Workload>,
    /// What tenants may use at once, and how that changes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub quotas: Vec<QuotaChange>,
    /// What goes wrong.
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

/// When nodes tell their vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Telemetry {
    /// How often a node looks at itself; what has changed by more than its signal's step is told
    /// at once.
    #[serde(default = "default_sample")]
    pub sample_ms: u64,
    /// How often it tells its vector in any case.
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

/// What the network does to messages. Ledger feeds arrive late and perhaps twice, but in order, as
/// the broker promises; everything else may be lost or overtaken too.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// Mean time on the way, in microseconds; exponentially distributed over a tenth of it.
    #[serde(default = "default_delay")]
    pub delay_us: u64,
    /// The share of messages that are lost: vectors, probes, orders, capsules; of appends, half
    /// lose the message and half its acknowledgement.
    #[serde(default)]
    pub loss: f64,
    /// The share of messages that arrive twice.
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

/// Nodes that are alike, named `<name>-0`, `<name>-1`, …; one alone is named `<name>`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NodeGroup {
    /// Their name.
    pub name: String,
    /// How many.
    #[serde(default = "one")]
    pub count: u32,
    /// Executions that one runs at once.
    #[serde(default = "default_slots")]
    pub slots: u32,
    /// Memory limit in bytes.
    #[serde(default = "default_memory")]
    pub memory_bytes: u64,
    /// Logical processors.
    #[serde(default = "default_cpus")]
    pub cpus: u32,
    /// How long it takes to begin an execution here, in milliseconds: its process, its inputs, σ.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub start_ms: u64,
    /// Executions that may wait on one at a boundary with their processes alive, beside its slots.
    #[serde(default, skip_serializing_if = "is_none")]
    pub parks: u32,
    /// How fast it computes; each node draws its own.
    #[serde(default = "default_speed")]
    pub speed: Quantity,
    /// The operator's labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Thresholds; a worker's own defaults where none is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thresholds: Option<BTreeMap<Signal, Threshold>>,
    /// Loads from outside, by signal, as shares of the limit; memory without one is 0.2.
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

/// A number, or how it is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Quantity {
    /// Always this.
    Fixed(f64),
    /// Evenly from `low` to `high`.
    Uniform {
        /// The least.
        low: f64,
        /// The most.
        high: f64,
    },
    /// Exponentially distributed.
    Exponential {
        /// Its mean.
        mean: f64,
    },
    /// Log-normal, as the durations of jobs often are.
    Lognormal {
        /// Half are below it.
        median: f64,
        /// Standard deviation of the logarithm.
        sigma: f64,
    },
    /// Bounded Pareto: a heavy tail.
    Pareto {
        /// The least.
        low: f64,
        /// The most.
        high: f64,
        /// The tail's exponent; the smaller, the heavier.
        alpha: f64,
    },
}

/// A load over time, in [0, 1].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Load {
    /// Always this.
    Constant(f64),
    /// From each moment on this: `[ms, value]`, in order of time.
    Steps(Vec<(u64, f64)>),
    /// `mean + amplitude · sin(2π (t + phase) / period)`; each node draws a phase where none is given.
    Sine {
        /// In the middle.
        mean: f64,
        /// How far it goes from there.
        amplitude: f64,
        /// How long one swing takes.
        period_ms: u64,
        /// Where it begins.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        phase_ms: Option<u64>,
    },
    /// A walk that is drawn back to its mean (Ornstein–Uhlenbeck).
    Walk {
        /// Where it begins and is drawn to.
        mean: f64,
        /// Standard deviation in the long run.
        deviation: f64,
        /// How long it remembers.
        memory_ms: u64,
    },
    /// From time to time full for a while: exponential times between and in it.
    Bursts {
        /// Outside of bursts.
        calm: f64,
        /// In them.
        burst: f64,
        /// Mean time between bursts.
        every_ms: u64,
        /// Mean time that one lasts.
        for_ms: u64,
    },
}

/// What is submitted: one template and how it comes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// For people.
    pub name: String,
    /// When its executions come.
    pub arrivals: Arrivals,
    /// How long an execution computes on a node of speed 1, in milliseconds.
    pub work_ms: Quantity,
    /// How long one capsule computes there, in milliseconds.
    #[serde(default = "default_capsule")]
    pub capsule_ms: Quantity,
    /// Bytes of σ.
    #[serde(default = "default_state")]
    pub state_bytes: Quantity,
    /// Bytes of memory that an execution takes of its node while it runs.
    #[serde(default = "default_none")]
    pub memory_bytes: Quantity,
    /// Whose it is; `sim` where nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<Tenant>,
    /// What each waits for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub after: Vec<After>,
    /// So many that follow each other start together or not at all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gang: Option<u32>,
    /// Its capsules are the tiles of a range that up to so many may compute at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spread: Option<u32>,
    /// The share of executions whose program fails at its end.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub fails: f64,
    /// The submission itself: what it requires, prefers, its thresholds, its commit policy, its
    /// batch, its gang, where others of the tenant's workloads are in it too. What it waits for, a
    /// gang of its own and how far it is spread are said by `after`, `gang` and `spread` beside it.
    #[serde(default = "default_submission")]
    pub submission: Submission,
}

impl Workload {
    /// How many start together, where they do: of its own, or with others of their name.
    pub fn gang_size(&self) -> Option<u32> {
        let named = self.submission.gang.as_ref();
        self.gang.or(named.map(|gang| gang.size))
    }
}

/// The submission of a range of so many tiles that up to so many may compute at once.
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

/// A submission of the built-in program that computes as told, with all defaults.
pub fn default_submission() -> Submission {
    Submission::of("synthetic@1")
}

/// When executions come. They stop at the scenario's `duration_ms`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Arrivals {
    /// So many at once.
    AtOnce {
        /// How many.
        count: u64,
        /// When.
        #[serde(default)]
        at_ms: u64,
    },
    /// Independently of each other, so many a second in the mean.
    Poisson {
        /// How many a second.
        per_s: f64,
        /// When they begin.
        #[serde(default)]
        from_ms: u64,
        /// No more than so many.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        count: Option<u64>,
    },
    /// Groups of one size, Poisson distributed.
    Batches {
        /// How many in one.
        size: u64,
        /// Mean time between two.
        every_ms: u64,
        /// No more executions than so many.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        count: Option<u64>,
    },
    /// At these moments, in order of time.
    Listed(Vec<u64>),
}

/// What goes wrong.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Fault {
    /// A node dies with all that runs on it; it returns under a new life, or never.
    Loss(NodeFault),
    /// A node goes on computing, but nothing reaches it and nothing comes from it.
    Silence(NodeFault),
    /// A node stands still: it neither computes nor speaks; messages wait for it.
    Stall(NodeFault),
    /// An operator drains a node, and takes it back.
    Drain(Drain),
    /// A node says that it will be gone, and is.
    Revoke(Revocation),
    /// An operator cordons a node, and takes it back.
    Cordon(NodeFault),
    /// A policy service stands still; what is told to it waits.
    PolicyStall(PolicyFault),
    /// A policy service dies; after a while a new one takes over the ledgers.
    PolicyLoss(PolicyFault),
    /// Such faults of nodes, drawn: independent of each other, each on a node of its own.
    Random {
        /// Which.
        what: Drawn,
        /// Mean time between two in the whole cluster.
        every_ms: u64,
        /// Mean time that one lasts.
        for_ms: u64,
        /// How long before its end a revoked node is told of it, and within what time a drained
        /// one is to be empty; 30 s for a revoked one and no time for a drained one where nothing
        /// is said.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        notice_ms: Option<u64>,
    },
}

/// Which faults are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Drawn {
    /// Nodes die and return.
    Loss,
    /// Nodes are cut off.
    Silence,
    /// Nodes stand still.
    Stall,
    /// Nodes are drained.
    Drain,
    /// Nodes are revoked, and return.
    Revoke,
}

/// Something about one node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NodeFault {
    /// Which.
    pub node: NodeId,
    /// When.
    pub at_ms: u64,
    /// For how long; for ever where nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub for_ms: Option<u64>,
}

/// Something about one policy service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PolicyFault {
    /// Which, from 0.
    pub policy: u32,
    /// When.
    pub at_ms: u64,
    /// For how long.
    pub for_ms: u64,
}

impl Scenario {
    /// Reads and checks a scenario.
    ///
    /// # Errors
    /// The field and the rule that it breaks; for what is no JSON, where it stops being it.
    pub fn parse(text: &[u8]) -> Result<Self, FieldError> {
        let scenario: Self = match serde_json::from_slice(text) {
            Ok(scenario) => scenario,
            Err(plain) => return Err(check_scenario::locate(text, &plain)),
        };
        // The plain reader takes a list for an object; what is read again must be refused then.
        check_scenario::objects_are_objects(text)?;
        scenario.check()?;
        Ok(scenario)
    }

    /// Checks the rules that types cannot say.
    ///
    /// # Errors
    /// The field and the rule that it breaks.
    pub fn check(&self) -> Result<(), FieldError> {
        check_scenario::check(self)
    }

    /// The scenario as JSON for people, with a line feed at its end.
    pub fn to_json(&self) -> String {
        // Fails only for maps whose keys are no strings; here they all are.
        let mut text = serde_json::to_string_pretty(self).unwrap_or_default();
        text.push('\n');
        text
    }

    /// How many nodes there are.
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
