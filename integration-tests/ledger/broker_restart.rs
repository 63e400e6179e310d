//! The broker dies and comes back with its store: running capsules go on, nothing is lost, and
//! nobody takes the outage for the loss of nodes.

use std::time::Duration;

use crate::stage::{
    Journal, Lab, audit, digest_of, undisturbed, undisturbed_synthetic, until, workers,
};
use fiec::commands::wait::outcome_of;
use fiec_broker::Ledger;
use fiec_schemas::ExecutionId;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep_until};

/// Longer than the silence after which a node counts as lost (5 s), so that a policy service that
/// took its own outage for theirs would be found out.
const OUTAGE: Duration = Duration::from_millis(6_500);

async fn terminal(lab: &Lab, id: ExecutionId) {
    let ledger = Ledger::new(&lab.broker);
    until(&format!("{id} has ended"), async || {
        let last = ledger.last(&lab.tenant, id).await.ok()??;
        outcome_of(last.message.state.phase.kind())
    })
    .await;
}

#[tokio::test]
async fn executions_complete_with_the_same_bits_after_a_broker_was_killed_and_restarted() {
    let mut lab = Lab::start(workers(2)).await;
    let steps = json!({"capsules": 2_000, "rest_us": 2_000, "state_bytes": 32_768});
    let cg = json!({"matrix": {"poisson2d": {"n": 120}}, "load_cases": 200});
    let submission = |id: &str, program: &str, params: &Value| json!({"id": id, "program": program, "params": params, "commit": {"every_ms": 500}});
    let first = lab
        .publish_json(&submission("steps", "synthetic@1", &steps))
        .await;
    let second = lab.publish_json(&submission("cg", "cg@1", &cg)).await;
    lab.journal.computing(first, 2).await;
    lab.journal.computing(second, 2).await;

    lab.servers.nats.kill().await;
    lab.servers.nats.restart().await.unwrap();
    terminal(&lab, first).await;
    terminal(&lab, second).await;

    let journal = Journal::open(&lab.broker);
    let last = journal.ended(first, "completed").await;
    assert_eq!(digest_of(&last), undisturbed_synthetic(&steps).await);
    let last = journal.ended(second, "completed").await;
    assert_eq!(digest_of(&last), undisturbed("cg@1", &cg).await);
    // The stream keeps the last 64 messages of each ledger; these are shorter.
    audit(&journal.of(first));
    audit(&journal.of(second));

    let after = lab
        .publish("after", "synthetic@1", &json!({"capsules": 3}))
        .await;
    terminal(&lab, after).await;
    assert_eq!(journal.ended(after, "completed").await.phase(), "completed");
    lab.none_ended().unwrap();
    lab.end().await;
}

/// Two executions that compute, each with a commit every half second.
async fn two_computing(lab: &Lab, params: &Value) -> Vec<ExecutionId> {
    let mut ids = Vec::new();
    for name in ["a", "b"] {
        let body = json!({"id": name, "program": "synthetic@1", "params": params,
            "commit": {"every_ms": 500}});
        let id = lab.publish_json(&body).await;
        lab.journal.computing(id, 1).await;
        ids.push(id);
    }
    ids
}

#[tokio::test]
async fn an_outage_longer_than_the_liveness_time_is_no_loss_of_nodes() {
    let mut lab = Lab::start(workers(2)).await;
    let params = json!({"capsules": 1_600, "rest_us": 5_000, "state_bytes": 1_024});
    let ids = two_computing(&lab, &params).await;

    lab.servers.nats.kill().await;
    // The length of the outage is what this test is about.
    sleep_until(Instant::now() + OUTAGE).await;
    lab.servers.nats.restart().await.unwrap();

    let expected = undisturbed_synthetic(&params).await;
    for id in &ids {
        terminal(&lab, *id).await;
    }
    let journal = Journal::open(&lab.broker);
    for id in ids {
        let last = journal.ended(id, "completed").await;
        assert_eq!(digest_of(&last), expected);
        assert_eq!(
            last.state().epoch,
            1,
            "it was moved for an outage of the broker"
        );
        audit(&journal.of(id));
    }
    lab.none_ended().unwrap();
    lab.end().await;
}

#[tokio::test]
async fn a_broker_that_hangs_longer_than_the_liveness_time_is_no_loss_of_nodes() {
    let mut lab = Lab::start(workers(2)).await;
    let params = json!({"capsules": 3_000, "rest_us": 5_000, "state_bytes": 1_024});
    let ids = two_computing(&lab, &params).await;

    // The connections stay, and nothing comes through them.
    let pid = rustix::process::Pid::from_raw(lab.servers.nats.pid().try_into().unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    // The length of the outage is what this test is about.
    sleep_until(Instant::now() + 2 * OUTAGE).await;
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();

    let expected = undisturbed_synthetic(&params).await;
    for id in &ids {
        terminal(&lab, *id).await;
    }
    for id in ids {
        let last = lab.journal.ended(id, "completed").await;
        assert_eq!(digest_of(&last), expected);
        assert_eq!(
            last.state().epoch,
            1,
            "it was moved for an outage of the broker"
        );
        audit(&lab.journal.of(id));
    }
    lab.none_ended().unwrap();
    lab.end().await;
}
