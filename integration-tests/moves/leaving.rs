//! Nodes that are to be left by a time: told by an operator, by a file or by a signal, and killed
//! at the announced moment; drains with a deadline.

use crate::stage;
use crate::stage::{Lab, args, audit, digest_of, proc, undisturbed_synthetic, until, workers};
use fiec_lab::cluster::ClusterOptions;
use fiec_schemas::{Cause, Event, ExecutionId, NodeId, Timestamp};
use rustix::process::Signal;
use serde_json::{Value, json};

fn steps(capsules: u64) -> Value {
    json!({"capsules": capsules, "rest_us": 5_000, "state_bytes": 1_024})
}

/// Commits seldom, so that what a yield commits is more than what was committed anyway.
fn body(id: &str, params: &Value) -> Value {
    json!({"id": id, "program": "synthetic@1", "params": params, "commit": {"every_ms": 700}})
}

/// When the node will be gone, as its flags say, once they do.
async fn revoked_at(lab: &Lab, node: &NodeId) -> Timestamp {
    until("the node says when it will be gone", async || {
        let status = lab.status_of(node).await.ok()?;
        status.flags.revocation_of(status.descriptor.instance)
    })
    .await
}

/// Waits for a moment that was announced, and kills the node's worker with all its children.
async fn gone_at(lab: &mut Lab, node: &NodeId, at: Timestamp) {
    let left = at.micros() - Timestamp::now().micros();
    let left = u64::try_from(left).unwrap_or(0);
    tokio::time::sleep(std::time::Duration::from_micros(left)).await;
    let pid = lab.worker(node).pid();
    let children = proc::descendants(pid);
    lab.worker(node).kill();
    children.into_iter().for_each(proc::kill_if_alive);
}

/// What left it committed with the yield all that it had computed, and nothing was lost with it.
fn lost_nothing(lab: &Lab, id: ExecutionId) {
    let ledger = lab.journal.of(id);
    audit(&ledger);
    let left: Vec<_> = ledger
        .iter()
        .filter(|line| {
            let revoked = |e: &Event| {
                let cause = match e {
                    Event::Yielded { cause, .. } => cause,
                    _ => return false,
                };
                matches!(cause, Cause::Revoked { .. })
            };
            line.message.events.iter().any(revoked)
        })
        .collect();
    assert_eq!(left.len(), 1, "it left once");
    let state = left[0].state();
    let boundary = state.boundary.as_ref().unwrap();
    assert_eq!(boundary.ordinal, state.ordinal, "committed with the yield");
    assert!(
        !lab.journal.causes(id).contains(&"lost"),
        "{:?}",
        lab.journal.causes(id)
    );
}

#[tokio::test]
async fn a_node_that_is_killed_when_it_said_it_would_be_has_lost_no_work() {
    let options = ClusterOptions {
        worker_args: args(&["--slots", "1", "--revocation-seconds", "8"]),
        ..workers(2)
    };
    let mut lab = Lab::start(options).await;
    let params = steps(2_500);
    let id = lab.publish_json(&body("spot", &params)).await;
    let node = lab.journal.computing(id, 1).await;
    lab.worker(&node).signal(Signal::POWER).unwrap();
    let at = revoked_at(&lab, &node).await;
    let what = "it computes elsewhere";
    let (to, moved) = lab
        .journal
        .find(id, what, |line| {
            let to = line.started_on().filter(|n| *n != node)?;
            Some((to, line.state().at))
        })
        .await;
    assert!(moved.micros() < at.micros(), "before the node is gone");
    // Nothing new goes there, and whoever asks is told why.
    let pinned = json!({"id": "late", "program": "synthetic@1", "requires": {"nodes": [node]}});
    lab.publish_json(&pinned).await;
    let told = until("it is told why", async || {
        let why = lab.fiec(&["why", "late"]).await;
        (why.code == 0).then_some(why.stdout)
    })
    .await;
    assert!(told.contains("it ends at"), "{told}");
    assert!(told.contains(&format!("undrain {node}")), "{told}");
    gone_at(&mut lab, &node, at).await;

    let last = lab.journal.ended(id, "completed").await;
    assert_eq!(digest_of(&last), undisturbed_synthetic(&params).await);
    assert_eq!(lab.journal.causes(id), ["initial", "revoked"]);
    lost_nothing(&lab, id);
    assert_ne!(to, node);

    // Another life under the name was not meant: what waited for it goes there.
    lab.restart_worker(stage::number_of(&node)).unwrap();
    lab.journal.ended(lab.id("late"), "completed").await;
    lab.end().await;
}

#[tokio::test]
async fn what_finds_no_other_place_commits_and_waits_before_its_node_is_gone() {
    let mut lab = Lab::start(workers(1)).await;
    let busy = lab.publish_json(&body("busy", &steps(100_000))).await;
    let other = lab.journal.computing(busy, 1).await;
    let notice = lab.path("notice");
    let file = notice.display().to_string();
    let node = lab
        .start_worker(&args(&["--revocation-file", &file]))
        .unwrap();
    let params = steps(2_000);
    let id = lab.publish_json(&body("alone", &params)).await;
    assert_eq!(lab.journal.computing(id, 2).await, node);
    std::fs::write(&notice, "5\n").unwrap();
    let at = revoked_at(&lab, &node).await;
    lab.journal
        .find(id, "it waits", |line| {
            (line.phase() == "pending" && line.state().epoch == 1).then_some(())
        })
        .await;
    let left_ms = at.millis() - lab.journal.of(id).last().unwrap().state().at.millis();
    assert!(left_ms > 0, "before it is gone: {left_ms} ms");
    assert!(
        left_ms < 4_500,
        "it computed on as long as it could: {left_ms} ms were left"
    );
    gone_at(&mut lab, &node, at).await;
    assert_eq!(lab.journal.of(id).last().unwrap().phase(), "pending");
    let why = lab.fiec(&["why", "alone"]).await.expect(0);
    assert!(why.stdout.contains("node ends at"), "{why:?}");

    lab.fiec(&["cancel", "busy"]).await.expect(0);
    let last = lab.journal.ended(id, "completed").await;
    assert_eq!(digest_of(&last), undisturbed_synthetic(&params).await);
    lost_nothing(&lab, id);
    let ledger = lab.journal.of(id);
    assert!(
        ledger
            .iter()
            .any(|line| line.started_on() == Some(other.clone()))
    );
    lab.end().await;
}

#[tokio::test]
async fn a_drain_with_a_deadline_ends_what_reaches_no_boundary_and_binds_it_elsewhere() {
    let mut lab = Lab::start(workers(2)).await;
    let endless = json!({"id": "stuck", "program": "synthetic@1",
        "params": {"capsules": 1, "work_us": 600_000_000}});
    let id = lab.publish_json(&endless).await;
    let node = lab.journal.computing(id, 0).await;
    let children = proc::descendants(lab.worker(&node).pid());
    let bad = lab
        .fiec(&["drain", node.as_str(), "--within", "soon"])
        .await
        .expect(2);
    assert!(bad.stderr.contains("10m"), "{bad:?}");
    lab.fiec(&["drain", node.as_str(), "--within", "2s", "--wait"])
        .await
        .expect(0);
    let to = lab
        .journal
        .find(id, "it computes elsewhere", |line| {
            line.started_on().filter(|n| *n != node)
        })
        .await;
    assert_ne!(to, node);
    let ledger = lab.journal.of(id);
    audit(&ledger);
    let given_up = |e: &Event| {
        matches!(
            e,
            Event::Yielded {
                cause: Cause::Drain { .. },
                ..
            }
        )
    };
    let line = ledger
        .iter()
        .find(|line| line.message.events.iter().any(given_up));
    let line = line.expect("its worker gave it up");
    assert!(line.state().boundary.is_none(), "there was no boundary");
    assert!(line.state().author.starts_with(&format!("worker/{node}/")));
    assert_eq!(lab.journal.causes(id), ["initial", "drain"]);
    until("its child is dead", async || {
        let busy = |pid: &&u32| proc::is_alive(**pid) && proc::cpu(&[**pid]).as_secs() >= 1;
        children.iter().find(busy).is_none().then_some(())
    })
    .await;

    // The slot is free again.
    let pinned = json!({"id": "next", "program": "synthetic@1", "requires": {"nodes": [node]}});
    lab.publish_json(&pinned).await;
    lab.fiec(&["undrain", node.as_str()]).await.expect(0);
    lab.journal.ended(lab.id("next"), "completed").await;
    lab.fiec(&["cancel", "stuck"]).await.expect(0);
    lab.journal.ended(id, "cancelled").await;
    lab.none_ended().unwrap();
    lab.end().await;
}

#[tokio::test]
async fn a_drain_names_what_no_other_node_can_take() {
    let lab = Lab::start(workers(2)).await;
    let line = |id: &str, requires: Value| {
        json!({"id": id, "program": "synthetic@1", "requires": requires,
               "params": {"capsules": 100_000, "rest_us": 5_000}})
    };
    let pinned = line("pinned", json!({"nodes": ["n1"]}));
    let id = lab.publish_json(&pinned).await;
    lab.journal.computing(id, 2).await;
    let node = NodeId::new("n1").unwrap();
    until("the vector lists it", async || {
        let status = lab.status_of(&node).await.ok()?;
        let running = status.vector?.running;
        running.iter().any(|one| one.execution == id).then_some(())
    })
    .await;
    let said = lab.fiec(&["drain", "n1"]).await.expect(0).stdout;
    let named = format!("no other node can take {id} (it must be on ");
    assert!(said.contains(&named), "{said}");
    lab.end().await;
}
