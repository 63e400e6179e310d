//! Entrusted first bindings, until a message of their ledger comes or their time is up.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Instant;

use async_nats::HeaderMap;
use fiec_broker::{Broker, Draft};
use fiec_schemas::messages::{HANDOVER_HEADER, Handover};
use fiec_schemas::{ExecutionId, NodeId, subjects};

use crate::intake::Line;

/// Most bindings in one message.
const BINDINGS: usize = 50;
/// Most bytes of bindings in one message, unless it has a single one. The broker takes twice this.
const BINDING_BYTES: usize = 512 * 1024;

/// A submission line and the first message of its ledger.
pub type OpenBinding = (Box<Line>, Draft);

/// Entrusted bindings whose ledgers have no message yet.
#[derive(Default)]
pub struct EntrustedBindings {
    /// Headers of ledger messages that are not sent, by node.
    unsent: BTreeMap<NodeId, Vec<String>>,
    open: HashMap<ExecutionId, OpenBinding>,
    /// When the service appends each binding itself, earliest first. Some entries are no longer
    /// open.
    due: VecDeque<(Instant, ExecutionId)>,
}

impl EntrustedBindings {
    /// Entrusts a binding to a node until `due`.
    pub fn push(&mut self, node: NodeId, (line, draft): OpenBinding, due: Instant) {
        let execution = line.execution();
        let headers = self.unsent.entry(node).or_default();
        headers.push(draft.header.clone());
        self.due.push_back((due, execution));
        self.open.insert(execution, (line, draft));
    }

    /// True if the binding of this execution is entrusted to a node.
    pub fn is_open(&self, execution: ExecutionId) -> bool {
        self.open.contains_key(&execution)
    }

    /// Takes the binding of this execution out.
    pub fn take(&mut self, execution: ExecutionId) -> Option<OpenBinding> {
        self.open.remove(&execution)
    }

    /// Takes out a binding whose time is up.
    pub fn take_overdue(&mut self, now: Instant) -> Option<OpenBinding> {
        while self.due.front().is_some_and(|(at, _)| *at <= now) {
            let (_, execution) = self.due.pop_front()?;
            if let Some(open) = self.open.remove(&execution) {
                return Some(open);
            }
        }
        None
    }

    /// Takes all out.
    pub fn drain(&mut self) -> impl Iterator<Item = OpenBinding> {
        self.open.drain().map(|(_, open)| open)
    }

    /// Sends the unsent bindings. A lost message only costs time: its bindings become overdue.
    pub async fn flush(&mut self, broker: &Broker) {
        while let Some((node, headers)) = self.unsent.pop_first() {
            let mut headers = &headers[..];
            while !headers.is_empty() {
                let (some, rest) = headers.split_at(count_fitting(headers));
                send_bindings(broker, &node, some).await;
                headers = rest;
            }
        }
    }
}

/// Number of headers that go in one message; at least one.
fn count_fitting(headers: &[String]) -> usize {
    let mut bytes = 0;
    let fits = |header: &&String| {
        bytes += header.len() + 1;
        bytes <= BINDING_BYTES
    };
    let count = headers.iter().take(BINDINGS).take_while(fits).count();
    count.clamp(1, headers.len().max(1))
}

async fn send_bindings(broker: &Broker, node: &NodeId, bindings: &[String]) {
    let word = Handover::Entrusted {
        bindings: u32::try_from(bindings.len()).unwrap_or(u32::MAX),
    };
    let Ok(word) = serde_json::to_string(&word) else {
        return;
    };
    let mut headers = HeaderMap::new();
    headers.insert(HANDOVER_HEADER, word);
    let (subject, body) = (subjects::handover(node), bindings.join("\n").into());
    let sent = broker.client.publish_with_headers(subject, headers, body);
    if let Err(error) = sent.await {
        tracing::debug!(%error, %node, "cannot send a node its first bindings");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_holds_bindings_up_to_its_bounds_and_always_one() {
        let headers = |bytes: usize, count| vec!["x".repeat(bytes); count];
        assert_eq!(count_fitting(&headers(100, 60)), BINDINGS);
        assert_eq!(count_fitting(&headers(48 * 1024, 60)), 10);
        assert_eq!(count_fitting(&headers(2 * BINDING_BYTES, 2)), 1);
    }
}
