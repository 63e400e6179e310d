//! A run in numbers.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

/// What is counted while a run goes on.
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
    /// Microseconds from submission to the first capsule.
    pub(crate) waited: Vec<f32>,
    /// Microseconds from submission to the end.
    pub(crate) lasted: Vec<f32>,
    pub(crate) in_policy: Duration,
    pub(crate) in_ticks: Duration,
}

impl Tally {
    /// How many of those that were submitted have ended.
    pub(crate) fn ended(&self) -> u64 {
        self.completed + self.failed
    }
}

/// What the world knows beside that.
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

/// Times in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Times {
    /// Their mean.
    pub mean_ms: f64,
    /// Half are below it.
    pub p50_ms: f64,
    /// All but a twentieth are below it.
    pub p95_ms: f64,
    /// The longest.
    pub most_ms: f64,
}

/// Executions that had not ended when the run did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Unfinished {
    /// What they waited for.
    pub why: String,
    /// How many.
    pub count: u64,
}

/// A run in numbers. Everything but `wall_s` and what is said of it depends on the scenario and
/// the policy alone.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// The scenario's seed.
    pub seed: u64,
    /// Nodes.
    pub nodes: u64,
    /// Executions submitted.
    pub submitted: u64,
    /// Of those, completed.
    pub completed: u64,
    /// Of those, failed: their programs, or what they waited for.
    pub failed: u64,
    /// The others, by what they wait for.
    pub unfinished: Vec<Unfinished>,
    /// Virtual time that was played, in milliseconds.
    pub played_ms: f64,
    /// From the first submission to the last completion, in milliseconds.
    pub makespan_ms: f64,
    /// What the completed executions computed at speed 1, in milliseconds.
    pub work_ms: f64,
    /// Share of the slots of living nodes that computed, until the last completion.
    pub utilization: f64,
    /// From submission to the first capsule.
    pub waited: Times,
    /// From submission to completion.
    pub lasted: Times,
    /// Bindings, the first ones included.
    pub bindings: u64,
    /// Bindings after the first, by cause.
    pub rebindings: BTreeMap<String, u64>,
    /// Orders to yield.
    pub orders: u64,
    /// How often an execution gave way to another.
    pub preemptions: u64,
    /// How often an execution was parked.
    pub parks: u64,
    /// Executions that were given up where they stood, because their node was to be empty.
    pub given_up: u64,
    /// Changes of what is reserved that policy services asked for.
    pub reservations: u64,
    /// Looks at ledgers that policy services asked for.
    pub lookups: u64,
    /// Parts that were split off ranges.
    pub parts: u64,
    /// Of those, given back with what they had left.
    pub returned: u64,
    /// Commits beside those at a yield or an end.
    pub commits: u64,
    /// Node time spent on what was never committed, in milliseconds.
    pub lost_ms: f64,
    /// Bytes of σ that moved with rebindings.
    pub moved_bytes: u64,
    /// Bindings that nodes refused.
    pub refusals: u64,
    /// Appends of policy services that were overtaken or not acknowledged.
    pub conflicts: u64,
    /// Runs that lost their binding before they knew.
    pub fenced: u64,
    /// Faults that were drawn or listed, by kind.
    pub faults: BTreeMap<String, u64>,
    /// Probes of silent nodes.
    pub probes: u64,
    /// Vectors that policy services heard.
    pub vectors: u64,
    /// Inputs of the policy.
    pub inputs: u64,
    /// Events of the virtual clock.
    pub steps: u64,
    /// Decisions: bindings and orders.
    pub decisions: u64,
    /// The same a second of real time.
    pub decisions_per_s: f64,
    /// Real time, in seconds.
    pub wall_s: f64,
    /// Share of it within the policy (sampled: one input in 64).
    pub policy_share: f64,
    /// Of that, share of the whole within its ticks.
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
