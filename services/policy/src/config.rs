//! Settings of the policy with their defaults. All times are in milliseconds.

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
    /// How long the replicas that are not preferred wait for the one that is.
    pub grace_ms: u64,
    /// The same for orders to a node, which other replicas cannot see.
    pub order_grace_ms: u64,
    /// A yield order that was not answered, or was refused, is tried again after this.
    pub order_retry_ms: u64,
    /// A yield order that was taken is repeated after this.
    pub order_repeat_ms: u64,
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
    /// Appends that one call may ask for.
    pub burst: usize,
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
            grace_ms: 500,
            order_grace_ms: 3_000,
            order_retry_ms: 1_000,
            order_repeat_ms: 30_000,
            replica_ms: 3_000,
            avoid_ms: 2_000,
            horizon_ms: 500,
            queue_ms: 60,
            ahead_per_completion: 4,
            ahead_limit: 8_000,
            residency_floor_ms: 100,
            burst: 256,
            verify_share: 0.0,
            verify_at_once: 8,
            verify_retry_ms: 500,
            verify_silence_ms: 30_000,
        }
    }
}
