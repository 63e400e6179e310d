//! One run of a workload under one variant, and its measurements.

use std::time::Duration;

use anyhow::Context as _;
use fiec_schemas::{Cause, ExecutionId, NodeId, Signal, Timestamp};

use super::container::says;
use super::stand::{Place, Stand};
use super::trace::{Sample, Trace};
use super::workload::Workload;

/// Longest time of one step of a run, beyond the experiment's own time.
pub(super) const PATIENCE: Duration = Duration::from_secs(120);

/// The conditions of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Variant {
    Baseline,
    /// Under load, with thresholds that cannot trip.
    Load,
    Rebinding,
    /// The load is on another node from the start. It shows the effect of caches and clock that
    /// processors share.
    Elsewhere,
}

impl Variant {
    /// The variants for a static load.
    pub const STATIC: [Self; 4] = [Self::Baseline, Self::Load, Self::Rebinding, Self::Elsewhere];
    /// The variants for envelopes, which apply to every node.
    pub const SWINGING: [Self; 3] = [Self::Baseline, Self::Load, Self::Rebinding];

    pub fn name(self) -> &'static str {
        match self {
            Self::Baseline => "baseline",
            Self::Load => "baseline with load",
            Self::Rebinding => "with rebinding",
            Self::Elsewhere => "control: load on the other node",
        }
    }

    fn short(self) -> &'static str {
        match self {
            Self::Baseline => "baseline",
            Self::Load => "load",
            Self::Rebinding => "rebinding",
            Self::Elsewhere => "elsewhere",
        }
    }
}

/// Start and length of the load.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timing {
    /// Seconds of computing before the load.
    pub lead: f64,
    /// Seconds of load, over which progress is measured.
    pub window: f64,
}

impl Timing {
    /// Scales both to the share of the work, and never up.
    pub fn within(self, share: f64) -> Self {
        let share = share.clamp(0.05, 1.0);
        Self {
            lead: self.lead * share,
            window: self.window * share,
        }
    }
}

/// The result of one run.
#[derive(Debug, Clone)]
pub(super) struct Run {
    pub workload: &'static str,
    pub variant: Variant,
    pub number: u32,
    pub trace: Trace,
    pub samples: Vec<Sample>,
    /// Start and end of the load, in seconds since the first capsule started.
    pub window: (f64, f64),
    /// True if the result and the number of capsules equal those of the undisturbed run.
    pub same: bool,
}

impl Run {
    /// Seconds from the first capsule to the last.
    pub fn seconds(&self) -> f64 {
        let end = self.trace.end.as_ref();
        end.map_or(0.0, |e| self.trace.seconds(e.at))
    }

    /// Number of rebindings because of pressure.
    pub fn pressed(&self) -> usize {
        let moves = self.trace.moves();
        let pressure = |c: &Cause| matches!(c, Cause::Pressure { .. });
        moves.iter().filter(|m| pressure(&m.cause)).count()
    }

    /// Seconds from the start of the load to the first capsule on another node.
    pub fn reaction(&self) -> Option<f64> {
        let moves = self.trace.moves();
        Some(self.trace.seconds(moves.first()?.at) - self.window.0)
    }

    /// Seconds computed on a node with a reading at or above `high`, and in total.
    pub fn strained(&self, place: Place, high: f64) -> (f64, f64) {
        let (mut strained, mut all) = (0.0, 0.0);
        for stay in &self.trace.stays {
            let (Some(since), Some(until)) = (stay.since, stay.until) else {
                continue;
            };
            let (from, to) = (self.trace.seconds(since), self.trace.seconds(until));
            all += to - from;
            let mut spans = Vec::new();
            for signal in [Signal::Memory, Signal::Power] {
                let of = |s: &&Sample| s.is(signal, stay.node.as_str(), place == Place::Device);
                let of = self.samples.iter().filter(of);
                let points: Vec<_> = of.map(|s| (self.trace.seconds(s.at), s.value)).collect();
                spans.extend(points.windows(2).filter_map(|pair| match pair {
                    [(a, value), (b, _)] if *value >= high => Some((a.max(from), b.min(to))),
                    _ => None,
                }));
            }
            strained += covered(spans);
        }
        (strained, all)
    }
}

/// The total length that the spans cover.
fn covered(mut spans: Vec<(f64, f64)>) -> f64 {
    spans.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (mut length, mut reached) = (0.0, f64::NEG_INFINITY);
    for (from, to) in spans {
        length += (to - from.max(reached)).max(0.0);
        reached = reached.max(to);
    }
    length
}

/// The median; 0 without values.
pub(super) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let (low, high) = (values.len().saturating_sub(1) / 2, values.len() / 2);
    match (values.get(low), values.get(high)) {
        (Some(a), Some(b)) => (a + b) / 2.0,
        _ => 0.0,
    }
}

/// Seconds of undisturbed work per second of the run's window; 1 is the speed of the baseline.
/// Capsules differ in cost, so each is weighed by the median of its times in the baselines.
pub(super) fn progress(run: &Run, baselines: &[&Run]) -> f64 {
    let (from, to) = (run.window.0, run.window.1.min(run.seconds()));
    if to <= from {
        return 0.0;
    }
    let worth = |at: f64| {
        let capsules = run.trace.capsules_at(at);
        median(baselines.iter().map(|b| b.trace.seconds_at(capsules)))
    };
    (worth(to) - worth(from)) / (to - from)
}

/// Submits an execution and waits until it computes.
pub(super) async fn begin(
    stand: &Stand,
    workload: &Workload,
    variant: Variant,
    number: u32,
) -> anyhow::Result<(ExecutionId, NodeId)> {
    stand.calm().await?;
    let id = format!("{}-{}-{number}", workload.name, variant.short());
    let submission = workload.submission(variant == Variant::Rebinding);
    let execution = stand.submit(&id, submission).await?;
    let computing = |t: &Trace| t.node().cloned();
    let what = "it computes";
    let node = stand
        .observer
        .until(what, execution, PATIENCE, computing)
        .await?;
    Ok((execution, node))
}

/// Waits for the end, and collects the observations.
pub(super) async fn end(
    stand: &Stand,
    workload: &Workload,
    variant: Variant,
    number: u32,
    execution: ExecutionId,
    window: (Timestamp, Timestamp),
) -> anyhow::Result<Run> {
    let ended = |t: &Trace| t.end.clone();
    let end = stand
        .observer
        .until("it completes", execution, PATIENCE, ended)
        .await?;
    let trace = stand.observer.trace(execution);
    let start = trace
        .start()
        .context("it completed without having started")?;
    Ok(Run {
        workload: workload.name,
        variant,
        number,
        samples: stand.observer.samples(start, end.at),
        window: (trace.seconds(window.0), trace.seconds(window.1)),
        same: says(&end.result, &workload.result) && end.capsules == workload.capsules,
        trace,
    })
}

/// One run with a static load on the node that computes first, or on the other node in the control.
pub(super) async fn static_load(
    stand: &Stand,
    workload: &Workload,
    variant: Variant,
    number: u32,
    timing: Timing,
) -> anyhow::Result<Run> {
    let (execution, node) = begin(stand, workload, variant, number).await?;
    let pause = |seconds: f64| tokio::time::sleep(Duration::from_secs_f64(seconds));
    pause(timing.lead).await;
    let load = match variant {
        Variant::Baseline => None,
        Variant::Load | Variant::Rebinding => Some(stand.press(&node).await?),
        Variant::Elsewhere => Some(stand.press(&stand.other_than(&node)?).await?),
    };
    // The load is fully on from this moment.
    let from = Timestamp::now();
    pause(timing.window).await;
    drop(load);
    end(
        stand,
        workload,
        variant,
        number,
        execution,
        (from, Timestamp::now()),
    )
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_that_overlap_are_counted_once() {
        assert_eq!(
            covered(vec![(3.0, 4.0), (0.0, 2.0), (1.0, 2.5), (2.0, 2.2)]),
            3.5
        );
        assert_eq!(covered(vec![(2.0, 1.0)]), 0.0);
    }
}
