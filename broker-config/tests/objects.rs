//! Objects by digest, on a private nats-server.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may end so")]

use std::time::Duration;

use fiec_broker::topology::{self, Profile};
use fiec_broker::{Broker, ConnectOptions, collect, store};
use fiec_dev_servers::{NatsOptions, NatsServer, NoProgress, locate_nats};
use fiec_schemas::{Digest, subjects};
use futures_util::future::join_all;

struct World {
    broker: Broker,
    server: NatsServer,
    _folder: tempfile::TempDir,
}

async fn world() -> World {
    let folder = tempfile::tempdir().unwrap();
    let binary = locate_nats(&NoProgress).await.unwrap();
    let options = NatsOptions::new(binary, folder.path().join("nats"));
    let server = NatsServer::start(options).await.unwrap();
    let broker = connect(&server, Duration::from_secs(5)).await;
    topology::apply(&broker, &Profile::default()).await.unwrap();
    World {
        broker,
        server,
        _folder: folder,
    }
}

async fn connect(server: &NatsServer, timeout: Duration) -> Broker {
    let mut options = ConnectOptions::new(server.client_url(), "test");
    options.timeout = timeout;
    Broker::connect(options).await.unwrap()
}

/// Messages of the bucket of data: one description an object, and its chunks.
async fn messages(broker: &Broker) -> u64 {
    let name = format!("OBJ_{}", subjects::DATA_BUCKET);
    let stream = broker.js.get_stream(name).await.unwrap();
    stream.cached_info().state.messages
}

/// 3 MB, which are 12 chunks.
fn data(seed: u8) -> Vec<u8> {
    (0..3_000_000_u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8 ^ seed)
        .collect()
}

#[tokio::test]
async fn a_put_of_an_object_that_is_there_soon_counts_as_new() {
    let world = world().await;
    let digest = Digest::of(b"x");
    let put_at = async || {
        let put = store::put_data(&world.broker, digest, b"x").await;
        put.unwrap();
        let objects = collect::contents(&world.broker, collect::Store::Data).await;
        objects.unwrap().objects[0].stored_at
    };
    let first = put_at().await;
    let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
    while put_at().await == first {
        assert!(
            tokio::time::Instant::now() < deadline,
            "puts do not renew it"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test]
async fn equal_puts_at_the_same_time_leave_one_object_and_disturb_no_reader() {
    let world = world().await;
    let data = data(1);
    let digest = Digest::of(&data);
    let once = world.server.client_url().to_owned();
    store::put_data(&world.broker, digest, &data).await.unwrap();
    let whole = messages(&world.broker).await;
    // Readers that have begun when equal bytes are put again, from connections of their own.
    let rounds = (0..6).map(|_| async {
        let own = Broker::connect(ConnectOptions::new(once.clone(), "other"));
        let own = own.await.unwrap();
        let (read, put) = tokio::join!(
            store::get_data(&own, digest, 0),
            store::put_data(&world.broker, digest, &data)
        );
        put.unwrap();
        assert_eq!(read.unwrap().len(), data.len());
    });
    let all = tokio::time::timeout(Duration::from_secs(60), join_all(rounds));
    all.await.expect("a reader waits for chunks that are gone");
    assert_eq!(messages(&world.broker).await, whole, "chunks were left");
}

#[tokio::test]
async fn first_puts_at_the_same_time_leave_no_chunks_of_their_own() {
    let world = world().await;
    let data = data(2);
    let digest = Digest::of(&data);
    let puts = (0..6).map(|_| async {
        store::put_data(&world.broker, digest, &data).await.unwrap();
        let read = store::get_data(&world.broker, digest, 0).await.unwrap();
        assert_eq!(read.len(), data.len());
    });
    join_all(puts).await;
    assert_eq!(
        messages(&world.broker).await,
        1 + data.len().div_ceil(subjects::INLINE_STATE_LIMIT) as u64,
        "the writers that lost left chunks"
    );
    // A put of an object that has lost its chunks stores them again.
    remove_chunks(&world.broker).await;
    store::put_data(&world.broker, digest, &data).await.unwrap();
    let read = store::get_data(&world.broker, digest, 0).await.unwrap();
    assert_eq!(read.len(), data.len());
}

async fn remove_chunks(broker: &Broker) {
    let name = format!("OBJ_{}", subjects::DATA_BUCKET);
    let stream = broker.js.get_stream(name).await.unwrap();
    let chunks = format!("$O.{}.C.>", subjects::DATA_BUCKET);
    stream.purge().filter(chunks).await.unwrap();
}

#[tokio::test]
async fn reading_an_object_whose_chunks_are_gone_ends_with_an_error() {
    let world = world().await;
    let data = data(3);
    let digest = Digest::of(&data);
    store::put_data(&world.broker, digest, &data).await.unwrap();
    remove_chunks(&world.broker).await;
    let hasty = connect(&world.server, Duration::from_secs(1)).await;
    let read = store::get_data(&hasty, digest, data.len() as u64);
    let read = tokio::time::timeout(Duration::from_secs(30), read).await;
    let error = read.expect("the reader waits without a limit").unwrap_err();
    assert!(
        error.to_string().contains("the broker sent nothing for 4s"),
        "{error}"
    );
}

#[tokio::test]
async fn an_unreadable_description_keeps_no_other_object_from_the_list() {
    let world = world().await;
    let broker = &world.broker;
    let data = data(1);
    let digest = Digest::of(&data);
    store::put_data(broker, digest, &data).await.unwrap();
    // Chunks that seem to belong to nothing may be those of the unreadable one.
    let unreadable = [("M", "{"), ("C", "chunk")];
    for (kind, payload) in unreadable {
        let subject = format!("$O.{}.{kind}.unreadable", subjects::DATA_BUCKET);
        let sent = broker.js.publish(subject, payload.into()).await.unwrap();
        sent.await.unwrap();
    }
    let contents = collect::contents(broker, collect::Store::Data).await;
    let contents = contents.unwrap();
    let names: Vec<_> = contents.objects.iter().map(|o| o.name.clone()).collect();
    assert_eq!(names, [digest.to_string()]);
    assert!(contents.orphans.is_empty(), "{:?}", contents.orphans);
}
