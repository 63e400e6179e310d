//! Appends to a private nats-server that loses what it has acknowledged.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may end so")]

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fiec_broker::topology::{self, Profile};
use fiec_broker::{Broker, ConnectOptions, Draft, Ledger, Tip};
use fiec_dev_servers::{NatsOptions, NatsServer, NoProgress, locate_nats};
use fiec_schemas::{ClientId, Event, ExecutionId, ExecutionState, Submission, Tenant, Timestamp};

#[tokio::test]
async fn an_acknowledgement_of_an_earlier_life_of_the_server_is_no_proof_that_a_message_is_stored()
{
    let folder = tempfile::tempdir().unwrap();
    let binary = locate_nats(&NoProgress).await.unwrap();
    let options = NatsOptions::new(binary, folder.path().join("nats"));
    let mut server = NatsServer::start(options).await.unwrap();
    let broker = Broker::connect(ConnectOptions::new(server.client_url(), "test"));
    let broker = broker.await.unwrap();
    topology::apply(&broker, &Profile::default()).await.unwrap();

    let (tenant, now) = (Tenant::new("lab").unwrap(), Timestamp::now());
    let id = ExecutionId::from_client(&tenant, &ClientId::new("a").unwrap());
    let spec = Submission::parse(br#"{"program":"synthetic@1"}"#).unwrap();
    let tip = Tip {
        seq: 0,
        digest: None,
        state: ExecutionState::unborn(tenant.clone(), id, Arc::new(spec), None, now).into(),
        seen_in: 0,
    };
    let draft = Draft::new(&tip, vec![Event::Submitted], "test", now).unwrap();
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
