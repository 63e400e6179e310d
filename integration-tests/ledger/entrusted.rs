//! First bindings that are left to their nodes, where processes are stopped and killed in between.

use std::collections::BTreeMap;

use crate::stage::{
    Lab, Line, args, audit, digest_of, slots, undisturbed_synthetic, until, workers,
    workers_with_history,
};
use fiec_lab::cluster::{Cluster, ClusterOptions};
use fiec_schemas::{Cause, Event, ExecutionId};
use rustix::process::Signal;
use serde_json::{Value, json};

/// Without a client's id: it cannot have a ledger yet.
fn line(params: &Value) -> String {
    json!({"program": "synthetic@1", "params": params}).to_string()
}

fn by_its_node(ledger: &[Line]) -> bool {
    ledger[0].state().author.starts_with("worker/")
}

fn count(ledger: &[Line], is: impl Fn(&Event) -> bool) -> usize {
    let events = ledger.iter().flat_map(|line| &line.message.events);
    events.filter(|event| is(event)).count()
}

/// Waits until there is one ledger, with so many messages.
async fn only_ledger(lab: &Lab, messages: usize) -> (ExecutionId, Vec<Line>) {
    until("there is a ledger", async || {
        let ledgers = lab.journal.by_execution();
        let (id, ledger) = ledgers.into_iter().next()?;
        (ledger.len() >= messages).then_some((id, ledger))
    })
    .await
}

async fn all_completed(lab: &Lab, count: usize) -> BTreeMap<ExecutionId, Vec<Line>> {
    until("everything has completed", async || {
        (lab.journal.ended_count("completed") >= count).then_some(())
    })
    .await;
    let ledgers = lab.journal.by_execution();
    assert_eq!(
        ledgers.len(),
        count,
        "a ledger for each submission and no other"
    );
    ledgers
}

#[tokio::test]
async fn what_ends_at_once_is_one_message_and_its_history_is_whole() {
    // However busy this machine is, the nodes are in time.
    let lab = Lab::start(ClusterOptions {
        policy_args: args(&["--entrust-ms", "60000"]),
        ..workers_with_history(2)
    })
    .await;
    let params = json!({"capsules": 0});
    for _ in 0..20 {
        lab.publish_text(&vec![line(&params); 25].join("\n")).await;
    }
    let ledgers = all_completed(&lab, 500).await;
    ledgers.values().for_each(|ledger| audit(ledger));
    // What a busy machine has let lie for seconds is not left to a node.
    let left = ledgers.values().filter(|ledger| by_its_node(ledger));
    assert!(left.count() > 0, "none of 500 was left to its node");
    // The others had started for 3 ms when their end came.
    let alone = ledgers.values().filter(|ledger| ledger.len() == 1).count();
    assert!(alone > 0, "none of 500 was one message");
    lab.recorded(500).await;
    let whole = "SELECT count(*) FROM executions e JOIN placements p ON p.execution = e.id \
                 JOIN decisions d ON d.execution = e.id \
                 WHERE e.spec IS NOT NULL AND p.bound_at <= p.computing_since \
                 AND p.end_reason = 'completed'";
    assert_eq!(lab.count(whole).await, 500);
    lab.stop().await;
}

#[tokio::test]
async fn a_flood_is_computed_to_its_end_though_a_worker_and_a_policy_service_are_killed() {
    let mut lab = Lab::start(ClusterOptions {
        policies: 2,
        worker_args: slots(4),
        ..workers(3)
    })
    .await;
    let params = json!({"capsules": 3, "rest_us": 500, "state_bytes": 0});
    for message in 0..40 {
        lab.publish_text(&vec![line(&params); 15].join("\n")).await;
        if message == 20 {
            until("the flood is being worked on", async || {
                (lab.journal.ended_count("completed") > 0).then_some(())
            })
            .await;
            lab.workers[0].kill();
            lab.policies[1].kill();
        }
    }
    let ledgers = all_completed(&lab, 600).await;
    let digest = undisturbed_synthetic(&params).await;
    for ledger in ledgers.values() {
        audit(ledger);
        assert_eq!(digest_of(ledger.last().unwrap()), digest);
        let ends = count(ledger, |e| matches!(e, Event::Completed { .. }));
        assert_eq!(ends, 1);
    }
    // How many of them within 200 ms, is up to this machine.
    let by_nodes = ledgers.values().filter(|l| by_its_node(l)).count();
    eprintln!("{by_nodes} of 600 were appended by their nodes");
    assert!(by_nodes > 0);
    lab.end().await;
}

#[tokio::test]
async fn a_worker_that_stalls_finds_its_binding_appended_and_goes_on_behind_it() {
    let mut lab = Lab::start(workers(1)).await;
    let node = Cluster::node(1);
    lab.worker(&node).signal(Signal::STOP).unwrap();
    let params = json!({"capsules": 3, "state_bytes": 0});
    lab.publish_text(&line(&params)).await;
    let (id, ledger) = only_ledger(&lab, 1).await;
    assert_eq!(ledger[0].phase(), "bound");
    assert!(!by_its_node(&ledger));
    lab.worker(&node).signal(Signal::CONT).unwrap();
    let last = lab.journal.ended(id, "completed").await;
    assert_eq!(digest_of(&last), undisturbed_synthetic(&params).await);
    let ledger = lab.journal.of(id);
    audit(&ledger);
    assert_eq!(last.state().epoch, 1, "nobody else was asked");
    lab.none_ended().unwrap();
    lab.end().await;
}

#[tokio::test]
async fn a_worker_that_comes_back_late_appends_nothing_that_was_left_to_it() {
    let mut lab = Lab::start(workers(1)).await;
    let node = Cluster::node(1);
    lab.worker(&node).signal(Signal::STOP).unwrap();
    let params = json!({"capsules": 3, "state_bytes": 0});
    lab.publish_text(&line(&params)).await;
    let (id, _) = only_ledger(&lab, 1).await;
    let other = lab.start_worker(&[]).unwrap();
    let last = lab.journal.ended(id, "completed").await;
    let lost = |e: &Event| {
        matches!(
            e,
            Event::Bound {
                cause: Cause::Lost { .. } | Cause::NotTaken { .. },
                ..
            }
        )
    };
    assert_eq!(count(&lab.journal.of(id), lost), 1);
    let author = format!("worker/{other}/");
    assert!(
        last.state().author.starts_with(&author),
        "{}",
        last.state().author
    );

    lab.worker(&node).signal(Signal::CONT).unwrap();
    // It has read what was left to it when it takes up something that came behind that.
    let after = json!({"id": "after", "program": "synthetic@1", "requires": {"nodes": [node]}});
    let after = lab.publish_json(&after).await;
    lab.journal.ended(after, "completed").await;
    let ledger = lab.journal.of(id);
    audit(&ledger);
    assert_eq!(
        ledger.last().unwrap().seq,
        last.seq,
        "the ledger has gone on"
    );
    assert_eq!(digest_of(&last), undisturbed_synthetic(&params).await);
    lab.none_ended().unwrap();
    lab.end().await;
}
