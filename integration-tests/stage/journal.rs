//! The journal of a cluster's ledgers, with conditions to wait for.

use std::ops::Deref;

use fiec_broker::Broker;
use fiec_lab::judge::journal;
pub use fiec_lab::judge::journal::{Line, compare_with_fold};
use fiec_schemas::scheduling::Rule;
use fiec_schemas::{Cause, Event, ExecutionId, NodeId};

use super::until;

/// By which rule, to whom and why in words an execution gives its place up with this message.
pub fn gives_way(line: &Line) -> Option<(Rule, Option<ExecutionId>, String)> {
    line.message.events.iter().find_map(|event| match event {
        Event::Yielded {
            cause: Cause::Preempted { rule, by, reason },
            ..
        } => Some((*rule, *by, reason.clone())),
        _ => None,
    })
}

/// Follows all ledgers from their beginning.
pub struct Journal(journal::Journal);

impl Deref for Journal {
    type Target = journal::Journal;
    fn deref(&self) -> &journal::Journal {
        &self.0
    }
}

impl Journal {
    pub fn open(broker: &Broker) -> Self {
        Self(journal::Journal::open(broker))
    }

    /// The causes of an execution's bindings, in their order.
    pub fn causes(&self, id: ExecutionId) -> Vec<&'static str> {
        let ledger = self.of(id);
        let events = ledger.iter().flat_map(|line| &line.message.events);
        events
            .filter_map(|event| match event {
                Event::Bound { cause, .. } => Some(cause.as_str()),
                _ => None,
            })
            .collect()
    }

    /// Waits for a message of one ledger for which `found` answers.
    pub async fn find<T>(
        &self,
        id: ExecutionId,
        what: &str,
        found: impl Fn(&Line) -> Option<T>,
    ) -> T {
        until(what, async || self.first(id, &found)).await
    }

    /// Waits until an execution computes and has committed so often; gives its node.
    pub async fn computing(&self, id: ExecutionId, commits: u64) -> NodeId {
        let what = format!("{id} computes with {commits} commits");
        self.find(id, &what, |line| {
            line.started_on()
                .filter(|_| line.message.state.totals.commits >= commits)
        })
        .await
    }

    /// Waits until an execution has ended so; gives its last message.
    pub async fn ended(&self, id: ExecutionId, phase: &str) -> Line {
        let last = self
            .find(id, &format!("{id} has ended ({phase})"), |line| {
                line.message.state.phase.is_terminal().then(|| line.clone())
            })
            .await;
        assert_eq!(last.phase(), phase, "{:?}", last.message.events);
        last
    }
}

/// The digest with which an execution completed.
#[track_caller]
pub fn digest_of(line: &Line) -> String {
    let result = line.message.events.iter().find_map(|event| match event {
        Event::Completed { result, .. } => result["digest"].as_str(),
        _ => None,
    });
    result.expect("a completed execution's digest").to_owned()
}

/// Asserts that each state of a ledger is the product's own fold of the one before.
#[track_caller]
pub fn audit(ledger: &[Line]) {
    assert!(!ledger.is_empty(), "there is no ledger");
    assert_eq!(compare_with_fold(ledger), Vec::<String>::new());
}
