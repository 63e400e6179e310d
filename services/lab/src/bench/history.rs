//! `bench history`: ledger events from the stream into PostgreSQL by the recorder, against plain
//! COPY of the very rows that this gives, into the same tables.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use async_nats::HeaderMap;
use async_nats::jetstream::message::PublishMessage;
use fiec::sql;
use fiec_broker::Broker;
use fiec_broker::feed::FeedItem;
use fiec_recorder::{Recorder, RecorderOptions, bench_support};
use fiec_schemas::subjects;
use sqlx::PgPool;
use tokio_util::sync::CancellationToken;

use super::Lab;
use super::figures::median;
use crate::cluster::{Cluster, ClusterOptions};

/// Short ones: what slows the machine down for a moment meets both sides of a round.
const ROUNDS: usize = 7;
/// How often the checkpoint is looked at.
const LOOK: Duration = Duration::from_millis(10);

/// Runs the bench: `rows_per_s`, floor = plain COPY, reach ≥ 0.5.
///
/// # Errors
/// When something could not be started or measured.
pub async fn run(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    let options = ClusterOptions {
        workers: 0,
        policies: 1,
        ..Default::default()
    };
    let mut cluster = Cluster::start(options, lab.steps).await?;
    // Only the servers, their streams and tables are wanted here.
    cluster.policies.clear();
    cluster.recorder = None;
    let pool = cluster.pool.clone().context("this bench needs history")?;
    let items = bench_support::short_ledgers(lab.samples(30_000), 1)
        .map_err(|reason| anyhow::anyhow!("{reason}"))?;
    lab.steps_message(&format!("history: writing {} ledger messages", items.len()));
    publish(&cluster.broker, &items).await?;
    let last = fiec_broker::feed::bounds(&cluster.broker).await?.1;
    let mut floors = Vec::new();
    let mut ratios = Vec::new();
    for round in 0..=ROUNDS {
        lab.steps_message(&format!("history: round {round} of {ROUNDS}"));
        bench_support::clear(&pool).await?;
        let floor = bench_support::plain_copy(&pool, &items).await?;
        bench_support::clear(&pool).await?;
        let seconds = record(&cluster.broker, &pool, last).await?;
        if round > 0 {
            floors.push(floor.rows_per_s());
            ratios.push(floor.rows as f64 / seconds / floor.rows_per_s());
        }
    }
    let floor = median(&mut floors);
    let value = floor * median(&mut ratios);
    let case = format!("{} messages", items.len());
    lab.figures
        .add("history", &case, "rows_per_s", "1/s", value, Some(floor));
    cluster.stop().await;
    Ok(())
}

/// Puts the messages into the stream as their writers would have.
async fn publish(broker: &Broker, items: &[FeedItem]) -> anyhow::Result<()> {
    let mut acks = VecDeque::new();
    for item in items {
        let mut headers = HeaderMap::new();
        headers.insert(subjects::EVENT_HEADER, item.header.as_str());
        let subject = subjects::ledger(&item.tenant, item.execution);
        let message = PublishMessage::build().headers(headers);
        acks.push_back(broker.js.send_publish(subject, message).await?);
        if acks.len() >= 1_000
            && let Some(first) = acks.pop_front()
        {
            let ack = first.await?;
            ensure!(ack.sequence > 0, "a message was not stored");
        }
    }
    for ack in acks {
        ack.await?;
    }
    Ok(())
}

/// Seconds until the recorder's checkpoint is the last message.
async fn record(broker: &Broker, pool: &PgPool, last: u64) -> anyhow::Result<f64> {
    let stop = CancellationToken::new();
    let recorder = Recorder::new(RecorderOptions::default(), broker.clone(), pool.clone());
    let began = Instant::now();
    let running = tokio::spawn(recorder.run(stop.clone()));
    let deadline = began + Duration::from_secs(60);
    let seconds = loop {
        let rows = sql::query(
            pool,
            format!(
                "SELECT seq::text AS seq FROM recorder_checkpoint WHERE stream = '{}'",
                subjects::LEDGER_STREAM
            ),
        )
        .await?;
        if rows
            .get(0, "seq")
            .and_then(|t| t.parse::<u64>().ok())
            .unwrap_or(0)
            >= last
        {
            break began.elapsed().as_secs_f64();
        }
        ensure!(
            Instant::now() < deadline,
            "the recorder did not reach {last} within a minute"
        );
        tokio::time::sleep(LOOK).await;
    };
    stop.cancel();
    running.await??;
    Ok(seconds)
}
