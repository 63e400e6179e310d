//! Submissions that cannot be taken in because the ledger stream refuses. They wait as long as that
//! lasts, and health is red meanwhile.
use std::time::Duration;

use crate::health::{healthz, watched_with};
use crate::stage::{Stage, until};
use async_nats::Subscriber;
use async_nats::jetstream::stream::{Config, DiscardPolicy};
use fiec_policy_service::Options;
use fiec_schemas::subjects;
use futures_util::StreamExt as _;

/// Most deliveries of a message.
const DELIVERIES: i64 = 3;

fn impatient() -> Options {
    Options {
        deliveries: DELIVERIES,
        retry: Duration::from_millis(20),
        ..Options::default()
    }
}

/// Ledgers that refuse appends until [`Refusing::end`].
struct Refusing {
    before: Config,
    appends: Subscriber,
}

impl Refusing {
    async fn begin(stage: &Stage) -> Self {
        let js = &stage.broker.js;
        let ledgers = js.get_stream(subjects::LEDGER_STREAM).await.unwrap();
        let before = ledgers.cached_info().config.clone();
        let refuses = Config {
            max_bytes: 1,
            discard: DiscardPolicy::New,
            ..before.clone()
        };
        js.update_stream(refuses).await.unwrap();
        let appends = stage.broker.client.subscribe("fiec.ledger.>");
        let appends = appends.await.unwrap();
        stage.broker.client.flush().await.unwrap();
        Self { before, appends }
    }

    /// Waits for more refused appends than a message may have deliveries.
    async fn appends(&mut self) {
        let more = usize::try_from(DELIVERIES).unwrap() + 2;
        let refused = self.appends.by_ref().take(more).count();
        let refused = tokio::time::timeout(Duration::from_secs(60), refused).await;
        assert_eq!(refused, Ok(more), "the line is not tried again");
    }

    async fn end(self, stage: &Stage) {
        stage.broker.js.update_stream(self.before).await.unwrap();
    }
}

async fn is_bound_and_nothing_was_refused(stage: &Stage, id: &str) {
    assert_eq!(stage.last(id).await.message.state.phase.as_str(), "bound");
    until(|| async { stage.submissions_left().await == 0 }).await;
    let records = stage.broker.js.get_stream(subjects::RECORD_STREAM).await;
    let records = records.unwrap();
    let rejections = subjects::rejection("lab");
    let refused = records.get_last_raw_message_by_subject(&rejections).await;
    assert!(refused.is_err(), "{refused:?}");
}

#[tokio::test]
async fn a_line_waits_as_long_as_the_ledgers_refuse_it_and_health_says_why() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let (service, address) = watched_with(&stage, impatient()).await;
    let says = async |words: &str| healthz(address).await.contains(words);
    until(|| says("200 OK")).await;
    let mut refusing = Refusing::begin(&stage).await;
    stage
        .publish(r#"{"id":"patient","program":"synthetic@1"}"#)
        .await;
    refusing.appends().await;
    until(|| says("503")).await;
    until(|| says("submissions are not taken in: 1 messages wait")).await;
    until(|| says("maximum bytes exceeded")).await;
    refusing.end(&stage).await;
    is_bound_and_nothing_was_refused(&stage, "patient").await;
    until(|| says("200 OK")).await;
    service.stop().await;
}

#[tokio::test]
async fn a_service_that_starts_while_the_ledgers_refuse_lets_the_line_wait_too() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let service = stage.service_with(impatient()).await;
    let mut refusing = Refusing::begin(&stage).await;
    stage
        .publish(r#"{"id":"patient","program":"synthetic@1"}"#)
        .await;
    refusing.appends().await;
    service.stop().await;
    let service = stage.service_with(impatient()).await;
    refusing.appends().await;
    refusing.end(&stage).await;
    is_bound_and_nothing_was_refused(&stage, "patient").await;
    service.stop().await;
}

#[tokio::test]
async fn a_waiting_message_that_is_gone_from_the_stream_leaves_health_green() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let (service, address) = watched_with(&stage, impatient()).await;
    let says = async |words: &str| healthz(address).await.contains(words);
    let mut refusing = Refusing::begin(&stage).await;
    stage
        .publish(r#"{"id":"elsewhere","program":"synthetic@1"}"#)
        .await;
    refusing.appends().await;
    until(|| says("submissions are not taken in")).await;
    // As if another policy service had taken it in.
    let submissions = stage.broker.js.get_stream(subjects::SUBMIT_STREAM).await;
    submissions.unwrap().delete_message(1).await.unwrap();
    until(|| says("200 OK")).await;
    service.stop().await;
}
