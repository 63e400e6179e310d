//! What people and scripts see: status, watch, logs, nodes, why, doctor, metrics, and that a
//! resubmission is recognized; that a test fails at whose end somebody is overdue.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use crate::stage;
use crate::stage::{Lab, args, until, workers, workers_with_history};
use fiec_broker::{Draft, Ledger, Tip};
use fiec_lab::process::Process;
use fiec_schemas::duty::Actor;
use fiec_schemas::messages::{ApiReply, NodeStatus, Viability};
use fiec_schemas::{
    Cause, Event, ExecutionId, ExecutionState, InstanceId, LedgerMessage, Phase, Submission,
    Timestamp,
};
use futures_util::FutureExt as _;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};

fn printing(id: &str, capsules: u64) -> Value {
    json!({"id": id, "program": "synthetic@1", "commit": {"every": 20},
        "params": {"capsules": capsules, "rest_us": 20_000, "state_bytes": 512, "print": true}})
}

#[tokio::test]
async fn an_execution_is_seen_while_it_runs_and_followers_end_with_it() {
    let mut lab = Lab::start(workers(1)).await;
    let id = lab.publish_json(&printing("seen", 500)).await;
    lab.journal.computing(id, 1).await;
    let logs = lab.command(&["logs", "seen", "-f"]).spawn().unwrap();
    let watch = lab.command(&["watch", "seen"]).spawn().unwrap();
    let mut watch_json = lab.command(&["watch", "seen", "--json"]).spawn().unwrap();
    let mut lines = BufReader::new(watch_json.stdout.take().unwrap()).lines();
    let first = tokio::time::timeout(stage::PATIENCE, lines.next_line()).await;
    let line = first.unwrap().unwrap().expect("a line while it runs");
    let message: LedgerMessage = serde_json::from_str(&line).unwrap();
    assert_eq!(message.state.execution, id);

    // By the client's id and by the UUID, for people and for scripts.
    let status = lab.fiec(&["status", "seen"]).await.expect(0);
    assert!(
        status.stdout.contains("started") && status.stdout.contains("n1"),
        "{status:?}"
    );
    let status = until("the progress beyond the commits is known", async || {
        let ran = lab
            .fiec(&["status", &id.to_string(), "--json"])
            .await
            .expect(0);
        let reply: ApiReply = serde_json::from_str(&ran.stdout).unwrap();
        let state = reply.state.unwrap();
        assert_eq!(state.execution, id);
        assert!(matches!(state.phase, Phase::Started(_)), "{state:?}");
        reply.progress
    })
    .await;
    assert_eq!((status.execution, status.of), (id, Some(500)));
    let why = lab.fiec(&["why", "seen"]).await.expect(0);
    assert!(why.stdout.contains("computing on n1"), "{why:?}");
    let next = "next: worker n1 must commit its next boundary or end\n";
    assert!(why.stdout.contains(next), "{why:?}");

    let followed = tokio::time::timeout(stage::PATIENCE, logs.wait_with_output()).await;
    let followed = followed.unwrap().unwrap();
    assert!(followed.status.success());
    let text = String::from_utf8(followed.stdout).unwrap();
    lab.journal.ended(id, "completed").await;
    assert_eq!(text.lines().count(), 500, "each line once:\n{text}");
    assert!(text.contains("stdout: boundary 1\n") && text.contains("boundary 500\n"));
    assert!(
        text.lines().all(|line| line.contains(" n1 e1 ")),
        "node and epoch on every line"
    );
    let watched = tokio::time::timeout(stage::PATIENCE, watch.wait_with_output()).await;
    let watched = watched.unwrap().unwrap();
    let text = String::from_utf8(watched.stdout).unwrap();
    assert!(
        watched.status.success() && text.contains("completed after 500 capsules"),
        "{text}"
    );

    let after = lab.fiec(&["logs", "seen", "--json"]).await.expect(0);
    let lines = after.json_lines();
    assert_eq!(lines.len(), 500);
    assert_eq!(
        (&lines[0]["node"], &lines[0]["stream"]),
        (&json!("n1"), &json!("stdout"))
    );
    let last = lab.fiec(&["logs", "seen", "-n", "2"]).await.expect(0);
    assert_eq!(last.stdout.lines().count(), 2, "{last:?}");
    assert!(last.stdout.ends_with("boundary 500\n"), "{last:?}");
    let after = lab.fiec(&["watch", "seen"]).await.expect(0);
    assert!(after.stdout.contains("completed"), "{after:?}");
    for verb in ["status", "why", "logs", "watch"] {
        let ran = lab.fiec(&[verb, "nobody"]).await.expect(1);
        assert!(ran.stderr.contains("nobody"), "{verb}: {ran:?}");
    }
    lab.none_ended().unwrap();
    lab.end().await;
}

#[tokio::test]
async fn a_resubmission_is_the_same_execution_and_another_body_is_an_error() {
    let lab = Lab::start(workers(1)).await;
    let file = lab.file("one.json", printing("same", 40).to_string());
    let name = file.display().to_string();
    let first = lab.fiec(&["submit", &name]).await.expect(0);
    assert_eq!(first.stdout.trim(), format!("{}  same", lab.id("same")));
    let again = lab.fiec(&["submit", "--json", &name]).await.expect(0);
    let answer = &again.json_lines()[0];
    assert_eq!(
        (&answer["id"], &answer["existing"]),
        (&json!(lab.id("same")), &json!(true))
    );
    // The same in other words: spelled defaults, another order.
    let spelled = r#"{"retries":3,"params":{"print":true,"capsules":40,"rest_us":20000,"state_bytes":512},
        "commit":{"every":20},"program":"synthetic@1","id":"same"}"#;
    let spelled = lab.file("spelled.json", spelled);
    lab.fiec(&["submit", &spelled.display().to_string()])
        .await
        .expect(0);
    let other = lab.file("other.json", printing("same", 41).to_string());
    let refused = lab
        .fiec(&["submit", &other.display().to_string()])
        .await
        .expect(2);
    assert!(refused.stderr.contains("line 1, field id"), "{refused:?}");

    // The exit code is the outcome, also for one that has ended before.
    lab.fiec(&["submit", "--wait", &name]).await.expect(0);
    lab.journal.ended(lab.id("same"), "completed").await;
    lab.fiec(&["submit", "--wait", &name]).await.expect(0);
    let refused = lab
        .fiec(&["submit", &other.display().to_string()])
        .await
        .expect(2);
    assert!(refused.stderr.contains("line 1, field id"), "{refused:?}");
    assert_eq!(lab.journal.by_execution().len(), 1);

    // Of another tenant it is another execution.
    lab.fiec(&["submit", "--wait", "--tenant", "other", &name])
        .await
        .expect(0);
    assert_eq!(lab.journal.by_execution().len(), 2);
    let tenant = lab
        .fiec(&["submit", "--tenant", "a.b", &name])
        .await
        .expect(2);
    assert!(tenant.stderr.contains("64 characters"), "{tenant:?}");
    lab.end().await;
}

#[tokio::test]
async fn what_waits_is_told_why_and_what_would_help() {
    let lab = Lab::start(workers(1)).await;
    let busy = json!({"id": "busy", "program": "synthetic@1",
        "params": {"capsules": 100_000, "rest_us": 1_000}});
    let file = lab.file("busy.json", busy.to_string());
    lab.fiec(&["submit", &file.display().to_string()])
        .await
        .expect(0);
    lab.journal.computing(lab.id("busy"), 0).await;
    let elsewhere = json!({"id": "elsewhere", "program": "synthetic@1",
        "requires": {"nodes": ["n7"]}});
    let large = json!({"id": "large", "program": "synthetic@1",
        "requires": {"memory_bytes": 1u64 << 60}});
    let labelled = json!({"id": "labelled", "program": "synthetic@1",
        "requires": {"labels": {"rack": "7"}}});
    let waits = json!({"id": "waits", "program": "synthetic@1"});
    let lines = [&elsewhere, &large, &labelled, &waits]
        .map(Value::to_string)
        .join("\n");
    let file = lab.file("waiting.jsonl", lines);
    lab.fiec(&["submit", &file.display().to_string()])
        .await
        .expect(0);
    for (id, words) in [
        ("elsewhere", "n1"),
        ("large", "memory"),
        ("labelled", "rack"),
    ] {
        let ran = lab.fiec(&["why", id, "--json"]).await.expect(0);
        let why = serde_json::from_str::<ApiReply>(&ran.stdout)
            .unwrap()
            .why
            .unwrap();
        assert!(why.summary.contains("pending"), "{why:?}");
        let verdict = &why
            .candidates
            .iter()
            .find(|c| c.node.as_str() == "n1")
            .unwrap()
            .rejected;
        assert!(!verdict.is_empty(), "{why:?}");
        assert!(ran.stdout.contains(words), "{id}: {}", ran.stdout);
        assert!(!why.would_help.is_empty(), "{why:?}");
    }
    let why = lab.fiec(&["why", "waits"]).await.expect(0);
    assert!(why.stdout.contains("n1"), "{why:?}");
    lab.fiec(&["cancel", "busy"]).await.expect(0);
    lab.journal.ended(lab.id("waits"), "completed").await;
    let nodes = lab.fiec(&["nodes"]).await.expect(0);
    assert!(
        nodes.stdout.contains("n1") && nodes.stdout.contains("viable"),
        "{nodes:?}"
    );
    lab.end().await;
}

#[tokio::test]
async fn doctor_nodes_metrics_and_logs_say_how_the_parts_are() {
    let mut lab = Lab::start(fiec_lab::cluster::ClusterOptions {
        worker_args: args(&["--slots", "2", "--log-json", "--label", "rack=7"]),
        ..workers_with_history(1)
    })
    .await;
    let id = lab
        .publish("one", "synthetic@1", &json!({"capsules": 3}))
        .await;
    lab.journal.ended(id, "completed").await;

    let ran = lab.fiec(&["doctor", "--json"]).await;
    assert!(
        ran.code == 0 || ran.stdout.contains("\"missing\""),
        "{ran:?}"
    );
    let checks = ran.json_lines();
    let status = |name: &str| {
        let check = checks.iter().find(|c| c["check"] == name);
        check.unwrap_or_else(|| panic!("no check {name} in {checks:?}"))["status"].clone()
    };
    for name in [
        "NATS",
        "ledger stream",
        "policy service and nodes",
        "PostgreSQL",
    ] {
        assert_eq!(status(name), "ok", "{checks:?}");
    }
    let every =
        |c: &Value| c["status"] == "ok" || c["remedy"].as_str().is_some_and(|r| !r.is_empty());
    assert!(
        checks.iter().all(every),
        "what is missing has a remedy: {checks:?}"
    );
    lab.fiec(&["doctor"]).await.expect(ran.code);

    let ran = lab.fiec(&["nodes", "--json"]).await.expect(0);
    let node: NodeStatus = serde_json::from_str(ran.stdout.trim()).unwrap();
    assert_eq!(
        (node.descriptor.slots, node.viability),
        (2, Viability::Viable)
    );
    assert_eq!(node.descriptor.labels["rack"], "7");
    assert!(node.descriptor.programs.contains(&"cg@1".to_owned()));
    let measured = node.vector.unwrap().readings;
    assert!(measured.iter().any(|r| r.value.is_some()), "{measured:?}");
    assert!(
        measured
            .iter()
            .all(|r| r.value.is_some() != r.missing.is_some()),
        "absent is not 0"
    );

    let http = node.descriptor.http.expect("the worker serves /metrics");
    let address = http
        .trim_start_matches("http://")
        .split('/')
        .next()
        .unwrap()
        .to_owned();
    let metrics = stage::get(&address, "/metrics").await;
    assert!(metrics.contains("# TYPE fiec_"), "{metrics}");
    assert!(
        stage::get(&address, "/healthz")
            .await
            .starts_with("HTTP/1.1 200")
    );

    let crash = json!({"capsules": 3, "crash_at": 1});
    let body = json!({"id": "two", "program": "synthetic@1", "params": crash, "retries": 0});
    let id = lab.publish_json(&body).await;
    lab.journal.ended(id, "failed").await;
    let log = until("the worker's log tells it as JSON", async || {
        let log = lab.workers[0].tail(1_000);
        log.contains(&id.to_string()).then_some(log)
    })
    .await;
    let about = log.lines().filter(|line| line.contains(&id.to_string()));
    for line in about.map(|line| serde_json::from_str::<Value>(line).unwrap()) {
        let place = if line["span"].is_object() {
            &line["span"]
        } else {
            &line
        };
        let known = (&place["execution"], &place["epoch"], &place["node"]);
        assert_eq!(known, (&json!(id), &json!(1), &json!("n1")), "{line}");
    }

    let setup = lab.fiec(&["setup"]).await.expect(0);
    assert!(
        setup.stdout.contains("as they should be"),
        "it may be run again: {setup:?}"
    );
    lab.conclude().await;
    lab.servers.nats.stop(stage::PATIENCE).await;
    let away = lab.fiec(&["status", "one"]).await.expect(4);
    assert!(away.stderr.contains("is the server running"), "{away:?}");
}

/// Puts the ledger of an execution behind all others that is bound to `n9`, which does not exist,
/// since `minutes`.
async fn forge_bound(lab: &Lab, minutes: i64) -> ExecutionId {
    let id = lab.id("forged");
    let at = Timestamp::from_micros(Timestamp::now().micros() - minutes * 60_000_000);
    let spec: Submission =
        serde_json::from_value(json!({"id": "forged", "program": "synthetic@1"})).unwrap();
    let bound = Event::Bound {
        epoch: 1,
        node: "n9".parse().unwrap(),
        instance: InstanceId::random(),
        substrate: "host".to_owned(),
        cause: Cause::Initial,
        decision: None,
    };
    let state = ExecutionState::unborn(lab.tenant.clone(), id, Arc::new(spec), None, at);
    let tip = Tip {
        seq: 0,
        digest: None,
        state: state.into(),
        seen_in: 0,
    };
    let draft = Draft::new(&tip, vec![Event::Submitted, bound], "policy/forged", at).unwrap();
    let ledger = Ledger::new(&lab.broker);
    ledger.append(draft, bytes::Bytes::new()).await.unwrap();
    id
}

/// The message with which this panics.
async fn said(panics: impl Future<Output = ()>) -> String {
    let panic = AssertUnwindSafe(panics).catch_unwind().await.unwrap_err();
    let words = panic.downcast_ref::<String>().cloned();
    words.unwrap_or_else(|| panic.downcast_ref::<&str>().unwrap().to_string())
}

/// A cluster without anybody who acts on executions, and one that is bound since ten minutes.
async fn nobody_acts() -> (Lab, ExecutionId) {
    let mut lab = Lab::start(workers(0)).await;
    lab.policies.iter_mut().for_each(Process::kill);
    lab.policies.clear();
    lab.patience = Duration::ZERO;
    let id = forge_bound(&lab, 10).await;
    (lab, id)
}

#[tokio::test]
async fn a_test_fails_at_whose_end_an_execution_was_not_started_in_time() {
    let (lab, id) = nobody_acts().await;
    let found = said(lab.end()).await;
    let words = format!("{id} (bound): a policy service must bind it to another node");
    assert!(found.contains(&words), "{found}");
    assert!(found.contains(" ms late"), "{found}");
}

#[tokio::test]
async fn a_test_does_not_fail_for_what_it_has_killed_on_purpose() {
    let (mut lab, _) = nobody_acts().await;
    lab.killed_on_purpose(&[Actor::PolicyService]);
    lab.end().await;
}

#[tokio::test]
async fn a_test_fails_that_does_not_check_its_history() {
    let lab = Lab::start(workers(0)).await;
    let found = said(async move { drop(lab) }).await;
    assert!(found.contains("lab.end().await"), "{found}");
}
