//! Real memory pressure on the node that solves a real matrix: it moves at a boundary, with a
//! recorded cause, ends with the bits of the undisturbed run, and the node takes work again only
//! after it has recovered for long enough. Under a cgroup where this machine permits one, and
//! against a declared budget.

use std::sync::LazyLock;
use std::time::Duration;

use crate::stage;
use crate::stage::{Lab, Line, args, audit, digest_of, until, workers_with_history};
use fiec_lab::cluster::ClusterOptions;
use fiec_lab::demo::matrix;
use fiec_schemas::messages::{ApiReply, Viability};
use fiec_schemas::{Cause, Event, Evidence, HardwareVector, NodeId, Signal, Timestamp, subjects};
use futures_util::StreamExt as _;
use serde_json::{Value, json};

const LIMIT_MIB: u64 = 256;
const HIGH: f64 = 0.80;
const LOW: f64 = 0.60;
const DWELL_MS: u32 = 700;

/// The undisturbed run, once for all tests of this file and beside them.
static REFERENCE: LazyLock<String> = LazyLock::new(|| {
    let outcome = fiec_kit::run_local("cg@1", &params()).unwrap();
    assert!(outcome.result["relative_residual"].as_f64().unwrap() <= 1e-10);
    outcome.result["digest"].as_str().unwrap().to_owned()
});

fn params() -> Value {
    json!({"matrix": {"file": matrix().unwrap()}, "tolerance": 1e-10,
        "iterations_per_capsule": 10, "load_cases": 40})
}

fn options(more: &[&str]) -> ClusterOptions {
    let threshold = format!("memory={HIGH}:{LOW}:{DWELL_MS}");
    let limit = format!("{LIMIT_MIB}MiB");
    let mut worker_args = args(&[
        "--slots",
        "1",
        "--memory-limit",
        &limit,
        "--threshold",
        &threshold,
    ]);
    worker_args.extend(args(more));
    ClusterOptions {
        worker_args,
        ..workers_with_history(2)
    }
}

/// The node and the evidence of a binding for pressure.
fn pressed(line: &Line) -> Option<(NodeId, Evidence)> {
    line.message.events.iter().find_map(|event| match event {
        Event::Bound {
            node,
            cause: Cause::Pressure { evidence },
            ..
        } => Some((node.clone(), (**evidence).clone())),
        _ => None,
    })
}

/// Real pressure, one rebinding, equal bits, history in SQL.
async fn an_execution_leaves_a_node_under_pressure(
    lab: &Lab,
) -> (NodeId, fiec_lab::process::Process) {
    let reference = tokio::task::spawn_blocking(|| REFERENCE.clone());
    let id = lab
        .publish_json(&json!({"id": "dam", "program": "cg@1", "params": params(),
            "commit": {"every_ms": 200}}))
        .await;
    let source = lab.journal.computing(id, 2).await;
    let pressure = lab.press(&source).await;
    let what = "it is bound elsewhere because of pressure";
    let (to, evidence) = lab.journal.find(id, what, pressed).await;

    assert_ne!(to, source);
    assert_eq!((&evidence.node, evidence.signal), (&source, Signal::Memory));
    assert!(
        evidence.value >= HIGH && evidence.value <= 0.97,
        "{evidence:?}"
    );
    let threshold = evidence.threshold;
    assert_eq!(
        (threshold.high, threshold.low, threshold.dwell_ms),
        (HIGH, LOW, DWELL_MS)
    );
    let bound = lab
        .journal
        .find(id, what, |line| pressed(line).map(|_| line.clone()))
        .await;
    let pressed_ms = bound.state().at.millis() - evidence.since.millis();
    assert!(
        pressed_ms >= i64::from(DWELL_MS),
        "moved after {pressed_ms} ms"
    );
    let read = |r: &fiec_schemas::Reading| r.signal == Signal::Memory && r.value.is_some();
    assert!(
        evidence.vector.iter().any(read),
        "the vector that caused it is kept"
    );

    let last = lab.journal.ended(id, "completed").await;
    assert_eq!(digest_of(&last), reference.await.unwrap());
    assert_eq!(last.state().totals.pressure, 1);
    audit(&lab.journal.of(id));

    lab.recorded(1).await;
    let rows = lab
        .sql(format!(
            "SELECT *, vector::text AS v, extract(epoch FROM dwell)::text AS dwell_s \
             FROM rebinding_history WHERE execution = '{id}'"
        ))
        .await;
    assert_eq!(rows.rows.len(), 1, "{rows:?}");
    assert_eq!(rows.get(0, "cause"), Some("pressure"));
    assert_eq!(rows.get(0, "signal"), Some("memory"));
    assert_eq!(rows.get(0, "from_node"), Some(source.as_str()));
    assert_eq!(rows.get(0, "to_node"), Some(to.as_str()));
    let number = |column| rows.get(0, column).unwrap().parse::<f64>().unwrap();
    assert!(number("value") >= HIGH);
    assert_eq!((number("high"), number("low")), (HIGH, LOW));
    assert!((number("dwell_s") - f64::from(DWELL_MS) / 1e3).abs() < 1e-9);
    assert!(rows.get(0, "v").unwrap().contains("memory"));
    assert!(rows.get(0, "gap_ms").is_some() && rows.get(0, "boundary").is_some());
    let why = rows.get(0, "why").unwrap();
    assert!(
        why.contains("memory") && why.contains(source.as_str()),
        "{why}"
    );
    (source, pressure)
}

/// What is measured of a node's memory, as it is published: the value, and when it was read.
struct Measured(async_nats::Subscriber);

impl Measured {
    /// Follows a node. The first vector has come when this returns, so that none is missed later: a
    /// subscription that was only sent may begin after the next vector.
    async fn of(lab: &Lab, node: &NodeId) -> (Self, f64) {
        let subject = subjects::telemetry(node);
        let mut measured = Self(lab.broker.client.subscribe(subject).await.unwrap());
        let (value, _) = measured.next().await;
        (measured, value)
    }

    async fn next(&mut self) -> (f64, Timestamp) {
        let next = async {
            while let Some(message) = self.0.next().await {
                let vector: HardwareVector = serde_json::from_slice(&message.payload).unwrap();
                let memory = vector.host(Signal::Memory);
                if let Some(found) = memory.and_then(|r| Some((r.value?, r.at))) {
                    return found;
                }
            }
            panic!("the telemetry ended");
        };
        tokio::time::timeout(stage::PATIENCE, next).await.unwrap()
    }

    /// The first moment at which memory was below `low`.
    async fn recovery(mut self) -> Timestamp {
        loop {
            let (value, at) = self.next().await;
            if value < LOW {
                assert!(value >= 0.0);
                return at;
            }
        }
    }
}

/// A node that was left takes new work only after a whole dwell below `low`.
async fn the_node_returns_after_sustained_recovery(
    lab: &Lab,
    node: &NodeId,
    mut pressure: fiec_lab::process::Process,
) {
    let pinned = json!({"id": "pinned", "program": "synthetic@1", "requires": {"nodes": [node]}});
    let file = lab.file("pinned.json", pinned.to_string());
    lab.fiec(&["submit", &file.display().to_string()])
        .await
        .expect(0);
    let ran = until("`why` names the pressure", async || {
        let ran = lab.fiec(&["why", "pinned", "--json"]).await.expect(0);
        let reply: ApiReply = serde_json::from_str(&ran.stdout).unwrap();
        let why = reply.why.unwrap();
        let verdict = why
            .candidates
            .iter()
            .find(|c| c.node == *node)?
            .rejected
            .join("; ");
        verdict.contains("memory").then_some(verdict)
    })
    .await;
    let status = lab.status_of(node).await.unwrap();
    assert_eq!(status.viability, Viability::Unviable, "{ran}");
    assert!(status.pressing.join("; ").contains("memory"), "{status:?}");

    let (measured, before) = Measured::of(lab, node).await;
    assert!(before >= LOW, "the pressure ended early: {before}");
    pressure.stop(Duration::from_secs(5)).await;
    let calm = measured.recovery().await;
    let id = lab.id("pinned");
    let bound = lab
        .journal
        .find(id, "the node takes work again", |line| {
            (line.state().epoch > 0).then(|| line.state().at)
        })
        .await;
    let after = bound.millis() - calm.millis();
    // The policy service's clock for the dwell is monotonic and starts when the vector arrives.
    assert!(
        after >= i64::from(DWELL_MS) - 50,
        "it came back after {after} ms"
    );
    lab.journal.ended(id, "completed").await;
}

#[tokio::test]
async fn pressure_inside_the_nodes_own_limit_rebinds_and_keeps_the_bits() {
    let mut lab = Lab::start(options(&[])).await;
    let (source, pressure) = an_execution_leaves_a_node_under_pressure(&lab).await;
    the_node_returns_after_sustained_recovery(&lab, &source, pressure).await;
    lab.none_ended().unwrap();
    lab.stop().await;
}

#[tokio::test]
async fn pressure_against_a_declared_budget_rebinds_and_keeps_the_bits() {
    let mut lab = Lab::start(options(&["--no-cgroup"])).await;
    let status = lab.status_of(&"n1".parse().unwrap()).await.unwrap();
    assert_eq!(status.descriptor.memory_limit_source, "declared");
    assert_eq!(status.descriptor.memory_limit_bytes, LIMIT_MIB << 20);
    let (source, pressure) = an_execution_leaves_a_node_under_pressure(&lab).await;
    the_node_returns_after_sustained_recovery(&lab, &source, pressure).await;
    lab.none_ended().unwrap();
    lab.end().await;
}
