//! Settings of the policy with their defaults. All times are in ms.

use std::collections::BTreeMap;
use std::sync::Arc;

use fiec_schemas::NodeId;
use serde::{Deserialize, Serialize};

use crate::lifecycle::queue::order::Discipline;

/// Tunable settings. They write and read themselves as JSON, for traces; what is not given has its
/// default.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
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
    /// Interval of the reports on waiting executions; 0 turns them off.
    pub tell_ms: u64,
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
    /// Time after which the reservation of an execution without a place is given back, so that
    /// others of its tenant have their turn.
    pub reserve_ms: u64,
    /// Time within which all members of a gang must be bound and started. Otherwise the gang starts
    /// again.
    pub gang_ms: u64,
    /// Time without places after which free places are reserved for a gang.
    pub gang_keep_ms: u64,
    /// Time for which a tenant may exceed a lowered quota before executions are preempted.
    pub quota_grace_ms: u64,
    /// Interval between two looks at the ledger of an unknown dependency.
    pub look_ms: u64,
    /// Time after which a dependency without a ledger counts as vanished.
    pub vanished_ms: u64,
    /// Most appends of one call.
    pub burst: usize,
    /// Order of the queue and rule of preemption.
    pub discipline: Discipline,
    /// True if a higher priority, a tenant below its share, or a deadline preempts.
    pub preempt: bool,
    /// True if the end of a time slice preempts. It does so only while an execution has waited for
    /// longer than a slice.
    pub slicing: bool,
    /// A time slice, and the unit of the service levels.
    pub slice_ms: u64,
    /// Shortest stay in a place before a preemption.
    pub preempt_residency_ms: u64,
    /// The same as a multiple of the cost of a move. With 20, moves take at most a twentieth of an
    /// execution's time.
    pub preempt_residency_moves: u64,
    /// Interval between two reviews of preemption.
    pub preempt_review_ms: u64,
    /// Wait after which an execution's priority counts one higher; 0 turns ageing off.
    pub ageing_ms: u64,
    /// Half-life of a tenant's usage.
    pub half_life_ms: u64,
    /// True if running executions are moved between devices: to a smaller one that suffices if
    /// others need the large one, and to a larger idle one that they gain from.
    pub reallocate: bool,
    /// Shortest stay on a device before such a move.
    pub reallocate_residency_ms: u64,
    /// Time for which a larger device must be idle before an execution is moved to it.
    pub upgrade_dwell_ms: u64,
    /// Contention of its device from which an execution gains from a larger one, in [0, 1].
    pub device_bound: f64,
    /// Interval between two reviews of spread ranges.
    pub spread_look_ms: u64,
    /// Time for which a place must be free before a range is split. Also the time after which a
    /// part without a place is given back if its holder waits for it.
    pub spread_dwell_ms: u64,
    /// Least remaining time of an execution that is split.
    pub spread_least_ms: u64,
    /// The same as a multiple of the cost of a move.
    pub spread_moves: u64,
    /// Time, plus four capsules, within which a split must follow its order.
    pub spread_answer_ms: u64,
    /// The pinned public keys of nodes. A node that is missing here, or claims another key, gets no
    /// work. None: a node's key is the one in its claim.
    pub node_keys: Option<Arc<BTreeMap<NodeId, String>>>,
    /// Share of the committed boundaries of built-in programs that other nodes compute again if the
    /// submission does not choose, in [0, 1]. It applies to the bitwise contract.
    pub verify_share: f64,
    /// Most verifications at the same time.
    pub verify_at_once: usize,
    /// Time until a failed verification is tried again. It doubles with each failure, up to 32
    /// times.
    pub verify_retry_ms: u64,
    /// Silence after which a verifier is given up.
    pub verify_silence_ms: u64,
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
            tell_ms: 500,
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
            reserve_ms: 5_000,
            gang_ms: 10_000,
            gang_keep_ms: 10_000,
            quota_grace_ms: 30_000,
            look_ms: 1_000,
            vanished_ms: 60_000,
            burst: 256,
            discipline: Discipline::Shared,
            preempt: true,
            slicing: true,
            slice_ms: 30_000,
            preempt_residency_ms: 5_000,
            preempt_residency_moves: 20,
            preempt_review_ms: 500,
            ageing_ms: 3_600_000,
            half_life_ms: 3_600_000,
            reallocate: true,
            reallocate_residency_ms: 30_000,
            upgrade_dwell_ms: 10_000,
            device_bound: 0.8,
            spread_look_ms: 250,
            spread_dwell_ms: 1_000,
            spread_least_ms: 2_000,
            spread_moves: 2,
            spread_answer_ms: 10_000,
            node_keys: None,
            verify_share: 0.0,
            verify_at_once: 8,
            verify_retry_ms: 500,
            verify_silence_ms: 30_000,
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
