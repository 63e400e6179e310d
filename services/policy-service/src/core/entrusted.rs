//! First bindings that are left to their nodes: the node is told what would be appended, computes
//! at once, and appends it together with what it has to say itself. What ends within milliseconds
//! costs one ledger message instead of two, and nobody waits for the broker before computing.
//!
//! Until then the submission is not acknowledged, so nothing is lost with either of the two. What
//! the node does not append in time is appended here, as it was told: from then on it is a binding
//! like any other. Should both append, compare-and-set lets one of them through, and the node knows
//! its own binding by its digest.
//!
//! What may have a ledger already is appended here at once; where nothing else is going on its node
//! begins meanwhile, and appends nothing before the capsule message has come.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Instant;

use async_nats::HeaderMap;
use bytes::Bytes;
use fiec_broker::{Broker, Draft};
use fiec_policy::LedgerView;
use fiec_schemas::messages::{HANDOVER_HEADER, Handover};
use fiec_schemas::package::is_built_in;
use fiec_schemas::{ExecutionId, NodeId, Phase, subjects};

use super::Core;
use crate::intake::Line;

/// Most bindings in one message.
const BINDINGS: usize = 50;
/// Most bytes of bindings in one message, unless it has a single one; the broker takes twice this.
const BINDING_BYTES: usize = 512 * 1024;

/// What nodes were told and have not appended yet, as far as is known here.
#[derive(Default)]
pub struct Entrusted {
    /// Texts to be sent, by node.
    waiting: BTreeMap<NodeId, Vec<String>>,
    open: HashMap<ExecutionId, (Box<Line>, Draft)>,
    /// When each is appended here, in the order of telling; some are not open any more.
    due: VecDeque<(Instant, ExecutionId)>,
}

impl Entrusted {
    fn push(&mut self, node: NodeId, line: Box<Line>, draft: Draft, until: Instant) {
        let texts = self.waiting.entry(node).or_default();
        texts.push(draft.header.clone());
        self.due.push_back((until, line.execution));
        self.open.insert(line.execution, (line, draft));
    }

    /// One that is to be appended here by now.
    fn overdue(&mut self, now: Instant) -> Option<(Box<Line>, Draft)> {
        while self.due.front().is_some_and(|(at, _)| *at <= now) {
            let (_, id) = self.due.pop_front()?;
            if let Some(open) = self.open.remove(&id) {
                return Some(open);
            }
        }
        None
    }

    /// Tells the nodes.
    pub async fn flush(&mut self, broker: &Broker) {
        while let Some((node, texts)) = self.waiting.pop_first() {
            let mut texts = &texts[..];
            while !texts.is_empty() {
                let (some, rest) = texts.split_at(fitting(texts));
                send(broker, &node, some, false).await;
                texts = rest;
            }
        }
    }
}

/// How many of these texts go in one message; at least one.
fn fitting(texts: &[String]) -> usize {
    let mut bytes = 0;
    let fits = |text: &&String| {
        bytes += text.len() + 1;
        bytes <= BINDING_BYTES
    };
    let count = texts.iter().take(BINDINGS).take_while(fits).count();
    count.clamp(1, texts.len().max(1))
}

/// Tells a node. What is lost on the way is appended here when its time has come, or was already.
async fn send(broker: &Broker, node: &NodeId, texts: &[String], appended: bool) {
    let bindings = u32::try_from(texts.len()).unwrap_or(u32::MAX);
    let word = Handover::Entrusted { bindings, appended };
    say(broker, node, &word, texts.join("\n").into()).await;
}

async fn say(broker: &Broker, node: &NodeId, word: &Handover, body: Bytes) {
    let Ok(word) = serde_json::to_string(word) else {
        return;
    };
    let mut headers = HeaderMap::new();
    headers.insert(HANDOVER_HEADER, word);
    let subject = subjects::handover(node);
    let sent = broker.client.publish_with_headers(subject, headers, body);
    if let Err(error) = sent.await {
        tracing::debug!(%error, %node, "cannot tell a node of its bindings");
    }
}

impl Core {
    /// The node that may begin a first binding before that is appended, where nothing speaks
    /// against it.
    pub(super) fn may_begin(&self, draft: &Draft) -> Option<NodeId> {
        let state = &draft.state;
        // Others look for a ledger behind a reservation, and at the parts of a range together.
        let plain = state.spec.is_some() && state.spread.is_none() && !state.guarded;
        let Phase::Bound(binding) = &state.phase else {
            return None;
        };
        let may =
            plain && !self.options.entrust.is_zero() && !self.policy.reserves_for(state.execution);
        may.then(|| binding.node.clone())
    }

    /// Appends what may have a ledger already, and has its node begin meanwhile where nothing else
    /// is going on: otherwise the capsule message costs less and comes soon enough. What a program
    /// of others' does may be seen outside, and an execution that has ended does nothing any more.
    pub(super) async fn append_and_tell(
        &mut self,
        node: NodeId,
        mut line: Box<Line>,
        draft: Draft,
    ) {
        let harmless = is_built_in(&line.spec.program);
        let alone = harmless && self.in_flight == 0 && self.later == 0;
        let text = alone.then(|| draft.header.clone());
        line.told = alone.then(|| (node.clone(), draft.state.epoch, draft.digest));
        // Behind the append: the broker stores that before it delivers this.
        if self.append_here(line, draft).await
            && let Some(text) = text
        {
            send(&self.effects.broker, &node, &[text], true).await;
        }
    }

    /// What a node may have begun was not appended.
    pub(super) async fn take_back(&self, line: &Line) {
        if let Some((node, epoch, digest)) = &line.told {
            let word = Handover::Abandoned {
                execution: line.execution,
                epoch: *epoch,
                bound: Some(*digest),
            };
            say(&self.effects.broker, node, &word, Bytes::new()).await;
        }
    }

    /// Leaves a first append to its node.
    pub(super) fn entrust(&mut self, node: NodeId, line: Box<Line>, draft: Draft) {
        tracing::debug!(execution = %line.execution, %node, "submitted, bound and left to its node");
        let until = Instant::now() + self.options.entrust;
        self.entrusted.push(node, line, draft, until);
        self.in_flight += 1;
    }

    /// A message of a ledger that was left to a node: the binding's fate.
    pub(super) async fn came(&mut self, view: &LedgerView<'_>) {
        let Some((line, draft)) = self.entrusted.open.remove(&view.state.execution) else {
            return;
        };
        if view.state.submission() == Some(draft.state.submission) {
            self.in_flight -= 1;
            self.metrics.submitted.inc();
            if view.worker().is_some() {
                self.metrics.entrusted.inc();
            }
            self.intake.done(line.message, true).await;
        } else {
            // Somebody else has the id.
            self.metrics.conflicts.inc();
            tokio::spawn(self.effects.clone().existing(line));
        }
    }

    /// At the end of the service: nobody would be there to see what the nodes do. The submissions
    /// come again to another service, which finds their ledgers.
    pub(super) async fn append_what_is_left(&mut self) {
        for (_, (line, draft)) in self.entrusted.open.drain() {
            let sent = self.effects.ledger.send(draft, Bytes::new()).await;
            if let Err(error) = sent {
                tracing::debug!(execution = %line.execution, %error, "not appended; it is submitted again");
            }
        }
    }

    /// Appends what the nodes have not appended in time.
    pub(super) async fn append_overdue(&mut self) {
        let now = Instant::now();
        while let Some((line, draft)) = self.entrusted.overdue(now) {
            self.metrics.overdue.inc();
            self.in_flight -= 1;
            self.append_here(line, draft).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_holds_bindings_up_to_its_bounds_and_always_one() {
        let texts = |bytes: usize, count| vec!["x".repeat(bytes); count];
        assert_eq!(fitting(&texts(100, 60)), BINDINGS);
        assert_eq!(fitting(&texts(48 * 1024, 60)), 10);
        assert_eq!(fitting(&texts(2 * BINDING_BYTES, 2)), 1);
    }
}
