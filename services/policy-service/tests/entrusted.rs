//! Entrusted first bindings: nodes that append them, nodes that do not answer, and other writers
//! that are first.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::stage::{Stage, until};
use bytes::Bytes;
use fiec_broker::{Draft, Ledger};
use fiec_policy_service::Options;
use fiec_schemas::messages::{BatchReply, Handover, RefusalCode};
use fiec_schemas::{
    Bound, Digest, Event, ExecutionId, LedgerMessage, Phase, Submission, Timestamp, subjects,
};
use serde_json::{Value, json};

type Heard = Arc<Mutex<Vec<(Handover, Bytes)>>>;

/// Longer than any of these tests.
const FOR_EVER: Duration = Duration::from_secs(600);

fn patient() -> Options {
    Options {
        entrust: FOR_EVER,
        ..Options::default()
    }
}

const LINE: &str = r#"{"program":"synthetic@1"}"#;

/// The ledger messages that were entrusted to a node so far.
fn entrusted(heard: &Heard) -> Vec<String> {
    let mut texts = Vec::new();
    for (word, body) in &*heard.lock().unwrap() {
        let Handover::Entrusted { bindings } = word else {
            continue;
        };
        let body = String::from_utf8(body.to_vec()).unwrap();
        let lines: Vec<_> = body.lines().map(str::to_owned).collect();
        assert_eq!(lines.len(), usize::try_from(*bindings).unwrap());
        texts.extend(lines);
    }
    texts
}

/// The `nth` message that was entrusted to the node, and its execution.
async fn told(heard: &Heard, nth: usize) -> (String, ExecutionId) {
    until(|| async { entrusted(heard).len() > nth }).await;
    let text = entrusted(heard).swap_remove(nth);
    let id = LedgerMessage::decode(&text, 0).unwrap().state.execution;
    (text, id)
}

/// Plays the node: appends the binding and all following events in one message.
async fn append_whole(stage: &Stage, text: &str) {
    let LedgerMessage {
        mut events, state, ..
    } = LedgerMessage::decode(text, 0).unwrap();
    let Phase::Bound(Bound { binding, .. }) = &state.phase else {
        panic!("{text}");
    };
    let author = format!("worker/{}/{}", binding.node, binding.instance);
    let (made, at) = (events.len(), Timestamp::now());
    events.extend([
        Event::Started {
            epoch: state.epoch,
            computing_since: at,
        },
        Event::Completed {
            result: Value::Null,
            object: None,
            computed_until: at,
            capsules: 1,
            outputs: vec![],
            energy: None,
        },
    ]);
    let draft = Draft::first(&state, events, made, &author, at).unwrap();
    let ledger = Ledger::new(&stage.broker);
    ledger.append(draft, Bytes::new()).await.unwrap();
}

#[tokio::test]
async fn what_a_node_does_not_append_in_time_is_appended_as_it_was_told() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let _service = stage.service().await;
    let heard = stage.hears("n1").await;
    stage.publish(LINE).await;
    let (text, id) = told(&heard, 0).await;
    let entry = stage.last_of(id).await;
    assert_eq!(entry.digest, Digest::of(text.as_bytes()));
    assert_eq!(entry.message.state.ordinal, 1);
    // From now on it is an ordinary binding.
    let capsule = stage.capsule("n1").await;
    assert_eq!(capsule.bindings[0].digest, entry.digest);
    assert_eq!(capsule.bindings[0].seq, entry.seq);
    until(|| async { stage.submissions_left().await == 0 }).await;
}

#[tokio::test]
async fn what_a_node_has_appended_is_done_with() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let _service = stage.service_with(patient()).await;
    let heard = stage.hears("n1").await;
    // The node has four slots. The next four have places once the service knows that these have
    // ended.
    for round in 0..3 {
        stage.publish(&[LINE; 4].join("\n")).await;
        let mut all = Vec::new();
        for nth in 4 * round..4 * round + 4 {
            all.push(told(&heard, nth).await);
        }
        assert_eq!(stage.submissions_left().await, 1);
        for (text, id) in all {
            append_whole(&stage, &text).await;
            assert_eq!(stage.last_of(id).await.message.state.ordinal, 1);
        }
        until(|| async { stage.submissions_left().await == 0 }).await;
    }
    assert_eq!(entrusted(&heard).len(), 12);
}

/// A client's id can have a ledger, so it is looked up.
#[tokio::test]
async fn a_new_id_of_a_client_is_left_to_its_node_and_one_that_has_a_ledger_is_not() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let _service = stage.service_with(patient()).await;
    let heard = stage.hears("n1").await;
    let line = r#"{"id":"a","program":"synthetic@1"}"#;
    stage.publish(line).await;
    let (text, id) = told(&heard, 0).await;
    append_whole(&stage, &text).await;
    until(|| async { stage.submissions_left().await == 0 }).await;
    stage.publish(line).await;
    until(|| async { stage.submissions_left().await == 0 }).await;
    assert_eq!(stage.last_of(id).await.message.state.ordinal, 1);
    // The next message that the node hears is the one entrusted afterwards.
    stage.publish(LINE).await;
    let (text, _) = told(&heard, 1).await;
    let words = heard.lock().unwrap().clone();
    assert_eq!(words.len(), 2, "{words:?}");
    assert_eq!(words[1].1, text.as_bytes());
}

/// The other line waits until the first one has its ledger.
#[tokio::test]
async fn of_equal_lines_with_one_new_id_one_is_left_to_a_node() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let _service = stage.service_with(patient()).await;
    let heard = stage.hears("n1").await;
    let line = r#"{"id":"a","program":"synthetic@1"}"#;
    for _ in 0..4 {
        stage.publish(line).await;
    }
    let (text, id) = told(&heard, 0).await;
    // Longer than the service looks for the ledger of another line.
    tokio::time::sleep(Duration::from_secs(1)).await;
    append_whole(&stage, &text).await;
    until(|| async { stage.submissions_left().await == 0 }).await;
    assert_eq!(entrusted(&heard).len(), 1);
    assert_eq!(stage.last_of(id).await.message.state.ordinal, 1);
}

#[tokio::test]
async fn a_submission_that_has_lain_in_the_service_for_long_is_not_left_to_a_node() {
    let stage = Stage::with_nodes(&["n1"]).await;
    // One at a time: the second submission waits in the service while the first one is at its node.
    let options = Options {
        in_flight: 1,
        ..patient()
    };
    let _service = stage.service_with(options).await;
    let heard = stage.hears("n1").await;
    stage.publish(LINE).await;
    stage.publish(LINE).await;
    let (first, _) = told(&heard, 0).await;
    // After four seconds, another service may have taken in the second submission.
    tokio::time::sleep(Duration::from_secs(5)).await;
    append_whole(&stage, &first).await;
    until(|| async { entrusted(&heard).len() > 1 || stage.submissions_left().await == 0 }).await;
    let others = entrusted(&heard).split_off(1);
    assert_eq!(others, [""; 0], "a stale submission was left to a node");
}

#[tokio::test]
async fn a_ledger_of_another_submission_is_no_answer() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let _service = stage.service_with(patient()).await;
    let heard = stage.hears("n1").await;
    stage.publish(LINE).await;
    let (text, _) = told(&heard, 0).await;
    let mut message = LedgerMessage::decode(&text, 0).unwrap();
    let other = json!({ "program": "synthetic@1", "params": { "capsules": 7 } });
    let other = Submission::parse(other.to_string().as_bytes()).unwrap();
    let state = Arc::make_mut(&mut message.state);
    state.submission = other.digest();
    state.spec = Some(Arc::new(other));
    append_whole(&stage, &message.encode().unwrap()).await;
    let rejection = stage.record(&subjects::rejection("lab")).await.to_string();
    assert!(
        rejection.contains("exists with another body"),
        "{rejection}"
    );
    until(|| async { stage.submissions_left().await == 0 }).await;
    // Its slot is free: the node has four.
    stage.publish(&[LINE; 4].join("\n")).await;
    told(&heard, 4).await;
}

#[tokio::test]
async fn what_shares_a_limit_with_others_is_appended_before_its_node_hears_of_it() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let _service = stage.service_with(patient()).await;
    let heard = stage.hears("n1").await;
    stage
        .publish(r#"{"program":"synthetic@1","batch":"few","at_once":1}"#)
        .await;
    let bound = stage.capsule("n1").await;
    assert!(bound.bindings[0].state.author.starts_with("policy/"));
    assert!(entrusted(&heard).is_empty());
}

#[tokio::test]
async fn nothing_is_left_to_nodes_where_that_is_switched_off() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let off = Options {
        entrust: Duration::ZERO,
        ..Options::default()
    };
    let _service = stage.service_with(off).await;
    let heard = stage.hears("n1").await;
    stage.publish(LINE).await;
    stage.capsule("n1").await;
    assert!(entrusted(&heard).is_empty());
}

#[tokio::test]
async fn a_service_that_is_told_to_end_appends_what_its_nodes_have_not() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let service = stage.service_with(patient()).await;
    let heard = stage.hears("n1").await;
    stage.publish(LINE).await;
    stage.publish(LINE).await;
    let (lost, done) = (told(&heard, 0).await, told(&heard, 1).await);
    append_whole(&stage, &done.0).await;
    service.stop().await;
    let entry = stage.last_of(lost.1).await;
    assert_eq!(entry.digest, Digest::of(lost.0.as_bytes()));
    assert_eq!(stage.last_of(done.1).await.message.state.ordinal, 1);
    // Another service sends its capsule.
    let _second = stage.service().await;
    assert_eq!(stage.capsule("n1").await.bindings[0].seq, entry.seq);
}

#[tokio::test]
async fn what_a_service_had_left_to_a_node_when_it_died_is_taken_up_by_another_one() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let first = stage.service_with(patient()).await;
    let heard = stage.hears("n1").await;
    stage.publish(LINE).await;
    stage.publish(LINE).await;
    let (lost, done) = (told(&heard, 0).await, told(&heard, 1).await);
    // The service ends without a message.
    first.die().await;
    // The node has done one. Only the stream of submissions knows the other one.
    append_whole(&stage, &done.0).await;
    let _second = stage.service().await;
    let capsule = stage.capsule("n1").await;
    assert_eq!(capsule.bindings[0].state.execution, lost.1);
    assert_eq!(stage.last_of(lost.1).await.message.state.epoch, 1);
    until(|| async { stage.submissions_left().await == 0 }).await;
    assert_eq!(stage.last_of(done.1).await.message.state.ordinal, 1);
}

#[tokio::test]
async fn a_request_about_a_batch_waits_for_what_has_no_ledger_yet_and_says_what_it_did_not_reach() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let first = stage.service_with(patient()).await;
    let heard = stage.hears("n1").await;
    let ask = async |verb: &str| {
        let request = json!({"batch": "b", "who": "ann", "within_ms": 4_000});
        let subject = format!("fiec.api.batch.{verb}.lab");
        stage.ask::<BatchReply>(&subject, &request).await
    };
    stage
        .publish(r#"{"batch":"b","program":"synthetic@1"}"#)
        .await;
    let (_, id) = told(&heard, 0).await;
    // The node does not answer, and the service waits for it without a limit.
    for verb in ["status", "cancel"] {
        let reply = ask(verb).await;
        let untaken = reply.untaken.unwrap();
        assert_eq!((untaken.messages, untaken.oldest), (1, untaken.upto));
        assert_eq!(reply.done, 0);
        assert_eq!(reply.refusal, Some(RefusalCode::NotTakenIn));
        let (error, words) = (reply.error.unwrap(), "1 submission messages of tenant lab");
        assert!(error.contains(words), "{error}");
    }
    first.stop().await;
    let second = stage.service().await;
    until(|| async { stage.submissions_left().await == 0 }).await;
    let reply = ask("cancel").await;
    assert_eq!((reply.untaken, reply.done), (None, 1), "{reply:?}");
    let state = stage.last_of(id).await.message.state;
    assert!(matches!(state.phase, Phase::Cancelled), "{state:?}");
    // The request waits for a service that appends in time.
    stage
        .publish(r#"{"batch":"b","program":"synthetic@1","labels":{"n":"2"}}"#)
        .await;
    told(&heard, 1).await;
    let mut reply = ask("cancel").await;
    while reply.untaken.is_some() {
        // This machine was busy for a second.
        reply = ask("cancel").await;
    }
    assert_eq!((reply.untaken, reply.done), (None, 1), "{reply:?}");
    second.stop().await;
}
