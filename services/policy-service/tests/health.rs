//! The answers of `/healthz` while the broker lacks something, and the recovery without a person.
use std::net::SocketAddr;
use std::time::Duration;

use crate::stage::{Running, Stage, until};
use async_nats::jetstream::consumer::{AckPolicy, pull};
use async_nats::jetstream::stream::Config;
use fiec_broker::topology;
use fiec_policy_service::Options;
use fiec_schemas::messages::{QuotaReply, SubmitReply};
use fiec_schemas::{Phase, subjects};
use futures_util::{StreamExt as _, TryStreamExt as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// The whole answer of `/healthz`.
pub async fn healthz(address: SocketAddr) -> String {
    let mut socket = TcpStream::connect(address).await.unwrap();
    let request = "GET /healthz HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n";
    socket.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await.unwrap();
    answer
}

/// A service and the address of its `/healthz`.
pub async fn watched(stage: &Stage) -> (Running, SocketAddr) {
    watched_with(stage, Options::default()).await
}

/// A service with these options and the address of its `/healthz`.
pub async fn watched_with(stage: &Stage, options: Options) -> (Running, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let options = Options {
        http: Some(address),
        ..options
    };
    (stage.service_with(options).await, address)
}

pub async fn submit(stage: &Stage) -> SubmitReply {
    let line = r#"{"program":"synthetic@1"}"#;
    let client = &stage.broker.client;
    let reply = client.request("fiec.api.submit.lab", line.into()).await;
    serde_json::from_slice(&reply.unwrap().payload).unwrap()
}

#[tokio::test]
async fn health_is_red_while_the_broker_lacks_something_and_memory_streams_come_back_by_themselves()
{
    let stage = Stage::with_nodes(&["n1"]).await;
    let (_service, address) = watched(&stage).await;
    let says = async |words: &str| healthz(address).await.contains(words);
    until(|| says("200 OK")).await;
    let js = &stage.broker.js;

    // As after a restart of the broker.
    js.delete_stream(subjects::TELEMETRY_STREAM).await.unwrap();
    until(|| async { js.get_stream(subjects::TELEMETRY_STREAM).await.is_ok() }).await;

    // A replacement for a full disk: the stream of the probes refuses every message.
    let probes = js.get_stream(subjects::PROBE_STREAM).await.unwrap();
    let sealed = Config {
        sealed: true,
        ..probes.cached_info().config.clone()
    };
    js.update_stream(&sealed).await.unwrap();
    until(|| says("503")).await;
    assert!(says("stores nothing").await && says("free its disk").await);
    let refused = submit(&stage).await;
    assert!(refused.error.unwrap().contains("stores nothing"));
    assert!(refused.accepted.is_empty());
    js.delete_stream(subjects::PROBE_STREAM).await.unwrap();
    until(|| says("200 OK")).await;
    assert_eq!(submit(&stage).await.accepted.len(), 1);

    js.delete_stream(subjects::OUTBOX_STREAM).await.unwrap();
    until(|| says("the broker has no FIEC_OUTBOX: restore its store")).await;
}

#[tokio::test]
async fn health_is_red_while_the_ledgers_cannot_be_read() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let js = &stage.broker.js;
    // The broker refuses a second consumer of the ledgers, as an example of any refusal.
    let ledgers = js.get_stream(subjects::LEDGER_STREAM).await.unwrap();
    let config = Config {
        max_consumers: 1,
        ..ledgers.cached_info().config.clone()
    };
    js.delete_stream(subjects::LEDGER_STREAM).await.unwrap();
    let ledgers = js.create_stream(config).await.unwrap();
    let (_service, address) = watched(&stage).await;
    let says = async |words: &str| healthz(address).await.contains(words);
    until(|| says("200 OK")).await;

    let names: Vec<String> = ledgers.consumer_names().try_collect().await.unwrap();
    let [reader] = &names[..] else {
        panic!("the service reads the ledgers with {names:?}")
    };
    ledgers.delete_consumer(reader).await.unwrap();
    let other = pull::Config {
        durable_name: Some("other".to_owned()),
        ..pull::Config::default()
    };
    ledgers.create_consumer(other).await.unwrap();
    until(|| says("503")).await;
    until(|| says("the ledgers are not read")).await;
    ledgers.delete_consumer("other").await.unwrap();
    until(|| says("200 OK")).await;
    assert_eq!(submit(&stage).await.accepted.len(), 1);
}

#[tokio::test]
async fn a_service_that_cannot_read_the_ledgers_holds_up_no_quota() {
    let stage = Stage::with_nodes(&[]).await;
    let js = &stage.broker.js;
    // The broker refuses a second reader of the ledgers, as an example of any refusal.
    let ledgers = js.get_stream(subjects::LEDGER_STREAM).await.unwrap();
    let config = Config {
        max_consumers: 1,
        ..ledgers.cached_info().config.clone()
    };
    js.delete_stream(subjects::LEDGER_STREAM).await.unwrap();
    js.create_stream(config).await.unwrap();
    let (_works, address) = watched(&stage).await;
    until(async || healthz(address).await.contains("200 OK")).await;
    for n in 0..20 {
        let line = format!(r#"{{"id":"q{n}","program":"synthetic@1"}}"#);
        stage.publish(&line).await;
        stage.last(&format!("q{n}")).await;
    }
    let (_is_blind, address) = watched(&stage).await;
    until(async || TcpStream::connect(address).await.is_ok()).await;
    until(async || healthz(address).await.contains("the ledgers are not read")).await;
    // Each service that says that it works has said so once more.
    let heard = stage.broker.client.subscribe(subjects::POLICY_PRESENCE);
    let heard = heard.await.unwrap().take(2);
    assert_eq!(heard.count().await, 2);
    let quota = serde_json::json!({"who": "ann", "change": {"running": 50}});
    let _: QuotaReply = stage.ask("fiec.api.quota.lab", &quota).await;
    stage.add_node("n1", &["synthetic@1"], 20).await;
    for n in 0..20 {
        let last = async || {
            stage
                .last(&format!("q{n}"))
                .await
                .message
                .state
                .phase
                .clone()
        };
        until(async || matches!(last().await, Phase::Bound(_))).await;
    }
}

#[tokio::test]
async fn a_broker_that_lacks_something_after_a_loss_is_waited_for() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let (service, address) = watched(&stage).await;
    let says = async |words: &str| healthz(address).await.contains(words);
    until(|| says("200 OK")).await;
    assert_eq!(submit(&stage).await.accepted.len(), 1);
    let js = &stage.broker.js;
    let ledgers = js.get_stream(subjects::LEDGER_STREAM).await.unwrap();
    until(|| async { ledgers.get_info().await.unwrap().state.messages > 0 }).await;

    let nodes = format!("KV_{}", subjects::NODES_BUCKET);
    let looks = format!("$JS.API.STREAM.INFO.{nodes}");
    let mut looks = stage.broker.client.subscribe(looks).await.unwrap();
    js.delete_stream(nodes).await.unwrap();
    js.delete_stream(subjects::LEDGER_STREAM).await.unwrap();
    let config = ledgers.cached_info().config.clone();
    js.create_stream(config).await.unwrap();
    // It asks for the bucket without success, and asks again.
    let again = looks.by_ref().take(4).count();
    let again = tokio::time::timeout(Duration::from_secs(60), again).await;
    assert!(again.is_ok(), "it does not try again");
    let profile = topology::Profile::default();
    topology::apply(&stage.broker, &profile).await.unwrap();
    until(|| says("200 OK")).await;
    service.stop().await;
}

#[tokio::test]
async fn a_lost_stream_of_any_shard_is_missed_and_setup_makes_it_again() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let profile = topology::Profile {
        shards: Some(2),
        ..topology::Profile::default()
    };
    topology::apply(&stage.broker, &profile).await.unwrap();
    let js = &stage.broker.js;
    js.delete_stream(subjects::capsule_stream(1)).await.unwrap();
    let (_service, address) = watched(&stage).await;
    let says = async |words: &str| healthz(address).await.contains(words);
    until(|| says("the broker has no FIEC_CAPSULE_1")).await;
    let profile = topology::Profile::default();
    topology::apply(&stage.broker, &profile).await.unwrap();
    until(|| says("200 OK")).await;
}

#[tokio::test]
async fn a_lost_consumer_of_the_submissions_is_made_again_or_else_health_is_red() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let (_service, address) = watched(&stage).await;
    let says = async |words: &str| healthz(address).await.contains(words);
    until(|| says("200 OK")).await;
    let js = &stage.broker.js;
    let submissions = js.get_stream(subjects::SUBMIT_STREAM).await.unwrap();
    // A work queue has one consumer. While it has another one, the service cannot make its own.
    let other = || pull::Config {
        durable_name: Some("other".to_owned()),
        ack_policy: AckPolicy::Explicit,
        ..pull::Config::default()
    };
    until(|| async {
        let _ = submissions.delete_consumer(subjects::SUBMIT_CONSUMER).await;
        submissions.create_consumer(other()).await.is_ok()
    })
    .await;
    until(|| says("submissions are not pulled")).await;
    let line = r#"{"program":"synthetic@1"}"#;
    let waits = js.publish("fiec.submit.lab", line.into()).await;
    waits.unwrap().await.unwrap();
    submissions.delete_consumer("other").await.unwrap();
    until(|| says("200 OK")).await;
    let ledgers = js.get_stream(subjects::LEDGER_STREAM).await.unwrap();
    until(|| async { ledgers.get_info().await.unwrap().state.messages > 0 }).await;
}
