//! Sharing, with real servers and real processes: what gives way and to whom, and that nothing of it
//! changes a bit.

use crate::stage;
use crate::stage::{
    Lab, args, audit, digest_of, gives_way, slots, undisturbed_synthetic, workers,
    workers_with_history,
};
use fiec_lab::cluster::ClusterOptions;
use fiec_schemas::scheduling::Rule;
use fiec_schemas::{Cause, Event, ExecutionId, Timestamp};
use serde_json::{Value, json};

/// One slot, and slices of a second. What runs may be asked to give way once it has computed for as
/// long as its beginning took: by the usual twenty times that it would stay, on a busy machine,
/// longer than any of these tests computes.
fn one_slot(options: ClusterOptions) -> ClusterOptions {
    ClusterOptions {
        worker_args: slots(1),
        policy_args: args(&[
            "--slice-ms",
            "1000",
            "--residency-ms",
            "500",
            "--residency-moves",
            "1",
            "--verify-share",
            "0",
        ]),
        ..options
    }
}

fn body(id: &str, capsules: u64, more: Value) -> Value {
    let params = json!({"capsules": capsules, "rest_us": 5_000, "state_bytes": 1_024});
    let mut body = json!({"id": id, "program": "synthetic@1", "params": params});
    let more = more.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(more);
    body
}

/// By which rule, to whom and why it gave way, each time.
fn gave_way(lab: &Lab, id: &str) -> Vec<(Rule, Option<ExecutionId>, String)> {
    let ledger = lab.journal.of(lab.id(id));
    ledger.iter().filter_map(gives_way).collect()
}

#[tokio::test]
async fn a_higher_priority_takes_the_only_slot_and_gives_it_back_with_the_same_bits() {
    let lab = Lab::start(one_slot(workers_with_history(1))).await;
    let long = body("long", 1_200, json!({}));
    let id = lab.publish_json(&long).await;
    lab.journal.computing(id, 1).await;
    let urgent = lab
        .publish_json(&body("urgent", 100, json!({"priority": 10})))
        .await;
    let done = lab.journal.ended(urgent, "completed").await;
    let end = lab.journal.ended(id, "completed").await;
    assert!(end.seq > done.seq, "the long one is done after it");

    let found = gave_way(&lab, "long");
    let (rule, by, reason) = found.first().expect("it gave way");
    assert_eq!((*rule, *by), (Rule::Priority, Some(urgent)));
    for words in ["priority 10, and this one has 0", "its regret is"] {
        assert!(reason.contains(words), "{reason}");
    }
    assert_eq!(
        digest_of(&end),
        undisturbed_synthetic(&long["params"]).await
    );
    for id in [id, urgent] {
        audit(&lab.journal.of(id));
    }
    // The same from SQL.
    lab.recorded(2).await;
    let told = "SELECT count(*) FROM rebinding_history WHERE client_id = 'long' \
                AND cause = 'preempted' AND why LIKE '%priority 10%regret%'";
    assert!(lab.count(told).await >= 1);
    let shares = "SELECT count(*) FROM tenant_shares WHERE gave_way_last_day >= 1 \
                  AND slot_time_last_hour > interval '3 seconds' AND holds = 0";
    assert_eq!(lab.count(shares).await, 1);
    lab.stop().await;
}

#[tokio::test]
async fn what_is_small_stands_aside_with_its_process_and_goes_on_with_the_same_bits() {
    let lab = Lab::start(one_slot(workers_with_history(1))).await;
    let little = json!({"memory_bytes": 1_048_576});
    let long = body(
        "long",
        1_200,
        json!({"requires": little, "deadline": {"within_s": 1}}),
    );
    let id = lab.publish_json(&long).await;
    lab.journal.computing(id, 1).await;
    let urgent = body("urgent", 200, json!({"requires": little, "priority": 10}));
    let urgent = lab.publish_json(&urgent).await;
    let cause = |event: &Event| match event {
        Event::Parked { cause, .. } => Some(cause.clone()),
        _ => None,
    };
    let parked = |line: &stage::journal::Line| line.message.events.iter().find_map(cause);
    let reason = lab.journal.find(id, "it is parked", parked).await;
    let Cause::Preempted { rule, by, reason } = reason else {
        panic!("{reason:?}")
    };
    assert_eq!((rule, by), (Rule::Priority, Some(urgent)));
    assert!(reason.contains("it waits in the host's memory"), "{reason}");
    lab.journal.ended(urgent, "completed").await;
    let end = lab.journal.ended(id, "completed").await;
    assert_eq!(end.state().epoch, 1, "it was bound once");
    assert_eq!(
        digest_of(&end),
        undisturbed_synthetic(&long["params"]).await
    );
    for id in [id, urgent] {
        audit(&lab.journal.of(id));
    }
    // A deadline that was changed is the one that counts.
    let later = body("later", 6_000, json!({"deadline": {"within_s": 1}}));
    let later = lab.publish_json(&later).await;
    lab.journal.computing(later, 1).await;
    lab.fiec(&["adjust", "later", "--deadline", "2h"])
        .await
        .expect(0);
    lab.fiec(&["cancel", "later"]).await.expect(0);
    lab.journal.ended(later, "cancelled").await;
    lab.recorded(3).await;
    let late = "SELECT count(*) FROM late_executions WHERE client_id = 'long' AND late \
                AND changed_by IS NULL";
    assert_eq!(lab.count(late).await, 1);
    let in_time = "SELECT count(*) FROM late_executions WHERE client_id = 'later' AND NOT late \
                   AND changed_by IS NOT NULL AND due_at > submitted_at + interval '1 hour'";
    assert_eq!(lab.count(in_time).await, 1);
    let times = "SELECT count(*) FROM parked_times WHERE execution IN \
                 (SELECT id FROM executions WHERE client_id = 'long')";
    assert_eq!(lab.count(times).await, 1);
    let shares = "SELECT count(*) FROM tenant_shares WHERE gave_way_last_day = 1";
    assert_eq!(lab.count(shares).await, 1);
    lab.stop().await;
}

#[tokio::test]
async fn a_short_one_does_not_wait_for_the_end_of_a_long_one() {
    let lab = Lab::start(one_slot(workers(1))).await;
    let long = lab.publish_json(&body("long", 6_000, json!({}))).await;
    lab.journal.computing(long, 3).await;
    let short = lab.publish_json(&body("short", 60, json!({}))).await;
    lab.journal.ended(short, "completed").await;
    assert_ne!(lab.journal.of(long).last().unwrap().phase(), "completed");
    let found = gave_way(&lab, "long");
    assert_eq!(found[0].0, Rule::TimeSlice, "{found:?}");
    lab.fiec(&["cancel", "long"]).await.expect(0);
    lab.journal.ended(long, "cancelled").await;
    audit(&lab.journal.of(long));
    lab.stop().await;
}

#[tokio::test]
async fn what_is_to_fail_at_its_deadline_does_so_while_it_runs_and_while_it_waits() {
    let lab = Lab::start(one_slot(workers(1))).await;
    let deadline = json!({"deadline": {"within_s": 6, "on_miss": "fail"}});
    let runs = lab
        .publish_json(&body("runs", 6_000, deadline.clone()))
        .await;
    lab.journal.computing(runs, 0).await;
    let waits = lab
        .publish_json(&body(
            "waits",
            6_000,
            json!({"priority": -5, "deadline": deadline["deadline"]}),
        ))
        .await;
    for id in [runs, waits] {
        let end = lab.journal.ended(id, "failed").await;
        let reason = end.message.events.iter().find_map(|event| match event {
            Event::Failed { reason, .. } => Some(reason.clone()),
            _ => None,
        });
        assert!(reason.unwrap().contains("was not done by its deadline"));
        let due = Timestamp::from_micros(end.state().submitted_at.micros() + 6_000_000);
        assert!(end.state().at >= due, "not before its time");
        audit(&lab.journal.of(id));
    }
    lab.stop().await;
}
