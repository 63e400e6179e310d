//! `bench boundary`: what boundaries cost a real solve. CG through FIEC with the default commit
//! policy against the bare loop of the same program in the same binary, in pairs; and what a
//! boundary that is not committed costs a loop in Python.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use fiec_broker::Broker;
use serde_json::{Value, json};

use super::figures::median;
use super::follow::Follow;
use super::python::Kit;
use super::{Lab, cluster, submit};

/// How long one solve takes at least, in seconds: shorter ones drown in the machine's noise.
const SOLVE: f64 = 4.2;
/// The same for a quick look.
const SOLVE_QUICK: f64 = 0.3;
/// Pairs of solves of each matrix.
const PAIRS: usize = 5;
/// After so long a matrix gets no further pair beyond the third, so that the bench ends in time.
const LIMIT: Duration = Duration::from_secs(38);

/// Runs the bench: `iterations_per_s` for each matrix, floor = bare loop, reach ≥ 0.98; and
/// `boundary_us` of the Python kit, reach < 20.
///
/// # Errors
/// When something could not be started or measured.
pub async fn run(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    let matrix = crate::demo::matrix()?;
    // With the load cases of an unmeasured solve, from whose time the number for [`SOLVE`] follows.
    let cases = [
        (
            "bcsstk16",
            20,
            json!({"matrix": {"file": matrix}, "iterations_per_capsule": 10}),
        ),
        (
            "poisson 1000x1000",
            2,
            json!({"matrix": {"poisson2d": {"n": 1000}}, "iterations_per_capsule": 10,
                   "tolerance": if lab.quick { 1e-1 } else { 1e-3 }}),
        ),
    ];
    let cluster = cluster(lab, 1, &[], true).await?;
    let mut follow = Follow::open(&cluster.broker).await?;
    let (solve, pairs) = if lab.quick {
        (SOLVE_QUICK, 1)
    } else {
        (SOLVE, PAIRS)
    };
    for (name, few, params) in cases {
        let slug = name.replace(' ', "-");
        let with = |load_cases: u64| {
            let mut params = params.clone();
            params["load_cases"] = json!(load_cases);
            params
        };
        // Once unmeasured on each side: pages, caches, the matrix.
        lab.steps_message(&format!("{name}: a trial"));
        let trial = bare_loop(with(few)).await?;
        through_us(&cluster.broker, &mut follow, &slug, with(few)).await?;
        let params = with(((solve * few as f64 / trial.seconds).ceil() as u64).max(1));
        let (mut bare, mut ratios) = (Vec::new(), Vec::new());
        let begin = Instant::now();
        for pair in 0..pairs {
            if pair >= 3 && begin.elapsed() > LIMIT {
                break;
            }
            lab.steps_message(&format!("{name}: pair {} of {pairs}", pair + 1));
            let id = format!("{slug}-{pair}");
            // The machine's speed drifts: each goes first in turn.
            let (ours, b) = if pair % 2 == 0 {
                let ours = through_us(&cluster.broker, &mut follow, &id, params.clone()).await?;
                (ours, bare_loop(params.clone()).await?)
            } else {
                let b = bare_loop(params.clone()).await?;
                let ours = through_us(&cluster.broker, &mut follow, &id, params.clone()).await?;
                (ours, b)
            };
            bare.push(b.iterations / b.seconds);
            ratios.push(b.seconds / ours);
        }
        let floor = median(&mut bare);
        // The ratio is the median of the pairs' ratios, not of the medians.
        let value = floor * median(&mut ratios);
        lab.figures.add(
            "boundary",
            name,
            "iterations_per_s",
            "1/s",
            value,
            Some(floor),
        );
    }
    cluster.stop().await;
    python(lab).await
}

/// Microseconds that a boundary without a commit adds to a turn of a loop in Python.
async fn python(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    let kit = match Kit::find().await {
        Ok(kit) => kit,
        Err(why) => {
            lab.left_out("bench boundary: the cases of the Python kit", &why);
            return Ok(());
        }
    };
    lab.steps_message("the Python kit's own bench");
    const METRIC: &str = "boundary_us";
    let figures = kit.bench().await.context("python3 -m fiec.bench")?;
    let boundaries: Vec<_> = figures.iter().filter(|f| f.metric == METRIC).collect();
    anyhow::ensure!(
        !boundaries.is_empty(),
        "python3 -m fiec.bench gave no {METRIC}: {figures:?}"
    );
    for figure in boundaries {
        let case = format!("python: {}", figure.case);
        let (unit, floor) = (&figure.unit, figure.floor);
        lab.figures
            .add("boundary", &case, METRIC, unit, figure.value, floor);
    }
    Ok(())
}

/// Seconds from the first capsule's begin to the last one's end of a solve by a worker.
async fn through_us(
    broker: &Broker,
    follow: &mut Follow,
    id: &str,
    params: Value,
) -> anyhow::Result<f64> {
    let submission = json!({"program": "cg@1", "params": params});
    let execution = submit(broker, id, submission).await?;
    let span = follow
        .to_completion(execution, Duration::from_secs(120))
        .await?;
    Ok(span.seconds())
}

struct Bare {
    iterations: f64,
    seconds: f64,
}

/// The bare loop, in a thread of this process.
async fn bare_loop(params: Value) -> anyhow::Result<Bare> {
    let outcome = tokio::task::spawn_blocking(move || {
        fiec_kit::local::run_local(fiec_schemas::programs::CG, &params)
    })
    .await?
    .map_err(|error| anyhow::anyhow!("the bare loop failed: {error}"))?;
    let iterations = outcome
        .result
        .get("iterations")
        .and_then(Value::as_f64)
        .context("the result names no iterations")?;
    Ok(Bare {
        iterations,
        seconds: outcome.seconds,
    })
}
