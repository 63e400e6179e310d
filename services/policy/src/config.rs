//! Settings of the policy with their defaults. All times are in milliseconds.

use std::collections::BTreeMap;
use std::sync::Arc;

use fiec_schemas::NodeId;

use crate::share::order::Discipline;

/// What may be tuned.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Silence after which a node is probed, and a vector is no evidence any more.
    pub liveness_ms: u64,
    /// A gap between ticks after which the observer distrusts its own clock.
    pub stall_ms: u64,
    /// How long a bound execution may wait before its capsule is sent again, and again as long
    /// before it is bound elsewhere.
    pub take_ms: u64,
    /// The same while the node says that it has a backlog.
    pub take_busy_ms: u64,
    /// How long an execution may wait behind long work while another node has a free slot.
    pub balance_ms: u64,
    /// How often a node is asked which executions it holds, while any are started there.
    pub holdings_ms: u64,
    /// What two answers, asked so far apart, both lack is bound anew.
    pub holdings_confirm_ms: u64,
    /// How long nothing is bound after the broker has lost messages: who holds a binding appends them
    /// again meanwhile.
    pub heal_ms: u64,
    /// How long the replicas that are not preferred wait for the one that is.
    pub grace_ms: u64,
    /// The same for orders to a node, which other replicas cannot see.
    pub order_grace_ms: u64,
    /// A yield order that was not answered, or was refused, is tried again after this.
    pub order_retry_ms: u64,
    /// A yield order that was taken is repeated after this.
    pub order_repeat_ms: u64,
    /// What must leave a node by a time and has no place to go is told to commit when this and
    /// twice its own interval between boundaries are left.
    pub leave_margin_ms: u64,
    /// How often it is looked at what is to be told of executions that wait; 0: never.
    pub tell_ms: u64,
    /// What is on a revoked node is given up so long before the node is gone.
    pub give_up_ms: u64,
    /// A replica that was not heard for so long is absent.
    pub replica_ms: u64,
    /// How long a node that refused an execution is not asked again for it.
    pub avoid_ms: u64,
    /// What a node may be given ahead is what it begins within this time.
    pub horizon_ms: u64,
    /// Nor may it be given more ahead than it completes within this time at its present rate.
    pub queue_ms: u64,
    /// What a node may be given ahead for each completion of the last two seconds.
    pub ahead_per_completion: u32,
    /// The most that a node may be given ahead.
    pub ahead_limit: u32,
    /// The least time between two rebindings for pressure, where a dwell is shorter.
    pub residency_floor_ms: u64,
    /// A reservation whose execution has found no room for so long is given back, and others of
    /// its tenant have their turn.
    pub reserve_ms: u64,
    /// A gang that is not bound, or not started, in full within this time begins anew.
    pub gang_ms: u64,
    /// A gang that has found no room for so long has what becomes free kept for it.
    pub gang_keep_ms: u64,
    /// What runs beyond a quota that was lowered goes on for so long before it gives way.
    pub quota_grace_ms: u64,
    /// How often the ledger of what is waited for and not known is looked at again.
    pub look_ms: u64,
    /// After so long nothing more of a submission is to come: what it waits for and has no ledger
    /// has vanished.
    pub vanished_ms: u64,
    /// Appends that one call may ask for.
    pub burst: usize,
    /// By what order what waits is served, and what may give way to it.
    pub discipline: Discipline,
    /// Whether what runs gives way to a higher priority, a tenant below its share, a deadline.
    pub preempt: bool,
    /// Whether what runs gives way when its slice of time is over. It does only while something
    /// has waited for longer than a slice.
    pub slicing: bool,
    /// A slice of time; also the unit of the levels of service.
    pub slice_ms: u64,
    /// How long, at least, something computes at a place before it gives way to anybody.
    pub preempt_residency_ms: u64,
    /// The same as a multiple of what a move costs it: with 20, moving takes at most a twentieth of
    /// its time.
    pub preempt_residency_moves: u64,
    /// How often it is looked at who should give way.
    pub preempt_review_ms: u64,
    /// What has waited so long counts as if its priority were one higher; 0: it never does.
    pub ageing_ms: u64,
    /// After so long what a tenant has used counts half.
    pub half_life_ms: u64,
    /// Whether what runs is moved to a smaller device that suffices when others need the large
    /// one, and to a larger one that idles when it would gain by that.
    pub reallocate: bool,
    /// How long, at least, something computes on a device before it is moved to another for that.
    pub reallocate_residency_ms: u64,
    /// How long a device must have been idle before something is moved to it because it is larger.
    pub upgrade_dwell_ms: u64,
    /// From this contention of its device on, in [0, 1], an execution would gain by a larger one.
    pub device_bound: f64,
    /// How often it is looked whether ranges that several compute should be shared out further.
    pub spread_look_ms: u64,
    /// How long there must have been a place for one more, and how long a part that its holder waits
    /// for may have none before it is given back.
    pub spread_dwell_ms: u64,
    /// Nobody is split who is done in less.
    pub spread_least_ms: u64,
    /// The same as a multiple of what a move costs it.
    pub spread_moves: u64,
    /// One that was told to split should have done so within this and four capsules.
    pub spread_answer_ms: u64,
    /// The public keys that nodes must have, where an operator has pinned them; whoever is not among
    /// them, or claims another key, is given nothing. None: a node's key is what its claim says.
    pub node_keys: Option<Arc<BTreeMap<NodeId, String>>>,
    /// Share of the committed boundaries of built-in programs under the bitwise contract that are
    /// computed once more elsewhere where the submission says nothing; in [0, 1].
    pub verify_share: f64,
    /// Parts that are computed once more at the same time.
    pub verify_at_once: usize,
    /// A part that led to nothing is tried again after this, doubled each time up to 32 times.
    pub verify_retry_ms: u64,
    /// Who computes a part and was not heard for so long is given up.
    pub verify_silence_ms: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            liveness_ms: 5_000,
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
    /// Why a node is not who an operator has said that it is; none where it is, or where nobody has
    /// said anything. `key`: what its claim states.
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
