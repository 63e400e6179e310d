//! What `/metrics` shows.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use fiec_policy::Duties;
use fiec_schemas::duty::Actor;
use fiec_schemas::{ClockReading, NodeId};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

type ByActor = Family<[(&'static str, &'static str); 1], Gauge>;
type ByNode = Family<[(&'static str, String); 1], Gauge<f64, AtomicU64>>;
type ByCause = Family<[(&'static str, &'static str); 1], Counter>;

/// All figures; cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    /// Lines that became executions.
    pub submitted: Counter,
    /// First bindings that their nodes appended.
    pub entrusted: Counter,
    /// First bindings that their nodes did not append in time.
    pub overdue: Counter,
    /// Lines that were refused.
    pub rejected: Counter,
    /// Lines that were there before.
    pub repeated: Counter,
    /// Bindings by cause.
    pub bindings: ByCause,
    /// Races lost to another writer.
    pub conflicts: Counter,
    /// Appends whose fate is not known.
    pub append_failures: Counter,
    /// Bindings sent to nodes.
    pub capsules: Counter,
    /// Publishes that were not acknowledged.
    pub publish_failures: Counter,
    /// Yield orders.
    pub orders: Counter,
    /// Probes.
    pub probes: Counter,
    /// Live executions.
    pub live: Gauge,
    /// Executions that wait for a node.
    pub waiting: Gauge,
    /// Live executions by who must act next.
    pub duties: ByActor,
    /// Those of them on which that is overdue.
    pub duties_overdue: ByActor,
    /// Appends under way.
    pub in_flight: Gauge,
    /// Submission messages not yet acknowledged.
    pub open_submissions: Gauge,
    /// Policy services present.
    pub replicas: Gauge,
    /// Names of nodes that are kept.
    pub nodes: Gauge,
    /// Names that sent vectors and have not joined, as far as they are kept.
    pub strangers: Gauge,
    /// Clocks of nodes that have joined, less the broker's, in seconds.
    pub node_clock_skew: ByNode,
}

impl Metrics {
    /// The registry that names them.
    pub fn registry(&self) -> Arc<Registry> {
        let mut r = Registry::with_prefix("fiec_policy");
        r.register(
            "submitted",
            "Lines that became executions",
            self.submitted.clone(),
        );
        r.register(
            "entrusted",
            "First bindings that their nodes appended",
            self.entrusted.clone(),
        );
        r.register(
            "overdue",
            "First bindings that their nodes did not append in time",
            self.overdue.clone(),
        );
        r.register("rejected", "Lines that were refused", self.rejected.clone());
        r.register(
            "repeated",
            "Lines that were there before",
            self.repeated.clone(),
        );
        r.register("bindings", "Bindings by cause", self.bindings.clone());
        r.register(
            "conflicts",
            "Races lost to another writer",
            self.conflicts.clone(),
        );
        r.register(
            "append_failures",
            "Appends whose fate is unknown",
            self.append_failures.clone(),
        );
        r.register("capsules", "Bindings sent to nodes", self.capsules.clone());
        r.register(
            "publish_failures",
            "Publishes not acknowledged",
            self.publish_failures.clone(),
        );
        r.register("yield_orders", "Orders to yield", self.orders.clone());
        r.register(
            "probes",
            "Direct probes of silent nodes",
            self.probes.clone(),
        );
        r.register("live_executions", "Live executions", self.live.clone());
        r.register(
            "waiting_executions",
            "Executions that wait for a node",
            self.waiting.clone(),
        );
        r.register(
            "duties",
            "Live executions by who must act next",
            self.duties.clone(),
        );
        r.register(
            "duties_overdue",
            "Live executions whose next party to act is late",
            self.duties_overdue.clone(),
        );
        r.register(
            "appends_in_flight",
            "Appends under way",
            self.in_flight.clone(),
        );
        r.register(
            "open_submissions",
            "Submission messages under way",
            self.open_submissions.clone(),
        );
        r.register("replicas", "Policy services present", self.replicas.clone());
        r.register("nodes", "Names of nodes that are kept", self.nodes.clone());
        r.register(
            "strangers",
            "Names that sent vectors and have not joined, as far as they are kept",
            self.strangers.clone(),
        );
        r.register(
            "node_clock_skew_seconds",
            "Clock of a node that has joined, less the broker's",
            self.node_clock_skew.clone(),
        );
        Arc::new(r)
    }

    /// Shows who must act next on how many executions.
    pub fn show_duties(&self, all: &BTreeMap<Actor, Duties>) {
        let number = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        for (actor, duties) in all {
            let who = [("who", actor.as_str())];
            let (all, overdue) = (number(duties.all), number(duties.overdue));
            self.duties.get_or_create(&who).set(all);
            self.duties_overdue.get_or_create(&who).set(overdue);
        }
    }

    /// Shows the clocks of the nodes that are there, and of no others.
    pub fn show_clocks<'a>(&self, all: impl Iterator<Item = (&'a NodeId, ClockReading)>) {
        self.node_clock_skew.clear();
        for (node, clock) in all {
            let node = [("node", node.as_str().to_owned())];
            let seconds = clock.ahead_us as f64 / 1e6;
            self.node_clock_skew.get_or_create(&node).set(seconds);
        }
    }

    /// Counts a binding.
    pub fn bound(&self, cause: &'static str) {
        self.bindings.get_or_create(&[("cause", cause)]).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_are_shown_of_the_nodes_that_are_there() {
        let metrics = Metrics::default();
        let nodes: [NodeId; 2] = ["n1".parse().unwrap(), "n2".parse().unwrap()];
        let clock = |ahead_us| ClockReading {
            ahead_us,
            within_us: 300,
        };
        metrics.show_clocks([(&nodes[0], clock(0))].into_iter());
        metrics.show_clocks([(&nodes[1], clock(-3_600_000_000))].into_iter());
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &metrics.registry()).unwrap();
        let line = r#"fiec_policy_node_clock_skew_seconds{node="n2"} -3600.0"#;
        assert!(text.contains(line), "{text}");
        assert!(!text.contains(r#"node="n1""#), "{text}");
    }

    #[test]
    fn duties_are_shown_for_each_actor() {
        let metrics = Metrics::default();
        let (all, overdue) = (3, 1);
        let none = Duties::default();
        let duties = Actor::ALL.map(|actor| (actor, none));
        let mut duties = BTreeMap::from(duties);
        duties.insert(Actor::Worker, Duties { all, overdue });
        metrics.show_duties(&duties);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &metrics.registry()).unwrap();
        for line in [
            r#"fiec_policy_duties{who="worker"} 3"#,
            r#"fiec_policy_duties_overdue{who="worker"} 1"#,
            r#"fiec_policy_duties{who="person"} 0"#,
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in {text}");
        }
    }
}
