//! What `/healthz` says while the broker lacks something, and what comes back without a person.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod stage;

use std::net::SocketAddr;

use async_nats::jetstream::stream::Config;
use fiec_policy_service::Options;
use fiec_schemas::messages::SubmitReply;
use fiec_schemas::subjects;
use stage::{Stage, until};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

async fn healthz(address: SocketAddr) -> String {
    let mut socket = TcpStream::connect(address).await.unwrap();
    let request = "GET /healthz HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n";
    socket.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await.unwrap();
    answer
}

async fn submit(stage: &Stage) -> SubmitReply {
    let line = r#"{"program":"synthetic@1"}"#;
    let client = &stage.broker.client;
    let reply = client.request("fiec.api.submit.lab", line.into()).await;
    serde_json::from_slice(&reply.unwrap().payload).unwrap()
}

#[tokio::test]
async fn health_is_red_while_the_broker_lacks_something_and_memory_streams_come_back_by_themselves()
{
    let stage = Stage::with_nodes(&["n1"]).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let options = Options {
        http: Some(address),
        ..Options::default()
    };
    let _service = stage.service_with(options).await;
    let says = async |words: &str| healthz(address).await.contains(words);
    until(|| says("200 OK")).await;
    let js = &stage.broker.js;

    // As after a restart of the broker.
    js.delete_stream(subjects::TELEMETRY_STREAM).await.unwrap();
    until(|| async { js.get_stream(subjects::TELEMETRY_STREAM).await.is_ok() }).await;

    // The stand-in for a full disk: the stream of the probes refuses everything.
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
