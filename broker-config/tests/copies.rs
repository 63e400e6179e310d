//! The copies of streams and buckets in a cluster of three servers: `apply` changes their number
//! only if it is asked to, and health is red while they differ.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use async_nats::jetstream::stream;
use fiec_broker::topology::{self, Profile};
use fiec_broker::{Broker, ConnectOptions, Upkeep};
use fiec_dev_servers::{NatsCluster, NoProgress, Sync, locate_nats};
use fiec_schemas::subjects;
use futures_util::TryStreamExt;

/// Copies of each stream, buckets included.
async fn copies(broker: &Broker) -> BTreeMap<String, usize> {
    let names: Vec<String> = broker.js.stream_names().try_collect().await.unwrap();
    let mut copies = BTreeMap::new();
    for name in names {
        // A stream whose copies have just changed elects a leader.
        let began = Instant::now();
        let found = loop {
            match broker.js.get_stream(&name).await {
                Ok(found) => break found,
                Err(error) => assert!(began.elapsed() < Duration::from_secs(30), "{name}: {error}"),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        copies.insert(name, found.cached_info().config.num_replicas);
    }
    copies
}

async fn reduce(broker: &Broker, stream: &str, num_replicas: usize) {
    let found = broker.js.get_stream(stream).await.unwrap();
    let config = found.cached_info().config.clone();
    let fewer = stream::Config {
        num_replicas,
        ..config
    };
    broker.js.update_stream(fewer).await.unwrap();
}

/// Waits for an answer, for longer than two comparisons take.
async fn until<T>(what: &str, look: impl Fn() -> Option<T>) -> T {
    for _ in 0..600 {
        if let Some(found) = look() {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("waited in vain until {what}");
}

#[tokio::test]
async fn a_second_setup_keeps_the_copies_and_takes_none_away_without_a_word() {
    let dir = tempfile::tempdir().unwrap();
    let nats = locate_nats(&NoProgress).await.unwrap();
    let cluster = NatsCluster::start(&nats, dir.path(), 3, Sync::Default).await;
    let cluster = cluster.unwrap();
    let broker = Broker::connect(ConnectOptions::new(cluster.urls(), "test")).await;
    let broker = broker.unwrap();
    let three = Profile {
        replicas: Some(3),
        ..Profile::default()
    };
    topology::apply(&broker, &three).await.unwrap();
    let made = copies(&broker).await;
    assert!(
        made.len() >= 15 && made.values().all(|n| *n == 3),
        "{made:?}"
    );

    topology::apply(&broker, &Profile::default()).await.unwrap();
    assert_eq!(
        copies(&broker).await,
        made,
        "after a setup without a number"
    );

    let one = Profile {
        replicas: Some(1),
        ..Profile::default()
    };
    let refused = topology::apply(&broker, &one)
        .await
        .unwrap_err()
        .to_string();
    assert!(
        refused.contains("FIEC_CAPSULE_0 has 3 copies, and 1 were requested"),
        "{refused}"
    );
    assert_eq!(copies(&broker).await, made, "after a refusal");

    // A stream that is made again gets as many as the others.
    broker.js.delete_stream("KV_FIEC_QUOTA").await.unwrap();
    topology::apply(&broker, &Profile::default()).await.unwrap();
    assert_eq!(copies(&broker).await, made, "after a loss");

    let allowed = Profile {
        allow_fewer_replicas: true,
        ..one
    };
    topology::apply(&broker, &allowed).await.unwrap();
    let fewer = copies(&broker).await;
    assert_eq!(fewer.len(), made.len());
    assert!(fewer.values().all(|n| *n == 1), "{fewer:?}");
    topology::apply(&broker, &three).await.unwrap();
    assert_eq!(copies(&broker).await, made, "after more are asked for");

    let upkeep = Upkeep::default();
    let keeping = tokio::spawn(upkeep.clone().keep(broker.clone(), "test"));
    reduce(&broker, subjects::CHUNK_STREAM, 1).await;
    let says = |health: Result<(), String>| health.err().filter(|why| why.contains("different"));
    let why = until("health is red", || says(upkeep.check())).await;
    assert!(why.contains("1: FIEC_CHUNK; 3: "), "{why}");
    topology::apply(&broker, &three).await.unwrap();
    until("health is green", || upkeep.check().ok()).await;
    keeping.abort();
}
