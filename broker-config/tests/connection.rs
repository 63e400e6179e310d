//! The number of the connection, on a private nats-server.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may end so")]

use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use bytes::Bytes;
use fiec_broker::{Broker, ConnectOptions};
use fiec_dev_servers::{NatsOptions, NatsServer, NoProgress, locate_nats};
use tracing::span;

const PATIENCE: Duration = Duration::from_secs(60);
/// Messages that the client keeps for a subscription that nobody reads.
const KEPT: u64 = 65_536;
/// More than the events that the client keeps for its callback.
const DROPPED: u64 = 1_000;

/// A log that blocks at the first slow consumer until the gate opens.
struct BlockedLog(Arc<Gate>);

#[derive(Default)]
struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn open(&self) {
        *self.is_open.lock().unwrap() = true;
        self.opened.notify_all();
    }

    /// Blocks the task that writes the log, but no other task of its thread. Opens at last, so that the
    /// test ends in any case.
    fn pass(&self) {
        tokio::task::block_in_place(|| {
            let is_open = self.is_open.lock().unwrap();
            let waited = self
                .opened
                .wait_timeout_while(is_open, PATIENCE, |is_open| !*is_open);
            *waited.unwrap().0 = true;
        });
    }
}

impl tracing::Subscriber for BlockedLog {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target() == "fiec_broker::connection" && *metadata.level() == tracing::Level::WARN
    }

    fn event(&self, _: &tracing::Event<'_>) {
        self.0.pass();
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_connection_that_was_made_amid_a_flood_of_other_events_is_counted_and_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let binary = locate_nats(&NoProgress).await.unwrap();
    let options = NatsOptions::new(binary, folder.path().join("nats"));
    let server = NatsServer::start(options).await.unwrap();
    let gate = Arc::new(Gate::default());
    tracing::subscriber::set_global_default(BlockedLog(gate.clone())).unwrap();
    let broker = Broker::connect(ConnectOptions::new(server.client_url(), "test"));
    let broker = broker.await.unwrap();
    let mut connections = broker.connections();
    let first = broker.connection();
    let made = || broker.client.statistics().connects.load(Ordering::Relaxed);
    assert_eq!(made(), 1);

    // The log blocks at the first message that is dropped, and the events behind it pile up.
    let unread = broker.client.subscribe("unread").await.unwrap();
    for _ in 0..KEPT + DROPPED {
        broker.client.publish("unread", Bytes::new()).await.unwrap();
    }
    // The answer to a later question comes after the messages.
    let asked = broker.client.request("nobody", Bytes::new()).await;
    assert!(asked.is_err(), "nobody answers");
    connections.mark_unchanged();
    broker.client.force_reconnect().await.unwrap();
    let reconnected = async {
        while made() < 2 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, reconnected).await.unwrap();
    let counted = broker.connection();
    gate.open();
    let noticed = tokio::time::timeout(Duration::from_secs(10), connections.changed()).await;
    assert_eq!((first, counted, noticed.is_ok()), (1, 2, true));
    assert_eq!(*connections.borrow(), broker.connection());
    drop(unread);
}
