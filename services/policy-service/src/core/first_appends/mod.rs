//! The first message of a ledger takes one of two roads.
//!
//! ```text
//!          entrusted binding                             own append
//!
//!   policy service          node             policy service           node
//!   choose a slot                            choose a slot, or none
//!   binding  ────────────►  compute          append submitted(+bound)
//!                           append           acknowledge the submission
//!                           submitted+bound  capsule message ───────► compute
//!                           +started+…                                append
//!   read that in the feed                                             started+…
//!   acknowledge the submission
//!
//!   1 ledger message for a short execution   2 ledger messages for a short execution
//! ```
//!
//! * An entrusted binding is faster: the node does not wait for the broker. It requires that nobody
//!   else can have begun the ledger, and that the execution shares no limit with others. A client's
//!   id can have a ledger, so it is looked up before. Of two lines with one new id that come at the
//!   same time, compare-and-set accepts one binding.
//! * If the node appends nothing within `--entrust-ms`, the binding is appended here, unchanged.
//!   From then on it is on the other road.
//! * If both append, compare-and-set accepts one message. The node knows its own binding by the
//!   digest, and appends `started` after it.
//! * If the service dies, the submission is not acknowledged, so the broker delivers it to another
//!   policy service. That one finds the ledger, or appends it.

mod entrusted_bindings;

use std::time::{Duration, Instant};

use bytes::Bytes;
use fiec_broker::{AppendError, Draft, Entry, Tip};
use fiec_policy::{Input, LedgerView};
use fiec_schemas::{Bound, Event, ExecutionId, NodeId, Phase};

use super::Core;
use crate::effects::Effects;
use crate::intake::{Line, Others};
pub use entrusted_bindings::EntrustedBindings;

impl Core {
    /// Begins the ledger of a submission line with these events.
    pub(super) async fn begin_ledger(&mut self, mut line: Box<Line>, events: Vec<Event>) {
        // If the line waited here for long, another policy service may have taken it in.
        if !line.asked.is_recent() {
            line.others = Others::OtherService;
        }
        let now = self.effects.broker.now();
        match Draft::new(&line.tip, events, &self.effects.author, now) {
            Ok(draft) => match self.entrusted_node(&line, &draft) {
                Some(node) => self.entrust_first_binding(node, line, draft),
                None => self.append_first_message(line, draft).await,
            },
            Err(error) => self.settle_first_append(line, Err(error)).await,
        }
    }

    /// The node that may append this first message itself, if any may.
    fn entrusted_node(&self, line: &Line, draft: &Draft) -> Option<NodeId> {
        let state = &draft.state;
        let Phase::Bound(Bound { binding, .. }) = &state.phase else {
            return None;
        };
        // Verifiers and parts of a range are found by their ledgers.
        let is_plain = state.spec.is_some() && state.spread.is_none() && !state.guarded;
        let may = is_plain
            && line.others == Others::Nobody
            && !self.options.entrust.is_zero()
            && !self.policy.reserves_for(state.execution);
        may.then(|| binding.node.clone())
    }

    fn entrust_first_binding(&mut self, node: NodeId, line: Box<Line>, draft: Draft) {
        tracing::debug!(execution = %line.execution(), %node, "submitted, bound and left to its node");
        let due = Instant::now() + self.options.entrust;
        self.entrusted.push(node, (line, draft), due);
    }

    async fn append_first_message(&mut self, line: Box<Line>, draft: Draft) {
        match self.effects.ledger.send(draft, Bytes::new()).await {
            Ok(in_flight) => {
                debug_assert!(self.firsts.is_closed() || self.firsts.capacity() > 0);
                // Fails only while the service ends.
                let _ = self.firsts.send((line, in_flight)).await;
            }
            Err(error) => self.settle_first_append(line, Err(error)).await,
        }
    }

    /// Takes the result of a first append of this service.
    pub(super) async fn settle_first_append(
        &mut self,
        line: Box<Line>,
        settled: Result<Box<Tip>, AppendError>,
    ) {
        let execution = line.execution();
        match settled {
            Ok(tip) => {
                self.metrics.submitted.inc();
                self.accept_line(&line).await;
                self.stored(tip, true).await;
            }
            Err(AppendError::Conflict) => {
                self.metrics.conflicts.inc();
                self.run_for_line(line, Effects::existing);
            }
            Err(error) => {
                self.metrics.append_failures.inc();
                self.step(Input::Vanished { execution });
                match error {
                    // A retry would fail in the same way.
                    AppendError::Transition(_) | AppendError::Message(_) => {
                        self.refuse_line(&line, "", error.to_string());
                    }
                    _ => {
                        tracing::warn!(%execution, %error, "a submission could not be appended; it is tried again");
                        let reason = format!("a ledger could not be begun: {error}");
                        self.retry_line(&line, reason).await;
                    }
                }
            }
        }
    }

    /// Takes a ledger message of another writer. If it begins the ledger of an entrusted binding,
    /// the submission is acknowledged.
    pub(super) async fn settle_entrusted_binding(&mut self, view: &LedgerView<'_>) {
        let Some((line, draft)) = self.entrusted.take(view.state.execution) else {
            return;
        };
        if view.state.submission() == Some(draft.state.submission) {
            self.metrics.submitted.inc();
            if view.worker().is_some() {
                self.metrics.entrusted.inc();
            }
            self.accept_line(&line).await;
        } else {
            // Another submission has the id.
            self.metrics.conflicts.inc();
            self.run_for_line(line, Effects::existing);
        }
    }

    /// Appends the bindings that their nodes did not append in time, nor in `more_time`.
    pub(super) async fn append_overdue_bindings(&mut self, more_time: Duration) {
        let Some(due) = Instant::now().checked_sub(more_time) else {
            return;
        };
        while let Some((line, draft)) = self.entrusted.take_overdue(due) {
            self.metrics.overdue.inc();
            self.append_first_message(line, draft).await;
        }
    }

    /// Appends all open bindings when the service ends, because no service would watch the nodes.
    /// The submissions are delivered to another service, which finds the ledgers.
    pub(super) async fn append_open_bindings(&mut self) {
        for (line, draft) in self.entrusted.drain() {
            let sent = self.effects.ledger.send(draft, Bytes::new()).await;
            if let Err(error) = sent {
                tracing::debug!(execution = %line.execution(), %error, "not appended; it is submitted again");
            }
        }
    }

    /// Takes the result of reading a ledger that existed before its first append. The same
    /// submission is accepted, another one is refused.
    pub(super) async fn compare_with_ledger(
        &mut self,
        line: Box<Line>,
        found: Result<Option<Box<Entry>>, String>,
    ) {
        let execution = line.execution();
        match found {
            Ok(Some(entry)) => {
                let other = entry.message.state.submission;
                // An execution that the policy no longer knows has ended. The message may be older.
                if line.others != Others::Nobody || self.policy.knows(execution) {
                    self.reread(&entry.message, entry.seq);
                }
                if other != line.tip.state.submission {
                    return self.refuse_line(&line, "id", taken(execution, &other.short()));
                }
                match line.others {
                    Others::Nobody => self.metrics.submitted.inc(),
                    Others::SameName | Others::OtherService => self.metrics.repeated.inc(),
                };
                self.accept_line(&line).await;
            }
            // Another line of this id is on its way.
            Ok(None) if self.entrusted.is_open(execution) => {
                self.retry_line(&line, "its ledger has not begun yet".to_owned())
                    .await;
            }
            Ok(None) => {
                self.step(Input::Vanished { execution });
                self.retry_line(&line, "a ledger vanished while it was compared".to_owned())
                    .await;
            }
            Err(error) => {
                tracing::warn!(%execution, error, "a ledger cannot be read; the submission is tried again");
                let reason = format!("a ledger cannot be read: {error}");
                self.retry_line(&line, reason).await;
            }
        }
    }
}

/// Says that another submission has this id.
pub fn taken(execution: ExecutionId, digest: &str) -> String {
    format!(
        "exists with another body (execution {execution}, submission {digest}): \
         choose another id, or submit the same body again"
    )
}
