//! Offers of nodes, requested from a real service through a real broker.
use crate::stage::{Stage, until};
use fiec_schemas::surroundings::{Offers, OffersReply};

async fn offers(stage: &Stage) -> Offers {
    let reply: OffersReply = stage.ask_raw("fiec.api.offers", "").await;
    reply.offers.unwrap_or_default()
}

fn slots(offers: &Offers, node: &str) -> Option<u32> {
    let mut nodes = offers.nodes.iter();
    nodes
        .find(|o| o.node.as_str() == node)
        .map(|o| o.free_slots)
}

#[tokio::test]
async fn agents_are_told_of_free_slots_and_of_no_node_that_takes_nothing() {
    let stage = Stage::with_nodes(&["n1", "n2"]).await;
    let service = stage.service().await;
    until(|| async { offers(&stage).await.nodes.len() == 2 }).await;
    let before = offers(&stage).await;
    let (n1, n2) = (slots(&before, "n1"), slots(&before, "n2"));
    assert!(n1.unwrap() > 0 && before.nodes[0].cores > 0, "{before:?}");
    stage
        .publish(r#"{"id":"one","program":"synthetic@1","requires":{"nodes":["n1"]}}"#)
        .await;
    until(|| async { slots(&offers(&stage).await, "n1") == n1.map(|n| n - 1) }).await;
    let said: serde_json::Value = stage
        .ask(
            "fiec.api.node.cordon",
            &serde_json::json!({"node": "n1", "who": "test"}),
        )
        .await;
    assert_eq!(said["error"], serde_json::Value::Null, "{said}");
    until(|| async { slots(&offers(&stage).await, "n1").is_none() }).await;
    assert_eq!(slots(&offers(&stage).await, "n2"), n2);
    service.stop().await;
}
