//! Settings of the policy with their defaults. All times are in ms.

use std::collections::BTreeMap;
use std::sync::Arc;

use fiec_schemas::NodeId;
use serde::de::{Error, IgnoredAny};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::explanation::ExplanationSettings;
use crate::gangs::GangsSettings;
use crate::lifecycle::queue::order::Discipline;
use crate::prerequisites::PrerequisitesSettings;
use crate::quotas::QuotasSettings;
use crate::reallocation::ReallocationSettings;
use crate::sharing::SharingSettings;
use crate::spreading::SpreadingSettings;
use crate::verification::VerificationSettings;

/// Tunable settings: those of the life cycle, and a group for each machine. In JSON all stand side by
/// side. They write and read themselves as JSON, for traces; what is not given has its
/// default.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Config {
    /// Silence after which a node is probed and its vector no longer counts.
    pub liveness_ms: u64,
    /// Silence after which a node that holds nothing is forgotten.
    pub forget_ms: u64,
    /// Gap between ticks after which this process distrusts its own clock.
    pub stall_ms: u64,
    /// Time after which a bound execution's capsule is sent again. After the same time once more,
    /// the execution is bound elsewhere. Both start again when more of its state has arrived.
    pub take_ms: u64,
    /// The same if the node reports a backlog.
    pub take_busy_ms: u64,
    /// Longest wait behind long work while another node has a free slot.
    pub balance_ms: u64,
    /// Interval of the question which executions a node holds, while any has started there.
    pub holdings_ms: u64,
    /// An execution that two answers lack, asked this far apart, is bound again.
    pub holdings_confirm_ms: u64,
    /// Time without bindings after the broker has lost messages. Holders append these again in the
    /// meantime.
    pub heal_ms: u64,
    /// Time that the other replicas wait for the preferred one.
    pub grace_ms: u64,
    /// The same for orders to a node, which other replicas do not see.
    pub order_grace_ms: u64,
    /// Time until a refused or unanswered order is repeated.
    pub order_retry_ms: u64,
    /// Time until an accepted order is repeated.
    pub order_repeat_ms: u64,
    /// Margin for a node with a deadline: an execution without a destination is ordered to commit
    /// when this plus twice its own interval between boundaries is left.
    pub leave_margin_ms: u64,
    /// An execution on a revoked node is given up this long before the node disappears.
    pub give_up_ms: u64,
    /// Silence after which a replica counts as absent.
    pub replica_ms: u64,
    /// Time for which a node that refused an execution is avoided for it.
    pub avoid_ms: u64,
    /// Time for which a node that could not start a program is set aside for it. It doubles with
    /// each failure in a row.
    pub start_retry_ms: u64,
    /// The longest such time.
    pub start_retry_longest_ms: u64,
    /// Workers that may end while they compute an execution, from one commit to the next. At this
    /// number it is held: its program may be what ends them. 0: it is never held for that.
    pub deadly_workers: u32,
    /// A node's queue holds at most the executions that start within this time.
    pub horizon_ms: u64,
    /// A node's queue holds at most its completions within this time at its present rate.
    pub queue_ms: u64,
    /// Queued executions that each completion of the last two seconds allows.
    pub ahead_per_completion: u32,
    /// Most queued executions on a node.
    pub ahead_limit: u32,
    /// Shortest time between two rebindings for pressure, even if a dwell is shorter.
    pub residency_floor_ms: u64,
    /// Interval between two looks at the ledger of an unknown dependency.
    pub look_ms: u64,
    /// Most appends of one call.
    pub burst: usize,
    /// Order of the queue and rule of preemption.
    pub discipline: Discipline,
    /// True if a higher priority, a tenant below its share, or a deadline preempts.
    pub preempt: bool,
    /// A time slice, and the unit of the service levels.
    pub slice_ms: u64,
    /// Shortest stay in a place before a preemption.
    pub preempt_residency_ms: u64,
    /// The same as a multiple of the cost of a move. With 20, moves take at most a twentieth of an
    /// execution's time.
    pub preempt_residency_moves: u64,
    /// Wait after which an execution's priority counts one higher; 0 turns ageing off.
    pub ageing_ms: u64,
    /// Half-life of a tenant's usage.
    pub half_life_ms: u64,
    /// Settings of verification: what other nodes compute again.
    #[serde(flatten)]
    pub verification: VerificationSettings,
    /// Settings of spreading: ranges that several nodes compute.
    #[serde(flatten)]
    pub spreading: SpreadingSettings,
    /// Settings of gangs: executions that start together.
    #[serde(flatten)]
    pub gangs: GangsSettings,
    /// Settings of quotas: how much of a quota is used.
    #[serde(flatten)]
    pub quotas: QuotasSettings,
    /// Settings of prerequisites: executions that wait for others.
    #[serde(flatten)]
    pub prerequisites: PrerequisitesSettings,
    /// Settings of reallocation: moves between devices.
    #[serde(flatten)]
    pub reallocation: ReallocationSettings,
    /// Settings of sharing: preemption.
    #[serde(flatten)]
    pub sharing: SharingSettings,
    /// Settings of explanation: reports.
    #[serde(flatten)]
    pub explanation: ExplanationSettings,
    /// The pinned public keys of nodes. A node that is missing here, or claims another key, gets no
    /// work. None: a node's key is the one in its claim.
    pub node_keys: Option<Arc<BTreeMap<NodeId, String>>>,
    /// Nothing else may be given.
    #[serde(flatten)]
    #[doc(hidden)]
    pub nothing: Nothing,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            liveness_ms: 5_000,
            forget_ms: 86_400_000,
            stall_ms: 1_000,
            take_ms: 5_000,
            take_busy_ms: 60_000,
            balance_ms: 1_000,
            holdings_ms: 5_000,
            holdings_confirm_ms: 1_000,
            heal_ms: 3_000,
            grace_ms: 500,
            order_grace_ms: 3_000,
            order_retry_ms: 1_000,
            order_repeat_ms: 30_000,
            leave_margin_ms: 2_000,
            give_up_ms: 1_000,
            replica_ms: 3_000,
            avoid_ms: 2_000,
            deadly_workers: 3,
            start_retry_ms: 5_000,
            start_retry_longest_ms: 600_000,
            horizon_ms: 500,
            queue_ms: 60,
            ahead_per_completion: 4,
            ahead_limit: 8_000,
            residency_floor_ms: 100,
            look_ms: 1_000,
            burst: 256,
            discipline: Discipline::Shared,
            preempt: true,
            slice_ms: 30_000,
            preempt_residency_ms: 5_000,
            preempt_residency_moves: 20,
            ageing_ms: 3_600_000,
            half_life_ms: 3_600_000,
            verification: VerificationSettings::default(),
            spreading: SpreadingSettings::default(),
            gangs: GangsSettings::default(),
            quotas: QuotasSettings::default(),
            prerequisites: PrerequisitesSettings::default(),
            reallocation: ReallocationSettings::default(),
            sharing: SharingSettings::default(),
            explanation: ExplanationSettings::default(),
            node_keys: None,
            nothing: Nothing,
        }
    }
}

impl Config {
    /// Why a node's key is not the pinned one. None if it is, or if no keys are pinned. `key`: the
    /// key in its claim.
    pub fn stranger(&self, node: &NodeId, key: Option<&str>) -> Option<String> {
        let pinned = self.node_keys.as_ref()?.get(node);
        match (pinned, key) {
            (None, _) => Some("it is not among the nodes whose keys are pinned".to_owned()),
            (Some(_), None) => {
                Some("its claim names no key, and one is pinned for this node".to_owned())
            }
            (Some(pinned), Some(key)) if pinned != key => Some(format!(
                "its key is {key}, and {pinned} is pinned for this node"
            )),
            (Some(_), Some(_)) => None,
        }
    }
}

/// Takes what no setting has taken, and refuses it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Nothing;

impl Serialize for Nothing {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_map(Some(0))?.end()
    }
}

impl<'de> Deserialize<'de> for Nothing {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let rest = BTreeMap::<String, IgnoredAny>::deserialize(from)?;
        match rest.first_key_value() {
            Some((name, _)) => Err(D::Error::custom(format!("there is no setting {name}"))),
            None => Ok(Self),
        }
    }
}
