//! `bench boundary`: what boundaries cost a real solve. CG through FIEC with the default commit
//! policy against the bare loop of the same program in the same binary, turn by turn.

use std::time::Duration;

use anyhow::Context as _;
use serde_json::{Value, json};

use super::figures::median;
use super::follow::Follow;
use super::{Lab, cluster, submit};

/// Runs the bench: `iterations_per_s` for each matrix, floor = bare loop, reach ≥ 0.98.
///
/// # Errors
/// When something could not be started or measured.
pub async fn run(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    let matrix = crate::demo::matrix()?;
    let cases = [
        (
            "bcsstk16",
            json!({"matrix": {"file": matrix}, "load_cases": lab.samples(60),
                   "iterations_per_capsule": 10}),
        ),
        (
            "poisson 1000x1000",
            json!({"matrix": {"poisson2d": {"n": 1000}}, "iterations_per_capsule": 10,
                   "tolerance": if lab.quick { 1e-1 } else { 1e-3 }}),
        ),
    ];
    let cluster = cluster(lab, 1, &[], true).await?;
    let mut follow = Follow::open(&cluster.broker).await?;
    for (name, params) in cases {
        // Once unmeasured on each side: pages, caches, the matrix.
        let mut bare = Vec::new();
        let mut ours = Vec::new();
        let rounds = if lab.quick { 1 } else { 5 };
        for round in 0..=rounds {
            lab.steps_message(&format!("{name}: round {round} of {rounds}"));
            let b = bare_loop(params.clone()).await?;
            let id = format!("{}-{round}", name.replace(' ', "-"));
            let submission = json!({"program": "cg@1", "params": params});
            let execution = submit(&cluster.broker, &id, submission).await?;
            let span = follow
                .to_completion(execution, Duration::from_secs(120))
                .await?;
            if round > 0 {
                ours.push(b.iterations / span.seconds());
                bare.push(b.iterations / b.seconds);
            }
        }
        let mut ratios: Vec<f64> = ours.iter().zip(&bare).map(|(o, b)| o / b).collect();
        let floor = median(&mut bare);
        // The machine's speed drifts: the ratio is the median of the pairs, not of the medians.
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
    Ok(())
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
