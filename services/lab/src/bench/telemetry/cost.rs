//! The cost of telemetry for a node at rest, at several rates.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;

use super::super::{Lab, cluster};
use crate::cluster::Cluster;

/// Milliseconds between two vectors, and the rate in words.
const RATES: [(u64, &str); 3] = [(1_000, "1 Hz"), (100, "10 Hz"), (10, "100 Hz")];

/// Starts one worker for each rate, all at rest: `agent_cpu_percent` of one core by the agent alone,
/// `vectors_per_s` and `bytes_per_s`.
pub(super) async fn run(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    let mut cluster = cluster(lab, 0, &[], false).await?;
    for (ms, _) in RATES {
        cluster.start_worker(&["--heartbeat-ms".to_owned(), ms.to_string()])?;
    }
    cluster.ready().await?;
    lab.steps_message("telemetry: agents at rest: settling");
    tokio::time::sleep(Duration::from_secs(2)).await;
    let mut vectors = cluster.broker.client.subscribe("fiec.telemetry.*").await?;
    let before: Vec<f64> = cluster.workers.iter().map(|w| seconds(w.pid())).collect();
    let span = Duration::from_secs(if lab.quick { 3 } else { 12 });
    lab.steps_message("telemetry: agents at rest: watching");
    let began = Instant::now();
    let mut bytes: BTreeMap<String, (f64, f64)> = BTreeMap::new();
    let count = async {
        while let Some(message) = vectors.next().await {
            let of = bytes.entry(message.subject.to_string()).or_default();
            *of = (of.0 + 1.0, of.1 + message.payload.len() as f64);
        }
    };
    // Vectors never end, so the count ends at the timeout.
    let _ = tokio::time::timeout(span, count).await;
    let passed = began.elapsed().as_secs_f64();
    for (number, ((worker, before), (_, rate))) in
        cluster.workers.iter().zip(before).zip(RATES).enumerate()
    {
        let case = format!("agent at {rate}");
        let percent = (seconds(worker.pid()) - before) / passed * 100.0;
        lab.figures
            .add("telemetry", &case, "agent_cpu_percent", "%", percent, None);
        let subject = fiec_schemas::subjects::telemetry(&Cluster::node(number + 1));
        let (count, sum) = bytes.get(&subject).copied().unwrap_or_default();
        for (metric, unit, value) in [
            ("vectors_per_s", "1/s", count / passed),
            ("bytes_per_s", "B/s", sum / passed),
        ] {
            lab.figures
                .add("telemetry", &case, metric, unit, value, None);
        }
    }
    cluster.stop().await;
    Ok(())
}

/// Processor time of all threads of a process without its children, in seconds, to the nanosecond.
pub(super) fn seconds(pid: u32) -> f64 {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
        return 0.0;
    };
    let of = |path: std::path::PathBuf| -> Option<f64> {
        let text = std::fs::read_to_string(path.join("schedstat")).ok()?;
        text.split(' ').next()?.parse().ok()
    };
    let nanos: f64 = tasks.flatten().filter_map(|t| of(t.path())).sum();
    nanos / 1e9
}

#[cfg(test)]
mod tests {
    #[test]
    fn this_process_has_used_processor_time() {
        let before = super::seconds(std::process::id());
        let mut x = 1u64;
        while super::seconds(std::process::id()) <= before {
            x = std::hint::black_box(x.wrapping_mul(3));
        }
        assert!(before > 0.0);
    }
}
