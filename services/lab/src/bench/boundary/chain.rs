//! The chain of commits of `bench boundary`: one execution without work commits 32 KiB of state at
//! every capsule. The floor is raw serial compare-and-set publishes of the same size on the same
//! stream. One case has the ledger alone, the other has a recorder that writes every boundary into
//! PostgreSQL.
//!
//! The bench does not follow the ledger meanwhile. To read thousands of messages a second takes
//! processor time from both sides, and not the same from each.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use async_nats::HeaderMap;
use async_nats::jetstream::message::PublishMessage;
use bytes::Bytes;
use fiec_broker::Broker;
use fiec_schemas::{ExecutionId, subjects};
use serde_json::json;

use super::super::cpu::{self, Spent};
use super::super::figures::median;
use super::super::follow::{self, Follow};
use super::super::{Lab, cluster, submit, tenant};

const STATE: usize = 32 * 1024;
/// Bytes of a boundary's event, so that both sides publish messages of one size.
const EVENT: usize = 1_000;

/// Rounds are short and many, so that a slow moment of the machine meets both sides of a round.
const ROUNDS: usize = 20;
/// Poll interval for the execution's end.
const POLL: Duration = Duration::from_millis(20);
/// Longest time of a round.
const PATIENCE: Duration = Duration::from_secs(60);

/// Measures `capsules_per_s` (floor: raw appends a second, reach ≥ 0.8), and `cpu_us_per_capsule` of
/// each part, for both sides.
///
/// # Errors
/// When something could not be started or measured.
pub(super) async fn run(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    for (case, history) in [("32 KiB", false), ("32 KiB with history", true)] {
        measure(lab, case, history).await?;
    }
    Ok(())
}

async fn measure(lab: &mut Lab<'_>, case: &str, history: bool) -> anyhow::Result<()> {
    let cluster = cluster(lab, 1, &[], history).await?;
    let count = lab.samples(1_500);
    let (mut ratios, mut floors) = (Vec::new(), Vec::new());
    let (mut spent, mut bare) = (Spent::default(), Spent::default());
    for round in 0..=ROUNDS {
        lab.steps_message(&format!("chain, {case}: round {round} of {ROUNDS}"));
        let first = cpu::parts(&cluster);
        let floor = raw(&cluster.broker, count).await?;
        let before = cpu::parts(&cluster);
        let rate = committed(&cluster.broker, round, count).await?;
        if round > 0 {
            ratios.push(rate / floor);
            floors.push(floor);
            bare.add(&first, &before, count);
            spent.add(&before, &cpu::parts(&cluster), count);
        }
    }
    let floor = median(&mut floors);
    let value = floor * median(&mut ratios);
    lab.figures
        .add("chain", case, "capsules_per_s", "1/s", value, Some(floor));
    let metric = "cpu_us_per_capsule";
    spent.add_to(lab.figures, "chain", &format!("{case}: "), metric);
    bare.add_to(lab.figures, "chain", &format!("{case}, raw: "), metric);
    cluster.stop().await;
    Ok(())
}

/// Capsules a second of one execution, each with its commit, by the program's own clock.
async fn committed(broker: &Broker, round: usize, count: usize) -> anyhow::Result<f64> {
    let submission = json!({
        "program": "synthetic@1",
        "params": {"capsules": count, "state_bytes": STATE},
        "commit": {"every": 1},
    });
    let mut started = Follow::open(broker).await?;
    let execution = submit(broker, &format!("chain-{round}"), submission).await?;
    let since = started.started(execution, 1, PATIENCE).await?.since;
    drop(started);
    let end = follow::ended(broker, execution, POLL, PATIENCE).await?;
    // The last capsule completes the execution; every other one ends in a commit.
    anyhow::ensure!(
        end.commits + 1 >= count as u64,
        "only {} of {count} boundaries were committed",
        end.commits
    );
    let micros = end.until.micros() - since.micros();
    Ok(end.capsules as f64 / (micros as f64 / 1e6))
}

/// Raw serial compare-and-set publishes a second.
async fn raw(broker: &Broker, count: usize) -> anyhow::Result<f64> {
    let subject = subjects::ledger(&tenant()?, ExecutionId(uuid::Uuid::now_v7()));
    let body = Bytes::from(vec![7u8; STATE]);
    let text = "x".repeat(EVENT);
    let mut last = 0;
    let began = Instant::now();
    for _ in 0..count {
        // As long as a boundary's event, but no event: readers skip it.
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
