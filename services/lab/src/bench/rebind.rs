//! `bench rebind`: end of the last capsule on A to start of the first on B, by the programs' own
//! clocks (both on this machine). Moves are ordered through the API, as an operator or the policy
//! would.

use fiec_schemas::messages::ExecutionVerb;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use fiec::client;
use serde_json::json;

use super::figures::quantile;
use super::follow;
use super::{Lab, cluster, submit, tenant};

/// How often it is looked whether it has arrived: nobody of ours wakes up while it moves.
const LOOK: Duration = Duration::from_millis(7);

/// Runs the bench: `gap_p50_ms`, `gap_p99_ms` for warm, cold and large states.
///
/// # Errors
/// When something could not be started or measured.
pub async fn run(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    let cases = [
        ("warm 72 KiB", 72 * 1024, 220, &[][..]),
        ("cold 72 KiB", 72 * 1024, 60, &["--cold"][..]),
        ("warm 24 MB", 24_000_000, 40, &[][..]),
    ];
    for (case, bytes, moves, worker_args) in cases {
        let moves = lab.samples(moves);
        let mut gaps = measure(lab, case, bytes, moves, worker_args).await?;
        for (metric, share) in [("gap_p50_ms", 0.5), ("gap_p99_ms", 0.99)] {
            let value = quantile(&mut gaps, share);
            lab.figures.add("rebind", case, metric, "ms", value, None);
        }
    }
    Ok(())
}

async fn measure(
    lab: &Lab<'_>,
    case: &str,
    bytes: u64,
    moves: usize,
    worker_args: &[&str],
) -> anyhow::Result<Vec<f64>> {
    let cluster = cluster(lab, 2, worker_args, false).await?;
    let patience = Duration::from_secs(20);
    // Capsules of 200 µs, routine commits once a second: the moves are what commits most.
    let submission = json!({
        "program": "synthetic@1",
        "params": {"capsules": 1_000_000_000u64, "state_bytes": bytes, "work_us": 200},
    });
    let execution = submit(&cluster.broker, "mover", submission).await?;
    let arrived = |epoch| follow::arrived(&cluster.broker, execution, epoch, LOOK, patience);
    let mut at = arrived(1).await?;
    let mut gaps = Vec::with_capacity(moves);
    for number in 0..moves {
        if number % 10 == 0 {
            lab.steps_message(&format!("{case}: move {number} of {moves}"));
        }
        // Long enough for a few capsules on each node, so that every move is one of a running
        // computation; odd, so that it does not beat with anything.
        tokio::time::sleep(Duration::from_millis(23)).await;
        let reply = client::execution(
            &cluster.broker,
            ExecutionVerb::Yield,
            &tenant()?,
            &execution.to_string(),
            None,
        )
        .await?;
        ensure!(
            reply.error.is_none(),
            "the move was refused: {:?}",
            reply.error
        );
        let moved = arrived(at.epoch + 1).await?;
        ensure!(
            moved.node != at.node,
            "it was bound to {} again",
            moved.node
        );
        let yielded = moved
            .yielded
            .context("a move without the end of computing before it")?;
        gaps.push((moved.since.micros() - yielded.micros()) as f64 / 1e3);
        at = moved;
    }
    let reply = client::execution(
        &cluster.broker,
        ExecutionVerb::Cancel,
        &tenant()?,
        &execution.to_string(),
        None,
    )
    .await?;
    ensure!(
        reply.error.is_none(),
        "the cancel was refused: {:?}",
        reply.error
    );
    cluster.stop().await;
    Ok(gaps)
}
