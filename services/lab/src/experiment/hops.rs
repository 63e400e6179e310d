//! Multi-hop: a load follows the execution over three nodes, and leaves the first one in time.

use anyhow::{Context as _, ensure};
use fiec::ui::Steps;
use fiec_schemas::{ExecutionId, NodeId, Timestamp};

use super::run::{PATIENCE, Run, Variant, begin, end};
use super::stand::{Stand, Wants};
use super::trace::Trace;
use super::workload::{Kind, Workload, prepare};
use super::{Experiment, ExperimentArgs, Name, runs};

/// Runs the experiment.
pub(super) async fn run(args: &ExperimentArgs, steps: &Steps) -> anyhow::Result<Experiment> {
    let (dwell_ms, seconds) = if args.quick {
        (200, 10.0)
    } else {
        (1_000, 20.0)
    };
    steps.step("sizing cg and running it undisturbed");
    let workload = prepare(Kind::Cg, None, seconds).await?;
    let stand = Stand::start(Wants::new(3, None, dwell_ms), steps).await?;
    let mut experiment = Experiment::of(Name::MultiHop, &stand);
    experiment.notes.push(
        "The load is on memory alone. That on A stays until the execution has left B, so that B leads to C; those on B and C \
         stay, so that C leads back to A."
            .to_owned(),
    );
    let total = runs(args);
    for number in 1..=total {
        for variant in [Variant::Baseline, Variant::Rebinding] {
            steps.step(&format!("cg, {}, run {number} of {total}", variant.name()));
            let run = one(&stand, &workload, variant, number).await;
            experiment
                .runs
                .push(run.with_context(|| format!("{}, run {number}", variant.name()))?);
        }
    }
    stand.cluster.stop().await;
    steps.done("stopped");
    Ok(experiment)
}

async fn one(
    stand: &Stand,
    workload: &Workload,
    variant: Variant,
    number: u32,
) -> anyhow::Result<Run> {
    let (execution, a) = begin(stand, workload, variant, number).await?;
    let from = Timestamp::now();
    if variant == Variant::Rebinding {
        let on_a = stand.fill(&a).await?;
        let b = left(stand, execution, &a).await?;
        let on_b = stand.fill(&b).await?;
        let c = left(stand, execution, &b).await?;
        ensure!(c != a, "it came back to {a}, which was under load");
        let on_c = stand.fill(&c).await?;
        drop(on_a);
        left(stand, execution, &c).await?;
        drop((on_b, on_c));
    }
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

/// The node on which the execution computes after it has left `from`.
async fn left(stand: &Stand, execution: ExecutionId, from: &NodeId) -> anyhow::Result<NodeId> {
    let elsewhere = |t: &Trace| t.node().filter(|n| *n != from).cloned();
    let what = format!("it computes elsewhere than on {from}");
    stand
        .observer
        .until(&what, execution, PATIENCE, elsewhere)
        .await
}
