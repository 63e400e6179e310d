//! `bench latency`: publish of a submission to the start of its first capsule, on an idle system
//! with warm children. The floor is one acknowledged publish on the same connection.

use std::time::{Duration, Instant};

use fiec_schemas::Timestamp;
use serde_json::json;

use super::figures::quantile;
use super::follow::Follow;
use super::{Lab, cluster, submit};

/// Runs the bench: `start_p50_ms` and `start_p99_ms`, reach ≤ 1 and ≤ 5.
///
/// # Errors
/// When something could not be started or measured.
pub async fn run(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    let cluster = cluster(lab, 2, &[], true).await?;
    let mut follow = Follow::open(&cluster.broker).await?;
    let count = lab.samples(500);
    let mut starts = Vec::with_capacity(count);
    let mut floors = Vec::with_capacity(count);
    for number in 0..count + 20 {
        if number % 25 == 0 {
            lab.steps_message(&format!("latency: {number} of {count}"));
        }
        tokio::time::sleep(Duration::from_millis(11)).await;
        let floor = floor(&cluster.broker).await?;
        tokio::time::sleep(Duration::from_millis(11)).await;
        let published = Timestamp::now();
        let submission = json!({"program": "synthetic@1", "params": {"capsules": 1}});
        let execution = submit(&cluster.broker, &format!("start-{number}"), submission).await?;
        let span = follow
            .to_completion(execution, Duration::from_secs(10))
            .await?;
        // The first twenty warm the children up.
        if number >= 20 {
            starts.push((span.since.micros() - published.micros()) as f64 / 1e3);
            floors.push(floor);
        }
    }
    for (metric, share) in [("start_p50_ms", 0.5), ("start_p99_ms", 0.99)] {
        let floor = quantile(&mut floors, share);
        let value = quantile(&mut starts, share);
        lab.figures
            .add("latency", "idle", metric, "ms", value, Some(floor));
    }
    cluster.stop().await;
    Ok(())
}

/// Milliseconds of one acknowledged publish to a stream.
async fn floor(broker: &fiec_broker::Broker) -> anyhow::Result<f64> {
    let began = Instant::now();
    broker
        .js
        .publish("fiec.record.bench.floor", "{}".into())
        .await?
        .await?;
    Ok(began.elapsed().as_secs_f64() * 1e3)
}
