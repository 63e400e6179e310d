//! The durable consumers by which nodes pull their capsules.
//!
//! A node that leaves in order removes its consumer. The server removes the consumer of a lost node
//! after [`CONSUMER_KEPT`]. No capsule is lost with a consumer: the stream is a work queue, which
//! keeps a message until it is acknowledged. A new consumer starts at the oldest message.

use std::time::Duration;

use async_nats::jetstream::consumer::{
    AckPolicy, Consumer, DeliverPolicy, IntoConsumerConfig, pull,
};
use fiec_schemas::{NodeId, subjects};
use futures_util::TryStreamExt as _;

use crate::{Broker, BrokerError};

/// The server removes the consumer of a node that pulled nothing for this long. A living node always
/// has a pull open, and makes its consumer again after each reconnection.
pub const CONSUMER_KEPT: Duration = Duration::from_secs(3_600);

/// A running program's node may keep a capsule unacknowledged while it fetches σ.
const ACK_WAIT: Duration = Duration::from_secs(30);

/// Configuration of a node's consumer: durable, with the node's exact subject as filter.
pub fn consumer_config(shard: u16, node: &NodeId) -> pull::Config {
    pull::Config {
        durable_name: Some(subjects::capsule_consumer(node)),
        ack_policy: AckPolicy::Explicit,
        ack_wait: ACK_WAIT,
        max_ack_pending: 20_000,
        filter_subject: subjects::capsule(shard, node),
        deliver_policy: DeliverPolicy::All,
        inactive_threshold: CONSUMER_KEPT,
        ..Default::default()
    }
}

/// Makes or opens a node's consumer.
///
/// # Errors
/// When the broker refuses it.
pub async fn node_consumer(
    broker: &Broker,
    shard: u16,
    node: &NodeId,
) -> Result<Consumer<pull::Config>, BrokerError> {
    let (config, stream) = (
        consumer_config(shard, node),
        subjects::capsule_stream(shard),
    );
    let made = broker.js.create_consumer_on_stream(config, stream).await;
    made.map_err(BrokerError::operation(format!(
        "create the consumer of node {node}"
    )))
}

/// Removes the consumer of a node that leaves.
///
/// # Errors
/// When the broker refuses it, or the consumer is not there.
pub async fn remove_consumer(
    broker: &Broker,
    shard: u16,
    node: &NodeId,
) -> Result<(), BrokerError> {
    let (name, stream) = (
        subjects::capsule_consumer(node),
        subjects::capsule_stream(shard),
    );
    let removed = broker.js.delete_consumer_from_stream(name, stream).await;
    removed.map(drop).map_err(BrokerError::operation(format!(
        "remove the consumer of node {node}"
    )))
}

/// Sets [`CONSUMER_KEPT`] on the consumers that an earlier version made without it.
///
/// # Errors
/// When the broker refuses a change.
pub async fn limit_consumers(broker: &Broker, shard: u16) -> Result<(), BrokerError> {
    let name = subjects::capsule_stream(shard);
    let what = format!("list the consumers of {name}");
    let stream = broker.js.get_stream(&name).await;
    let stream = stream.map_err(BrokerError::operation(what.clone()))?;
    let listed: Result<Vec<_>, _> = stream.consumers().try_collect().await;
    for info in listed.map_err(BrokerError::operation(what))? {
        if !info.config.inactive_threshold.is_zero() {
            continue;
        }
        let mut config = info.config.into_consumer_config();
        config.inactive_threshold = CONSUMER_KEPT;
        let changed = stream.create_consumer(config).await;
        changed.map_err(BrokerError::operation(format!(
            "limit the age of consumer {}",
            info.name
        )))?;
    }
    Ok(())
}
