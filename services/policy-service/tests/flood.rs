//! More submissions than any queue of the service holds. The service waits for others, but never
//! for itself.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use crate::stage::{Stage, until};
use fiec_policy_service::Options;
use fiec_schemas::messages::ApiReply;
use fiec_schemas::{Bound, HardwareVector, NodeId, Phase, subjects};
use futures_util::StreamExt as _;
use futures_util::future::join_all;
use tokio_util::sync::CancellationToken;

const MESSAGES: usize = 5;
/// Lines of each message; every second line is invalid. In total, there are more invalid lines than
/// the queue of outcomes holds, and more valid ones than the queue of acknowledgements.
const LINES: usize = 2_200;
/// Executions with thresholds of their own.
const THRESHOLDS: u32 = 6_000;
const PATIENCE: Duration = Duration::from_secs(240);

async fn messages_of(stage: &Stage, stream: &str) -> u64 {
    let stream = stage.broker.js.get_stream(stream).await.unwrap();
    stream.cached_info().state.messages
}

#[tokio::test]
async fn a_flood_larger_than_every_queue_is_taken_in_while_questions_are_answered() {
    let stage = Stage::with_nodes(&["n1", "n2"]).await;
    let options = Options {
        // So small that the queue of appends is always full.
        in_flight: 4,
        ..Options::default()
    };
    let _service = stage.service_with(options).await;
    let records = messages_of(&stage, subjects::RECORD_STREAM).await;
    for message in 0..MESSAGES {
        let mut body = String::new();
        for line in 0..LINES / 2 {
            writeln!(
                body,
                r#"{{"id":"f{message}-{line}","program":"synthetic@1"}}"#
            )
            .unwrap();
            writeln!(body, r#"{{"program":7}}"#).unwrap();
        }
        stage.publish(&body).await;
    }
    let began = Instant::now();
    let mut answered = 0;
    while stage.submissions_left().await > 0 {
        assert!(began.elapsed() < PATIENCE, "{answered} questions answered");
        let ask = || stage.ask_raw::<ApiReply>("fiec.api.nodes", "{}");
        for reply in join_all((0..50).map(|_| ask())).await {
            assert_eq!((reply.error, reply.nodes.len()), (None, 2));
            answered += 1;
        }
    }
    assert!(answered > 0);
    let half = (MESSAGES * LINES / 2) as u64;
    assert_eq!(messages_of(&stage, subjects::LEDGER_STREAM).await, half);
    let refused = messages_of(&stage, subjects::RECORD_STREAM).await - records;
    assert!(refused >= half, "{refused} of {half} refusals are recorded");
}

#[tokio::test]
async fn a_flood_goes_on_within_seconds_after_the_broker_was_killed_in_its_middle() {
    let mut stage = Stage::with_nodes(&["n1", "n2"]).await;
    let _service = stage.service().await;
    let lines = 4_000;
    let mut body = String::new();
    for line in 0..lines {
        writeln!(body, r#"{{"id":"k{line}","program":"synthetic@1"}}"#).unwrap();
    }
    stage.publish(&body).await;
    // From here on, hundreds of appends are in flight. The lost ones time out at once.
    until(|| async { messages_of(&stage, subjects::LEDGER_STREAM).await >= 300 }).await;
    stage.restart_broker().await;
    let began = Instant::now();
    while stage.submissions_left().await > 0 {
        let stored = messages_of(&stage, subjects::LEDGER_STREAM).await;
        assert!(began.elapsed() < PATIENCE, "{stored} of {lines} are stored");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(messages_of(&stage, subjects::LEDGER_STREAM).await, lines);
}

#[tokio::test]
async fn a_flood_of_vectors_of_one_node_does_not_hide_that_another_one_is_lost() {
    let stage = Stage::with_nodes(&[]).await;
    let (_, lives) = stage.add_mute_node("n2").await;
    let _service = stage.service().await;
    stage.publish(r#"{"id":"a","program":"synthetic@1"}"#).await;
    let is_on = async |node: &str| match &stage.last("a").await.message.state.phase {
        Phase::Bound(Bound { binding, .. }) => binding.node.as_str() == node,
        _ => false,
    };
    until(|| is_on("n2")).await;
    // Each vector is judged by the thresholds of every one, so it takes the service long.
    let mut body = String::new();
    for line in 0..THRESHOLDS {
        let high = 0.9 + f64::from(line) / 100_000.0;
        writeln!(
            body,
            r#"{{"program":"synthetic@1","requires":{{"memory_bytes":1000000000000000}},"viability":{{"memory":{{"high":{high},"low":0.4,"dwell_ms":900}}}}}}"#
        )
        .unwrap();
    }
    stage.publish(&body).await;
    until(|| async { stage.submissions_left().await == 0 }).await;
    stage.add_node("n1", &["synthetic@1"], 4).await;
    let client = &stage.broker.client;
    let subject = subjects::telemetry(&NodeId::new("n1").unwrap());
    let mut vectors = client.subscribe(subject.clone()).await.unwrap();
    let vector = vectors.next().await.unwrap().payload;
    let mut vector: HardwareVector = serde_json::from_slice(&vector).unwrap();
    drop(vectors);
    let stop = CancellationToken::new();
    let _stop = stop.clone().drop_guard();
    let flooding = client.clone();
    tokio::spawn(stop.run_until_cancelled_owned(async move {
        for count in 1_000_000.. {
            vector.count = count;
            vector.readings[0].value = Some(if count % 2 == 0 { 0.2 } else { 0.3 });
            let payload = serde_json::to_vec(&vector).unwrap().into();
            flooding.publish(subject.clone(), payload).await.unwrap();
        }
    }));
    drop(lives);
    let began = Instant::now();
    until(|| is_on("n1")).await;
    let took = began.elapsed();
    assert!(took < Duration::from_secs(30), "bound anew after {took:?}");
}
