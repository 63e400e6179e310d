//! Telemetry of invented names, and in the name of others, against a running policy service.

use std::net::SocketAddr;

use crate::stage::{Stage, until};
use fiec_policy_service::Options;
use fiec_schemas::{HardwareVector, InstanceId, NodeId, Phase, Timestamp, subjects};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// The value of a metric of the policy service.
async fn metric(addr: SocketAddr, name: &str) -> Option<i64> {
    let mut socket = tokio::net::TcpStream::connect(addr).await.ok()?;
    let request = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    socket.write_all(request).await.ok()?;
    let mut text = String::new();
    socket.read_to_string(&mut text).await.ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().parse().ok()
}

/// A free address for `/metrics`, and options with it.
fn with_metrics() -> (SocketAddr, Options) {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = free.local_addr().unwrap();
    let options = Options {
        http: Some(addr),
        ..Options::default()
    };
    (addr, options)
}

fn vector(node: &NodeId, instance: InstanceId) -> HardwareVector {
    HardwareVector {
        v: 1,
        node: node.clone(),
        instance,
        count: 1,
        at: Timestamp::now(),
        clock: None,
        readings: vec![],
        draining: false,
        slots: 1,
        running_count: 0,
        queued_count: 0,
        running: vec![],
        arriving: vec![],
        stuck: Vec::new(),
    }
}

#[tokio::test]
async fn invented_names_are_no_nodes_and_work_goes_on() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let (addr, options) = with_metrics();
    let service = stage.service_with(options).await;
    for n in 0..3_000 {
        let node = NodeId::new(format!("invented-{n}")).unwrap();
        let vector = vector(&node, InstanceId::random());
        let payload = serde_json::to_vec(&vector).unwrap();
        let client = &stage.broker.client;
        let sent = client.publish(subjects::telemetry(&node), payload.into());
        sent.await.unwrap();
    }
    stage.broker.client.flush().await.unwrap();
    until(async || {
        metric(addr, "fiec_policy_strangers")
            .await
            .is_some_and(|n| n > 0)
    })
    .await;
    // The next submission is placed.
    stage
        .publish(&json!({"id":"behind","program":"synthetic@1"}).to_string())
        .await;
    stage.last("behind").await;
    let strangers = metric(addr, "fiec_policy_strangers").await.unwrap();
    assert!(strangers <= 256, "{strangers} invented names are kept");
    assert_eq!(metric(addr, "fiec_policy_nodes").await, Some(1));
    // The names fall silent and are forgotten.
    until(async || metric(addr, "fiec_policy_strangers").await == Some(0)).await;
    service.stop().await;
}

#[tokio::test]
async fn a_vector_counts_for_the_node_of_its_subject_alone() {
    let stage = Stage::with_nodes(&[]).await;
    let (instance, _speaks) = stage.add_mute_node("n1").await;
    let (addr, options) = with_metrics();
    let service = stage.service_with(options).await;
    // Another worker says that n1 drains. It knows the instance from the bucket of nodes.
    let forged = HardwareVector {
        count: 1_000_000,
        draining: true,
        ..vector(&NodeId::new("n1").unwrap(), instance)
    };
    let payload = serde_json::to_vec(&forged).unwrap();
    let subject = subjects::telemetry(&NodeId::new("n2").unwrap());
    let sent = stage.broker.client.publish(subject, payload.into());
    sent.await.unwrap();
    let unreadable = "fiec_policy_unreadable_vectors_total";
    until(async || metric(addr, unreadable).await == Some(1)).await;
    stage
        .publish(&json!({"id":"one","program":"synthetic@1"}).to_string())
        .await;
    // n1 does not drain.
    until(async || {
        let last = stage.last("one").await.message;
        matches!(last.state.phase, Phase::Bound(_))
    })
    .await;
    service.stop().await;
}
