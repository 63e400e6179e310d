//! Processes that end or stall without a word: workers and children, killed and stopped for real.

use crate::stage;
use crate::stage::{Lab, Line, audit, digest_of, proc, undisturbed_synthetic, until, workers};
use async_nats::jetstream::stream;
use fiec_broker::outbox::PLACE_HEADER;
use fiec_schemas::messages::Viability;
use fiec_schemas::{Cause, Event, ExecutionId, NodeId, subjects};
use rustix::process::Signal;
use serde_json::{Value, json};

/// Some seconds of computation with a commit every 50 ms.
fn long() -> Value {
    json!({"capsules": 600, "rest_us": 5_000, "state_bytes": 4_096})
}

fn submission(id: &str, params: &Value) -> Value {
    json!({"id": id, "program": "synthetic@1", "params": params, "commit": {"every": 10}})
}

/// The node of a binding for a loss.
fn lost_to(line: &Line) -> Option<NodeId> {
    line.message.events.iter().find_map(|event| match event {
        Event::Bound {
            node,
            cause: Cause::Lost { .. },
            ..
        } => Some(node.clone()),
        _ => None,
    })
}

fn boundaries(ledger: &[Line]) -> Vec<u64> {
    let events = ledger.iter().flat_map(|line| &line.message.events);
    events
        .filter_map(|event| match event {
            Event::Boundary(boundary) => Some(boundary.index),
            _ => None,
        })
        .collect()
}

#[tokio::test]
async fn an_execution_goes_on_from_its_last_commit_when_its_worker_is_killed() {
    let mut lab = Lab::start(workers(2)).await;
    let id = lab.publish_json(&submission("killed", &long())).await;
    let node = lab.journal.computing(id, 3).await;
    let children = proc::descendants(lab.worker(&node).pid());
    assert!(!children.is_empty(), "the program runs in a child process");

    lab.worker(&node).kill();
    until("no orphan is left", async || {
        children
            .iter()
            .all(|pid| !proc::is_alive(*pid))
            .then_some(())
    })
    .await;
    let next = lab.journal.find(id, "it is bound anew", lost_to).await;
    assert_ne!(next, node);
    let last = lab.journal.ended(id, "completed").await;

    assert_eq!(digest_of(&last), undisturbed_synthetic(&long()).await);
    assert_eq!((last.state().epoch, last.state().totals.rebindings), (2, 1));
    let ledger = lab.journal.of(id);
    audit(&ledger);
    let indices = boundaries(&ledger);
    assert!(indices.windows(2).all(|w| w[0] < w[1]), "{indices:?}");
    // It went on from the last commit: the first commit after the loss is the next one.
    let at_loss = ledger.iter().find(|line| lost_to(line).is_some()).unwrap();
    let from = at_loss.state().boundary_index();
    assert!(
        from >= 30,
        "three commits were made before the loss, not {from} capsules"
    );
    assert!(indices.contains(&(from + 10)), "{from} in {indices:?}");
    lab.end().await;
}

#[tokio::test]
async fn a_stopped_worker_that_comes_back_is_fenced() {
    let mut lab = Lab::start(workers(2)).await;
    let id = lab.publish_json(&submission("stopped", &long())).await;
    let node = lab.journal.computing(id, 2).await;
    let children = proc::descendants(lab.worker(&node).pid());
    assert!(!children.is_empty());

    lab.worker(&node).signal(Signal::STOP).unwrap();
    let what = "the silent node's execution is bound elsewhere";
    let next = lab.journal.find(id, what, lost_to).await;
    assert_ne!(next, node);
    lab.worker(&node).signal(Signal::CONT).unwrap();

    // What the stalled agent still had in hand must not get into the ledger, and its child ends or
    // drops the execution.
    let last = lab.journal.ended(id, "completed").await;
    assert_eq!(digest_of(&last), undisturbed_synthetic(&long()).await);
    let ledger = lab.journal.of(id);
    audit(&ledger);
    let since = ledger
        .iter()
        .position(|line| lost_to(line).is_some())
        .unwrap();
    let stale = format!("worker/{node}/");
    assert!(
        ledger[since..]
            .iter()
            .all(|line| !line.state().author.starts_with(&stale)),
        "a fenced worker wrote to the ledger"
    );
    let status = until("the node is heard again and runs nothing", async || {
        let status = lab.status_of(&node).await.ok()?;
        let idle = status.vector.as_ref()?.running_count == 0;
        (status.viability == Viability::Viable && status.bound == 0 && idle).then_some(status)
    })
    .await;
    assert_eq!(status.descriptor.node, node);

    // The node itself is as good as before.
    let pinned = json!({"id": "after", "program": "synthetic@1", "requires": {"nodes": [node]}});
    let after = lab.publish_json(&pinned).await;
    lab.journal.ended(after, "completed").await;
    lab.none_ended().unwrap();
    lab.end().await;
}

#[tokio::test]
async fn a_killed_child_is_tried_again_from_the_last_commit() {
    let mut lab = Lab::start(workers(1)).await;
    let id = lab.publish_json(&submission("child", &long())).await;
    let node = lab.journal.computing(id, 3).await;
    let agent = lab.worker(&node).pid();
    let children = proc::descendants(agent);
    assert!(!children.is_empty());
    children.iter().for_each(|pid| proc::kill(*pid));

    let crash = lab
        .journal
        .find(id, "its crash is in the ledger", |line| {
            let crashed = |e: &Event| matches!(e, Event::Crashed { .. });
            line.message.events.iter().find(|e| crashed(e)).cloned()
        })
        .await;
    let Event::Crashed { attempt, exit, .. } = &crash else {
        unreachable!()
    };
    assert_eq!(*attempt, 1);
    assert!(
        exit.contains("signal") && exit.contains('9') || exit.contains("KILL"),
        "{exit}"
    );
    let last = lab.journal.ended(id, "completed").await;
    assert_eq!(digest_of(&last), undisturbed_synthetic(&long()).await);
    assert_eq!(last.state().totals.crashes, 1);
    audit(&lab.journal.of(id));
    lab.none_ended().unwrap();
    lab.end().await;
}

#[tokio::test]
async fn a_program_that_keeps_crashing_fails_with_its_stderr_after_its_retries() {
    let lab = Lab::start(workers(1)).await;
    let always = json!({"id": "always", "program": "synthetic@1", "retries": 2,
        "params": {"capsules": 10, "crash_at": 4}, "commit": {"every": 1}});
    let never_again = json!({"id": "no-retry", "program": "synthetic@1", "retries": 0,
        "params": {"capsules": 10, "crash_at": 0}});
    let params = json!({"capsules": 50, "state_bytes": 100, "crash_at": 7, "crash_attempts": 1});
    let once = json!({"id": "once", "program": "synthetic@1", "retries": 1, "params": params,
        "commit": {"every": 1}});

    let file = lab.file("always.json", always.to_string());
    let ran = lab
        .fiec(&["submit", "--wait", &file.display().to_string()])
        .await;
    let said = ran.expect(1);
    assert!(said.stderr.contains("failed"), "{said:?}");

    let last = lab.journal.ended(lab.id("always"), "failed").await;
    let failed = last.message.events.iter().find_map(|event| match event {
        Event::Failed { reason, stderr, .. } => Some((reason.clone(), stderr.clone())),
        _ => None,
    });
    let (reason, stderr) = failed.unwrap();
    assert!(
        stderr.contains("crashing at capsule 4"),
        "{reason}: {stderr}"
    );
    assert_eq!(last.state().boundary_index(), 4, "what was committed stays");
    let ledger = lab.journal.of(lab.id("always"));
    audit(&ledger);
    let backoffs: Vec<u64> = ledger
        .iter()
        .flat_map(|line| &line.message.events)
        .filter_map(|event| match event {
            Event::Crashed { backoff_ms, .. } => Some(*backoff_ms),
            _ => None,
        })
        .collect();
    // The last crash may be told by `failed` alone.
    assert!(
        (2..=3).contains(&backoffs.len()),
        "two retries: {backoffs:?}"
    );
    assert!(backoffs[0] > 0 && backoffs[1] > backoffs[0], "{backoffs:?}");
    let status = lab.fiec(&["status", "always"]).await.expect(0);
    assert!(status.stdout.contains("failed"), "{status:?}");

    let id = lab.publish_json(&never_again).await;
    lab.journal.ended(id, "failed").await;

    let id = lab.publish_json(&once).await;
    let last = lab.journal.ended(id, "completed").await;
    assert_eq!(digest_of(&last), undisturbed_synthetic(&params).await);
    assert_eq!(last.state().totals.crashes, 1);
    audit(&lab.journal.of(id));
    lab.end().await;
}

#[tokio::test]
async fn a_nodes_name_is_held_by_one_worker_and_goes_on_under_its_next_life() {
    let mut lab = Lab::start(workers(1)).await;
    let params = json!({"capsules": 2_000, "rest_us": 5_000, "state_bytes": 4_096});
    let id = lab.publish_json(&submission("named", &params)).await;
    let node = lab.journal.computing(id, 2).await;
    let run_dir = lab.data_dir().join("run").display().to_string();
    let second = ["worker", "--node", node.as_str(), "--run-dir", &run_dir];
    let refused = lab.fiec(&second).await.expect(1);
    assert!(
        refused.stderr.contains("--node"),
        "it says what to do: {refused:?}"
    );
    let before = lab.journal.of(id).last().unwrap().state().boundary_index();
    lab.journal
        .find(id, "the first one goes on undisturbed", |line| {
            (line.state().boundary_index() > before + 20).then_some(())
        })
        .await;

    lab.worker(&node).kill();
    lab.restart_worker(stage::number_of(&node)).unwrap();
    let last = lab.journal.ended(id, "completed").await;
    assert_eq!(digest_of(&last), undisturbed_synthetic(&params).await);
    let totals = &last.state().totals;
    assert_eq!(
        (totals.crashes, totals.rebindings),
        (0, 1),
        "{:?}",
        last.state()
    );
    let ledger = lab.journal.of(id);
    audit(&ledger);
    let instances: std::collections::BTreeSet<_> = ledger
        .iter()
        .filter_map(|line| line.state().phase.binding().map(|b| b.instance))
        .collect();
    assert_eq!(
        instances.len(),
        2,
        "two lives of one name are never taken for one"
    );
    lab.none_ended().unwrap();
    lab.end().await;
}

/// What was published for the outside of an execution: where it was emitted, and what it says.
async fn published(lab: &Lab, id: ExecutionId) -> Vec<(String, String)> {
    let js = &lab.broker.js;
    let mut stream = js.get_stream(subjects::OUTBOX_STREAM).await.unwrap();
    let last = stream.info().await.unwrap().state.last_sequence;
    let mut found = Vec::new();
    for seq in 1..=last {
        let message = stream.direct_get(seq).await.unwrap();
        if message.subject.as_str() == subjects::outbox(&lab.tenant, id, "tick") {
            let place = message.headers.get(PLACE_HEADER).unwrap().to_string();
            let text = String::from_utf8(message.payload.to_vec()).unwrap();
            found.push((place, text));
        }
    }
    found
}

#[tokio::test]
async fn what_a_killed_worker_had_committed_and_not_published_the_next_one_publishes_once() {
    const CAPSULES: u64 = 1_500;
    let mut lab = Lab::start(workers(2)).await;
    let mut line = submission(
        "owes",
        &json!({"capsules": CAPSULES, "rest_us": 5_000, "emit_every": 1}),
    );
    line["commit"] = json!({"every": 5});
    let id = lab.publish_json(&line).await;
    let node = lab.journal.computing(id, 3).await;
    // From here on commits can be stored, and what they carry cannot be published: the worker is
    // between the two until it is killed.
    let js = lab.broker.js.clone();
    let stream = js.get_stream(subjects::OUTBOX_STREAM).await.unwrap();
    let config = stream.cached_info().config.clone();
    js.update_stream(stream::Config {
        subjects: vec!["elsewhere.*".to_owned()],
        ..config.clone()
    })
    .await
    .unwrap();
    let log = lab.data_dir().join("logs");
    until("the worker tries in vain to publish", async || {
        let said = std::fs::read_to_string(log.join(format!("{node}.log"))).ok()?;
        said.contains("publish the emitted messages").then_some(())
    })
    .await;
    let there = published(&lab, id).await;
    lab.worker(&node).kill();
    js.update_stream(config).await.unwrap();
    let owed = lab.journal.of(id).into_iter().next_back().unwrap();
    let owed = owed.state().outbox.unwrap().through;
    assert!((there.len() as u64) < owed, "{} of {owed}", there.len());

    let next = lab.journal.find(id, "it is bound anew", lost_to).await;
    assert_ne!(next, node);
    let last = lab.journal.ended(id, "completed").await;
    assert_eq!(last.state().epoch, 2);
    audit(&lab.journal.of(id));
    let all = (1..=CAPSULES).map(|n| (format!("{n}.0"), n.to_string()));
    assert_eq!(published(&lab, id).await, all.collect::<Vec<_>>());
    lab.end().await;
}
