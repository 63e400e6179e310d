//! Limits on submissions. A message that can never be taken in is refused in the end. A slow one is
//! not delivered to another service. A lost submission fails its execution.
use std::sync::Arc;
use std::time::Duration;

use crate::stage::{Stage, tenant, until};
use async_nats::jetstream::AckKind;
use fiec_broker::{Draft, Ledger, Tip, topology};
use fiec_policy_service::Options;
use fiec_schemas::messages::SubmitReply;
use fiec_schemas::{
    ClientId, Event, ExecutionId, ExecutionState, Phase, Submission, Timestamp, subjects,
};
use futures_util::StreamExt as _;

/// Number of deliveries of this message before the service sees it.
const DELIVERED: usize = 16;

#[tokio::test]
async fn a_message_that_was_delivered_again_and_again_is_refused_and_what_lay_beside_it_goes_on() {
    let stage = Stage::with_nodes(&["n1"]).await;
    stage
        .publish(r#"{"id":"deadly","program":"synthetic@1"}"#)
        .await;
    let consumer = topology::submit_consumer(&stage.broker).await.unwrap();
    for _ in 0..DELIVERED {
        let mut fetched = consumer.fetch().max_messages(1).messages().await.unwrap();
        let message = fetched.next().await.unwrap().unwrap();
        message.ack_with(AckKind::Nak(None)).await.unwrap();
        stage.broker.client.flush().await.unwrap();
        until(|| async {
            let mut consumer = topology::submit_consumer(&stage.broker).await.unwrap();
            consumer.info().await.unwrap().num_ack_pending == 1
        })
        .await;
    }
    stage
        .publish(r#"{"id":"innocent","program":"synthetic@1"}"#)
        .await;
    let service = stage.service().await;
    let refused = stage.record(&subjects::rejection("lab")).await;
    let reason = refused["error"]["reason"].as_str().unwrap_or_default();
    assert!(reason.contains("was delivered 17 times"), "{refused}");
    assert!(refused["excerpt"].as_str().unwrap().contains("deadly"));
    assert_eq!(
        stage.last("innocent").await.message.state.phase.as_str(),
        "bound"
    );
    // The broker delivers neither again.
    until(|| async { stage.submissions_left().await == 0 }).await;
    service.stop().await;
}

#[tokio::test]
async fn a_message_that_takes_longer_than_the_broker_waits_is_delivered_once() {
    let stage = Stage::with_nodes(&["n1"]).await;
    // The node does not answer. The service appends the binding later than the broker would
    // redeliver.
    let options = Options {
        entrust: Duration::from_secs(11),
        ..Options::default()
    };
    let service = stage.service_with(options).await;
    stage.publish(r#"{"program":"synthetic@1"}"#).await;
    until(|| async { stage.submissions_left().await == 0 }).await;
    let mut consumer = topology::submit_consumer(&stage.broker).await.unwrap();
    let info = consumer.info().await.unwrap();
    assert_eq!(
        info.delivered.consumer_sequence, 1,
        "it was delivered again"
    );
    service.stop().await;
}

#[tokio::test]
async fn an_execution_whose_submission_is_lost_fails_and_says_so() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let blob = "x".repeat(4_096);
    let line = format!(r#"{{"id":"lost","program":"synthetic@1","labels":{{"x":"{blob}"}}}}"#);
    let spec = Arc::new(Submission::parse(line.as_bytes()).unwrap());
    let id = ExecutionId::from_client(&tenant(), &ClientId::new("lost").unwrap());
    let state = ExecutionState::unborn(tenant(), id, spec, None, Timestamp::now());
    let tip = Tip {
        seq: 0,
        digest: None,
        state: state.into(),
        seen_in: 0,
    };
    let events = vec![Event::Submitted];
    let draft = Draft::new(&tip, events, "policy/gone", Timestamp::now()).unwrap();
    let ledger = Ledger::new(&stage.broker);
    ledger.append(draft, bytes::Bytes::new()).await.unwrap();
    let service = stage.service().await;
    until(|| async {
        let phase = stage.last("lost").await.message.state.phase.clone();
        matches!(phase, Phase::Failed)
    })
    .await;
    let last = stage.last("lost").await.message;
    assert!(
        last.events.iter().any(|event| matches!(
            event,
            Event::Failed { reason, .. } if reason.contains("submit it again")
        )),
        "{:?}",
        last.events
    );
    service.stop().await;
}

#[tokio::test]
async fn an_array_that_comes_to_too_much_is_answered_and_recorded_with_its_size() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let service = stage.service().await;
    let blob = "x".repeat(20 << 10);
    let line = format!(
        r#"{{"program":"synthetic@1","labels":{{"x":"{blob}"}},"array":{{"count":10000}}}}"#
    );
    let reply: SubmitReply = stage.ask_raw("fiec.api.submit.lab", &line).await;
    assert_eq!(reply.errors[0].field, "array.count", "{reply:?}");
    assert!(reply.errors[0].reason.contains("MiB"), "{reply:?}");
    // The same as a message. The other line of the message is accepted.
    let body = format!("{line}\n{}", r#"{"id":"small","program":"synthetic@1"}"#);
    stage.publish(&body).await;
    assert_eq!(
        stage.last("small").await.message.state.phase.as_str(),
        "bound"
    );
    until(|| async { stage.submissions_left().await == 0 }).await;
    service.stop().await;
}
