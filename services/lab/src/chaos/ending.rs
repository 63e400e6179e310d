//! The end of a run: what stays is paused and at last cancelled, and everything else ends by itself.

use std::collections::BTreeMap;
use std::time::Duration;

use fiec_schemas::messages::ExecutionVerb;
use fiec_schemas::{ExecutionId, Phase, Sequence, Tenant};
use tokio::time::{Instant, sleep};

use super::client::Client;
use super::load::Role;
use crate::cluster::Cluster;
use crate::judge::checker::{Rule, Violation};
use crate::judge::oracles::ledgers::last_of_each;

/// Longest time until everything has ended once all processes run again.
const QUIET: Duration = Duration::from_secs(240);
/// From then on everything counts as stuck whose ledgers do not move.
const STILL: Duration = Duration::from_secs(75);

/// Pauses or cancels the executions with these roles.
pub async fn end_stays(
    cluster: &Cluster,
    client: &Client,
    roles: &[Role],
    verb: ExecutionVerb,
) -> Vec<Violation> {
    let deadline = Instant::now() + STILL;
    let kept = client.kept();
    let kept: Vec<_> = kept
        .iter()
        .filter(|(_, _, is)| roles.contains(is))
        .collect();
    let pauses = matches!(verb, ExecutionVerb::Pause);
    let what = match pauses {
        true => "cannot be paused",
        false => "cannot be cancelled",
    };
    loop {
        let ledgers = last_of_each(&cluster.broker).await.unwrap_or_default();
        let is_done = |id: &ExecutionId| {
            ledgers.get(id).is_some_and(|last| match &last.state.phase {
                // One that is held does not go on, either.
                Phase::Paused { .. } | Phase::Held { .. } => pauses,
                phase => phase.is_terminal(),
            })
        };
        let open = kept.iter().filter(|(id, ..)| !is_done(id));
        let open: Vec<_> = open.collect();
        if open.is_empty() || Instant::now() >= deadline {
            let late = open.into_iter().map(|(id, ..)| id.to_string());
            let late = late.map(|id| Violation::new(Rule::Liveness, &id, what));
            return late.collect();
        }
        for (id, tenant, _) in open {
            client.end_stay(verb, *id, tenant).await;
        }
        sleep(Duration::from_millis(500)).await;
    }
}

/// Waits until every execution has ended that ends by itself. What is paused is resumed, and what is
/// held is retried.
pub async fn settle(cluster: &Cluster, client: &mut Client) -> Vec<Violation> {
    let deadline = Instant::now() + QUIET;
    let (mut moved_at, mut places) = (Instant::now(), BTreeMap::new());
    loop {
        let ledgers = last_of_each(&cluster.broker).await.unwrap_or_default();
        let mut open: BTreeMap<ExecutionId, String> = BTreeMap::new();
        let mut rests: Vec<(ExecutionId, Tenant, ExecutionVerb)> = Vec::new();
        for (id, tenant) in client.executions() {
            match ledgers.get(&id).map(|last| &last.state.phase) {
                None => drop(open.insert(id, "has no ledger".to_owned())),
                Some(phase) if phase.is_terminal() => {}
                Some(phase) => {
                    match phase {
                        Phase::Paused { .. } => {
                            rests.push((id, tenant.clone(), ExecutionVerb::Resume));
                        }
                        Phase::Held { .. } => {
                            rests.push((id, tenant.clone(), ExecutionVerb::Retry));
                        }
                        _ => {}
                    }
                    open.insert(id, format!("is {} and does not end", phase.kind()));
                }
            }
        }
        if open.is_empty() && !ledgers.is_empty() {
            return Vec::new();
        }
        let sequence = |id: &ExecutionId| ledgers.get(id).map_or(0, |last| last.seq);
        let now: BTreeMap<ExecutionId, Sequence> =
            open.keys().map(|id| (*id, sequence(id))).collect();
        if now != places {
            (moved_at, places) = (Instant::now(), now);
        }
        if Instant::now() >= deadline || moved_at.elapsed() >= STILL {
            let late = open
                .into_iter()
                .map(|(id, what)| Violation::new(Rule::Liveness, &id.to_string(), what));
            return late.collect();
        }
        client.let_go_on(&rests).await;
        sleep(Duration::from_millis(500)).await;
    }
}
