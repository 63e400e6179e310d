//! Telemetry of invented names against a running policy service.

use std::net::SocketAddr;

use crate::stage::{Stage, until};
use fiec_policy_service::Options;
use fiec_schemas::{HardwareVector, InstanceId, NodeId, Timestamp, subjects};
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

#[tokio::test]
async fn invented_names_are_no_nodes_and_work_goes_on() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = free.local_addr().unwrap();
    drop(free);
    let options = Options {
        http: Some(addr),
        ..Options::default()
    };
    let service = stage.service_with(options).await;
    for n in 0..3_000 {
        let node = NodeId::new(format!("invented-{n}")).unwrap();
        let vector = HardwareVector {
            v: 1,
            node: node.clone(),
            instance: InstanceId::random(),
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
        };
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
