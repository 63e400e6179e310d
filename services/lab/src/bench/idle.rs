//! `bench idle`: what one worker, a policy service and a recorder cost at rest.

use std::time::{Duration, Instant};

use super::cpu;
use super::{Lab, cluster};

/// Runs the bench: `cpu_percent` of one core (reach < 1) and `resident_mb` (reach < 150).
///
/// # Errors
/// When something could not be started or measured.
pub async fn run(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    let cluster = cluster(lab, 1, &[], true).await?;
    let span = Duration::from_secs(if lab.quick { 3 } else { 30 });
    lab.steps_message("idle: settling");
    tokio::time::sleep(Duration::from_secs(3)).await;
    let parts: Vec<_> = cluster
        .workers
        .iter()
        .chain(&cluster.policies)
        .chain(&cluster.recorder)
        .map(|p| (p.name.clone(), p.pid()))
        .collect();
    let before: Vec<f64> = parts
        .iter()
        .map(|(_, pid)| cpu::tree(*pid).seconds)
        .collect();
    lab.steps_message("idle: watching");
    let began = Instant::now();
    tokio::time::sleep(span).await;
    let seconds = began.elapsed().as_secs_f64();
    let mut all = (0.0, 0.0);
    for ((name, pid), before) in parts.iter().zip(before) {
        let usage = cpu::tree(*pid);
        let percent = (usage.seconds - before) / seconds * 100.0;
        let mb = usage.resident as f64 / 1e6;
        all = (all.0 + percent, all.1 + mb);
        lab.figures
            .add("idle", name, "cpu_percent", "%", percent, None);
        lab.figures.add("idle", name, "resident_mb", "MB", mb, None);
    }
    lab.figures
        .add("idle", "together", "cpu_percent", "%", all.0, None);
    lab.figures
        .add("idle", "together", "resident_mb", "MB", all.1, None);
    cluster.stop().await;
    Ok(())
}
