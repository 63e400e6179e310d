//! Whole batches: the committed example of an order with an array, a limit and a gang, through
//! `fiec submit`, into SQL; hundreds of executions paused, resumed and cancelled together; quotas;
//! all or nothing.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::path::Path;

use fiec::cluster::ClusterOptions;
use serde_json::Value;
use support::{Lab, args, audit, until, workers, workers_with_history};

fn example() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/batch-dag.jsonl");
    path.to_str().unwrap().to_owned()
}

#[tokio::test]
async fn the_example_runs_in_its_order_within_its_limit_and_its_gang_starts_together() {
    let lab = Lab::start(ClusterOptions {
        worker_args: args(&["--slots", "4"]),
        ..workers_with_history(2)
    })
    .await;
    let submit = ["submit", &example(), "--all-or-nothing", "--wait", "--json"];
    let lines = lab.fiec(&submit).await.expect(0).json_lines();
    assert_eq!(lines.len(), 8, "one, four, two, one: {lines:?}");
    for id in lab.journal.by_execution().keys() {
        audit(&lab.journal.of(*id));
    }
    lab.recorded(8).await;
    let ahead = lab
        .count(
            "SELECT count(*) FROM executions e JOIN executions d
             ON (d.client_id, e.client_id ~ '^dag-part') IN (('dag-data', true))
             OR (d.client_id ~ '^dag-part' AND e.client_id ~ '^dag-solver')
             OR (d.client_id ~ '^dag-solver' AND e.client_id = 'dag-report')
             WHERE e.bound_at < d.finished_at",
        )
        .await;
    assert_eq!(
        ahead, 0,
        "nothing was bound before what it waits for had ended"
    );
    let most = lab
        .count(
            "SELECT max(n)::bigint FROM (
               SELECT count(*) AS n
               FROM placement_timeline a
               JOIN placement_timeline b ON b.client_id ~ '^dag-part'
                AND b.bound_at <= a.bound_at AND b.ended_at > a.bound_at
               WHERE a.client_id ~ '^dag-part' GROUP BY a.execution, a.epoch) x",
        )
        .await;
    assert!((1..=2).contains(&most), "{most} parts at once");
    let alone = lab
        .count(
            "SELECT count(*) FROM placement_timeline a JOIN placement_timeline b
             ON a.client_id = 'dag-solver-0' AND b.client_id = 'dag-solver-1'
             WHERE a.started_at < b.bound_at OR b.started_at < a.bound_at",
        )
        .await;
    assert_eq!(
        alone, 0,
        "no member of the gang started before both were bound"
    );
    let summary = lab
        .sql("SELECT name, tenant, executions, completed, ended::text FROM batch_summary")
        .await;
    let row: Vec<_> = ["name", "tenant", "executions", "completed", "ended"]
        .iter()
        .map(|column| summary.get(0, column).unwrap())
        .collect();
    assert_eq!(row, ["dag", "lab", "8", "8", "true"]);
    let status = lab
        .fiec(&["batch", "status", "dag", "--json"])
        .await
        .expect(0);
    assert_eq!(status.json_lines()[0]["phases"]["completed"], 8);

    // Once more: the same executions. A circle, or a bad line of a whole: nothing at all.
    let again = lab.fiec(&submit).await.expect(0).json_lines();
    assert!(
        again.iter().all(|line| line["existing"] == true),
        "{again:?}"
    );
    let text = std::fs::read_to_string(example()).unwrap();
    let bad = text.replace("dag-", "bad-").replace("\"dag\"", "\"bad\"");
    let bad = bad.replacen(
        "\"labels\"",
        "\"after\": [{\"id\": \"bad-report\"}], \"labels\"",
        1,
    );
    let file = lab.file("circle.jsonl", bad);
    let file = file.to_str().unwrap();
    let refused = lab
        .fiec(&["submit", file, "--all-or-nothing"])
        .await
        .expect(2);
    assert!(
        refused.stderr.contains("in a circle: "),
        "{}",
        refused.stderr
    );
    assert_eq!(
        lab.journal.by_execution().len(),
        8,
        "nothing is half-created"
    );
    lab.stop().await;
}

fn number(reply: &Value, field: &str) -> u64 {
    reply[field].as_u64().unwrap_or(0)
}

#[tokio::test]
async fn hundreds_of_executions_are_paused_resumed_and_cancelled_as_one() {
    const COUNT: u64 = 400;
    let lab = Lab::start(ClusterOptions {
        worker_args: args(&["--slots", "4"]),
        ..workers(2)
    })
    .await;
    let line = format!(
        r#"{{"id": "big", "batch": "big", "program": "synthetic@1", "array": {{"count": {COUNT}}},
            "params": {{"capsules": 100000, "work_us": 20000, "state_bytes": 64}},
            "commit": {{"every_ms": 100}}}}"#
    );
    let file = lab.file("big.json", line);
    let submit = ["submit", file.to_str().unwrap(), "--json"];
    assert_eq!(
        lab.fiec(&submit).await.expect(0).json_lines().len() as u64,
        COUNT
    );
    let batch = async |verb: &str| {
        let ran = lab.fiec(&["batch", verb, "big", "--json"]).await;
        ran.expect(0).json_lines()[0].clone()
    };
    until("all have ledgers", async || {
        let phases = batch("status").await["phases"].clone();
        let all: u64 = phases.as_object()?.values().filter_map(Value::as_u64).sum();
        (all == COUNT).then_some(())
    })
    .await;
    lab.journal.computing(lab.id("big-0"), 1).await;
    let paused = batch("pause").await;
    assert_eq!(
        (number(&paused, "done"), number(&paused, "left")),
        (COUNT, 0),
        "{paused}"
    );
    until("all are paused", async || {
        let phases = batch("status").await["phases"].clone();
        (number(&phases, "paused") == COUNT).then_some(())
    })
    .await;
    let resumed = batch("resume").await;
    assert_eq!(number(&resumed, "done"), COUNT, "{resumed}");
    let cancelled = batch("cancel").await;
    assert_eq!(number(&cancelled, "failed"), 0, "{cancelled}");
    until("all are cancelled", async || {
        let phases = batch("status").await["phases"].clone();
        (number(&phases, "cancelled") == COUNT).then_some(())
    })
    .await;
    let nobody = lab.fiec(&["batch", "status", "nobody"]).await.expect(1);
    assert!(
        nobody.stderr.contains("has no batch nobody"),
        "{}",
        nobody.stderr
    );
    lab.stop().await;
}

#[tokio::test]
async fn a_quota_holds_back_what_is_over_it_and_why_says_so() {
    let lab = Lab::start(ClusterOptions {
        worker_args: args(&["--slots", "4"]),
        ..workers(1)
    })
    .await;
    let set = [
        "quota",
        "set",
        "lab",
        "--running",
        "1",
        "--weight",
        "3",
        "--json",
    ];
    lab.fiec(&set).await.expect(0);
    let line = r#"{"id": "q", "program": "synthetic@1", "array": {"count": 2},
        "params": {"capsules": 100000, "work_us": 20000}}"#;
    let file = lab.file("q.json", line);
    lab.fiec(&["submit", file.to_str().unwrap()])
        .await
        .expect(0);
    let one = until("one of the two computes", async || {
        let phase = async |n: u8| {
            let status = lab.fiec(&["status", &format!("q-{n}"), "--json"]).await;
            status.json_lines()[0]["state"]["phase"]["is"].clone()
        };
        let both = [phase(0).await, phase(1).await];
        both.iter().position(|phase| *phase == "started")
    })
    .await;
    let other = format!("q-{}", 1 - one);
    let why = lab.fiec(&["why", &other]).await.expect(0);
    assert!(
        why.stdout.contains("its tenant's quota (1 running)"),
        "{}",
        why.stdout
    );
    let list = lab.fiec(&["quota", "list", "--json"]).await.expect(0);
    let tenant = &list.json_lines()[0]["tenants"][0];
    assert_eq!(
        (&tenant["tenant"], &tenant["running"]),
        (&"lab".into(), &1.into())
    );
    assert_eq!(tenant["quota"]["weight"], 3);
    assert!(tenant["quota"]["who"].as_str().unwrap().contains('@'));
    lab.fiec(&["cancel", &format!("q-{one}")]).await.expect(0);
    until("the other one computes", async || {
        let status = lab.fiec(&["status", &other, "--json"]).await;
        (status.json_lines()[0]["state"]["phase"]["is"] == "started").then_some(())
    })
    .await;
    lab.stop().await;
}
