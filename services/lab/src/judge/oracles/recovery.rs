//! While an execution computes, the age of its last commit is bounded: what a lost machine would
//! take with it.

use std::collections::BTreeMap;
use std::time::Duration;

use fiec_broker::Broker;
use fiec_schemas::hardware::RunningProgress;
use fiec_schemas::{CommitPolicy, ExecutionId, NodeId, Phase, Timestamp};

use super::ledgers::{Last, last_of_each};
use crate::judge::checker::{Rule, Violation};

/// Most age of a commit by time while boundaries are passed: the longest interval of a worker, once
/// more, and the time for which the machine may pause.
pub const fn bound(longest_interval: Duration, machine_pauses: Duration) -> Duration {
    Duration::from_secs(2 * longest_interval.as_secs() + machine_pauses.as_secs())
}

/// Compares the progress that these nodes report with the ledgers, which are read after it.
pub async fn observe(
    broker: &Broker,
    bound: Duration,
    of: impl Fn(&NodeId) -> bool,
) -> Result<Vec<Violation>, String> {
    let nodes = fiec::client::me(broker)
        .nodes()
        .await
        .map_err(|e| format!("{e:#}"))?;
    let now = broker.now();
    let ledgers = last_of_each(broker).await?;
    let running = nodes.nodes.into_iter().filter_map(|node| node.vector);
    let running = running.filter(|vector| of(&vector.node));
    let progress: Vec<RunningProgress> = running.flat_map(|vector| vector.running).collect();
    Ok(judge(&ledgers, &progress, now, bound))
}

/// Finds executions that have passed boundaries, and whose last commit is too old.
pub fn judge(
    ledgers: &BTreeMap<ExecutionId, Last>,
    progress: &[RunningProgress],
    now: Timestamp,
    bound: Duration,
) -> Vec<Violation> {
    let mut found = Vec::new();
    for running in progress {
        let Some(Last { state, .. }) = ledgers.get(&running.execution) else {
            continue;
        };
        let computes = matches!(state.phase, Phase::Started(_)) && state.parked().is_none();
        // A submission that commits by boundaries sets its own bound.
        let by_time = state
            .spec
            .as_ref()
            .is_none_or(|spec| !matches!(spec.commit, CommitPolicy::Every(_)));
        let beyond = running.epoch == state.epoch && running.boundary > state.boundary_index();
        let age = u64::try_from(now.millis() - state.at.millis()).unwrap_or(0);
        if computes && by_time && beyond && Duration::from_millis(age) > bound {
            let id = running.execution.to_string();
            let what = "has passed boundaries that no commit holds for too long";
            found.push(Violation::new(Rule::RecoveryPoint, &id, what));
        }
    }
    found
}
