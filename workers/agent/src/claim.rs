//! The node's name: held by one instance at a time, by compare-and-set on its key.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_nats::jetstream::kv::{Operation, Store};
use fiec_broker::{Broker, BrokerError, nodes};
use fiec_schemas::messages::{ControlReply, ControlRequest, NodeEventKind, Record};
use fiec_schemas::{InstanceId, NodeDescriptor, NodeId, subjects};
use futures_util::StreamExt;
use tokio_util::sync::CancellationToken;

const PROBE_WITHIN: Duration = Duration::from_millis(1_500);

/// The reason why the name could not be claimed.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// A living instance has the name.
    #[error(
        "node {node} is held by another running worker (instance {instance}, host {host}, pid {pid}): stop it, or give this one another name with --node"
    )]
    Held {
        /// The name.
        node: NodeId,
        /// The instance that holds it.
        instance: InstanceId,
        /// Its host.
        host: String,
        /// Its process.
        pid: u32,
    },
    /// A broker operation failed.
    #[error(transparent)]
    Broker(#[from] BrokerError),
}

/// A claimed name.
pub struct Claim {
    store: Store,
    key: String,
    instance: InstanceId,
    node: NodeId,
    revision: AtomicU64,
}

async fn answers(broker: &Broker, node: &NodeId) -> Option<ControlReply> {
    let body = serde_json::to_vec(&ControlRequest::Ping).ok()?;
    let request = broker.client.request(subjects::control(node), body.into());
    let message = tokio::time::timeout(PROBE_WITHIN, request)
        .await
        .ok()?
        .ok()?;
    serde_json::from_slice(&message.payload).ok()
}

/// Claims the name that the descriptor says.
///
/// # Errors
/// [`ClaimError::Held`] when a living instance has it.
pub async fn claim(broker: &Broker, descriptor: &NodeDescriptor) -> Result<Claim, ClaimError> {
    let node = descriptor.node.clone();
    let key = subjects::node_key(&node);
    let store = broker
        .js
        .get_key_value(subjects::NODES_BUCKET)
        .await
        .map_err(BrokerError::operation("open the bucket of nodes"))?;
    let value = serde_json::to_vec(descriptor).map_err(|error| BrokerError::Malformed {
        what: "own descriptor".to_owned(),
        reason: error.to_string(),
    })?;
    for _ in 0..8 {
        let entry = store
            .entry(&key)
            .await
            .map_err(BrokerError::operation("read the node's key"))?;
        let before = entry.as_ref().filter(|e| e.operation == Operation::Put);
        if let Some(entry) = before
            && let Some(living) = answers(broker, &node).await
            && living.instance != descriptor.instance
        {
            let held: Option<NodeDescriptor> = serde_json::from_slice(&entry.value).ok();
            let held = held.filter(|d| d.instance == living.instance);
            return Err(ClaimError::Held {
                node,
                instance: living.instance,
                host: held.as_ref().map(|d| d.host.clone()).unwrap_or_default(),
                pid: held.map(|d| d.pid).unwrap_or_default(),
            });
        }
        let last = entry.map_or(0, |e| e.revision);
        match store.update(&key, value.clone().into(), last).await {
            Ok(revision) => {
                let claim = Claim {
                    store,
                    key,
                    instance: descriptor.instance,
                    node,
                    revision: AtomicU64::new(revision),
                };
                let detail = format!("{} pid {}", descriptor.host, descriptor.pid);
                record(
                    broker,
                    &claim,
                    NodeEventKind::Joined,
                    detail,
                    Some(Box::new(descriptor.clone())),
                )
                .await;
                return Ok(claim);
            }
            // Another worker was faster. The next round checks whether it lives.
            Err(error) => tracing::debug!(%error, "the node's key has changed"),
        }
    }
    Err(ClaimError::Broker(BrokerError::Missing {
        what: format!("a quiet moment on key {key}"),
        hint: ": several workers are starting under this name".to_owned(),
    }))
}

async fn record(
    broker: &Broker,
    claim: &Claim,
    what: NodeEventKind,
    detail: String,
    descriptor: Option<Box<NodeDescriptor>>,
) {
    let record = Record::Node {
        node: claim.node.clone(),
        instance: Some(claim.instance),
        what,
        contract: None,
        substrate: None,
        detail,
        who: None,
        at: broker.now(),
        descriptor,
    };
    let Ok(body) = serde_json::to_vec(&record) else {
        return;
    };
    let published = broker
        .js
        .publish(subjects::node_record(&claim.node), body.into())
        .await;
    let stored = match published {
        Ok(ack) => ack.await.map(drop),
        Err(error) => Err(error),
    };
    if let Err(error) = stored {
        tracing::warn!(%error, %what, "cannot record the node's change");
    }
}

impl Claim {
    /// Returns when another instance has the name.
    pub async fn taken_over(&self, stop: CancellationToken) {
        while !stop.is_cancelled() {
            let Ok(mut watch) = self
                .store
                .watch_from_revision(&self.key, self.revision.load(Ordering::Acquire))
                .await
            else {
                tokio::time::sleep(Duration::from_secs(1)).await;
                continue;
            };
            loop {
                let entry = tokio::select! {
                    () = stop.cancelled() => return,
                    entry = watch.next() => entry,
                };
                match entry {
                    Some(Ok(entry)) if entry.operation == Operation::Put => {
                        let found: Option<NodeDescriptor> =
                            serde_json::from_slice(&entry.value).ok();
                        if found.is_some_and(|d| d.instance != self.instance) {
                            return;
                        }
                    }
                    Some(Ok(_)) => {}
                    Some(Err(error)) => {
                        tracing::debug!(%error, "watch of the node's key");
                    }
                    None => break,
                }
            }
        }
    }

    /// Publishes the node's descriptor again.
    ///
    /// # Errors
    /// When another instance has the name, or the broker does not do it.
    pub async fn renew(&self, descriptor: &NodeDescriptor) -> Result<(), BrokerError> {
        let value = serde_json::to_vec(descriptor).map_err(|error| BrokerError::Malformed {
            what: "own descriptor".to_owned(),
            reason: error.to_string(),
        })?;
        let before = self.revision.load(Ordering::Acquire);
        let revision = self
            .store
            .update(&self.key, value.into(), before)
            .await
            .map_err(BrokerError::operation("renew the node's claim"))?;
        self.revision.store(revision, Ordering::Release);
        Ok(())
    }

    /// Publishes the node's descriptor again if the broker has lost it.
    ///
    /// # Errors
    /// When the broker does not do it.
    pub async fn restore(&self, descriptor: &NodeDescriptor) -> Result<(), BrokerError> {
        const WHAT: &str = "look for the node's claim";
        let entry = self.store.entry(&self.key).await;
        let entry = entry.map_err(BrokerError::operation(WHAT))?;
        if let Some(entry) = entry.as_ref().filter(|e| e.operation == Operation::Put) {
            let found: Option<NodeDescriptor> = serde_json::from_slice(&entry.value).ok();
            if found.is_some_and(|d| d.instance == self.instance) {
                self.revision.store(entry.revision, Ordering::Release);
            }
            // Another instance's is seen by `taken_over`.
            return Ok(());
        }
        self.revision
            .store(entry.map_or(0, |e| e.revision), Ordering::Release);
        tracing::warn!(node = %self.node, "the broker had lost the node's claim; it is written again");
        self.renew(descriptor).await
    }

    /// Gives the name back.
    pub async fn release(&self, broker: &Broker, why: &str) {
        record(broker, self, NodeEventKind::Left, why.to_owned(), None).await;
        let revision = self.revision.load(Ordering::Acquire);
        if let Err(error) = nodes::leave(&self.store, &self.node, revision).await {
            tracing::warn!(%error, "cannot release the node's name; policy services will see it as silent");
        }
    }
}
