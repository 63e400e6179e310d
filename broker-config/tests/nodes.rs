//! A node that leaves or is forgotten has its keys deleted, and the marks of these deletions age out.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may end so")]

use std::time::Duration;

use async_nats::jetstream::kv::{Operation, Store};
use async_nats::jetstream::stream;
use fiec_broker::topology::{self, Profile};
use fiec_broker::{Broker, ConnectOptions, buckets, nodes};
use fiec_dev_servers::{NatsOptions, NatsServer, NoProgress, locate_nats};
use fiec_schemas::trust::{Quarantine, Quarantined};
use fiec_schemas::{Contract, InstanceId, NodeDescriptor, NodeFlags, NodeId, Timestamp, subjects};
use futures_util::TryStreamExt as _;
use serde_json::{Value, json};

struct World {
    broker: Broker,
    bucket: Store,
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
            bucket: bucket(&broker).await,
            broker,
            _server: server,
            _folder: folder,
        }
    }

    async fn put(&self, key: String, value: &impl serde::Serialize) -> u64 {
        let value = serde_json::to_vec(value).unwrap();
        self.bucket.put(key, value.into()).await.unwrap()
    }

    /// A descriptor and a proof, as a worker states them. Only the instance is read.
    async fn join(&self, node: &NodeId, instance: InstanceId) -> u64 {
        self.put(subjects::proof_key(node), &json!({"proof": 1}))
            .await;
        let descriptor = descriptor(node, instance);
        serde_json::from_value::<NodeDescriptor>(descriptor.clone()).unwrap();
        self.put(subjects::node_key(node), &descriptor).await
    }

    async fn keys(&self) -> Vec<String> {
        let entries = buckets::entries(&self.bucket).await.unwrap();
        entries.into_iter().map(|(key, _)| key).collect()
    }
}

async fn bucket(broker: &Broker) -> Store {
    let bucket = broker.js.get_key_value(subjects::NODES_BUCKET).await;
    bucket.unwrap()
}

fn descriptor(node: &NodeId, instance: InstanceId) -> Value {
    json!({
        "v": 1, "node": node, "instance": instance, "host": "h", "pid": 1, "version": "0",
        "started_at": Timestamp::now(), "shard": 0, "slots": 1, "cpus": 1, "isa": "x86_64",
        "memory_limit_bytes": 1, "memory_limit_source": "declared", "substrates": [],
        "profile": {}, "programs": [], "labels": {}, "thresholds": fiec_schemas::hardware::default_thresholds(),
    })
}

fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

#[tokio::test]
async fn a_node_that_leaves_or_is_forgotten_leaves_only_a_mark_that_ages_out() {
    let world = World::new().await;
    let (left, lost) = (node("left"), node("lost"));
    let instance = InstanceId::random();
    let revision = world.join(&left, instance).await;
    world.join(&lost, instance).await;
    let revoked = NodeFlags {
        revoked_at: Some(Timestamp::now()),
        revoked: Some(instance),
        ..NodeFlags::default()
    };
    world.put(subjects::flags_key(&lost), &revoked).await;
    world
        .put(subjects::quarantine_key(&lost), &Quarantine::default())
        .await;
    nodes::leave(&world.bucket, &left, revision).await.unwrap();
    assert!(
        nodes::forget(&world.broker, &lost, Some(instance))
            .await
            .unwrap()
    );
    assert_eq!(world.keys().await, Vec::<String>::new());
    let all = world.bucket.stream.info_with_subjects("$KV.FIEC_NODES.>");
    let all: Vec<(String, usize)> = all.await.unwrap().try_collect().await.unwrap();
    assert_eq!(all.len(), 6, "{all:?}");
    for (subject, count) in all {
        assert_eq!(count, 1, "{subject} keeps more than its mark");
        let mark = world
            .bucket
            .stream
            .get_last_raw_message_by_subject(&subject);
        let headers = mark.await.unwrap().headers;
        let age = headers.get("Nats-TTL").map(ToString::to_string);
        let kept = nodes::MARKS_KEPT.as_secs().to_string();
        assert!(age == Some(kept), "{subject}: {headers:?}");
    }
}

/// A worker takes the name while the service deletes what was kept of the one before.
#[tokio::test]
async fn a_node_that_joins_meanwhile_keeps_its_proof_and_its_name() {
    let world = World::new().await;
    let (name, old) = (node("n1"), InstanceId::random());
    // It joins at another step of the deletion in each round.
    for round in 0..200_u64 {
        world.join(&name, old).await;
        let new = InstanceId::random();
        let joins = async {
            let began = std::time::Instant::now();
            while began.elapsed() < Duration::from_micros(10 * round) {
                tokio::task::yield_now().await;
            }
            // Both at once: the step between two deletions is short.
            let (descriptor, proof) = (descriptor(&name, new), json!({"proof": new}));
            let (descriptor, proof) = tokio::join!(
                world.put(subjects::node_key(&name), &descriptor),
                world.put(subjects::proof_key(&name), &proof),
            );
            (descriptor, proof)
        };
        let forgets = nodes::forget(&world.broker, &name, Some(old));
        let ((descriptor, proof), _) = tokio::join!(joins, forgets);
        for (key, revision) in [
            (subjects::node_key(&name), descriptor),
            (subjects::proof_key(&name), proof),
        ] {
            let entry = world.bucket.entry(&key).await.unwrap().unwrap();
            assert_eq!(
                (entry.operation, entry.revision),
                (Operation::Put, revision),
                "{key}"
            );
        }
    }
}

/// The client library's list waits up to a minute for what is deleted while it lists.
#[tokio::test]
async fn a_bucket_is_listed_at_once_while_its_keys_are_deleted() {
    let world = World::new().await;
    let all: Vec<NodeId> = (0..300).map(|n| node(&format!("pod-{n}"))).collect();
    let instance = InstanceId::random();
    for node in &all {
        world.join(node, instance).await;
    }
    let deleting = async {
        for node in &all {
            let forgotten = nodes::forget(&world.broker, node, Some(instance)).await;
            assert!(forgotten.unwrap());
        }
    };
    let listing = async {
        let mut longest = Duration::ZERO;
        loop {
            let began = std::time::Instant::now();
            let left = world.keys().await.len();
            longest = longest.max(began.elapsed());
            if left == 0 {
                break longest;
            }
        }
    };
    let ((), longest) = tokio::join!(deleting, listing);
    assert!(longest < Duration::from_secs(5), "{longest:?}");
}

#[tokio::test]
async fn what_another_life_or_an_operator_has_said_stays() {
    let world = World::new().await;
    let (old, new) = (InstanceId::random(), InstanceId::random());
    let again = node("again");
    let stale = world.join(&again, old).await;
    world.join(&again, new).await;
    for instance in [Some(old), None] {
        let forgotten = nodes::forget(&world.broker, &again, instance).await;
        assert!(!forgotten.unwrap());
    }
    nodes::leave(&world.bucket, &again, stale)
        .await
        .unwrap_err();
    let kept = node("kept");
    let cordoned = NodeFlags {
        cordoned: true,
        ..NodeFlags::default()
    };
    world.put(subjects::flags_key(&kept), &cordoned).await;
    let quarantine = Quarantine {
        entries: vec![Quarantined {
            contract: Contract::Bitwise,
            substrate: None,
            reason: "a test".to_owned(),
            who: "ann".to_owned(),
            at: Timestamp::now(),
        }],
        released: None,
    };
    world
        .put(subjects::quarantine_key(&kept), &quarantine)
        .await;
    assert!(nodes::forget(&world.broker, &kept, None).await.unwrap());
    let expected = ["flags.kept", "node.again", "proof.again", "quarantine.kept"];
    assert_eq!(world.keys().await, expected);
}

/// It was set up by a version that let marks stay for ever.
#[tokio::test]
async fn a_bucket_of_an_earlier_version_is_served_and_a_setup_brings_it_up_to_date() {
    let world = World::new().await;
    let name = world.bucket.stream_name.clone();
    world.broker.js.delete_stream(&name).await.unwrap();
    let earlier = async_nats::jetstream::kv::Config {
        bucket: subjects::NODES_BUCKET.to_owned(),
        history: 4,
        ..Default::default()
    };
    let earlier = world.broker.js.create_key_value(earlier).await.unwrap();
    let world = World {
        bucket: earlier,
        ..world
    };
    let (one, other) = (node("one"), node("other"));
    let instance = InstanceId::random();
    world.join(&one, instance).await;
    let revision = world.join(&other, instance).await;
    assert!(
        nodes::forget(&world.broker, &one, Some(instance))
            .await
            .unwrap()
    );
    nodes::leave(&world.bucket, &other, revision).await.unwrap();
    assert_eq!(world.keys().await, Vec::<String>::new());
    let entry = world.bucket.entry("node.one").await.unwrap().unwrap();
    assert_eq!(entry.operation, Operation::Purge);
    topology::apply(&world.broker, &Profile::default())
        .await
        .unwrap();
    let config: stream::Config = bucket(&world.broker)
        .await
        .stream
        .cached_info()
        .config
        .clone();
    assert!(config.allow_message_ttl);
    assert_eq!(config.subject_delete_marker_ttl, Some(nodes::MARKS_KEPT));
    assert_eq!(nodes::MARKS_KEPT, Duration::from_secs(3_600));
}
