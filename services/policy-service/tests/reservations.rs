//! Reservations under a tenant's quota, through real brokers and the lives of policy services.

use std::time::Duration;

use crate::stage::{Stage, until};
use fiec_policy_service::Options;
use fiec_schemas::Phase;
use fiec_schemas::messages::{ApiReply, QuotaReply};
use serde_json::json;

async fn is_bound(stage: &Stage, client: &str) -> bool {
    let last = stage.last(client).await;
    matches!(last.message.state.phase, Phase::Bound(_))
}

/// The number of reservations, after this request about the quota.
async fn reserved(stage: &Stage, request: &serde_json::Value) -> u32 {
    let reply: QuotaReply = stage.ask("fiec.api.quota.lab", request).await;
    assert_eq!(reply.error, None);
    reply.tenants[0].running
}

#[tokio::test]
async fn an_execution_without_a_place_that_a_dead_service_reserved_for_lets_the_others_run() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let service = stage.service().await;
    let one = json!({"who": "ann", "change": {"running": 1}});
    assert_eq!(reserved(&stage, &one).await, 0);
    stage
        .publish(r#"{"id":"nowhere","program":"synthetic@1","requires":{"nodes":["elsewhere"]}}"#)
        .await;
    until(|| async { reserved(&stage, &json!({})).await == 1 }).await;
    service.die().await;

    let mut policy = fiec_policy::Config::default();
    // It waits for the other life, and then for a place, for this long.
    (policy.replica_ms, policy.quotas.reserve_ms) = (1_500, 1_000);
    let options = Options {
        policy,
        ..Options::default()
    };
    let _service = stage.service_with(options).await;
    stage.publish(r#"{"id":"x","program":"synthetic@1"}"#).await;
    let bound = until(|| is_bound(&stage, "x"));
    let bound = tokio::time::timeout(Duration::from_secs(50), bound).await;
    let why: ApiReply = stage.ask("fiec.api.why.lab", &json!({"id": "x"})).await;
    assert!(bound.is_ok(), "{:?}", why.why.map(|why| why.summary));
    let nowhere = stage.last("nowhere").await.message.state;
    assert!(
        matches!(nowhere.phase, Phase::Pending { .. }),
        "{nowhere:?}"
    );
}
