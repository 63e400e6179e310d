//! A policy service that lags behind its queue of submissions, and nodes that do not answer,
//! through a real broker.
use std::sync::Arc;
use std::time::Duration;

use crate::stage::{Stage, tenant, until};
use async_nats::jetstream::AckKind;
use fiec_broker::{Draft, Ledger, Tip, topology};
use fiec_policy_service::Options;
use fiec_schemas::messages::{ApiReply, BatchReply, SubmitReply, Viability};
use fiec_schemas::{
    BatchId, BatchPlace, Cause, ClientId, Event, ExecutionId, ExecutionState, InstanceId, NodeId,
    PhaseKind, Submission, Timestamp,
};
use futures_util::StreamExt as _;

async fn phase(stage: &Stage, client: &str) -> String {
    let entry = stage.last(client).await;
    entry.message.state.phase.as_str().to_owned()
}

async fn exists(stage: &Stage, client: &str) -> bool {
    let id = ExecutionId::from_client(&tenant(), &ClientId::new(client).unwrap());
    let ledger = Ledger::new(&stage.broker);
    ledger.last(&tenant(), id).await.unwrap().is_some()
}

#[tokio::test]
async fn what_was_submitted_and_not_taken_in_may_be_waited_for_however_far_behind_the_service_is() {
    let stage = Stage::with_nodes(&["n1"]).await;
    // Another service has pulled it, and takes it in only when the test allows it.
    stage
        .publish(r#"{"id":"first","program":"synthetic@1"}"#)
        .await;
    let consumer = topology::submit_consumer(&stage.broker).await.unwrap();
    let mut fetched = consumer.fetch().max_messages(1).messages().await.unwrap();
    let message = Arc::new(fetched.next().await.unwrap().unwrap());
    let held = Arc::clone(&message);
    let hold = tokio::spawn(async move {
        loop {
            held.ack_with(AckKind::Progress).await.unwrap();
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    });
    let service = stage.service().await;
    let line = r#"{"id":"second","program":"synthetic@1","after":[{"id":"first"}]}"#;
    let reply: SubmitReply = stage.ask_raw("fiec.api.submit.lab", line).await;
    assert_eq!(
        (reply.accepted.len(), reply.errors.len()),
        (1, 0),
        "{reply:?}"
    );
    // By message as well.
    stage.publish(&line.replace("second", "third")).await;
    for waiting in ["second", "third"] {
        until(|| async { exists(&stage, waiting).await }).await;
        assert_eq!(phase(&stage, waiting).await, "pending");
    }
    assert!(!exists(&stage, "first").await, "it is not taken in yet");
    // A dependency that nobody submitted is refused.
    let line = r#"{"id":"fourth","program":"synthetic@1","after":[{"id":"nobody"}]}"#;
    let reply: SubmitReply = stage.ask_raw("fiec.api.submit.lab", line).await;
    assert_eq!(reply.errors[0].field, "after[0].id", "{reply:?}");
    hold.abort();
    message.ack_with(AckKind::Nak(None)).await.unwrap();
    until(|| async { phase(&stage, "first").await == "bound" }).await;
    stage.finish("first", "n1").await;
    for waiting in ["second", "third"] {
        until(|| async { phase(&stage, waiting).await == "bound" }).await;
    }
    service.stop().await;
}

/// Members of the batch `b` that compute on a node, as its worker appended it.
async fn computing(stage: &Stage, node: &str, instance: InstanceId, count: u32) {
    let line =
        format!(r#"{{"id":"b","batch":"b","program":"synthetic@1","array":{{"count":{count}}}}}"#);
    let specs = Submission::parse(line.as_bytes())
        .unwrap()
        .expand()
        .unwrap();
    let (ledger, at) = (Ledger::new(&stage.broker), Timestamp::now());
    let (author, node) = (
        format!("worker/{node}/{instance}"),
        NodeId::new(node).unwrap(),
    );
    let batch = BatchId::from_client(&tenant(), specs[0].batch.as_ref().unwrap());
    let appends = specs.into_iter().map(|spec| {
        let id = ExecutionId::from_client(&tenant(), spec.id.as_ref().unwrap());
        let place = BatchPlace { id: batch, line: 1 };
        let state = ExecutionState::unborn(tenant(), id, Arc::new(spec), Some(place), at);
        let tip = Tip {
            seq: 0,
            digest: None,
            state: state.into(),
            seen_in: 0,
        };
        let events = vec![
            Event::Submitted,
            Event::Bound {
                epoch: 1,
                node: node.clone(),
                instance,
                substrate: "host".to_owned(),
                cause: Cause::Initial,
                decision: None,
            },
        ];
        let draft = Draft::new(&tip, events, "policy/gone", at).unwrap();
        let (ledger, author) = (&ledger, &author);
        async move {
            let tip = ledger.append(draft, bytes::Bytes::new()).await.unwrap();
            let started = Event::Started {
                epoch: 1,
                computing_since: at,
            };
            let draft = Draft::new(&tip, vec![started], author, at).unwrap();
            ledger.append(draft, bytes::Bytes::new()).await.unwrap();
        }
    });
    futures_util::stream::iter(appends)
        .for_each_concurrent(64, |append| append)
        .await;
}

async fn ask_batch(stage: &Stage, verb: &str) -> BatchReply {
    let request = serde_json::json!({"batch": "b", "who": "ann", "within_ms": 8_000});
    let body = async_nats::Request::new()
        .payload(request.to_string().into())
        .timeout(Some(Duration::from_secs(30)));
    let subject = format!("fiec.api.batch.{verb}.lab");
    let client = &stage.broker.client;
    let reply = client.send_request(subject, body).await.unwrap();
    serde_json::from_slice(&reply.payload).unwrap()
}

#[tokio::test]
async fn a_batch_on_a_silent_node_costs_one_wait_and_is_cancelled_once_the_node_is_lost() {
    const COUNT: u32 = 2_000;
    let stage = Stage::with_nodes(&[]).await;
    let (instance, silence) = stage.add_mute_node("n1").await;
    computing(&stage, "n1", instance, COUNT).await;
    let mut policy = fiec_policy::Config::default();
    (policy.liveness_ms, policy.explanation.report_ms) = (3_000, 0);
    let options = Options {
        policy,
        control_timeout: Duration::from_millis(500),
        ..Options::default()
    };
    let service = stage.service_with(options).await;
    let asked = stage.hears_control("n1").await;
    let began = std::time::Instant::now();
    let paused = ask_batch(&stage, "pause").await;
    assert_eq!(
        (paused.done, paused.failed, paused.left),
        (0, COUNT, 0),
        "{paused:?}"
    );
    assert!(paused.reasons[0].contains("does not answer"), "{paused:?}");
    let pauses = || {
        let asked = asked.lock().unwrap();
        let pause = |request: &&String| request.contains("pause");
        asked.iter().filter(pause).count()
    };
    assert!((1..=32).contains(&pauses()), "{} requests", pauses());
    eprintln!("{COUNT} refused within {:?}", began.elapsed());
    drop(silence);
    until(|| async {
        let nodes: ApiReply = stage.ask_raw("fiec.api.nodes", "{}").await;
        nodes.nodes.iter().all(|n| n.viability == Viability::Lost)
    })
    .await;
    let began = std::time::Instant::now();
    let (mut done, mut answers) = (0, 0);
    while done < COUNT {
        let reply = ask_batch(&stage, "cancel").await;
        assert_eq!((reply.failed, reply.error), (0, None));
        (done, answers) = (done + reply.done, answers + 1);
        assert!(answers <= 10, "{done} of {COUNT}");
    }
    eprintln!("{COUNT} cancelled within {:?}", began.elapsed());
    let status = ask_batch(&stage, "status").await;
    assert_eq!(
        status.phases.get(&PhaseKind::Cancelled),
        Some(&COUNT),
        "{status:?}"
    );
    service.stop().await;
}
