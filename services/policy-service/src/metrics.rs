//! Metrics of the service, as `/metrics` shows them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use fiec_broker::figures;
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

figures! {
    /// All figures; cheap to clone.
    pub struct Metrics in "fiec_policy" {
        /// Lines that became executions.
        submitted: Counter,
        /// First bindings that their nodes appended.
        entrusted: Counter,
        /// First bindings that their nodes did not append in time.
        overdue: Counter,
        /// Lines that were refused.
        rejected: Counter,
        /// Lines that were there before.
        repeated: Counter,
        /// Bindings by cause.
        bindings: ByCause,
        /// Races lost to another writer.
        conflicts: Counter,
        /// Appends whose fate is unknown.
        append_failures: Counter,
        /// Bindings sent to nodes.
        capsules: Counter,
        /// Publishes not acknowledged.
        publish_failures: Counter,
        /// Orders to yield.
        yield_orders: Counter,
        /// Direct probes of silent nodes.
        probes: Counter,
        /// Live executions.
        live_executions: Gauge,
        /// Executions that wait for a node.
        waiting_executions: Gauge,
        /// Live executions by who must act next.
        duties: ByActor,
        /// Live executions whose next party to act is late.
        duties_overdue: ByActor,
        /// Appends under way.
        appends_in_flight: Gauge,
        /// Submission messages under way.
        open_submissions: Gauge,
        /// 1 while submissions cannot be pulled.
        intake_closed: Gauge,
        /// Policy services present.
        replicas: Gauge,
        /// Names of nodes that are kept.
        nodes: Gauge,
        /// Names that sent vectors and have not joined, as far as they are kept.
        strangers: Gauge,
        /// Vectors that cannot be read, or that speak for another node than their subject.
        unreadable_vectors: Counter,
        /// Clock of a node that has joined, less the broker's.
        node_clock_skew_seconds: ByNode,
    }
}

impl Metrics {
    /// A registry that has them.
    pub fn registry(&self) -> Arc<Registry> {
        let mut registry = Registry::default();
        self.register(&mut registry);
        Arc::new(registry)
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
        self.node_clock_skew_seconds.clear();
        for (node, clock) in all {
            let node = [("node", node.as_str().to_owned())];
            let seconds = clock.ahead_us as f64 / 1e6;
            self.node_clock_skew_seconds
                .get_or_create(&node)
                .set(seconds);
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
