//! From the crossing of a threshold to the first capsule on another node. A process allocates inside
//! the node's own limit and prints when it crossed the threshold. The bench observes everything else
//! on its own connection, so each stage includes the broker.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use fiec::client;
use fiec_broker::Broker;
use fiec_schemas::hardware::default_thresholds;
use fiec_schemas::messages::{ControlRequest, ExecutionVerb};
use fiec_schemas::{ExecutionId, HardwareVector, NodeId, Signal, Timestamp};
use futures_util::StreamExt as _;
use serde_json::json;
use tokio::sync::mpsc;

use super::super::figures::quantile;
use super::super::follow::{Follow, Moved, millis};
use super::super::{Lab, cluster, request, submit, tenant};
use crate::cluster::Cluster;
use crate::process::Process;

const LIMIT: &str = "512MiB";
const HIGH: f64 = 0.6;
const LOW: f64 = 0.4;
/// Share of the limit up to which the process allocates.
const SHARE: f64 = 0.68;
/// Longest time of one move.
const PATIENCE: Duration = Duration::from_secs(20);

/// One move, in milliseconds.
#[derive(Debug, Clone, Copy)]
struct Stages {
    pressure_to_vector: f64,
    vector_to_decision: f64,
    decision_to_yield: f64,
    yield_to_first_capsule: f64,
    whole: f64,
}

/// Measures moves out of a real cgroup, if the machine lets us make one, and out of a declared
/// budget.
pub(super) async fn run(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    for (case, more) in [
        ("cgroup", &[][..]),
        ("declared budget", &["--no-cgroup"][..]),
    ] {
        let thresholds = thresholds();
        let mut args = vec!["--memory-limit", LIMIT];
        for threshold in &thresholds {
            args.extend(["--threshold", threshold]);
        }
        args.extend(more);
        let cluster = cluster(lab, 2, &args, false).await?;
        let source = cluster.status_of(&Cluster::node(1)).await?;
        let source = source.descriptor.memory_limit_source;
        if more.is_empty() && !source.starts_with("cgroup") {
            lab.left_out(
                "moves out of a cgroup",
                "no cgroup may be made here; the declared budget is measured all the same",
            );
            cluster.stop().await;
            continue;
        }
        let moves = measure(lab, case, &cluster).await;
        cluster.stop().await;
        type Pick = fn(&Stages) -> f64;
        let stages: [(&str, Pick); 5] = [
            ("pressure_to_vector", |s| s.pressure_to_vector),
            ("vector_to_decision", |s| s.vector_to_decision),
            ("decision_to_yield", |s| s.decision_to_yield),
            ("yield_to_first_capsule", |s| s.yield_to_first_capsule),
            ("pressure_to_first_capsule", |s| s.whole),
        ];
        let moves = moves?;
        for (stage, pick) in stages {
            let mut samples: Vec<f64> = moves.iter().map(pick).collect();
            for (suffix, share) in [("p50", 0.5), ("p99", 0.99)] {
                let value = quantile(&mut samples, share);
                let metric = format!("{stage}_{suffix}_ms");
                lab.figures
                    .add("telemetry", case, &metric, "ms", value, None);
            }
        }
    }
    Ok(())
}

/// The thresholds of the nodes. No signal has a dwell, because an execution returns to a node that it
/// left only after every signal has been calm for its dwell. Only memory can cross its threshold.
fn thresholds() -> Vec<String> {
    let all = default_thresholds().into_keys();
    all.map(|signal| match signal {
        Signal::Memory => format!("memory={HIGH}:{LOW}:0"),
        other => format!("{other}=1:0.999:0"),
    })
    .collect()
}

/// A message on the way of a move, with the time of its arrival here.
enum Seen {
    Vector(Timestamp, Box<HardwareVector>),
    Yield(Timestamp, ExecutionId, NodeId),
}

/// Forwards vectors and orders as they come, each with the time of its arrival.
async fn watch(broker: &Broker) -> anyhow::Result<mpsc::Receiver<Seen>> {
    let (sender, receiver) = mpsc::channel(4_096);
    let mut vectors = broker.client.subscribe("fiec.telemetry.*").await?;
    let mut orders = broker.client.subscribe("fiec.control.*").await?;
    broker.client.flush().await?;
    tokio::spawn(async move {
        loop {
            let seen = tokio::select! {
                message = vectors.next() => {
                    let (at, Some(message)) = (Timestamp::now(), message) else { return };
                    let vector = serde_json::from_slice(&message.payload);
                    vector.ok().map(|vector| Seen::Vector(at, Box::new(vector)))
                }
                message = orders.next() => {
                    let (at, Some(message)) = (Timestamp::now(), message) else { return };
                    let node = message.subject.rsplit('.').next().unwrap_or_default();
                    let node = NodeId::from_host_name(node);
                    match serde_json::from_slice(&message.payload) {
                        Ok(ControlRequest::Yield { execution, .. }) => {
                            Some(Seen::Yield(at, execution, node))
                        }
                        _ => None,
                    }
                }
            };
            // The task ends when the receiver is dropped.
            if let Some(seen) = seen
                && sender.send(seen).await.is_err()
            {
                return;
            }
        }
    });
    Ok(receiver)
}

async fn measure(lab: &Lab<'_>, case: &str, cluster: &Cluster) -> anyhow::Result<Vec<Stages>> {
    let mut follow = Follow::open(&cluster.broker).await?;
    let mut seen = watch(&cluster.broker).await?;
    let submission = json!({
        "program": "synthetic@1",
        "params": {"capsules": 1_000_000_000u64, "state_bytes": 65_536, "work_us": 200},
    });
    let execution = submit(&cluster.broker, "mover", submission).await?;
    let mut at = follow.started(execution, 1, PATIENCE).await?;
    let moves = lab.samples(40).max(3);
    let mut all = Vec::with_capacity(moves);
    for number in 0..moves {
        if number % 5 == 0 {
            lab.steps_message(&format!("telemetry: {case}: move {number} of {moves}"));
        }
        let node: NodeId = at.node.parse().context("a node's name in the ledger")?;
        let other = Cluster::node(if node == Cluster::node(1) { 2 } else { 1 });
        wait_until_calm(&mut seen, [&node, &other]).await?;
        let (mut hog, log) = press(cluster, &node, number).await?;
        let moved = observe_move(&mut seen, &mut follow, execution, &node, at.epoch).await;
        let why = match &moved {
            Ok(_) => String::new(),
            Err(_) => explain(cluster, execution).await,
        };
        let crossed = crossed(&log);
        hog.kill();
        let (vector, order, yielded, moved) = moved.with_context(|| why)?;
        let crossed = crossed?;
        all.push(Stages {
            pressure_to_vector: millis(crossed, vector),
            vector_to_decision: millis(vector, order),
            decision_to_yield: millis(order, yielded),
            yield_to_first_capsule: millis(yielded, moved.since),
            whole: millis(crossed, moved.since),
        });
        at = moved;
    }
    request(&cluster.broker, ExecutionVerb::Cancel, execution).await?;
    Ok(all)
}

/// The policy service's explanation of an execution that should have moved.
async fn explain(cluster: &Cluster, execution: ExecutionId) -> String {
    let Ok(tenant) = tenant() else {
        return String::new();
    };
    let id = execution.to_string();
    match client::me(&cluster.broker)
        .execution(ExecutionVerb::Why, &tenant, &id, None)
        .await
    {
        Ok(reply) => reply.why.map(|why| why.summary).unwrap_or_default(),
        Err(error) => error.to_string(),
    }
}

/// Waits until both nodes report memory below `LOW`.
async fn wait_until_calm(
    seen: &mut mpsc::Receiver<Seen>,
    nodes: [&NodeId; 2],
) -> anyhow::Result<()> {
    let mut calm = [false; 2];
    let wait = async {
        while calm != [true; 2] {
            let Seen::Vector(_, vector) = seen.recv().await.context("the connection ended")? else {
                continue;
            };
            if let Some(i) = nodes.iter().position(|n| **n == vector.node) {
                let memory = vector.host(Signal::Memory).and_then(|r| r.value);
                calm[i] = memory.is_some_and(|v| v < LOW);
            }
        }
        anyhow::Ok(())
    };
    let waited = tokio::time::timeout(PATIENCE, wait).await;
    waited.context("the nodes' memory did not calm down")?
}

/// Starts the process that fills the node's memory. Returns it with its log.
async fn press(
    cluster: &Cluster,
    node: &NodeId,
    number: usize,
) -> anyhow::Result<(Process, PathBuf)> {
    let status = cluster.status_of(node).await?;
    let vector = status.vector.as_ref();
    let used = vector
        .and_then(|v| v.host(Signal::Memory))
        .and_then(|r| r.raw)
        .unwrap_or(0.0);
    let run_dir = cluster.data_dir().join("run").join(node.as_str());
    let args = [
        ("--limit-source", status.descriptor.memory_limit_source),
        (
            "--limit-bytes",
            status.descriptor.memory_limit_bytes.to_string(),
        ),
        ("--run-dir", run_dir.display().to_string()),
        ("--used-bytes", format!("{used:.0}")),
        ("--share", SHARE.to_string()),
        ("--say-share", HIGH.to_string()),
        ("--hold", "30".to_owned()),
    ];
    let args: Vec<String> = std::iter::once("pressure".to_owned())
        .chain(
            args.into_iter()
                .flat_map(|(name, value)| [name.to_owned(), value]),
        )
        .collect();
    let log = cluster
        .data_dir()
        .join(format!("logs/pressure-{number}.log"));
    let hog = Process::start(
        "pressure",
        &std::env::current_exe()?,
        &args,
        &[],
        log.clone(),
    )?;
    Ok((hog, log))
}

/// Reads from the process's log when it crossed the threshold.
fn crossed(log: &PathBuf) -> anyhow::Result<Timestamp> {
    let text = std::fs::read_to_string(log)?;
    let said = text.lines().find_map(|l| l.strip_prefix("crossed "));
    let micros = said.and_then(|m| m.parse().ok()).with_context(|| {
        format!("the allocating process did not say when it crossed; it said {text:?}")
    })?;
    Ok(Timestamp::from_micros(micros))
}

/// Observes one move: the times of the first vector above the threshold, of the order to yield and of
/// the end of the last capsule on `node`; and the start elsewhere.
async fn observe_move(
    seen: &mut mpsc::Receiver<Seen>,
    follow: &mut Follow,
    execution: ExecutionId,
    node: &NodeId,
    epoch: u64,
) -> anyhow::Result<(Timestamp, Timestamp, Timestamp, Moved)> {
    let order = async {
        let mut vector_at = None;
        loop {
            match seen.recv().await.context("the connection ended")? {
                Seen::Vector(at, vector) if vector.node == *node => {
                    let memory = vector.host(Signal::Memory).and_then(|r| r.value);
                    if memory.is_some_and(|v| v >= HIGH) {
                        vector_at.get_or_insert(at);
                    }
                }
                Seen::Yield(at, who, from) if who == execution && from == *node => {
                    let vector_at =
                        vector_at.context("an order before a vector above the threshold")?;
                    return anyhow::Ok((vector_at, at));
                }
                _ => {}
            }
        }
    };
    let moved = async {
        let moved = follow.started(execution, epoch + 1, PATIENCE).await?;
        anyhow::Ok((moved.yielded_from(node.as_str())?, moved))
    };
    let both = async { tokio::try_join!(order, moved) };
    let both = tokio::time::timeout(PATIENCE, both).await;
    let ((vector, order), (yielded, moved)) =
        both.with_context(|| format!("pressure did not move the execution away from {node}"))??;
    Ok((vector, order, yielded, moved))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_signal_of_the_benchs_nodes_has_a_dwell() {
        let set = thresholds();
        for signal in default_thresholds().into_keys() {
            let begin = format!("{signal}=");
            let found = set.iter().find(|text| text.starts_with(&begin));
            assert!(
                found.is_some_and(|t| t.ends_with(":0")),
                "{signal}: {set:?}"
            );
        }
    }
}
