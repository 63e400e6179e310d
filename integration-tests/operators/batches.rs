//! Whole batches: the committed example of an order with an array, a limit and a gang, through
//! `fiec submit`, into SQL; hundreds of executions paused, resumed and cancelled together; quotas;
//! all or nothing.

use std::path::Path;

use crate::stage::{
    Lab, args, audit, digest_of, gives_way, slots, undisturbed_synthetic, until, workers,
    workers_with_history,
};
use fiec_lab::cluster::ClusterOptions;
use fiec_schemas::messages::QuotaReply;
use fiec_schemas::scheduling::Rule;
use fiec_schemas::{Event, ExecutionId, Tenant};
use serde_json::{Value, json};

fn example() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/batch-dag.jsonl");
    path.to_str().unwrap().to_owned()
}

#[tokio::test]
async fn the_example_runs_in_its_order_within_its_limit_and_its_gang_starts_together() {
    let lab = Lab::start(ClusterOptions {
        worker_args: slots(4),
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
        worker_args: slots(4),
        ..workers(2)
    })
    .await;
    let line = format!(
        r#"{{"id": "big", "batch": "big", "program": "synthetic@1", "array": {{"count": {COUNT}}},
            "params": {{"capsules": 100000, "rest_us": 20000, "state_bytes": 64}},
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
        (
            number(&paused, "done") + number(&paused, "underway"),
            number(&paused, "left"),
        ),
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
        nobody.stderr.contains("has no execution of batch nobody"),
        "{}",
        nobody.stderr
    );
    lab.stop().await;
}

#[tokio::test]
async fn a_quota_holds_back_what_is_over_it_and_why_says_so() {
    let lab = Lab::start(ClusterOptions {
        worker_args: slots(4),
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
        "params": {"capsules": 100000, "rest_us": 20000}}"#;
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

/// Sets how many a tenant may run; gives what is in force then.
async fn allow(lab: &Lab, tenant: &str, running: &str) -> fiec_schemas::quota::Quota {
    let set = ["quota", "set", tenant, "--running", running, "--json"];
    let said = lab.fiec(&set).await.expect(0).stdout;
    let reply: QuotaReply = serde_json::from_str(&said).unwrap();
    reply.tenants[0].quota.clone().unwrap()
}

/// True while it computes where it was bound first, and nothing was asked of it.
fn is_untouched(lab: &Lab, id: ExecutionId) -> bool {
    let ledger = lab.journal.of(id);
    let touched = |event: &Event| matches!(event, Event::Yielded { .. } | Event::Parked { .. });
    let mut events = ledger.iter().flat_map(|line| &line.message.events);
    let state = ledger.last().unwrap().state();
    state.phase.as_str() == "started" && state.epoch == 1 && !events.any(touched)
}

#[tokio::test]
async fn a_lowered_quota_takes_what_is_worth_least_and_a_raised_one_lets_it_go_on() {
    const GRACE_MS: i64 = 1_000;
    let mut lab = Lab::start(ClusterOptions {
        worker_args: slots(4),
        policy_args: args(&["--quota-grace-ms", "1000", "--verify-share", "0"]),
        ..workers_with_history(1)
    })
    .await;
    let (own, other) = (lab.tenant.clone(), Tenant::new("other").unwrap());
    let body = |id: &str, capsules: u64, every: u64| {
        let params = json!({"capsules": capsules, "rest_us": 5_000, "state_bytes": 1_024});
        json!({"id": id, "program": "synthetic@1", "params": params, "commit": {"every": every}})
    };
    allow(&lab, "lab", "3").await;
    // What commits ten times a second has little to lose, what never does all that it has computed.
    let cheap = body("cheap", 2_500, 20);
    let mut dear = Vec::new();
    for id in ["dear-1", "dear-2"] {
        dear.push(lab.publish_json(&body(id, 1_000_000, 1_000_000)).await);
    }
    lab.tenant = other.clone();
    dear.push(
        lab.publish_json(&body("theirs", 1_000_000, 1_000_000))
            .await,
    );
    lab.tenant = own.clone();
    for id in &dear {
        lab.journal.computing(*id, 0).await;
    }
    let id = lab.publish_json(&cheap).await;
    lab.journal.computing(id, 2).await;

    let lowered = allow(&lab, "lab", "2").await;
    assert!(lowered.who.contains('@'), "{lowered:?}");
    let (at, (rule, by, reason)) = lab
        .journal
        .find(id, "it has given way", |line| {
            Some((line.state().at, gives_way(line)?))
        })
        .await;
    assert!(
        at.micros() >= lowered.at.micros() + GRACE_MS * 1_000,
        "{at}: not before the grace is over"
    );
    assert_eq!((rule, by), (Rule::Quota, None));
    let set = format!("{} has set 2 running", lowered.who);
    let spared = format!("spared: {}", dear[0]);
    let has = "its tenant lab has 3 bound or running";
    let either = [&*spared, &*format!("spared: {}", dear[1])];
    assert!(
        either.iter().any(|words| reason.contains(words)),
        "{reason}"
    );
    for words in [has, &set, "its regret is"] {
        assert!(reason.contains(words), "{words} in {reason}");
    }
    let why = until("`fiec why` names what it waits for", async || {
        let why = lab.fiec(&["why", "cheap"]).await.expect(0).stdout;
        why.contains("it waits for its tenant's quota (2 running)")
            .then_some(why)
    })
    .await;
    assert!(
        why.contains("must be bound anew") && why.contains(&set),
        "{why}"
    );
    assert!(
        dear.iter().all(|id| is_untouched(&lab, *id)),
        "others go on"
    );
    assert_eq!(lab.journal.of(id).last().unwrap().phase(), "pending");

    let raised = allow(&lab, "lab", "3").await;
    let again = lab
        .journal
        .find(id, "it goes on", |line| {
            (line.phase() == "started" && line.state().epoch == 2).then(|| line.state().at)
        })
        .await;
    assert!(again > raised.at, "{again}: not before it was raised");
    let end = lab.journal.ended(id, "completed").await;
    assert_eq!(end.state().epoch, 2);
    assert_eq!(
        digest_of(&end),
        undisturbed_synthetic(&cheap["params"]).await
    );
    assert!(
        dear.iter().all(|id| is_untouched(&lab, *id)),
        "others go on"
    );

    for (tenant, names) in [(&own, &["dear-1", "dear-2"][..]), (&other, &["theirs"])] {
        lab.tenant = tenant.clone();
        for name in names {
            lab.fiec(&["cancel", name]).await.expect(0);
        }
        lab.recorded(if tenant == &own { 3 } else { 1 }).await;
    }
    for id in dear.iter().chain([&id]) {
        audit(&lab.journal.of(*id));
    }
    let placed = "SELECT string_agg(client_id || ' ' || n, ', ' ORDER BY client_id) FROM \
                  (SELECT client_id, count(*) AS n FROM placement_timeline GROUP BY 1) p";
    let placed = lab.sql(placed).await.rows[0][0].clone();
    assert_eq!(placed.unwrap(), "cheap 2, dear-1 1, dear-2 1, theirs 1");
    let told = format!(
        "SELECT count(*) FROM rebinding_history WHERE client_id = 'cheap' \
         AND cause = 'preempted' AND why LIKE '%{has}%{set}%its regret is%spared%'"
    );
    assert_eq!(lab.count(told).await, 1);
    let changes = "SELECT before, after, who, (until IS NULL)::text FROM quota_history \
                   WHERE tenant = 'lab' ORDER BY at";
    let rows = until("every change of the quota is in PostgreSQL", async || {
        let rows = lab.sql(changes).await.rows;
        (rows.len() == 3).then_some(rows)
    })
    .await;
    let who = lowered.who.as_str();
    let row = |before, after, holds| [before, after, who, holds].map(|t| Some(t.to_owned()));
    assert_eq!(
        rows,
        [
            row("no limits", "3 running", "false"),
            row("3 running", "2 running", "false"),
            row("2 running", "3 running", "true")
        ]
    );
    lab.stop().await;
}
