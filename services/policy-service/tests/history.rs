//! Submissions that are sent again after their ledgers have dropped out of the stream. The test plays
//! the recorder.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::stage::{Stage, tenant, until};
use fiec_broker::Ledger;
use fiec_schemas::messages::{Recorded, RecordedReply, RecordedRequest, SubmitReply};
use fiec_schemas::{ClientId, Digest, ExecutionId, PhaseKind, subjects};
use futures_util::StreamExt as _;

fn id(client: &str) -> ExecutionId {
    ExecutionId::from_client(&tenant(), &ClientId::new(client).unwrap())
}

/// Answers with what it knows, or not at all, and counts the executions that it is asked about.
async fn recorder(stage: &Stage, knows: Option<Vec<Recorded>>) -> Arc<AtomicU64> {
    let client = stage.broker.client.clone();
    let mut requests = client.subscribe(subjects::RECORDER_RECORDED).await.unwrap();
    client.flush().await.unwrap();
    let asked = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&asked);
    tokio::spawn(async move {
        while let Some(request) = requests.next().await {
            let ids: RecordedRequest = serde_json::from_slice(&request.payload).unwrap();
            count.fetch_add(ids.executions.len() as u64, Ordering::Relaxed);
            let Some(mut recorded) = knows.clone() else {
                continue;
            };
            recorded.retain(|r| ids.executions.contains(&r.execution));
            let reply = RecordedReply {
                recorded,
                error: None,
            };
            let reply = serde_json::to_vec(&reply).unwrap();
            let to = request.reply.unwrap();
            client.publish(to, reply.into()).await.unwrap();
        }
    });
    asked
}

/// Runs an execution to its end and removes its ledger, as its age does. Gives the submission's digest.
async fn end_and_forget(stage: &Stage, client: &str) -> Digest {
    let service = stage.service().await;
    stage
        .publish(&format!(r#"{{"id":"{client}","program":"synthetic@1"}}"#))
        .await;
    stage.finish(client, "n1").await;
    until(|| async { stage.submissions_left().await == 0 }).await;
    service.stop().await;
    let digest = stage.last(client).await.message.state.submission;
    let stream = stage.broker.js.get_stream(subjects::LEDGER_STREAM).await;
    let subject = subjects::ledger(&tenant(), id(client));
    stream.unwrap().purge().filter(subject).await.unwrap();
    digest
}

async fn has_ledger(stage: &Stage, client: &str) -> bool {
    let last = Ledger::new(&stage.broker).last(&tenant(), id(client)).await;
    last.unwrap().is_some()
}

#[tokio::test]
async fn a_line_whose_ledger_is_gone_does_not_run_again_if_the_history_knows_its_end() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let submission = end_and_forget(&stage, "a").await;
    let knows = Recorded {
        execution: id("a"),
        phase: PhaseKind::Completed,
        submission,
    };
    recorder(&stage, Some(vec![knows])).await;
    let _service = stage.service().await;

    // By the stream: acknowledged, or refused if it is another submission.
    stage.publish(r#"{"id":"a","program":"synthetic@1"}"#).await;
    until(|| async { stage.submissions_left().await == 0 }).await;
    assert!(!has_ledger(&stage, "a").await, "it runs again");
    let other = r#"{"id":"a","program":"synthetic@1","params":{"capsules":2}}"#;
    stage.publish(other).await;
    let record = stage.record("fiec.record.rejection.lab").await;
    let reason = record["error"]["reason"].as_str().unwrap();
    assert!(reason.contains("another body"), "{record}");

    // By request: the answer says the same.
    let same = r#"{"id":"a","program":"synthetic@1"}"#;
    let reply: SubmitReply = stage.ask_raw("fiec.api.submit.lab", same).await;
    assert!(reply.accepted[0].existing, "{reply:?}");
    let reply: SubmitReply = stage.ask_raw("fiec.api.submit.lab", other).await;
    assert!(reply.errors[0].reason.contains("another body"), "{reply:?}");
    assert!(!has_ledger(&stage, "a").await, "it runs again");
}

#[tokio::test]
async fn a_line_begins_anew_if_no_recorder_answers_or_the_execution_had_not_ended() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let submission = end_and_forget(&stage, "a").await;
    let live = Recorded {
        execution: id("a"),
        phase: PhaseKind::Started,
        submission,
    };
    for knows in [None, Some(vec![live])] {
        let asked = recorder(&stage, knows).await;
        let service = stage.service().await;
        stage.publish(r#"{"id":"a","program":"synthetic@1"}"#).await;
        until(|| async { has_ledger(&stage, "a").await }).await;
        assert!(asked.load(Ordering::Relaxed) > 0);
        stage.finish("a", "n1").await;
        until(|| async { stage.submissions_left().await == 0 }).await;
        service.stop().await;
        let stream = stage.broker.js.get_stream(subjects::LEDGER_STREAM).await;
        stream.unwrap().purge().await.unwrap();
    }
}

#[tokio::test]
async fn no_recorder_is_asked_while_the_stream_has_every_ledger() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let asked = recorder(&stage, Some(Vec::new())).await;
    let _service = stage.service().await;
    let next = Mutex::new(0..);
    // The service asks until it has looked at the stream for the first time.
    until(|| async {
        let number = next.lock().unwrap().next().unwrap();
        let before = asked.load(Ordering::Relaxed);
        stage
            .publish(&format!(r#"{{"id":"a{number}","program":"cg@1","params":{{"matrix":{{"poisson2d":{{"n":8}}}}}}}}"#))
            .await;
        stage.last(&format!("a{number}")).await;
        asked.load(Ordering::Relaxed) == before
    })
    .await;
}
