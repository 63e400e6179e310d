//! `bench history`: the recorder writes ledger events from the stream into PostgreSQL. The floor is a
//! plain COPY of the same rows into the same tables.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use async_nats::HeaderMap;
use async_nats::jetstream::message::PublishMessage;
use fiec_broker::Broker;
use fiec_broker::feed::FeedItem;
use fiec_recorder::{Recorder, RecorderOptions, lab_support};
use fiec_schemas::subjects;
use sqlx::PgPool;
use tokio_util::sync::CancellationToken;

use super::figures::median;
use super::{Lab, recorded};
use crate::cluster::{Cluster, ClusterOptions};

/// Rounds are short, so that a slow moment of the machine meets both sides of a round.
const ROUNDS: usize = 7;
/// Poll interval of the checkpoint.
const POLL: Duration = Duration::from_millis(10);

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
    // The bench uses only the servers, their streams and tables.
    cluster.policies.clear();
    cluster.recorder = None;
    let pool = cluster.pool.clone().context("this bench needs history")?;
    let items = lab_support::short_ledgers(lab.samples(30_000), 1)
        .map_err(|reason| anyhow::anyhow!("{reason}"))?;
    lab.steps_message(&format!("history: writing {} ledger messages", items.len()));
    publish(&cluster.broker, &items).await?;
    let last = fiec_broker::feed::bounds(&cluster.broker).await?.1;
    let mut floors = Vec::new();
    let mut ratios = Vec::new();
    for round in 0..=ROUNDS {
        lab.steps_message(&format!("history: round {round} of {ROUNDS}"));
        lab_support::clear(&pool).await?;
        let floor = lab_support::plain_copy(&pool, &items).await?;
        lab_support::clear(&pool).await?;
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

/// Publishes the messages to the stream as their writers do.
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
        if recorded(pool).await? >= last {
            break began.elapsed().as_secs_f64();
        }
        ensure!(
            Instant::now() < deadline,
            "the recorder did not reach {last} within a minute"
        );
        tokio::time::sleep(POLL).await;
    };
    stop.cancel();
    running.await??;
    Ok(seconds)
}
