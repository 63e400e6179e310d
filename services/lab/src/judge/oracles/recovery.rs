//! While an execution computes, the age of its last commit is bounded: what a lost machine would
//! take with it.

use std::collections::BTreeMap;

use fiec_broker::Broker;
use fiec_schemas::hardware::RunningProgress;
use fiec_schemas::{CommitPolicy, ExecutionId, Phase, Timestamp};

use super::ledgers::Last;
use crate::judge::checker::{Rule, Violation};

/// Most age of a commit by time while boundaries are passed, in ms: the longest interval of a
/// worker, once more, and a machine that pauses.
pub const BOUND_MS: i64 = 2 * 60_000 + 10_000;

/// Compares the progress that nodes report with the ledgers.
pub async fn observe(
    broker: &Broker,
    ledgers: &BTreeMap<ExecutionId, Last>,
) -> Result<Vec<Violation>, String> {
    let nodes = fiec::client::nodes(broker)
        .await
        .map_err(|e| format!("{e:#}"))?;
    let running = nodes.nodes.into_iter().filter_map(|node| node.vector);
    let progress: Vec<RunningProgress> = running.flat_map(|vector| vector.running).collect();
    Ok(judge(ledgers, &progress, broker.now()))
}

/// Finds executions that have passed boundaries, and whose last commit is too old.
pub fn judge(
    ledgers: &BTreeMap<ExecutionId, Last>,
    progress: &[RunningProgress],
    now: Timestamp,
) -> Vec<Violation> {
    let mut found = Vec::new();
    for running in progress {
        let Some(Last { state, .. }) = ledgers.get(&running.execution) else {
            continue;
        };
        let computes = matches!(state.phase, Phase::Started(_)) && state.parked.is_none();
        // Who asks for a commit every so many boundaries sets the bound.
        let by_time = state
            .spec
            .as_ref()
            .is_none_or(|spec| !matches!(spec.commit, CommitPolicy::Every(_)));
        let beyond = running.epoch == state.epoch && running.boundary > state.boundary_index();
        let age = now.millis() - state.at.millis();
        if computes && by_time && beyond && age > BOUND_MS {
            let id = running.execution.to_string();
            let what = "has passed boundaries that no commit holds for too long";
            found.push(Violation::new(Rule::RecoveryPoint, &id, what));
        }
    }
    found
}
