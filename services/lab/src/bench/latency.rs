//! `bench latency`: publish of a submission to the start of its first capsule, on an idle system. The
//! floor is one acknowledged publish on the same connection.
//!
//! The cases `latency` have warm children. A submission without an id has no ledger yet, so its first
//! append is left to its node. One with a client's id may have a ledger, so the policy service looks
//! for it first. The cases `launch` compare a program of the Rust kit with one of the Python kit, each
//! with a warm child and with a new one for each start.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use fiec_broker::Broker;
use fiec_schemas::{Timestamp, programs};
use serde_json::{Value, json};

use super::figures::{Figures, quantile};
use super::follow::{self, millis};
use super::python::Kit;
use super::{Lab, cluster, submit, submit_unnamed};
use crate::cluster::Cluster;

/// Poll interval of the ledger. A feed would wake this process while the execution starts.
const POLL: Duration = Duration::from_millis(7);
/// Name of the package in Python.
const PYTHON: &str = "launch@1";
/// Longest time of its push.
const PUSH: Duration = Duration::from_secs(60);

/// Runs the bench: `start_p50_ms` and `start_p99_ms` of each case. Reach ≤ 1 and ≤ 5 for `latency`,
/// and ≤ 1 for the median of `launch`, `warm rust`.
///
/// # Errors
/// When something could not be started or measured.
pub async fn run(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    latency(lab).await?;
    launch(lab).await
}

async fn latency(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    let cluster = cluster(lab, 2, &[], true).await?;
    let count = lab.samples(500);
    for (case, has_id) in [("idle", false), ("idle, with a client's id", true)] {
        let program = Program {
            label: "latency",
            name: programs::SYNTHETIC,
            params: json!({"capsules": 1}),
            unmeasured: 20,
            has_id,
        };
        let starts = starts(lab, &cluster.broker, &program, count).await?;
        starts.add_to(lab.figures, "latency", case);
    }
    cluster.stop().await;
    Ok(())
}

async fn launch(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    let kit = Kit::find().await;
    if let Err(why) = &kit {
        lab.left_out("bench latency: cold python, warm python", why);
    }
    // A start of a new process takes longer, so fewer samples fill the same time.
    let runs = [
        (&["--cold"][..], "cold rust", "cold python", 300, 200, 3),
        (&[][..], "warm rust", "warm python", 500, 500, 20),
    ];
    for (more, rust, python, of_rust, of_python, unmeasured) in runs {
        let worker_args = [&["--allow-program", PYTHON], more].concat();
        let cluster = cluster(lab, 1, &worker_args, true).await?;
        let mut cases = vec![(rust, programs::SYNTHETIC, json!({"capsules": 1}), of_rust)];
        if let Ok(kit) = &kit {
            let folder = tempfile::tempdir()?;
            kit.package(folder.path())?;
            push(&cluster, folder.path()).await?;
            cases.push((python, PYTHON, json!({}), of_python));
        }
        for (case, name, params, count) in cases {
            let count = lab.samples(count);
            let program = Program {
                label: case,
                name,
                params,
                unmeasured,
                has_id: true,
            };
            let starts = starts(lab, &cluster.broker, &program, count).await?;
            starts.add_to(lab.figures, "launch", case);
        }
        cluster.stop().await;
    }
    Ok(())
}

/// A program that is started. It must end with its first capsule, which must do nothing.
struct Program {
    /// Names it in progress and in ids.
    label: &'static str,
    name: &'static str,
    params: Value,
    /// Starts at the beginning that do not count. They fetch the package and warm children and
    /// caches.
    unmeasured: usize,
    /// Each submission has a client's id.
    has_id: bool,
}

/// Milliseconds from publish to the begin of the first capsule, with the floor of each.
struct Starts {
    starts: Vec<f64>,
    floors: Vec<f64>,
}

impl Starts {
    /// Adds `start_p50_ms` and `start_p99_ms`.
    fn add_to(mut self, figures: &mut Figures, bench: &str, case: &str) {
        for (metric, share) in [("start_p50_ms", 0.5), ("start_p99_ms", 0.99)] {
            let floor = quantile(&mut self.floors, share);
            let value = quantile(&mut self.starts, share);
            figures.add(bench, case, metric, "ms", value, Some(floor));
        }
    }
}

/// Starts `count` executions. Each starts on an idle system, after the one before has ended.
async fn starts(
    lab: &Lab<'_>,
    broker: &Broker,
    program: &Program,
    count: usize,
) -> anyhow::Result<Starts> {
    let label = program.label;
    let mut starts = Vec::with_capacity(count);
    let mut floors = Vec::with_capacity(count);
    for number in 0..count + program.unmeasured {
        if number % 25 == 0 {
            lab.steps_message(&format!("{label}: {number} of {count}"));
        }
        tokio::time::sleep(Duration::from_millis(11)).await;
        let floor = floor(broker).await?;
        tokio::time::sleep(Duration::from_millis(11)).await;
        let submission = json!({"program": program.name, "params": program.params});
        let published = Timestamp::now();
        let execution = if program.has_id {
            let id = format!("{}-{number}", label.replace(' ', "-"));
            submit(broker, &id, submission).await?
        } else {
            submit_unnamed(broker, &submission).await?
        };
        let end = follow::ended(broker, execution, POLL, Duration::from_secs(10)).await?;
        if number >= program.unmeasured {
            // The only capsule does nothing, so its end is its begin. The end always comes from the
            // program's own clock. The begin comes from the agent if a child reports it late.
            starts.push(millis(published, end.until));
            floors.push(floor);
        }
    }
    Ok(Starts { starts, floors })
}

/// Milliseconds of one acknowledged publish to a stream.
async fn floor(broker: &Broker) -> anyhow::Result<f64> {
    let began = Instant::now();
    broker
        .js
        .publish("fiec.record.bench.floor", "{}".into())
        .await?
        .await?;
    Ok(began.elapsed().as_secs_f64() * 1e3)
}

/// Pushes the package with `fiec program push`.
async fn push(cluster: &Cluster, folder: &Path) -> anyhow::Result<()> {
    let binary = std::env::current_exe().context("cannot find this program's own file")?;
    let mut command = tokio::process::Command::new(binary);
    command
        .args(["--json", "program", "push", PYTHON])
        .arg(folder)
        .envs(cluster.environment("program"))
        .stdin(std::process::Stdio::null())
        .kill_on_drop(true);
    let output = tokio::time::timeout(PUSH, command.output())
        .await
        .with_context(|| format!("the push of {PYTHON} did not end within {PUSH:?}"))??;
    ensure!(
        output.status.success(),
        "the push of {PYTHON} failed: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}
