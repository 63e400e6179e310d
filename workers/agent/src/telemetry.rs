//! H(t) of this node: a slow heartbeat, and at once when something changes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fiec_probes::{Sampler, changed};
use fiec_schemas::messages::RecorderCheckpoint;
use fiec_schemas::{HardwareVector, Reading, Sequence, Signal, Threshold, Timestamp, subjects};
use tokio_util::sync::CancellationToken;

use crate::shared::Shared;

/// Memory is looked at so often.
const FAST: Duration = Duration::from_millis(50);
/// What counts as a change.
const STEP: f64 = 0.02;

/// Whether a value stands at a threshold's other side than before.
fn crossed(before: f64, now: f64, threshold: &Threshold) -> bool {
    [threshold.high, threshold.low]
        .iter()
        .any(|limit| (before >= *limit) != (now >= *limit))
}

/// Publishes until `stop`, and once more at the end.
pub async fn publish(shared: Arc<Shared>, mut sampler: Sampler, stop: CancellationToken) {
    let mut tick = tokio::time::interval(FAST);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (mut count, mut last) = (0, None::<Instant>);
    let mut published: Vec<Reading> = Vec::new();
    let memory = |readings: &[Reading]| {
        readings
            .iter()
            .find(|r| r.signal == Signal::Memory && r.device.is_none())
            .and_then(|r| r.value)
    };
    let latency = sampler.latency();
    loop {
        let leaving = tokio::select! {
            () = stop.cancelled() => true,
            () = shared.news.notified() => false,
            _ = tick.tick() => {
                let heartbeat = last.is_none_or(|at| at.elapsed() >= shared.options.heartbeat);
                let now = sampler.fast(Timestamp::now()).and_then(|r| r.value);
                let news = match (memory(&published), now) {
                    (Some(before), Some(now)) => {
                        (now - before).abs() > STEP
                            || shared.options.thresholds.get(&Signal::Memory).is_some_and(|t| crossed(before, now, t))
                    }
                    _ => false,
                };
                if !heartbeat && !news {
                    continue;
                }
                false
            }
        };
        let now = Timestamp::now();
        let readings = sampler.sample(now);
        if changed(&published, &readings, STEP) {
            tracing::trace!("hardware vector changed");
        }
        if let Some(value) = memory(&readings) {
            shared.metrics.memory_permille.set((value * 1_000.0) as i64);
        }
        shared.metrics.running.set(shared.running().into());
        shared.metrics.queued.set(shared.queued() as i64);
        count += 1;
        let vector = HardwareVector {
            v: 1,
            node: shared.node().clone(),
            instance: shared.instance,
            count,
            at: now,
            readings,
            draining: shared.is_draining() || leaving,
            slots: shared.options.slots,
            running_count: shared.running(),
            queued_count: u32::try_from(shared.queued()).unwrap_or(u32::MAX),
            running: shared.progress(),
        };
        let sent = match serde_json::to_vec(&vector) {
            Ok(body) => {
                shared
                    .broker
                    .client
                    .publish(subjects::telemetry(shared.node()), body.into())
                    .await
            }
            Err(_) => return,
        };
        if let Err(error) = sent {
            tracing::debug!(%error, "cannot publish telemetry");
        }
        published = vector.readings;
        if last.is_none_or(|at| at.elapsed() >= shared.options.heartbeat) {
            let (client, latency) = (shared.broker.client.clone(), latency.clone());
            tokio::spawn(async move {
                let start = Instant::now();
                if client.flush().await.is_ok() {
                    latency.record(start.elapsed().as_secs_f64() * 1e6);
                }
            });
        }
        last = Some(Instant::now());
        if leaving {
            return;
        }
    }
}

/// How many messages the recorder is behind: as it said, or as the sequence that this node has seen
/// since then shows, because a recorder that hangs says nothing.
pub fn behind(word: &RecorderCheckpoint, newest: Sequence) -> u64 {
    word.lag.max(newest.saturating_sub(word.seq))
}

/// How far routine commits by time are to be apart when the recorder is so many messages behind.
pub fn stretch_for(lag: u64) -> u32 {
    match lag {
        0..20_000 => 0,
        20_000..100_000 => 5_000,
        100_000..500_000 => 20_000,
        _ => 60_000,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crossing_counts_in_both_directions_and_at_both_limits() {
        let t = Threshold {
            high: 0.9,
            low: 0.7,
            dwell_ms: 0,
        };
        assert!(crossed(0.89, 0.9, &t) && crossed(0.9, 0.89, &t) && crossed(0.7, 0.69, &t));
        assert!(!crossed(0.75, 0.89, &t));
    }
}
