//! The limit on a tenant's waiting executions, through a real broker and without nodes.

use std::cell::Cell;
use std::fmt::Write as _;

use async_nats::HeaderMap;
use fiec_broker::Ledger;
use fiec_policy_service::Options;
use fiec_schemas::messages::{QuotaReply, SubmitReply};
use fiec_schemas::submission::ATOMIC_HEADER;
use fiec_schemas::{ClientId, ExecutionId, Tenant, subjects};
use serde_json::json;

use crate::stage::{Stage, tenant, until};

async fn messages_of(stage: &Stage, stream: &str) -> u64 {
    let stream = stage.broker.js.get_stream(stream).await.unwrap();
    stream.cached_info().state.messages
}

async fn exists(stage: &Stage, owner: &Tenant, client: &str) -> bool {
    let id = ExecutionId::from_client(owner, &ClientId::new(client).unwrap());
    let ledger = Ledger::new(&stage.broker);
    ledger.last(owner, id).await.unwrap().is_some()
}

/// Sets the tenant's limit, and waits until the service knows it. Returns how many lines were
/// refused for that.
async fn allow(stage: &Stage, waiting: u32) -> u64 {
    let change = json!({"who": "ann", "change": {"waiting": waiting}});
    let reply: QuotaReply = stage.ask("fiec.api.quota.lab", &change).await;
    assert_eq!(reply.error, None);
    let quota = reply.tenants[0].quota.as_ref();
    assert_eq!(quota.and_then(|q| q.waiting), Some(waiting));
    let refused = "tenant lab has";
    let words = format!("its quota allows {waiting}:");
    // An array that is too large is refused, with the limit in force.
    let asked = Cell::new(0);
    until(|| async {
        asked.set(asked.get() + 1);
        let line = r#"{"program":"synthetic@1","array":{"count":9000}}"#;
        let reply: SubmitReply = stage.ask_raw("fiec.api.submit.lab", line).await;
        let reason = reply.errors.first().map(|e| e.reason.clone());
        reason.is_some_and(|r| r.starts_with(refused) && r.contains(&words))
    })
    .await;
    asked.get()
}

async fn waiting(stage: &Stage) -> Option<u32> {
    let reply: QuotaReply = stage.ask("fiec.api.quota.lab", &json!({})).await;
    reply.tenants[0].waiting
}

fn body(name: &str, count: usize) -> String {
    let mut body = String::new();
    for n in 0..count {
        writeln!(body, r#"{{"id":"{name}-{n}","program":"synthetic@1"}}"#).unwrap();
    }
    body
}

/// A service that holds each tenant without a quota to ten waiting executions, at first.
async fn service(stage: &Stage) -> crate::stage::Running {
    let options = Options {
        waiting: 10,
        ..Options::default()
    };
    stage.service_with(options).await
}

#[tokio::test]
async fn a_line_beyond_a_tenants_waiting_executions_is_refused_and_other_tenants_go_on() {
    let stage = Stage::with_nodes(&[]).await;
    let _service = service(&stage).await;
    let asked = allow(&stage, 200).await;
    stage.publish(&body("w", 201)).await;
    until(|| async { stage.submissions_left().await == 0 }).await;
    assert_eq!(messages_of(&stage, subjects::LEDGER_STREAM).await, 200);
    assert!(!exists(&stage, &tenant(), "w-200").await);
    let record = stage.record("fiec.record.rejection.lab").await;
    assert_eq!(record["error"]["line"], 201, "{record}");
    assert_eq!(
        record["error"]["reason"],
        "tenant lab has 200 waiting executions, this line adds 1, and its quota allows 200: submit \
         it again when fewer wait, cancel some, or ask for more (`fiec quota set lab --waiting N`)"
    );
    assert_eq!(waiting(&stage).await, Some(200));

    // Another tenant has the default.
    let other = Tenant::new("other").unwrap();
    let reply: SubmitReply = stage.ask_raw("fiec.api.submit.other", &body("w", 11)).await;
    assert_eq!(reply.accepted.len(), 10, "{reply:?}");
    assert_eq!(reply.errors.len(), 1);
    let reason = &reply.errors[0].reason;
    assert!(
        reason.contains("tenant other has 10 waiting") && reason.contains("without a quota"),
        "{reason}"
    );
    until(|| async { exists(&stage, &other, "w-9").await }).await;

    // A line that was accepted before is no new one.
    let reply: SubmitReply = stage.ask_raw("fiec.api.submit.lab", &body("w", 201)).await;
    assert!(reply.accepted.iter().all(|a| a.existing), "{reply:?}");
    assert_eq!((reply.accepted.len(), reply.errors[0].line), (200, 201));
    // Records are stored after the answer: the change of the quota, and three more lines.
    let before = asked + 4;
    until(|| async { messages_of(&stage, subjects::RECORD_STREAM).await == before }).await;
    stage.publish(&body("w", 200)).await;
    until(|| async { stage.submissions_left().await == 0 }).await;
    assert_eq!(messages_of(&stage, subjects::RECORD_STREAM).await, before);

    // A higher limit has room, and a lower one ends nothing.
    allow(&stage, 201).await;
    stage.publish(&body("w", 201)).await;
    until(|| async { exists(&stage, &tenant(), "w-200").await }).await;
    allow(&stage, 0).await;
    assert_eq!(waiting(&stage).await, Some(201));
}

#[tokio::test]
async fn an_array_and_an_atomic_message_beyond_the_limit_are_refused_as_a_whole() {
    let stage = Stage::with_nodes(&[]).await;
    let _service = service(&stage).await;
    let array = |name: &str, count: usize| {
        format!(r#"{{"id":"{name}","program":"synthetic@1","array":{{"count":{count}}}}}"#)
    };
    // The second array would be the eleventh to thirteenth, and the last line is the ninth.
    let lines = format!("{}\n{}\n{}", array("a", 8), array("b", 3), body("c", 1));
    stage.publish(&lines).await;
    until(|| async { stage.submissions_left().await == 0 }).await;
    assert_eq!(messages_of(&stage, subjects::LEDGER_STREAM).await, 9);
    assert!(!exists(&stage, &tenant(), "b-0").await);
    let record = stage.record("fiec.record.rejection.lab").await;
    let reason = record["error"]["reason"].as_str().unwrap();
    assert!(reason.contains("this line adds 3"), "{reason}");

    let mut headers = HeaderMap::new();
    headers.insert(ATOMIC_HEADER, "true");
    let subject = subjects::submit(&tenant());
    let body = body("d", 2);
    let ack = stage
        .broker
        .js
        .publish_with_headers(subject, headers, body.into());
    ack.await.unwrap().await.unwrap();
    until(|| async { stage.submissions_left().await == 0 }).await;
    assert_eq!(messages_of(&stage, subjects::LEDGER_STREAM).await, 9);
    // Nothing is promised any more: one fits.
    assert_eq!(waiting(&stage).await, Some(9));
    stage.publish(&array("e", 1)).await;
    until(|| async { exists(&stage, &tenant(), "e-0").await }).await;

    // The same array again adds nothing.
    let before = messages_of(&stage, subjects::RECORD_STREAM).await;
    stage.publish(&array("a", 8)).await;
    until(|| async { stage.submissions_left().await == 0 }).await;
    assert_eq!(messages_of(&stage, subjects::RECORD_STREAM).await, before);
    assert_eq!(waiting(&stage).await, Some(10));
}
