//! `bench throughput`: no-op executions to completion, with their history complete in PostgreSQL
//! at the end; and where the processor time went.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use fiec_broker::{Broker, feed};
use fiec_schemas::subjects;

use super::cpu::{self, Spent};
use super::figures::median;
use super::{Lab, cluster, tenant};
use crate::cluster::Cluster;
use crate::sql;

const LINES_A_MESSAGE: usize = 50;

/// Runs the bench: `executions_per_s`, reach ≥ 14,000; `cpu_us_per_execution` for each part.
///
/// # Errors
/// When something could not be started or measured.
pub async fn run(lab: &mut Lab<'_>, workers: u32, slots: u32) -> anyhow::Result<()> {
    let cluster = cluster(lab, workers, &["--slots", &slots.to_string()], true).await?;
    let count = lab.samples(10_000);
    let rounds = if lab.quick { 1 } else { 5 };
    let mut rates = Vec::new();
    let mut spent = Spent::default();
    let mut done = 0;
    for round in 0..=rounds {
        lab.steps_message(&format!("throughput: round {round} of {rounds}"));
        let before = cpu::parts(&cluster);
        let began = Instant::now();
        flood(&cluster.broker, count).await?;
        done += count;
        complete(&cluster, done).await?;
        let seconds = began.elapsed().as_secs_f64();
        if round == 0 {
            continue; // learns the nodes' rate, fills caches
        }
        rates.push(count as f64 / seconds);
        spent.add(&before, &cpu::parts(&cluster), count);
    }
    let rate = median(&mut rates);
    lab.figures
        .add("throughput", "no-op", "executions_per_s", "1/s", rate, None);
    spent.add_to(lab.figures, "throughput", "", "cpu_us_per_execution");
    cluster.stop().await;
    Ok(())
}

/// Publishes so many no-op submissions, fifty lines a message, acknowledged in order.
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

/// Waits until PostgreSQL has everything that the ledger stream has, and the stream everything
/// that was submitted; then counts, once, since counting costs what is being measured.
async fn complete(cluster: &Cluster, count: usize) -> anyhow::Result<()> {
    let pool = cluster.pool.as_ref().context("this bench needs history")?;
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut wait = Duration::from_millis(5);
    loop {
        let rows = sql::query(
            pool,
            format!(
                "SELECT seq::text AS seq FROM recorder_checkpoint WHERE stream = '{}'",
                subjects::LEDGER_STREAM
            ),
        )
        .await?;
        let recorded: u64 = rows.get(0, "seq").and_then(|t| t.parse().ok()).unwrap_or(0);
        // Every execution has a message at least.
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
            // Some took more messages than one; look less often.
            wait = Duration::from_millis(50);
        }
        ensure!(
            Instant::now() < deadline,
            "not complete in PostgreSQL after a minute"
        );
        tokio::time::sleep(wait).await;
    }
}
