//! What an operator does to executions and nodes: cancel, pause, resume, yield, cordon, drain, and
//! ending a worker the orderly way. What a command shows is in `sight.rs`.

use crate::stage;
use crate::stage::{Lab, audit, digest_of, proc, undisturbed_synthetic, until, workers};
use fiec_broker::Ledger;
use fiec_lab::cluster::Cluster;
use fiec_schemas::{Cause, Event, NodeId, subjects};
use rustix::process::Signal;
use serde_json::{Value, json};

fn steps(capsules: u64) -> Value {
    json!({"capsules": capsules, "rest_us": 5_000, "state_bytes": 1_024})
}

fn body(id: &str, params: &Value) -> Value {
    json!({"id": id, "program": "synthetic@1", "params": params, "commit": {"every": 20}})
}

async fn submit(lab: &Lab, submission: &Value) {
    let name = format!("{}.json", submission["id"].as_str().unwrap());
    let file = lab.file(&name, submission.to_string());
    lab.fiec(&["submit", &file.display().to_string()])
        .await
        .expect(0);
}

/// The causes and nodes of all bindings.
fn bindings(lab: &Lab, id: &str) -> Vec<(&'static str, NodeId)> {
    let ledger = lab.journal.of(lab.id(id));
    let events = ledger.iter().flat_map(|line| &line.message.events);
    events
        .filter_map(|event| match event {
            Event::Bound { cause, node, .. } => Some((cause.as_str(), node.clone())),
            _ => None,
        })
        .collect()
}

#[tokio::test]
async fn what_is_cancelled_ends_whether_it_waits_or_runs() {
    let mut lab = Lab::start(workers(1)).await;
    // One capsule of ten minutes: it reaches no boundary at which it could stop.
    let endless = json!({"id": "runs", "program": "synthetic@1",
        "params": {"capsules": 1, "rest_us": 600_000_000}});
    submit(&lab, &endless).await;
    let node = lab.journal.computing(lab.id("runs"), 0).await;
    let children = proc::descendants(lab.worker(&node).pid());
    assert!(!children.is_empty());
    submit(&lab, &body("waits", &steps(5))).await;
    let file = lab.path("waits.json").display().to_string();
    let waiter = lab.command(&["submit", "--wait", &file]).spawn().unwrap();

    lab.fiec(&["cancel", "waits"]).await.expect(0);
    let last = lab.journal.ended(lab.id("waits"), "cancelled").await;
    assert_eq!(last.state().boundary_index(), 0);
    let ended = tokio::time::timeout(stage::PATIENCE, waiter.wait_with_output()).await;
    assert_eq!(
        ended.unwrap().unwrap().status.code(),
        Some(3),
        "the outcome is the exit code"
    );

    lab.fiec(&["cancel", "runs"]).await.expect(0);
    let last = lab.journal.ended(lab.id("runs"), "cancelled").await;
    let who = last.message.events.iter().find_map(|event| match event {
        Event::Cancelled { who } => Some(who.clone()),
        _ => None,
    });
    assert!(who.unwrap().contains('@'), "who asked is kept");
    until("its child is dead", async || {
        children
            .iter()
            .all(|pid| !proc::is_alive(*pid))
            .then_some(())
    })
    .await;
    let twice = lab.fiec(&["cancel", "runs"]).await;
    assert!(
        twice.code == 0 || twice.stderr.contains("cancelled"),
        "{twice:?}"
    );
    let unknown = lab.fiec(&["cancel", "nobody"]).await.expect(1);
    assert!(unknown.stderr.contains("nobody"), "{unknown:?}");

    let id = lab
        .publish("after", "synthetic@1", &json!({"capsules": 2}))
        .await;
    lab.journal.ended(id, "completed").await;
    for id in ["waits", "runs", "after"] {
        audit(&lab.journal.of(lab.id(id)));
    }
    lab.none_ended().unwrap();
    lab.end().await;
}

#[tokio::test]
async fn a_cancel_survives_the_death_of_the_worker_that_took_it() {
    let mut lab = Lab::start(workers(2)).await;
    let endless = json!({"id": "runs", "program": "synthetic@1",
        "params": {"capsules": 1, "rest_us": 600_000_000}});
    let id = lab.publish_json(&endless).await;
    let node = lab.journal.computing(id, 0).await;
    lab.fiec(&["cancel", "runs"]).await.expect(0);
    lab.worker(&node).kill();
    let last = lab.journal.ended(id, "cancelled").await;
    let ledger = lab.journal.of(id);
    audit(&ledger);
    let events = ledger.iter().flat_map(|line| &line.message.events);
    let starts = events
        .filter(|e| matches!(e, Event::Started { .. }))
        .count();
    assert_eq!(starts, 1, "it did not run again: {:?}", last.message.events);
    lab.end().await;
}

#[tokio::test]
async fn a_paused_execution_waits_at_a_boundary_and_goes_on_from_there() {
    let lab = Lab::start(workers(1)).await;
    let params = steps(1_500);
    let id = lab.publish_json(&body("p", &params)).await;
    lab.journal.computing(id, 1).await;
    lab.fiec(&["pause", "p"]).await.expect(0);
    let what = "it is paused";
    let paused = lab
        .journal
        .find(id, what, |line| {
            (line.phase() == "paused").then(|| line.state().boundary_index())
        })
        .await;
    assert!(paused > 0 && paused < 1_500, "{paused}");
    let status = lab.fiec(&["status", "p"]).await.expect(0);
    assert!(status.stdout.contains("paused"), "{status:?}");
    let why = lab.fiec(&["why", "p"]).await.expect(0);
    assert!(
        why.stdout.contains("resume"),
        "it says what would help: {why:?}"
    );

    // Its slot is free meanwhile.
    let other = lab
        .publish("other", "synthetic@1", &json!({"capsules": 3}))
        .await;
    lab.journal.ended(other, "completed").await;
    assert_eq!(lab.journal.of(id).last().unwrap().phase(), "paused");

    lab.fiec(&["resume", "p"]).await.expect(0);
    let last = lab.journal.ended(id, "completed").await;
    assert_eq!(digest_of(&last), undisturbed_synthetic(&params).await);
    audit(&lab.journal.of(id));
    assert_eq!(bindings(&lab, "p").last().unwrap().0, "resumed");
    let late = lab.fiec(&["pause", "p"]).await.expect(1);
    assert!(late.stderr.contains("completed"), "{late:?}");
    lab.end().await;
}

#[tokio::test]
async fn a_yield_moves_to_another_node_or_to_the_one_that_was_asked_for() {
    let lab = Lab::start(workers(3)).await;
    let params = steps(2_000);
    let id = lab.publish_json(&body("y", &params)).await;
    let first = lab.journal.computing(id, 1).await;
    lab.fiec(&["yield", "y"]).await.expect(0);
    let moved = |epoch: u64| {
        lab.journal
            .find(id, "it computes on another node", move |line| {
                line.started_on().filter(|_| line.state().epoch == epoch)
            })
    };
    let second = moved(2).await;
    assert_ne!(second, first);
    let others = ["n1", "n2", "n3"].map(|n| n.parse::<NodeId>().unwrap());
    let third = others
        .into_iter()
        .find(|n| *n != first && *n != second)
        .unwrap();
    lab.fiec(&["yield", "y", "--to", third.as_str()])
        .await
        .expect(0);
    assert_eq!(moved(3).await, third);
    let nowhere = lab.fiec(&["yield", "y", "--to", "n9"]).await.expect(1);
    assert!(nowhere.stderr.contains("n9"), "{nowhere:?}");
    let unnamed = lab.fiec(&["yield", "y", "--to", "a.b"]).await.expect(2);
    assert!(unnamed.stderr.contains("64 characters"), "{unnamed:?}");

    let last = lab.journal.ended(id, "completed").await;
    assert_eq!(digest_of(&last), undisturbed_synthetic(&params).await);
    let ledger = lab.journal.of(id);
    audit(&ledger);
    let causes: Vec<_> = bindings(&lab, "y")
        .into_iter()
        .map(|(cause, _)| cause)
        .collect();
    assert_eq!(causes, ["initial", "operator", "operator"]);
    // A handover is one message: state, yield and the next binding are true together.
    let handover = |line: &stage::Line| {
        let events = &line.message.events;
        let has = |f: &dyn Fn(&Event) -> bool| events.iter().any(f);
        has(&|e| {
            matches!(
                e,
                Event::Yielded {
                    cause: Cause::Operator { .. },
                    ..
                }
            )
        }) && has(&|e| matches!(e, Event::Bound { .. }))
    };
    assert_eq!(ledger.iter().filter(|line| handover(line)).count(), 2);
    lab.end().await;
}

#[tokio::test]
async fn a_drained_node_is_left_and_a_cordoned_one_gets_nothing_until_it_is_released() {
    let mut lab = Lab::start(workers(2)).await;
    let params = steps(1_500);
    let id = lab.publish_json(&body("d", &params)).await;
    let node = lab.journal.computing(id, 1).await;
    lab.fiec(&["drain", node.as_str()]).await.expect(0);
    let what = "it computes elsewhere";
    let to = lab
        .journal
        .find(id, what, |line| line.started_on().filter(|n| *n != node))
        .await;
    assert_eq!(bindings(&lab, "d").last().unwrap(), &("drain", to.clone()));
    let nodes = lab.fiec(&["nodes"]).await.expect(0);
    assert!(nodes.stdout.contains("draining"), "{nodes:?}");

    // The other is busy; the drained one is not used.
    let pinned = json!({"id": "pinned", "program": "synthetic@1", "requires": {"nodes": [node]}});
    submit(&lab, &pinned).await;
    let why = lab.fiec(&["why", "pinned"]).await.expect(0);
    assert!(
        why.stdout.contains("drain") || why.stdout.contains("cordon"),
        "{why:?}"
    );
    lab.fiec(&["uncordon", node.as_str()]).await.expect(0);
    lab.journal.ended(lab.id("pinned"), "completed").await;

    lab.fiec(&["cordon", node.as_str()]).await.expect(0);
    let pinned = json!({"id": "again", "program": "synthetic@1", "requires": {"nodes": [node]}});
    submit(&lab, &pinned).await;
    let why = lab.fiec(&["why", "again"]).await.expect(0);
    assert!(why.stdout.contains("cordon"), "{why:?}");
    assert_eq!(
        lab.journal.of(lab.id("again")).last().unwrap().phase(),
        "pending"
    );
    lab.fiec(&["uncordon", node.as_str()]).await.expect(0);
    lab.journal.ended(lab.id("again"), "completed").await;
    let unknown = lab.fiec(&["cordon", "n9"]).await.expect(1);
    assert!(unknown.stderr.contains("n9"), "{unknown:?}");

    let last = lab.journal.ended(id, "completed").await;
    assert_eq!(digest_of(&last), undisturbed_synthetic(&params).await);
    for id in ["d", "pinned", "again"] {
        audit(&lab.journal.of(lab.id(id)));
    }
    lab.none_ended().unwrap();
    lab.end().await;
}

#[tokio::test]
async fn a_worker_that_is_told_to_end_hands_over_what_it_runs_and_loses_nothing() {
    let mut lab = Lab::start(workers(2)).await;
    let params = steps(1_500);
    let id = lab.publish_json(&body("t", &params)).await;
    let node = lab.journal.computing(id, 2).await;
    let children = proc::descendants(lab.worker(&node).pid());
    lab.worker(&node).signal(Signal::TERM).unwrap();
    let status = {
        let worker = lab.worker(&node);
        until("the worker has left", async || worker.ended()).await
    };
    assert!(status.success(), "{status}: {}", lab.worker(&node).tail(20));
    assert!(
        children.iter().all(|pid| !proc::is_alive(*pid)),
        "its children left before it"
    );

    let last = lab.journal.ended(id, "completed").await;
    assert_eq!(digest_of(&last), undisturbed_synthetic(&params).await);
    let ledger = lab.journal.of(id);
    audit(&ledger);
    let yielded = ledger.iter().find(|line| {
        let drain = |e: &Event| {
            matches!(
                e,
                Event::Yielded {
                    cause: Cause::Drain { .. },
                    ..
                }
            )
        };
        line.message.events.iter().any(drain)
    });
    // The state that it had reached is committed with the yield: no capsule is computed twice.
    let at_yield = yielded.expect("it yielded because of the drain").state();
    assert_eq!(
        at_yield.boundary.as_ref().unwrap().ordinal,
        at_yield.ordinal
    );
    let cause = &bindings(&lab, "t")[1];
    assert_eq!(cause.0, "drain");
    assert_ne!(cause.1, node);

    // A worker of the same name takes its place.
    let number = stage::number_of(&node);
    lab.restart_worker(number).unwrap();
    assert_eq!(Cluster::node(number), node);
    let pinned = json!({"id": "back", "program": "synthetic@1", "requires": {"nodes": [node]}});
    let back = lab.publish_json(&pinned).await;
    lab.journal.ended(back, "completed").await;
    lab.end().await;
}

#[tokio::test]
async fn what_is_cancelled_while_it_is_paused_keeps_its_last_state_and_none_before_it() {
    let mut lab = Lab::start(workers(1)).await;
    let params = json!({"capsules": 100_000, "rest_us": 5_000, "state_bytes": 1_000_000});
    let id = lab.publish_json(&body("large", &params)).await;
    lab.journal.computing(id, 1).await;
    lab.fiec(&["pause", "large"]).await.expect(0);
    let place = lab
        .journal
        .find(id, "it is paused", |line| {
            let place = line.state().boundary.clone();
            place.filter(|_| line.phase() == "paused")
        })
        .await;
    assert!(fiec_broker::store::is_large(&place), "{place:?}");
    let stored = Ledger::new(&lab.broker).state(id, &place).await.unwrap();
    assert_eq!(stored.len(), 1_000_000);

    lab.fiec(&["cancel", "large"]).await.expect(0);
    lab.journal.ended(id, "cancelled").await;
    // A worker that leaves drops at once what it would keep for a while.
    lab.worker(&Cluster::node(1)).signal(Signal::TERM).unwrap();
    let manifest = fiec_broker::store::manifest(&lab.broker, &place).await;
    let named = manifest.unwrap().chunks.len() as u64;
    until("all states before it are dropped", async || {
        let stream = subjects::CHUNK_STREAM;
        let mut stream = lab.broker.js.get_stream(stream).await.ok()?;
        let left = stream.info().await.ok()?.state.messages;
        (left == named).then_some(())
    })
    .await;
    // It may be retried.
    let stored = Ledger::new(&lab.broker).state(id, &place).await.unwrap();
    assert_eq!(stored.len(), 1_000_000);
    lab.end().await;
}

#[tokio::test]
async fn a_worker_refuses_a_run_folder_that_is_not_its_users_alone_and_says_what_to_do() {
    use std::os::unix::fs::PermissionsExt as _;
    let lab = Lab::start(workers(0)).await;
    let folder = lab.path("run");
    let open = folder.join("w1");
    std::fs::create_dir_all(&open).unwrap();
    std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o777)).unwrap();
    let run_dir = folder.display().to_string();
    let worker = ["worker", "--node", "w1", "--run-dir", &run_dir];
    let refused = lab.fiec(&worker).await.expect(1);
    for words in ["run folder", open.to_str().unwrap(), "777", "chmod 700"] {
        assert!(refused.stderr.contains(words), "{words}: {refused:?}");
    }

    // The default is a name in a folder; somebody else may have put a link there.
    let elsewhere = lab.path("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    let link = folder.join("fiec-w1");
    std::os::unix::fs::symlink(&elsewhere, &link).unwrap();
    let mut command = lab.command(&["worker", "--node", "w1"]);
    command.env("XDG_RUNTIME_DIR", &folder);
    let refused = stage::run(command).await.expect(1);
    for words in [link.to_str().unwrap(), "is no folder", "--run-dir"] {
        assert!(refused.stderr.contains(words), "{words}: {refused:?}");
    }
    assert_eq!(std::fs::read_dir(&elsewhere).unwrap().count(), 0);
    lab.end().await;
}
