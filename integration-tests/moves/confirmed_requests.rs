//! A pause or a cancel that a worker has confirmed is carried out, also if that worker dies or leaves
//! before the next boundary. A cancel does not need the worker's word.

use crate::stage::{Lab, args, slots, workers};
use fiec_lab::cluster::{Cluster, ClusterOptions};
use fiec_schemas::{ExecutionId, NodeId};
use rustix::process::Signal;
use serde_json::{Value, json};

/// A capsule that lasts for longer than any of these tests.
fn endless() -> Value {
    json!({"capsules": 2, "rest_us": 300_000_000})
}

/// Starts an execution in a batch; gives the node that computes it.
async fn computing(lab: &Lab, name: &str) -> (ExecutionId, NodeId) {
    let submission = json!({"id": name, "batch": "b", "program": "synthetic@1",
        "params": endless(), "commit": {"every": 1}});
    let id = lab.publish_json(&submission).await;
    let node = lab
        .journal
        .find(id, "it computes", |line| line.started_on())
        .await;
    (id, node)
}

/// Waits until the ledger's phase is this one.
async fn comes_to_be(lab: &Lab, id: ExecutionId, phase: &'static str) {
    let what = format!("{id} is {phase}");
    let found = lab
        .journal
        .find(id, &what, |line| (line.phase() == phase).then_some(()));
    found.await;
}

#[tokio::test]
async fn a_confirmed_pause_holds_when_its_worker_is_killed() {
    let mut lab = Lab::start(workers(2)).await;
    let (id, node) = computing(&lab, "p").await;
    lab.fiec(&["pause", "p"]).await.expect(0);
    lab.worker(&node).kill();
    comes_to_be(&lab, id, "paused").await;
    lab.fiec(&["resume", "p"]).await.expect(0);
    let again = lab.journal.find(id, "it computes elsewhere", |line| {
        line.started_on().filter(|other| *other != node)
    });
    again.await;
    lab.fiec(&["cancel", "p"]).await.expect(0);
    lab.journal.ended(id, "cancelled").await;
    lab.end().await;
}

#[tokio::test]
async fn a_confirmed_cancel_is_carried_out_when_its_worker_is_killed_and_no_node_is_left() {
    let mut lab = Lab::start(workers(1)).await;
    let (id, node) = computing(&lab, "c").await;
    lab.fiec(&["cancel", "c"]).await.expect(0);
    lab.worker(&node).kill();
    lab.journal.ended(id, "cancelled").await;
    lab.end().await;
}

#[tokio::test]
async fn a_confirmed_pause_holds_when_its_worker_leaves_at_the_end_of_its_drain() {
    let options = workers(2);
    let mut lab = Lab::start(ClusterOptions {
        worker_args: [options.worker_args.clone(), args(&["--drain-seconds", "2"])].concat(),
        ..options
    })
    .await;
    let (id, node) = computing(&lab, "d").await;
    lab.fiec(&["pause", "d"]).await.expect(0);
    lab.worker(&node).signal(Signal::TERM).unwrap();
    comes_to_be(&lab, id, "paused").await;
    lab.fiec(&["cancel", "d"]).await.expect(0);
    lab.journal.ended(id, "cancelled").await;
    lab.end().await;
}

#[tokio::test]
async fn a_batch_counts_as_paused_only_what_is_paused() {
    let mut lab = Lab::start(workers(2)).await;
    let (killed, node) = computing(&lab, "q1").await;
    let (other, _) = computing(&lab, "q2").await;
    let batch = async |lab: &Lab, verb: &str| {
        let ran = lab.fiec(&["batch", verb, "b", "--json"]).await.expect(0);
        let reply = ran.json_lines()[0].clone();
        let number = |field: &str| reply[field].as_u64().unwrap_or(0);
        (number("done"), number("underway"), number("unconcerned"))
    };
    assert_eq!(batch(&lab, "pause").await, (0, 2, 0));
    lab.worker(&node).kill();
    comes_to_be(&lab, killed, "paused").await;
    assert_eq!(batch(&lab, "pause").await, (0, 1, 1));
    assert_eq!(batch(&lab, "cancel").await, (1, 1, 0));
    for id in [killed, other] {
        lab.journal.ended(id, "cancelled").await;
    }
    lab.end().await;
}

#[tokio::test]
async fn a_cancel_is_carried_out_while_the_node_is_silent() {
    let options = workers(1);
    let mut lab = Lab::start(ClusterOptions {
        worker_args: slots(3),
        // It is silent, and not lost.
        policy_args: args(&["--liveness-ms", "60000"]),
        ..options
    })
    .await;
    let mut ids = Vec::new();
    for name in ["s1", "s2", "s3"] {
        ids.push(computing(&lab, name).await.0);
    }
    let node = Cluster::node(1);
    lab.worker(&node).signal(Signal::STOP).unwrap();
    let paused = lab.fiec(&["pause", "s1"]).await.expect(1);
    assert!(paused.stderr.contains("does not answer"), "{paused:?}");
    lab.fiec(&["cancel", "s1"]).await.expect(0);
    lab.journal.ended(ids[0], "cancelled").await;
    // Of a batch, the node is asked for the first alone.
    let ran = lab
        .fiec(&["batch", "cancel", "b", "--json"])
        .await
        .expect(0);
    assert_eq!(ran.json_lines()[0]["done"], 2, "{ran:?}");
    for id in &ids[1..] {
        lab.journal.ended(*id, "cancelled").await;
    }
    // The worker hears of each, although their capsules last for minutes: all slots are free.
    lab.worker(&node).signal(Signal::CONT).unwrap();
    for name in ["t1", "t2", "t3"] {
        let (id, _) = computing(&lab, name).await;
        lab.fiec(&["cancel", name]).await.expect(0);
        lab.journal.ended(id, "cancelled").await;
    }
    lab.end().await;
}
