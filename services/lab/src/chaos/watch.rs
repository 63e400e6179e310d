//! Watches, while the faults go on, what must hold all the time: a commit of what runs undisturbed is
//! never too old, whatever is done to the history.

use std::collections::BTreeMap;
use std::time::Duration;

use fiec_broker::Broker;
use fiec_schemas::NodeId;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::faults::Calm;
use super::schedule::Target;
use crate::cluster::Cluster;
use crate::judge::checker::Violation;
use crate::judge::oracles::recovery;

/// Pause between two observations, and the time that one may take.
const PAUSE: Duration = Duration::from_secs(1);
const WITHIN: Duration = Duration::from_secs(5);

/// Observes until the end. Gives what two observations in a row have shown of nodes that ran
/// undisturbed for the bound, beside an undisturbed broker. A run in which nothing could be observed
/// is a violation, too.
pub async fn recovery_points(
    broker: Broker,
    calm: Calm,
    (workers, brokers): (usize, usize),
    bound: Duration,
    end: CancellationToken,
) -> Vec<Violation> {
    let mut found: BTreeMap<String, Violation> = BTreeMap::new();
    let mut before: BTreeMap<String, Violation> = BTreeMap::new();
    let mut has_observed = false;
    while end.run_until_cancelled(sleep(PAUSE)).await.is_some() {
        let undisturbed = |node: &NodeId| {
            let at = (0..workers).find(|at| Cluster::node(at + 1) == *node);
            let worker = at.map(|at| Target::Worker(at as u64));
            // A killed child begins again at its last commit.
            let brokers = (0..brokers).map(|at| Target::Broker(at as u64));
            let mut needed = worker.into_iter().chain(brokers).chain([Target::Child(0)]);
            at.is_some() && needed.all(|target| calm.lasts(target, bound))
        };
        let observed = timeout(WITHIN, recovery::observe(&broker, bound, undisturbed)).await;
        // While the broker or all policy services are away nothing can be observed.
        let Ok(Ok(now)) = observed else {
            before.clear();
            continue;
        };
        has_observed = true;
        let now: BTreeMap<String, Violation> =
            now.into_iter().map(|v| (v.to_string(), v)).collect();
        let again = now.iter().filter(|(words, _)| before.contains_key(*words));
        found.extend(again.map(|(words, v)| (words.clone(), v.clone())));
        before = now;
    }
    if !has_observed {
        return vec![Violation::unobserved("no recovery point was ever observed")];
    }
    found.into_values().collect()
}
