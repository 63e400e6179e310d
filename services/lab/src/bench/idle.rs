//! `bench idle`: the cost of one worker, a policy service and a recorder at rest; and the time until
//! a new node has joined, with its canaries and without.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use async_nats::jetstream::kv::{Operation, Store};
use fiec_schemas::trust::{Proof, SignedProof};
use fiec_schemas::{NodeId, subjects};
use futures_util::StreamExt as _;

use super::cpu;
use super::figures::{median, quantile};
use super::{Lab, cluster};
use crate::cluster::Cluster;

/// Longest time of a node's join.
const PATIENCE: Duration = Duration::from_secs(20);

/// Runs the bench: `cpu_percent` of one core (reach < 1) and `resident_mb` (reach < 150) of each
/// part; `join_p50_ms` and `join_p99_ms` of a node's claim and of its proof (reach ≤ 1,000), and
/// `p50_ms` of the canaries between the two.
///
/// # Errors
/// When something could not be started or measured, or a proof does not pass.
pub async fn run(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    rest(lab).await?;
    joins(lab).await
}

/// Measures the parts of a cluster without work.
async fn rest(lab: &mut Lab<'_>) -> anyhow::Result<()> {
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

/// Starts workers, each until its claim (the node is there) and its signed proof (its canaries have
/// passed). The floor is the start of the same program with `--version`.
async fn joins(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    let count = lab.samples(40);
    let mut cluster = cluster(lab, 0, &[], false).await?;
    let store = cluster
        .broker
        .js
        .get_key_value(subjects::NODES_BUCKET)
        .await?;
    let (mut claims, mut proofs, mut between) = (Vec::new(), Vec::new(), Vec::new());
    let mut floors = Vec::new();
    for number in 1..=count {
        lab.steps_message(&format!("idle: node {number} of {count} joins"));
        floors.push(bare_start().await?);
        let (claim, proof) = join(&mut cluster, &store).await?;
        claims.push(claim);
        proofs.push(proof);
        between.push(proof - claim);
    }
    let floor = Some(median(&mut floors));
    for (case, samples) in [("claim", &mut claims), ("proof", &mut proofs)] {
        for (metric, share) in [("join_p50_ms", 0.5), ("join_p99_ms", 0.99)] {
            let value = quantile(samples, share);
            lab.figures.add("canary", case, metric, "ms", value, floor);
        }
    }
    let value = median(&mut between);
    lab.figures
        .add("canary", "canaries", "p50_ms", "ms", value, None);
    cluster.stop().await;
    Ok(())
}

/// Milliseconds from the start of a worker to its claim, and to its proof. Ends the worker.
async fn join(cluster: &mut Cluster, store: &Store) -> anyhow::Result<(f64, f64)> {
    let node: NodeId = "n1".parse()?;
    let mut entries = store
        .watch_many([subjects::node_key(&node), subjects::proof_key(&node)])
        .await?;
    let began = Instant::now();
    cluster.start_worker(&[])?;
    let milliseconds = || began.elapsed().as_secs_f64() * 1e3;
    let mut claim = None;
    let proof = loop {
        let entry = tokio::time::timeout(PATIENCE, entries.next())
            .await
            .with_context(|| format!("{node} did not join within {PATIENCE:?}"))?
            .context("the watch of the nodes ended")??;
        if entry.operation != Operation::Put {
            continue;
        }
        if entry.key == subjects::node_key(&node) {
            claim.get_or_insert_with(milliseconds);
        } else {
            let signed: SignedProof = serde_json::from_slice(&entry.value)?;
            let proof: Proof = serde_json::from_str(&signed.statement)?;
            if let Some(broken) = proof.results.iter().find(|r| !r.passed) {
                bail!("the canaries fail on this machine: {}", broken.detail);
            }
            break milliseconds();
        }
    };
    let mut process = cluster.workers.pop().context("it was just started")?;
    process.kill();
    // Its entries must not slow down the next join.
    store.purge(subjects::node_key(&node)).await?;
    store.purge(subjects::proof_key(&node)).await?;
    let claim = claim.context("a proof came before the claim")?;
    Ok((claim, proof))
}

/// Milliseconds that the program takes to print its version.
async fn bare_start() -> anyhow::Result<f64> {
    let binary = std::env::current_exe().context("cannot find this program's own file")?;
    let began = Instant::now();
    let mut command = tokio::process::Command::new(binary);
    command
        .arg("--version")
        .stdout(std::process::Stdio::null())
        .kill_on_drop(true);
    tokio::time::timeout(PATIENCE, command.status())
        .await
        .context("`fiec --version` does not end")??;
    Ok(began.elapsed().as_secs_f64() * 1e3)
}
