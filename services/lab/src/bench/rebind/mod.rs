//! `bench rebind`: the gap of a move, from the end of the last capsule on node A to the begin of the
//! first capsule on node B. Both times are from the clock of this machine, read by the program. The
//! bench orders the moves through the API, as an operator does. `state` measures what a commit and
//! a move of a large σ store and send, and `file` what `torch.save` takes for as many bytes.

mod file;
mod state;

use std::time::Duration;

use fiec_schemas::messages::ExecutionVerb;
use serde_json::json;

use super::figures::quantile;
use super::follow::{self, millis};
use super::{Lab, cluster, request, submit};

/// Poll interval of the ledger. A feed would wake this process while the execution moves.
const POLL: Duration = Duration::from_millis(7);
/// Longest time of one move.
const PATIENCE: Duration = Duration::from_secs(20);

/// Runs the bench: `gap_p50_ms`, `gap_p99_ms` for warm, cold and large states, and the figures of
/// `state`.
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
    state::run(lab).await
}

async fn measure(
    lab: &Lab<'_>,
    case: &str,
    bytes: u64,
    moves: usize,
    worker_args: &[&str],
) -> anyhow::Result<Vec<f64>> {
    let cluster = cluster(lab, 2, worker_args, false).await?;
    let broker = &cluster.broker;
    // Capsules of 200 µs and one routine commit a second, so that most commits are those of moves.
    let submission = json!({
        "program": "synthetic@1",
        "params": {"capsules": 1_000_000_000u64, "state_bytes": bytes, "work_us": 200},
    });
    let execution = submit(broker, "mover", submission).await?;
    let arrived = |epoch| follow::arrived(broker, execution, epoch, POLL, PATIENCE);
    let mut at = arrived(1).await?;
    let mut gaps = Vec::with_capacity(moves);
    for number in 0..moves {
        if number % 10 == 0 {
            lab.steps_message(&format!("{case}: move {number} of {moves}"));
        }
        // Long enough for a few capsules on each node, so that a running computation moves. An odd
        // number does not beat with the intervals of the services.
        tokio::time::sleep(Duration::from_millis(23)).await;
        request(broker, ExecutionVerb::Yield, execution).await?;
        let moved = arrived(at.epoch + 1).await?;
        gaps.push(millis(moved.yielded_from(&at.node)?, moved.since));
        at = moved;
    }
    request(broker, ExecutionVerb::Cancel, execution).await?;
    cluster.stop().await;
    Ok(gaps)
}
