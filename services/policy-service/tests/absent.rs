//! A node that was killed and never comes back is forgotten: here, and in the bucket of nodes.

use std::time::Duration;

use fiec_broker::buckets;
use fiec_policy_service::Options;
use fiec_schemas::messages::ApiReply;
use fiec_schemas::subjects;

use crate::stage::{Stage, until};

async fn keys(stage: &Stage) -> Vec<String> {
    let bucket = stage.broker.js.get_key_value(subjects::NODES_BUCKET).await;
    let entries = buckets::entries(&bucket.unwrap()).await.unwrap();
    entries.into_iter().map(|(key, _)| key).collect()
}

async fn names(stage: &Stage) -> Vec<String> {
    let reply: ApiReply = stage.ask_raw("fiec.api.nodes", "{}").await;
    reply
        .nodes
        .iter()
        .map(|n| n.descriptor.node.to_string())
        .collect()
}

#[tokio::test]
async fn killed_nodes_with_names_of_their_own_are_forgotten_by_all_services_and_the_broker() {
    let stage = Stage::with_nodes(&["stays"]).await;
    let mut policy = fiec_policy::Config::default();
    (policy.liveness_ms, policy.forget_ms) = (1_000, 3_000);
    let options = || Options {
        policy: policy.clone(),
        probe_timeout: Duration::from_millis(200),
        ..Options::default()
    };
    let services = [
        stage.service_with(options()).await,
        stage.service_with(options()).await,
    ];
    let mut speaking = Vec::new();
    for n in 0..20 {
        speaking.push(stage.add_mute_node(&format!("pod-{n}")).await);
    }
    until(|| async { names(&stage).await.len() == 21 }).await;
    assert_eq!(
        keys(&stage).await.len(),
        42,
        "a descriptor and a proof each"
    );
    drop(speaking);
    until(|| async { keys(&stage).await == ["node.stays", "proof.stays"] }).await;
    // Each service answers some of the questions.
    until(|| async {
        for _ in 0..8 {
            if names(&stage).await != ["stays"] {
                return false;
            }
        }
        true
    })
    .await;
    for service in services {
        service.stop().await;
    }
}
