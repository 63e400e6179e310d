//! `cargo demo`: the whole path on this machine, with a real matrix and real memory pressure. It
//! exits with 0 only if every printed claim was checked.

mod checks;
mod matrix;
mod timeline;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::Args;
use fiec::exit::Outcome;
use fiec::ui::{self, Steps};
use fiec_schemas::{
    Event, ExecutionId, LedgerMessage, NodeId, Phase, Signal, Started, Tenant, subjects,
};
use serde_json::json;

use crate::cluster::{Cluster, ClusterOptions};
use crate::process::Process;

pub use matrix::matrix;
use timeline::Timeline;

/// Run the whole path on this machine: three workers, real pressure, one rebinding, equal bits
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Folder of data and logs [default: a temporary folder]
    #[arg(long)]
    pub data_dir: Option<PathBuf>,
    /// File of the report [default: `fiec-demo-report.html`, in `target` if there is that folder]
    #[arg(long)]
    pub report: Option<PathBuf>,
    /// Right-hand sides to solve for [default: as many as take this machine about 20 seconds]
    #[arg(long)]
    pub load_cases: Option<u64>,
}

/// A node's memory limit in the demo.
const LIMIT: &str = "512MiB";
/// Thresholds of the demo's nodes: a short dwell, so that the demo is short.
const THRESHOLD: &str = "memory=0.80:0.60:1500";
/// Share of its limit to which pressure fills a node.
const SHARE: f64 = 0.88;
/// Length of the undisturbed solve, in seconds: long enough for visible pressure on a fast machine,
/// short enough for a slow one.
const SOLVE_SECONDS: f64 = 20.0;
/// Longest time of the whole demo.
const PATIENCE: Duration = Duration::from_secs(85);

/// Runs the demo.
///
/// # Errors
/// If a part could not be started, or an expected event did not come in time.
pub async fn run(args: DemoArgs, json: bool) -> anyhow::Result<Outcome> {
    let began = Instant::now();
    let steps = Steps::new(json);
    let matrix = matrix()?;
    let params = |load_cases: u64| {
        json!({
            "matrix": {"file": matrix}, "tolerance": 1e-10,
            "iterations_per_capsule": 10, "load_cases": load_cases,
        })
    };
    let load_cases = match args.load_cases {
        Some(given) => given,
        None => {
            steps.step("measuring how fast this machine solves one load case");
            let tried = 6;
            let seconds = reference(params(tried)).await??.seconds / tried as f64;
            ((SOLVE_SECONDS / seconds.max(1e-4)) as u64).clamp(40, 5_000)
        }
    };
    let params = params(load_cases);
    steps.step("starting a private cluster");
    let cluster = Cluster::start(
        ClusterOptions {
            data_dir: args.data_dir.clone(),
            input_dirs: matrix.parent().map(Path::to_owned).into_iter().collect(),
            worker_args: [
                "--slots",
                "1",
                "--memory-limit",
                LIMIT,
                "--threshold",
                THRESHOLD,
            ]
            .map(str::to_owned)
            .to_vec(),
            ..ClusterOptions::default()
        },
        &steps,
    )
    .await?;
    let outcome = scene(&cluster, &args, &params, json, began, &steps).await;
    steps.step("stopping everything");
    if outcome.is_err() {
        eprintln!("logs are in {}", cluster.data_dir().join("logs").display());
        for process in cluster
            .workers
            .iter()
            .chain(&cluster.policies)
            .chain(&cluster.recorder)
        {
            eprintln!("--- {}\n{}", process.name, process.tail(6));
        }
    }
    cluster.stop().await;
    steps.done(&format!(
        "stopped; {:.1} s in all",
        began.elapsed().as_secs_f64()
    ));
    outcome
}

async fn scene(
    cluster: &Cluster,
    args: &DemoArgs,
    params: &serde_json::Value,
    json: bool,
    began: Instant,
    steps: &Steps,
) -> anyhow::Result<Outcome> {
    let tenant = Tenant::new("demo")?;
    let reference = reference(params.clone());
    let submission = json!({"id": "dam", "program": "cg@1", "params": params});
    let mut timeline = Timeline::open(&cluster.broker, json).await?;
    let execution = submit(cluster, &tenant, &submission).await?;
    if !json {
        println!(
            "\n$ nats pub -J {} '{submission}'\n  execution {execution}: the Corps of Engineers \
             dam (BCSSTK16, 4,884 unknowns), {} load cases by conjugate gradients\n",
            subjects::submit(&tenant),
            params
                .get("load_cases")
                .map(ToString::to_string)
                .unwrap_or_default()
        );
    }

    // Wait until the first node has committed some boundaries.
    let source = timeline
        .until(execution, left(began)?, |message| {
            match &message.state.phase {
                Phase::Started(Started { binding, .. }) if message.state.totals.commits >= 2 => {
                    Some(binding.node.clone())
                }
                _ => None,
            }
        })
        .await
        .context("the execution did not start computing")?;

    timeline.say(&format!(
        "real memory pressure on {source}: a process fills its limit to 88 %"
    ));
    let mut pressure = press(cluster, &source).await?;
    let moved = timeline
        .until(execution, left(began)?, |message| moved(message, &source))
        .await
        .context("the execution was not rebound under pressure")?;
    timeline.say(&format!("now on {moved}; the pressure on {source} ends"));
    pressure.stop(Duration::from_secs(2)).await;

    let mut last = timeline
        .until(execution, left(began)?, |message| {
            message.state.phase.is_terminal().then(|| message.clone())
        })
        .await
        .context("the execution did not end")?;
    fiec_broker::results::resolve(&cluster.broker, &mut last).await?;
    steps.step("waiting for the undisturbed run of the same submission");
    let reference = tokio::time::timeout(left(began)?, reference)
        .await
        .context("the undisturbed run took too long")???;
    steps.done("the undisturbed run has ended");

    let report = args.report.clone().unwrap_or_else(|| {
        let name = PathBuf::from("fiec-demo-report.html");
        let target = PathBuf::from("target");
        if target.is_dir() {
            target.join(name)
        } else {
            name
        }
    });
    let scene = checks::Scene {
        cluster,
        execution,
        source: &source,
        last: &last,
        reference: &reference,
        report: &report,
        json,
    };
    let held = tokio::time::timeout(left(began)?, scene.check())
        .await
        .context("the history did not arrive in PostgreSQL")??;
    Ok(if held { Outcome::Done } else { Outcome::Failed })
}

fn left(began: Instant) -> anyhow::Result<Duration> {
    match PATIENCE.checked_sub(began.elapsed()) {
        Some(left) => Ok(left),
        None => bail!("the demo has taken more than {PATIENCE:?}"),
    }
}

/// Runs the submission without any server, node or boundary, on its own thread.
fn reference(
    params: serde_json::Value,
) -> tokio::task::JoinHandle<anyhow::Result<fiec_kit::local::LocalOutcome>> {
    tokio::task::spawn_blocking(move || {
        fiec_kit::local::run_local(fiec_schemas::programs::CG, &params)
            .map_err(|error| anyhow::anyhow!("the undisturbed run failed: {error}"))
    })
}

/// Publishes one message with the stream's acknowledgement, like `nats pub -J`.
async fn submit(
    cluster: &Cluster,
    tenant: &Tenant,
    submission: &serde_json::Value,
) -> anyhow::Result<ExecutionId> {
    cluster
        .broker
        .js
        .publish(subjects::submit(tenant), submission.to_string().into())
        .await?
        .await
        .context("the submission was not stored")?;
    Ok(ExecutionId::from_client(
        tenant,
        &fiec_schemas::ClientId::new("dam")?,
    ))
}

/// Starts the process that fills the node's memory.
async fn press(cluster: &Cluster, node: &NodeId) -> anyhow::Result<Process> {
    let status = cluster.status_of(node).await?;
    let used = status
        .vector
        .as_ref()
        .and_then(|v| v.host(Signal::Memory))
        .and_then(|r| r.raw)
        .unwrap_or(0.0);
    let args = [
        "pressure".to_owned(),
        "--limit-source".to_owned(),
        status.descriptor.memory_limit_source.clone(),
        "--limit-bytes".to_owned(),
        status.descriptor.memory_limit_bytes.to_string(),
        "--run-dir".to_owned(),
        cluster
            .data_dir()
            .join("run")
            .join(node.as_str())
            .display()
            .to_string(),
        "--used-bytes".to_owned(),
        format!("{used:.0}"),
        "--share".to_owned(),
        SHARE.to_string(),
        "--hold".to_owned(),
        "60".to_owned(),
    ];
    let log = cluster.data_dir().join("logs").join("pressure.log");
    Process::start("pressure", &std::env::current_exe()?, &args, &[], log)
}

/// The node on which the execution has started after a move, if the message says so.
fn moved(message: &LedgerMessage, source: &NodeId) -> Option<NodeId> {
    let Phase::Started(Started { binding, .. }) = &message.state.phase else {
        return None;
    };
    let begun = message
        .events
        .iter()
        .any(|e| matches!(e, Event::Started { .. }));
    (begun && binding.node != *source).then(|| binding.node.clone())
}

/// A line of the demo's verdict.
fn verdict(ok: bool, claim: &str, found: &str) -> Vec<String> {
    vec![
        if ok { "✓" } else { "✗" }.to_owned(),
        claim.to_owned(),
        found.to_owned(),
    ]
}

fn print_verdicts(rows: Vec<Vec<String>>) {
    println!("{}", ui::table(["", "claim", "found"], rows));
}
