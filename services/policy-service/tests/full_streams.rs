//! Streams without room: submissions are refused or wait, and nothing is lost.
use crate::health::{healthz, submit, watched};
use crate::stage::{Stage, until};
use async_nats::jetstream::stream::{Config, State};
use fiec_broker::topology;
use fiec_schemas::subjects;

async fn state(stage: &Stage, name: &str) -> State {
    let stream = stage.broker.js.get_stream(name).await.unwrap();
    stream.cached_info().state.clone()
}

/// Lowers a stream's limit to this.
async fn limit(stage: &Stage, name: &str, bytes: u64) {
    let js = &stage.broker.js;
    let stream = js.get_stream(name).await.unwrap();
    let lower = Config {
        max_bytes: bytes as i64,
        ..stream.cached_info().config.clone()
    };
    js.update_stream(lower).await.unwrap();
}

async fn give_room(stage: &Stage) {
    let profile = topology::Profile::default();
    topology::apply(&stage.broker, &profile).await.unwrap();
}

#[tokio::test]
async fn a_full_stream_of_submissions_refuses_in_a_sentence_until_it_has_room() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let (_service, address) = watched(&stage).await;
    until(|| async { healthz(address).await.contains("200 OK") }).await;
    limit(&stage, subjects::SUBMIT_STREAM, 50).await;
    let refused = submit(&stage).await;
    let why = refused.error.unwrap();
    for words in ["was not stored", "is full", "`fiec setup --store-bytes`"] {
        assert!(why.contains(words), "{why}");
    }
    assert!(refused.accepted.is_empty());
    give_room(&stage).await;
    assert_eq!(submit(&stage).await.accepted.len(), 1);
}

#[tokio::test]
async fn submissions_wait_while_the_ledgers_have_no_room_and_health_names_the_stream() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let ledgers = async || state(&stage, subjects::LEDGER_STREAM).await;
    let (service, address) = watched(&stage).await;
    until(|| async { healthz(address).await.contains("200 OK") }).await;
    assert_eq!(submit(&stage).await.accepted.len(), 1);
    until(|| async { ledgers().await.messages > 0 }).await;
    // The next request must not be this one's: it has not looked since.
    service.stop().await;
    let before = ledgers().await;
    limit(&stage, subjects::LEDGER_STREAM, before.bytes).await;

    let (_service, address) = watched(&stage).await;
    let says = async |words: &str| healthz(address).await.contains(words);
    until(|| says("streams are full: FIEC_LEDGER (")).await;
    assert!(says("`fiec setup --store-bytes`").await);
    let refused = submit(&stage).await.error.unwrap();
    assert!(refused.contains("FIEC_LEDGER"), "{refused}");
    // As a client that asks no service.
    let line = r#"{"program":"synthetic@1"}"#;
    let sent = stage.broker.js.publish("fiec.submit.lab", line.into());
    sent.await.unwrap().await.unwrap();
    assert_eq!(ledgers().await.messages, before.messages);

    give_room(&stage).await;
    until(|| says("200 OK")).await;
    until(|| async { ledgers().await.messages > before.messages }).await;
    let waiting = async || state(&stage, subjects::SUBMIT_STREAM).await.messages;
    until(|| async { waiting().await == 0 }).await;
}
