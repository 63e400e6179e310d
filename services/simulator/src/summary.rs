//! The figures of a run.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

/// The counters of a run.
#[derive(Debug, Default)]
pub struct Tally {
    pub(crate) inputs: u64,
    pub(crate) vectors: u64,
    pub(crate) bindings: u64,
    pub(crate) starts: u64,
    pub(crate) commits: u64,
    pub(crate) orders: u64,
    pub(crate) preemptions: u64,
    pub(crate) probes: u64,
    pub(crate) held_lines: u64,
    pub(crate) records: u64,
    pub(crate) conflicts: u64,
    pub(crate) refusals: u64,
    pub(crate) fenced: u64,
    pub(crate) stale_capsules: u64,
    pub(crate) completed: u64,
    pub(crate) failed: u64,
    pub(crate) parks: u64,
    pub(crate) given_up: u64,
    pub(crate) lookups: u64,
    pub(crate) reservations: u64,
    pub(crate) parts: u64,
    pub(crate) parts_ended: u64,
    pub(crate) returned: u64,
    pub(crate) useful_us: u64,
    pub(crate) busy_us: u64,
    pub(crate) lost_us: u64,
    pub(crate) moved_bytes: u64,
    pub(crate) first_submission: Option<u64>,
    pub(crate) last_end: u64,
    pub(crate) rebindings: BTreeMap<&'static str, u64>,
    pub(crate) faults: BTreeMap<&'static str, u64>,
    /// Time from submission to the first capsule, in microseconds.
    pub(crate) waited: Vec<f32>,
    /// Time from submission to the end, in microseconds.
    pub(crate) lasted: Vec<f32>,
    pub(crate) in_policy: Duration,
    pub(crate) in_ticks: Duration,
}

impl Tally {
    /// Number of submitted executions that have ended.
    pub(crate) fn ended(&self) -> u64 {
        self.completed + self.failed
    }
}

/// Further figures that the world provides.
pub(crate) struct Frame {
    pub seed: u64,
    pub nodes: u64,
    pub submitted: u64,
    pub now_us: u64,
    pub slots_us: u128,
    pub wall: Duration,
    pub steps: u64,
    pub unfinished: Vec<Unfinished>,
}

/// A distribution of times, in ms.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Times {
    /// The mean.
    pub mean_ms: f64,
    /// The median.
    pub p50_ms: f64,
    /// The 95th percentile.
    pub p95_ms: f64,
    /// The maximum.
    pub most_ms: f64,
}

/// Executions that had not ended at the end of the run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Unfinished {
    /// The reason.
    pub why: String,
    /// Their number.
    pub count: u64,
}

/// The figures of a run. All but `wall_s` and what follows from it depend only on the scenario and
/// the policy.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// The scenario's seed.
    pub seed: u64,
    /// Number of nodes.
    pub nodes: u64,
    /// Number of submitted executions.
    pub submitted: u64,
    /// Number of completed ones.
    pub completed: u64,
    /// Number of failed ones, because of their program or a dependency.
    pub failed: u64,
    /// The other executions, by the reason.
    pub unfinished: Vec<Unfinished>,
    /// Played virtual time, in ms.
    pub played_ms: f64,
    /// Time from the first submission to the last completion, in ms.
    pub makespan_ms: f64,
    /// Computing time of the completed executions at speed 1, in ms.
    pub work_ms: f64,
    /// Share of the slots of live nodes that computed, until the last completion.
    pub utilization: f64,
    /// Time from submission to the first capsule.
    pub waited: Times,
    /// Time from submission to completion.
    pub lasted: Times,
    /// Number of bindings, including the first ones.
    pub bindings: u64,
    /// Number of bindings after the first, by cause.
    pub rebindings: BTreeMap<String, u64>,
    /// Number of orders to yield.
    pub orders: u64,
    /// Number of preemptions.
    pub preemptions: u64,
    /// Number of parks.
    pub parks: u64,
    /// Executions that were given up because their node had to be empty.
    pub given_up: u64,
    /// Requested changes of reservations.
    pub reservations: u64,
    /// Requested looks at ledgers.
    pub lookups: u64,
    /// Parts that were split off ranges.
    pub parts: u64,
    /// Parts that were given back unfinished.
    pub returned: u64,
    /// Commits other than those at a yield or an end.
    pub commits: u64,
    /// Node time spent on work that was never committed, in ms.
    pub lost_ms: f64,
    /// Bytes of σ that moved with rebindings.
    pub moved_bytes: u64,
    /// Bindings that nodes refused.
    pub refusals: u64,
    /// Appends of policy services that lost a race or were not acknowledged.
    pub conflicts: u64,
    /// Runs that lost their binding before they knew it.
    pub fenced: u64,
    /// Faults, by kind.
    pub faults: BTreeMap<String, u64>,
    /// Probes of silent nodes.
    pub probes: u64,
    /// Submissions that a policy service held until a slot was free or their time was over, by tries.
    pub held_lines: u64,
    /// Vectors that policy services received.
    pub vectors: u64,
    /// Inputs of the policy.
    pub inputs: u64,
    /// Events of the virtual clock.
    pub steps: u64,
    /// Decisions: bindings and orders.
    pub decisions: u64,
    /// Decisions per second of real time.
    pub decisions_per_s: f64,
    /// Real time, in seconds.
    pub wall_s: f64,
    /// Share of real time within the policy (sampled: one input in 64).
    pub policy_share: f64,
    /// Share of real time within the policy's ticks.
    pub tick_share: f64,
}

#[expect(
    clippy::cast_precision_loss,
    reason = "counts and times far below 2^52"
)]
pub(crate) fn make(tally: &mut Tally, frame: &Frame) -> Summary {
    let begin = tally.first_submission.unwrap_or(0);
    let wall_s = frame.wall.as_secs_f64();
    let decisions = tally.bindings + tally.orders;
    let own = |map: &BTreeMap<&'static str, u64>| {
        map.iter().map(|(k, v)| ((*k).to_owned(), *v)).collect()
    };
    let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
    Summary {
        seed: frame.seed,
        nodes: frame.nodes,
        submitted: frame.submitted,
        completed: tally.completed,
        failed: tally.failed,
        unfinished: frame.unfinished.clone(),
        played_ms: frame.now_us as f64 / 1e3,
        makespan_ms: tally.last_end.saturating_sub(begin) as f64 / 1e3,
        work_ms: tally.useful_us as f64 / 1e3,
        utilization: share(tally.busy_us as f64, frame.slots_us as f64).min(1.0),
        waited: times(&mut tally.waited),
        lasted: times(&mut tally.lasted),
        bindings: tally.bindings,
        rebindings: own(&tally.rebindings),
        orders: tally.orders,
        preemptions: tally.preemptions,
        parks: tally.parks,
        given_up: tally.given_up,
        reservations: tally.reservations,
        lookups: tally.lookups,
        parts: tally.parts,
        returned: tally.returned,
        commits: tally.commits,
        lost_ms: tally.lost_us as f64 / 1e3,
        moved_bytes: tally.moved_bytes,
        refusals: tally.refusals,
        conflicts: tally.conflicts,
        fenced: tally.fenced,
        faults: own(&tally.faults),
        probes: tally.probes,
        held_lines: tally.held_lines,
        vectors: tally.vectors,
        inputs: tally.inputs,
        steps: frame.steps,
        decisions,
        decisions_per_s: share(decisions as f64, wall_s),
        wall_s,
        policy_share: share(tally.in_policy.as_secs_f64(), wall_s).min(1.0),
        tick_share: share(tally.in_ticks.as_secs_f64(), wall_s).min(1.0),
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
fn times(micros: &mut [f32]) -> Times {
    micros.sort_by(f32::total_cmp);
    let ms = |us: f32| f64::from(us) / 1e3;
    let rank = |share: f64| {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a rank"
        )]
        let at = (share * micros.len() as f64).ceil() as usize;
        micros.get(at.max(1) - 1).copied().map_or(0.0, ms)
    };
    let sum: f64 = micros.iter().map(|us| ms(*us)).sum();
    Times {
        mean_ms: sum / micros.len().max(1) as f64,
        p50_ms: rank(0.5),
        p95_ms: rank(0.95),
        most_ms: rank(1.0),
    }
}
