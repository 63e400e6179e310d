//! Consumers of departed nodes go and their capsules stay, on a private nats-server.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may end so")]

use std::time::Duration;

use async_nats::jetstream::consumer::pull;
use fiec_broker::topology::{self, Profile};
use fiec_broker::{Broker, ConnectOptions, capsules};
use fiec_dev_servers::{NatsOptions, NatsServer, NoProgress, locate_nats};
use fiec_schemas::{NodeId, subjects};
use futures_util::StreamExt as _;

struct World {
    broker: Broker,
    node: NodeId,
    _server: NatsServer,
    _folder: tempfile::TempDir,
}

impl World {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let binary = locate_nats(&NoProgress).await.unwrap();
        let options = NatsOptions::new(binary, folder.path().join("nats"));
        let server = NatsServer::start(options).await.unwrap();
        let broker = Broker::connect(ConnectOptions::new(server.client_url(), "test"));
        let broker = broker.await.unwrap();
        topology::apply(&broker, &Profile::default()).await.unwrap();
        Self {
            broker,
            node: NodeId::new("n1").unwrap(),
            _server: server,
            _folder: folder,
        }
    }

    /// The node's consumer, which the server keeps for this long.
    async fn consumer(&self, kept: Duration) {
        let config = pull::Config {
            inactive_threshold: kept,
            ..capsules::consumer_config(0, &self.node)
        };
        let stream = subjects::capsule_stream(0);
        let made = self.broker.js.create_consumer_on_stream(config, stream);
        made.await.unwrap();
    }

    /// How long the server keeps the node's consumer; none if it is not there.
    async fn kept(&self) -> Option<Duration> {
        let stream = self.broker.js.get_stream(subjects::capsule_stream(0)).await;
        let info = stream.unwrap();
        let info = info.consumer_info(subjects::capsule_consumer(&self.node));
        Some(info.await.ok()?.config.inactive_threshold)
    }

    async fn until_removed(&self) {
        for _ in 0..100 {
            if self.kept().await.is_none() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("the consumer of a node that is gone was not removed");
    }

    async fn publish(&self, payload: &'static str) {
        let subject = subjects::capsule(0, &self.node);
        let sent = self.broker.js.publish(subject, payload.into()).await;
        sent.unwrap().await.unwrap();
    }

    /// The capsules that the node is given, in their order; none is acknowledged.
    async fn pull(&self, count: usize) -> Vec<String> {
        let consumer = capsules::node_consumer(&self.broker, 0, &self.node).await;
        let consumer = consumer.unwrap();
        let pulled = consumer.fetch().max_messages(count).messages();
        let pulled = pulled.await.unwrap().take(count);
        let read = pulled.map(|m| String::from_utf8(m.unwrap().payload.to_vec()).unwrap());
        let read = tokio::time::timeout(Duration::from_secs(20), read.collect());
        read.await.unwrap()
    }
}

#[tokio::test]
async fn the_consumer_of_a_lost_node_is_removed_and_no_capsule_with_it() {
    let world = World::new().await;
    world.publish("delivered, not acknowledged").await;
    assert_eq!(world.pull(1).await, ["delivered, not acknowledged"]);
    assert_eq!(world.kept().await, Some(capsules::CONSUMER_KEPT));
    capsules::remove_consumer(&world.broker, 0, &world.node)
        .await
        .unwrap();
    assert_eq!(world.kept().await, None);

    world.consumer(Duration::from_secs(1)).await;
    world.publish("published while it was lost").await;
    world.until_removed().await;
    world
        .publish("published after its consumer was removed")
        .await;

    let all = [
        "delivered, not acknowledged",
        "published while it was lost",
        "published after its consumer was removed",
    ];
    assert_eq!(world.pull(3).await, all);
}

#[tokio::test]
async fn a_node_that_pulls_keeps_its_consumer() {
    let world = World::new().await;
    world.consumer(Duration::from_secs(1)).await;
    let consumer = world
        .broker
        .js
        .get_consumer_from_stream::<pull::Config, _, _>(
            subjects::capsule_consumer(&world.node),
            subjects::capsule_stream(0),
        );
    let consumer = consumer.await.unwrap();
    let messages = consumer
        .stream()
        .expires(Duration::from_secs(30))
        .messages();
    let mut messages = messages.await.unwrap();
    let quiet = tokio::time::timeout(Duration::from_secs(4), messages.next()).await;
    assert!(quiet.is_err(), "there was no capsule");
    assert!(world.kept().await.is_some(), "four times the limit");
    world.publish("late").await;
    assert_eq!(messages.next().await.unwrap().unwrap().payload, "late");
}

#[tokio::test]
async fn setup_limits_the_consumers_of_an_earlier_version() {
    let world = World::new().await;
    world.consumer(Duration::ZERO).await;
    assert_eq!(world.kept().await, Some(Duration::ZERO));
    topology::apply(&world.broker, &Profile::default())
        .await
        .unwrap();
    assert_eq!(world.kept().await, Some(capsules::CONSUMER_KEPT));
    // The server starts the timer of a consumer that is changed.
    world.consumer(Duration::ZERO).await;
    world.consumer(Duration::from_secs(1)).await;
    world.until_removed().await;
}
