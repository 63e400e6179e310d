//! `bench chain`: one execution, 32 KiB of state committed at every capsule, no-op work, against
//! raw serial compare-and-set publishes of the same size on the same stream. Once with the ledger
//! alone, and once with a recorder that writes every boundary into PostgreSQL meanwhile.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use async_nats::HeaderMap;
use async_nats::jetstream::message::PublishMessage;
use bytes::Bytes;
use fiec_broker::Broker;
use fiec_schemas::{ExecutionId, subjects};
use serde_json::json;

use super::figures::median;
use super::follow::Follow;
use super::{Lab, cluster, submit, tenant};

const STATE: usize = 32 * 1024;
/// Bytes of a boundary's event, so that both sides publish messages of one size.
const EVENT: usize = 1_000;

/// Runs the bench: `capsules_per_s`, floor = raw appends a second, reach ≥ 0.8.
///
/// # Errors
/// When something could not be started or measured.
pub async fn run(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    for (case, history) in [("32 KiB", false), ("32 KiB with history", true)] {
        measure(lab, case, history).await?;
    }
    Ok(())
}

async fn measure(lab: &mut Lab<'_>, case: &str, history: bool) -> anyhow::Result<()> {
    let cluster = cluster(lab, 1, &[], history).await?;
    let mut follow = Follow::open(&cluster.broker).await?;
    let count = lab.samples(5_000);
    let mut ratios = Vec::new();
    let mut floors = Vec::new();
    for round in 0..6 {
        lab.steps_message(&format!("chain, {case}: round {round} of 5"));
        let floor = raw(&cluster.broker, count).await?;
        let submission = json!({
            "program": "synthetic@1",
            "params": {"capsules": count, "state_bytes": STATE},
            "commit": {"every": 1},
        });
        let execution = submit(&cluster.broker, &format!("chain-{round}"), submission).await?;
        let span = follow
            .to_completion(execution, Duration::from_secs(60))
            .await?;
        // The last capsule completes the execution; every other one ends in a commit.
        anyhow::ensure!(
            span.commits + 1 >= count as u64,
            "only {} of {count} boundaries were committed",
            span.commits
        );
        if round > 0 {
            ratios.push(span.capsules as f64 / span.seconds() / floor);
            floors.push(floor);
        }
    }
    let floor = median(&mut floors);
    let value = floor * median(&mut ratios);
    lab.figures
        .add("chain", case, "capsules_per_s", "1/s", value, Some(floor));
    cluster.stop().await;
    Ok(())
}

/// Raw serial compare-and-set publishes a second.
async fn raw(broker: &Broker, count: usize) -> anyhow::Result<f64> {
    let subject = subjects::ledger(&tenant()?, ExecutionId(uuid::Uuid::now_v7()));
    let body = Bytes::from(vec![7u8; STATE]);
    let text = "x".repeat(EVENT);
    let mut last = 0;
    let began = Instant::now();
    for _ in 0..count {
        // As long as a boundary's event, but none: readers pass over it.
        let mut headers = HeaderMap::new();
        headers.insert("Fiec-Bench", text.as_str());
        let message = PublishMessage::build()
            .payload(body.clone())
            .headers(headers)
            .expected_last_subject_sequence(last);
        let ack = broker.js.send_publish(subject.clone(), message).await?;
        last = ack.await.context("a raw append failed")?.sequence;
    }
    Ok(count as f64 / began.elapsed().as_secs_f64())
}
