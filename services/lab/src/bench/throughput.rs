//! `bench throughput`: no-op executions to completion, with complete history in PostgreSQL at the
//! end; and the processor time of each part.
//!
//! The floor is the least that every execution needs: the broker stores one message of the size of
//! its ledger, the first of a subject, by compare-and-set. It is measured in the same round. One
//! process sends these messages without waiting for each, and nobody reads them.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use async_nats::HeaderMap;
use async_nats::jetstream::context::PublishAckFuture;
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::stream::Config;
use fiec::sql;
use fiec_broker::{Broker, feed};
use fiec_schemas::subjects;

use super::cpu::{self, Spent};
use super::figures::median;
use super::{Lab, cluster, recorded, tenant};
use crate::cluster::Cluster;

const LINES_A_MESSAGE: usize = 50;
/// Bytes of the ledger message of an execution without work.
const MESSAGE: usize = 1_200;
/// Appends of the floor that may be unacknowledged.
const IN_FLIGHT: usize = 256;
const FLOOR_STREAM: &str = "FIEC_BENCH_FLOOR";

/// Runs the bench: `executions_per_s`, floor = raw first appends a second, reach ≥ 14,000;
/// `cpu_us_per_execution` for each part.
///
/// # Errors
/// When something could not be started or measured.
pub async fn run(lab: &mut Lab<'_>, workers: u32, slots: u32) -> anyhow::Result<()> {
    let cluster = cluster(lab, workers, &["--slots", &slots.to_string()], true).await?;
    let count = lab.samples(10_000);
    let rounds = if lab.quick { 1 } else { 5 };
    let (mut rates, mut floors) = (Vec::new(), Vec::new());
    let mut spent = Spent::default();
    let mut done = 0;
    for round in 0..=rounds {
        lab.steps_message(&format!("throughput: round {round} of {rounds}"));
        let floor = appended(&cluster.broker, count).await?;
        let before = cpu::parts(&cluster);
        let began = Instant::now();
        flood(&cluster.broker, count).await?;
        done += count;
        complete(&cluster, done).await?;
        let seconds = began.elapsed().as_secs_f64();
        if round == 0 {
            continue; // the first round learns the nodes' rate and fills caches
        }
        rates.push(count as f64 / seconds);
        floors.push(floor);
        spent.add(&before, &cpu::parts(&cluster), count);
    }
    let (rate, floor) = (median(&mut rates), median(&mut floors));
    let metric = "executions_per_s";
    lab.figures
        .add("throughput", "no-op", metric, "1/s", rate, Some(floor));
    spent.add_to(lab.figures, "throughput", "", "cpu_us_per_execution");
    cluster.stop().await;
    Ok(())
}

/// Raw first appends a second, each to a subject of its own.
async fn appended(broker: &Broker, count: usize) -> anyhow::Result<f64> {
    let config = Config {
        name: FLOOR_STREAM.to_owned(),
        subjects: vec!["bench.floor.>".to_owned()],
        ..Config::default()
    };
    broker.js.get_or_create_stream(config).await?;
    let text = "x".repeat(MESSAGE);
    let mut in_flight = VecDeque::new();
    let began = Instant::now();
    for _ in 0..count {
        if in_flight.len() >= IN_FLIGHT
            && let Some(ack) = in_flight.pop_front()
        {
            settled(ack).await?;
        }
        let mut headers = HeaderMap::new();
        headers.insert("Fiec-Bench", text.as_str());
        let message = PublishMessage::build()
            .headers(headers)
            .expected_last_subject_sequence(0);
        let subject = format!("bench.floor.{}", uuid::Uuid::now_v7());
        in_flight.push_back(broker.js.send_publish(subject, message).await?);
    }
    for ack in in_flight {
        settled(ack).await?;
    }
    let rate = count as f64 / began.elapsed().as_secs_f64();
    broker.js.delete_stream(FLOOR_STREAM).await?;
    Ok(rate)
}

async fn settled(ack: PublishAckFuture) -> anyhow::Result<()> {
    ack.await.context("a raw append failed")?;
    Ok(())
}

/// Publishes `count` no-op submissions, fifty lines a message, and waits for all acknowledgements.
async fn flood(broker: &Broker, count: usize) -> anyhow::Result<()> {
    let subject = subjects::submit(&tenant()?);
    let line = "{\"program\":\"synthetic@1\",\"params\":{\"capsules\":0}}\n";
    let mut acks = Vec::new();
    let mut left = count;
    while left > 0 {
        let lines = left.min(LINES_A_MESSAGE);
        acks.push(
            broker
                .js
                .publish(subject.clone(), line.repeat(lines).into())
                .await?,
        );
        left -= lines;
    }
    for ack in acks {
        ack.await.context("a submission was not stored")?;
    }
    Ok(())
}

/// Waits until the ledger stream has all executions and PostgreSQL has the whole stream. Counts rows
/// only then, because a count takes processor time from the services.
async fn complete(cluster: &Cluster, count: usize) -> anyhow::Result<()> {
    let pool = cluster.pool.as_ref().context("this bench needs history")?;
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut wait = Duration::from_millis(5);
    loop {
        let recorded = recorded(pool).await?;
        // Every execution has at least one message.
        if recorded >= count as u64 && feed::bounds(&cluster.broker).await?.1 == recorded {
            let rows = sql::query(
                pool,
                "SELECT count(*) FILTER (WHERE phase::text = 'completed') AS completed, \
                 (SELECT count(*) FROM placements WHERE ended_at IS NOT NULL) AS placed \
                 FROM executions"
                    .to_owned(),
            )
            .await?;
            let number = |c| {
                rows.get(0, c)
                    .and_then(|t| t.parse::<usize>().ok())
                    .unwrap_or(0)
            };
            if number("completed") >= count {
                ensure!(
                    number("placed") >= count,
                    "placements are missing from the history"
                );
                return Ok(());
            }
            // Some executions have several messages. Poll less often.
            wait = Duration::from_millis(50);
        }
        ensure!(
            Instant::now() < deadline,
            "not complete in PostgreSQL after a minute"
        );
        tokio::time::sleep(wait).await;
    }
}
