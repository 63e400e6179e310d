//! Bindings to send to nodes. They are gathered while acknowledgements keep coming, and sent
//! together as soon as none is waiting.

use std::collections::BTreeMap;

use async_nats::jetstream::message::PublishMessage;
use fiec_broker::{Broker, Unacknowledged};
use fiec_policy::Policy;
use fiec_schemas::messages::{CapsuleBinding, CapsuleMessage};
use fiec_schemas::{NodeId, subjects};
use tokio::sync::mpsc::Sender;

use crate::metrics::Metrics;

/// Bindings that are not sent.
pub struct Outbox {
    /// Bindings by node, in the order of their appends.
    waiting: BTreeMap<NodeId, Vec<CapsuleBinding>>,
    /// Most bindings in one message.
    limit: usize,
    /// Where the acknowledgements are awaited.
    acks: Sender<Unacknowledged>,
}

impl Outbox {
    /// Empty.
    pub fn new(limit: usize, acks: Sender<Unacknowledged>) -> Self {
        Self {
            waiting: BTreeMap::new(),
            limit,
            acks,
        }
    }

    /// Adds a stored binding. Returns true if its node's message is full.
    pub fn push(&mut self, binding: CapsuleBinding) -> bool {
        let Some(bound) = binding.state.phase.binding() else {
            return false;
        };
        let list = self.waiting.entry(bound.node.clone()).or_default();
        list.push(binding);
        list.len() >= self.limit
    }

    /// Sends everything.
    pub async fn flush(&mut self, broker: &Broker, policy: &Policy, metrics: &Metrics) {
        if self.waiting.is_empty() {
            return;
        }
        let server = broker.server();
        while let Some((node, mut bindings)) = self.waiting.pop_first() {
            while !bindings.is_empty() {
                let rest = bindings.split_off(bindings.len().min(self.limit));
                let some = std::mem::replace(&mut bindings, rest);
                metrics.capsules.inc_by(some.len() as u64);
                let message = CapsuleMessage {
                    v: 1,
                    bindings: some,
                    server: Some(server.clone()),
                };
                let Ok(payload) = serde_json::to_vec(&message) else {
                    continue;
                };
                let subject = subjects::capsule(policy.shard(&node), &node);
                let publish = PublishMessage::build().payload(payload.into());
                match broker.js.send_publish(subject, publish).await {
                    Ok(ack) => drop(self.acks.send(broker.sent(ack)).await),
                    Err(error) => {
                        metrics.publish_failures.inc();
                        tracing::warn!(%error, %node, "cannot send capsules; the sweep will");
                    }
                }
            }
        }
    }
}
