//! What executions emit is in the stream once and in order, on a private nats-server.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may end so")]

use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::stream::Config;
use bytes::Bytes;
use fiec_broker::outbox::{self, Emit, PLACE_HEADER};
use fiec_broker::topology::{self, Profile};
use fiec_broker::{Broker, ConnectOptions};
use fiec_dev_servers::{NatsOptions, NatsServer, NoProgress, locate_nats};
use fiec_schemas::{ExecutionId, ExecutionState, Submission, Tenant, Timestamp, subjects};
use futures_util::future::join_all;

struct World {
    broker: Broker,
    tenant: Tenant,
    execution: ExecutionId,
    server: NatsServer,
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
            tenant: Tenant::new("lab").unwrap(),
            execution: ExecutionId(uuid::Uuid::now_v7()),
            server,
            _folder: folder,
        }
    }

    /// Changes the stream's configuration.
    async fn configure(&self, change: impl FnOnce(&mut Config)) {
        let stream = self.broker.js.get_stream(subjects::OUTBOX_STREAM).await;
        let mut config = stream.unwrap().cached_info().config.clone();
        change(&mut config);
        self.broker.js.update_stream(config).await.unwrap();
    }

    async fn publish(&self, emits: &[Emit]) -> Result<(), fiec_broker::BrokerError> {
        outbox::publish(&self.broker, &self.tenant, self.execution, emits).await
    }

    /// The places of all messages, in the order in which the stream has them.
    async fn places(&self) -> Vec<String> {
        let stream = self.broker.js.get_stream(subjects::OUTBOX_STREAM).await;
        let stream = stream.unwrap();
        let mut places = Vec::new();
        for seq in 1..=stream.cached_info().state.last_sequence {
            let message = stream.direct_get(seq).await.unwrap();
            places.extend(message.headers.get(PLACE_HEADER).map(ToString::to_string));
        }
        places
    }
}

/// Messages of one boundary; the one in the middle is large.
fn emits(boundary: u64, count: u32) -> Vec<Emit> {
    let bytes = |index| if index == count / 2 { 5_000 } else { 10 };
    (0..count)
        .map(|index| Emit {
            name: format!("n{}", index % 2),
            boundary,
            index,
            bytes: Bytes::from(vec![b'x'; bytes(index)]),
        })
        .collect()
}

fn in_order(boundary: u64, count: u32) -> Vec<String> {
    (0..count)
        .map(|index| format!("{boundary}.{index}"))
        .collect()
}

#[tokio::test]
async fn a_message_that_was_lost_between_two_that_are_stored_is_published_by_the_next_holder() {
    let world = World::new().await;
    let emits = emits(7, 5);
    let stored = outbox::store(&world.broker, &world.tenant, world.execution, &emits);
    let submission = Submission::parse(br#"{"program":"synthetic@1"}"#).unwrap();
    let (tenant, now) = (world.tenant.clone(), Timestamp::now());
    let mut state =
        ExecutionState::unborn(tenant, world.execution, Arc::new(submission), None, now);
    state.outbox = Some(stored.await.unwrap());
    // The message in the middle is lost on its way.
    world
        .configure(|config| config.max_message_size = 1_000)
        .await;
    assert!(world.publish(&emits).await.is_err());
    world.configure(|config| config.max_message_size = -1).await;
    outbox::settle(&world.broker, &state).await.unwrap();
    assert_eq!(world.places().await, in_order(7, 5));
}

#[tokio::test]
async fn a_publisher_that_was_stopped_for_longer_than_the_window_publishes_nothing_again() {
    let world = World::new().await;
    let window = Duration::from_millis(100);
    world
        .configure(|config| config.duplicate_window = window)
        .await;
    let emits = emits(3, 4);
    world.publish(&emits).await.unwrap();
    // The window is over once the server takes the same id again.
    let mut taken = 0;
    while taken < 2 {
        let message = async_nats::jetstream::message::PublishMessage::build().message_id("probe");
        let subject = subjects::outbox(&world.tenant, ExecutionId(uuid::Uuid::nil()), "probe");
        let ack = world
            .broker
            .js
            .send_publish(subject, message)
            .await
            .unwrap();
        taken += usize::from(!ack.await.unwrap().duplicate);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    world.publish(&emits).await.unwrap();
    assert_eq!(world.places().await, in_order(3, 4));
}

#[tokio::test]
async fn publishers_that_race_publish_each_message_once_and_in_order() {
    let world = World::new().await;
    let mut expected = Vec::new();
    for boundary in 1..=20 {
        let emits = emits(boundary, 1 + (boundary % 3) as u32 * 20);
        expected.extend(in_order(boundary, emits.len() as u32));
        let racing = (0..4).map(|_| async {
            let own = ConnectOptions::new(world.server.client_url(), "racing");
            let own = Broker::connect(own).await.unwrap();
            let published = outbox::publish(&own, &world.tenant, world.execution, &emits);
            published.await.unwrap();
        });
        join_all(racing).await;
    }
    assert_eq!(world.places().await, expected);
}
