//! Appends to a private nats-server that loses what it has acknowledged.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may end so")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fiec_broker::topology::{self, Profile};
use fiec_broker::{Broker, ConnectOptions, Draft, Ledger, Tip};
use fiec_dev_servers::{NatsOptions, NatsServer, NoProgress, locate_nats};
use fiec_schemas::{
    ClientId, Digest, Event, ExecutionId, ExecutionState, Submission, Tenant, Timestamp,
};

/// A private server with the streams, and a connection to it.
async fn start(folder: &tempfile::TempDir) -> (NatsServer, Broker) {
    let binary = locate_nats(&NoProgress).await.unwrap();
    let options = NatsOptions::new(binary, folder.path().join("nats"));
    let server = NatsServer::start(options).await.unwrap();
    let broker = Broker::connect(ConnectOptions::new(server.client_url(), "test"));
    let broker = broker.await.unwrap();
    topology::apply(&broker, &Profile::default()).await.unwrap();
    (server, broker)
}

/// The first message of the ledger of this name, before it is sent.
fn first(tenant: &Tenant, name: &str) -> Draft {
    let now = Timestamp::now();
    let id = ExecutionId::from_client(tenant, &ClientId::new(name).unwrap());
    let spec = Submission::parse(br#"{"program":"synthetic@1"}"#).unwrap();
    let tip = Tip {
        seq: 0,
        digest: None,
        state: ExecutionState::unborn(tenant.clone(), id, Arc::new(spec), None, now).into(),
        seen_in: 0,
    };
    Draft::new(&tip, vec![Event::Submitted], "test", now).unwrap()
}

#[tokio::test]
async fn many_ledgers_are_read_at_once_also_if_their_messages_do_not_fit_one_answer() {
    let folder = tempfile::tempdir().unwrap();
    let (_server, broker) = start(&folder).await;
    let (tenant, ledger) = (Tenant::new("lab").unwrap(), Ledger::new(&broker));
    let id = |name: String| ExecutionId::from_client(&tenant, &ClientId::new(name).unwrap());
    let none: Vec<_> = (0..1_200).map(|n| id(format!("none-{n}"))).collect();
    assert!(
        ledger
            .last_of_many(&tenant, &none)
            .await
            .unwrap()
            .is_empty()
    );
    let mut all = none;
    // 300 messages of 300 KB are more than the server has under way to one reader.
    for (name, count, bytes) in [("small", 700, 0), ("large", 300, 300_000)] {
        let mut digests = BTreeMap::new();
        for n in 0..count {
            let name = format!("{name}-{n}");
            let draft = first(&tenant, &name);
            digests.insert(id(name), draft.digest);
            let body = Bytes::from(vec![7; bytes]);
            ledger.append(draft, body).await.unwrap();
        }
        all.extend(digests.keys());
        let found = ledger.last_of_many(&tenant, &all).await.unwrap();
        let found = found
            .into_iter()
            .map(|(id, entry)| (id, Digest::of(entry.as_bytes())));
        let found: BTreeMap<_, _> = found.filter(|(id, _)| digests.contains_key(id)).collect();
        assert_eq!(found, digests);
    }
    let other = Tenant::new("other").unwrap();
    assert!(ledger.last_of_many(&other, &all).await.unwrap().is_empty());
}

#[tokio::test]
async fn an_acknowledgement_of_an_earlier_life_of_the_server_is_no_proof_that_a_message_is_stored()
{
    let folder = tempfile::tempdir().unwrap();
    let (mut server, broker) = start(&folder).await;
    let tenant = Tenant::new("lab").unwrap();
    let id = ExecutionId::from_client(&tenant, &ClientId::new("a").unwrap());
    let draft = first(&tenant, "a");
    let (ledger, digest) = (Ledger::new(&broker), draft.digest);
    let in_flight = ledger.send(draft, Bytes::new()).await.unwrap();
    // The answer to a later question comes after the acknowledgement.
    while ledger.last(&tenant, id).await.unwrap().is_none() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }

    let mut connections = broker.connections();
    connections.mark_unchanged();
    server.kill().await;
    std::fs::remove_dir_all(server.data_dir().join("jetstream")).unwrap();
    server.restart().await.unwrap();
    connections.changed().await.unwrap();
    topology::apply(&broker, &Profile::default()).await.unwrap();
    let last = ledger.last(&tenant, id).await.unwrap();
    assert!(last.is_none(), "it was not lost");
    ledger.settle(in_flight).await.unwrap();
    let last = ledger.last(&tenant, id).await.unwrap();
    assert_eq!(last.map(|last| last.digest), Some(digest));
}
