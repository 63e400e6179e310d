//! A first binding told to its node at the moment of its append, not after it: the node computes
//! while the broker stores, and what it computes counts once the capsule message has confirmed the
//! binding. It saves a round trip where nothing else is going on.

use async_nats::HeaderMap;
use bytes::Bytes;
use fiec_broker::{Broker, Draft};
use fiec_schemas::messages::{HANDOVER_HEADER, Handover};
use fiec_schemas::{NodeId, Phase, subjects};

/// What is told a node: its word, and the body that goes with it.
type Word = (Handover, Bytes);

/// Whom to tell what, where the draft binds.
pub fn word(draft: &Draft) -> Option<(NodeId, Word)> {
    let Phase::Bound(binding) = &draft.state.phase else {
        return None;
    };
    let word = Handover::Ahead {
        execution: draft.state.execution,
        epoch: draft.state.epoch,
    };
    let text = Bytes::copy_from_slice(draft.header.as_bytes());
    Some((binding.node.clone(), (word, text)))
}

/// Tells it. What is lost on the way costs nothing: the capsule message is on its way in any case.
pub async fn tell(broker: &Broker, node: &NodeId, (word, body): Word) {
    let Ok(text) = serde_json::to_string(&word) else {
        return;
    };
    let mut headers = HeaderMap::new();
    headers.insert(HANDOVER_HEADER, text);
    let subject = subjects::handover(node);
    let sent = broker.client.publish_with_headers(subject, headers, body);
    if let Err(error) = sent.await {
        tracing::debug!(%error, %node, "cannot tell a node of a binding ahead");
    }
}
