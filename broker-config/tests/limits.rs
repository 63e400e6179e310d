//! Limits of bytes on private nats-servers: each stream has one, a full one refuses and loses nothing,
//! and a setup fits into the store that there is.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may end so")]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::stream::{Config, DiscardPolicy, Info, StorageType};
use bytes::Bytes;
use fiec_broker::topology::{self, Profile};
use fiec_broker::{
    AppendError, Broker, BrokerError, ConnectOptions, Draft, Ledger, Tip, Upkeep, copies,
};
use fiec_dev_servers::{NatsOptions, NatsServer, NoProgress, locate_nats};
use fiec_schemas::{
    ClientId, Event, ExecutionId, ExecutionState, Submission, Tenant, Timestamp, subjects,
};

const MIB: u64 = 1 << 20;

struct World {
    broker: Broker,
    server: NatsServer,
    folder: tempfile::TempDir,
}

impl World {
    /// A server whose store has at most this many MiB.
    async fn with_store(mib: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self::in_folder(folder, mib).await
    }

    async fn in_folder(folder: tempfile::TempDir, mib: u64) -> Self {
        let binary = locate_nats(&NoProgress).await.unwrap();
        let mut options = NatsOptions::new(binary, folder.path().join("nats"));
        let store = options.data_dir.display();
        options.extra_config =
            format!("jetstream {{ store_dir: \"{store}\", max_file_store: {mib}MiB }}");
        let server = NatsServer::start(options).await.unwrap();
        let broker = Broker::connect(ConnectOptions::new(server.client_url(), "test"));
        let broker = broker.await.unwrap();
        Self {
            broker,
            server,
            folder,
        }
    }

    /// The same store in a server that may use this many MiB.
    async fn restarted_with(mut self, mib: u64) -> Self {
        assert!(self.server.stop(Duration::from_secs(10)).await);
        drop(self.server);
        Self::in_folder(self.folder, mib).await
    }

    async fn apply(&self, store_bytes: Option<u64>) -> topology::Applied {
        let profile = Profile {
            store_bytes,
            ..Profile::default()
        };
        topology::apply(&self.broker, &profile).await.unwrap()
    }

    async fn streams(&self) -> Vec<Info> {
        let streams = copies::read_streams(&self.broker).await.unwrap();
        streams.into_values().collect()
    }

    async fn stream(&self, name: &str) -> Info {
        let found = self.broker.js.get_stream(name).await.unwrap();
        found.cached_info().clone()
    }

    /// Publishes until a message of this size is refused. Returns how many were stored.
    async fn fill(&self, subject: &str, bytes: usize) -> (usize, String) {
        for stored in 0..10_000 {
            let body = Bytes::from(vec![b'x'; bytes]);
            let sent = self.broker.js.publish(subject.to_owned(), body).await;
            if let Err(error) = sent.unwrap().await {
                return (stored, error.to_string());
            }
        }
        panic!("{subject} takes any number of messages");
    }
}

fn first_message(id: &str) -> (Tenant, ExecutionId, Draft) {
    let (tenant, now) = (Tenant::new("lab").unwrap(), Timestamp::now());
    let id = ExecutionId::from_client(&tenant, &ClientId::new(id).unwrap());
    let spec = Submission::parse(br#"{"program":"synthetic@1"}"#).unwrap();
    let tip = Tip {
        seq: 0,
        digest: None,
        state: ExecutionState::unborn(tenant.clone(), id, Arc::new(spec), None, now).into(),
        seen_in: 0,
    };
    let draft = Draft::new(&tip, vec![Event::Submitted], "test", now).unwrap();
    (tenant, id, draft)
}

#[tokio::test]
async fn each_stream_and_bucket_has_a_limit_and_refuses_unless_it_may_forget() {
    let world = World::with_store(1_024).await;
    let applied = world.apply(None).await;
    assert!(applied.notes.is_empty(), "{:?}", applied.notes);
    let streams = world.streams().await;
    assert!(streams.len() >= 15, "{}", streams.len());
    for info in &streams {
        assert!(
            info.config.max_bytes > 0,
            "{} has no limit",
            info.config.name
        );
    }
    let forget = streams.iter().map(|info| &info.config);
    let forget = forget.filter(|config| config.discard == DiscardPolicy::Old);
    let forget: BTreeSet<&str> = forget.map(|config| config.name.as_str()).collect();
    let may = ["FIEC_LOG", "FIEC_PROBE", "FIEC_RECORD", "FIEC_TELEMETRY"];
    assert_eq!(forget, BTreeSet::from(may));

    let on_disk = streams.iter().map(|info| &info.config);
    let on_disk = on_disk.filter(|config| config.storage == StorageType::File);
    let reserved = on_disk.map(|config| config.max_bytes as u64).sum::<u64>();
    assert!(reserved <= applied.store_bytes, "{reserved}");
    // Half of what is accepted, which is found to a quarter.
    let expected = 1_024 * MIB * 3 / 8..=512 * MIB;
    assert!(expected.contains(&applied.store_bytes), "{applied:?}");
}

#[tokio::test]
async fn a_setup_fits_into_a_small_store_and_a_later_one_into_a_smaller_one() {
    let world = World::with_store(16).await;
    let first = world.apply(None).await;
    let before = world.streams().await;
    // As after a restart on a disk that others have filled: the server refuses every change.
    let world = world.restarted_with(2).await;
    let second = world.apply(None).await;
    assert_eq!(first.store_bytes, second.store_bytes);
    let limits = |streams: Vec<Info>| -> Vec<(String, i64)> {
        let each = streams.into_iter().map(|info| info.config);
        each.map(|config| (config.name, config.max_bytes)).collect()
    };
    assert_eq!(limits(world.streams().await), limits(before));

    let tiny = World::with_store(3).await;
    let refused = topology::apply(&tiny.broker, &Profile::default()).await;
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("max_file_store"), "{refused}");
    assert!(tiny.streams().await.is_empty());
}

#[tokio::test]
async fn a_setup_with_fewer_bytes_loses_nothing_and_says_so() {
    let world = World::with_store(1_024).await;
    world.apply(Some(400 * MIB)).await;
    for subject in ["fiec.log.lab.a", "fiec.outbox.lab.a.x"] {
        for _ in 0..20 {
            let body = Bytes::from(vec![b'x'; 100_000]);
            let sent = world.broker.client.publish(subject, body);
            sent.await.unwrap();
        }
    }
    world.broker.client.flush().await.unwrap();
    let stored = async |stream| world.stream(stream).await.state.messages;
    for stream in [subjects::LOG_STREAM, subjects::OUTBOX_STREAM] {
        while stored(stream).await < 20 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    let applied = world.apply(Some(10 * MIB)).await;
    assert_eq!(stored(subjects::LOG_STREAM).await, 20);
    assert_eq!(stored(subjects::OUTBOX_STREAM).await, 20);
    let notes = applied.notes.join("\n");
    for stream in ["FIEC_LOG holds 1.9 MiB", "FIEC_OUTBOX holds 1.9 MiB"] {
        assert!(notes.contains(stream), "{notes}");
    }
    assert_eq!(applied.notes.len(), 2, "{notes}");
    // One that refuses when it is full still takes messages.
    let (more, _) = world.fill("fiec.outbox.lab.a.x", 100_000).await;
    assert!(more > 0);
    // The shares are kept.
    assert_eq!(world.apply(None).await.store_bytes, 10 * MIB);
}

#[tokio::test]
async fn streams_of_an_earlier_version_get_limits_and_keep_what_they_hold() {
    let world = World::with_store(64).await;
    world.apply(None).await;
    for info in world.streams().await {
        let without = Config {
            max_bytes: -1,
            metadata: Default::default(),
            ..info.config
        };
        world.broker.js.update_stream(without).await.unwrap();
    }
    let body = Bytes::from(vec![b'x'; 100_000]);
    for _ in 0..60 {
        let sent = world.broker.js.publish("fiec.outbox.lab.a.x", body.clone());
        sent.await.unwrap().await.unwrap();
    }
    let applied = world.apply(None).await;
    let streams = world.streams().await;
    let unlimited = streams.iter().find(|info| info.config.max_bytes <= 0);
    assert!(unlimited.is_none(), "{unlimited:?}");
    let outbox = world.stream(subjects::OUTBOX_STREAM).await;
    assert_eq!(outbox.state.messages, 60);
    assert!(outbox.config.max_bytes as u64 > outbox.state.bytes);
    assert_eq!(applied.notes.len(), 1, "{:?}", applied.notes);
}

#[tokio::test]
async fn full_submissions_leave_the_ledgers_their_room() {
    let world = World::with_store(64).await;
    world.apply(None).await;
    let (stored, refused) = world.fill("fiec.submit.greedy", 100_000).await;
    assert!(
        stored > 0 && refused.contains("10077"),
        "{stored}: {refused}"
    );
    let (_, _, draft) = first_message("a");
    let appended = Ledger::new(&world.broker).append(draft, Bytes::new()).await;
    appended.unwrap();

    let upkeep = Upkeep::default();
    let keeping = tokio::spawn(upkeep.clone().keep(world.broker.clone(), "test"));
    let red = async {
        loop {
            if let Err(why) = upkeep.check() {
                break why;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let why = tokio::time::timeout(Duration::from_secs(60), red).await;
    let why = why.expect("health is red");
    assert!(why.contains("streams are full: FIEC_SUBMIT ("), "{why}");
    upkeep.stores().unwrap();
    keeping.abort();
}

#[tokio::test]
async fn a_full_ledger_stream_refuses_without_a_conflict_and_goes_on_with_more_bytes() {
    let world = World::with_store(64).await;
    world.apply(Some(4 * MIB)).await;
    // Room for nothing more.
    let ledgers = world.stream(subjects::LEDGER_STREAM).await.config;
    let full = Config {
        max_bytes: 100,
        ..ledgers
    };
    world.broker.js.update_stream(full).await.unwrap();
    let (tenant, id, draft) = first_message("a");
    let ledger = Ledger::new(&world.broker);
    let refused = ledger.append(draft.clone(), Bytes::new()).await;
    match refused {
        Err(AppendError::Broker(error @ BrokerError::Full { .. })) => {
            let error = error.to_string();
            assert!(error.contains("fiec setup --store-bytes"), "{error}");
        }
        other => panic!("{other:?}"),
    }
    assert!(ledger.last(&tenant, id).await.unwrap().is_none());
    world.apply(Some(8 * MIB)).await;
    ledger.append(draft, Bytes::new()).await.unwrap();
}
