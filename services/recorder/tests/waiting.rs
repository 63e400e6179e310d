//! Why things wait, however long the queue is, and who changed which quota, as SQL says it, against
//! a real PostgreSQL.
use std::sync::Arc;

use crate::support::{database, rows};
use fiec_recorder::lab_support::{LedgerWriter, project};
use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::{ClientId, Event, ExecutionId, Submission, Tenant, Timestamp};
use serde_json::{Value, json};
use sqlx::PgPool;

fn id(client: &str) -> ExecutionId {
    ExecutionId::from_client(
        &Tenant::new("lab").unwrap(),
        &ClientId::new(client).unwrap(),
    )
}

/// Executions that wait, each by its submission, and what happened to them since.
async fn pending(pool: &PgPool, all: &[(Value, Vec<Event>)]) {
    let (tenant, at) = (Tenant::new("lab").unwrap(), Timestamp::now());
    let (mut items, mut seq) = (Vec::new(), 0);
    for (spec, events) in all {
        let spec = Submission::parse(spec.to_string().as_bytes()).unwrap();
        let execution = id(spec.id.as_ref().unwrap().as_str());
        let mut ledger = LedgerWriter::new(tenant.clone(), execution, Arc::new(spec), at);
        for event in [&[Event::Submitted], &events[..]].concat() {
            seq += 1;
            items.push(ledger.append(vec![event], "policy/x", at, seq).unwrap());
        }
    }
    project(pool, items).await.unwrap();
}

#[tokio::test]
async fn of_one_of_which_nothing_was_told_sql_says_what_was_told_of_one_that_wants_the_same() {
    let db = database().await;
    let pool = db.pool.clone();
    let big = |id: &str, n: u32| {
        json!({"id": id, "program": "synthetic@1", "params": {"capsules": n}, "priority": n,
            "labels": {"n": n.to_string()}, "requires": {"memory_bytes": 1u64 << 40}})
    };
    let with = |mut spec: Value, field: &str, value: Value| {
        spec[field] = value;
        spec
    };
    let pinned = Event::Adjusted {
        who: "ann".into(),
        change: Adjustment {
            nodes: Some(vec!["n1".parse().unwrap()]),
            ..Adjustment::default()
        },
    };
    let first = json!([{"id": "told"}, {"id": "alike", "on": "any"}, {"id": "gone"}]);
    let none = json!({"id": "none", "program": "synthetic@1"});
    pending(
        &pool,
        &[
            (big("told", 1), vec![]),
            (big("alike", 2), vec![]),
            (with(big("behind", 3), "after", first), vec![]),
            (big("pinned", 4), vec![pinned]),
            (none, vec![]),
        ],
    )
    .await;
    sqlx::query(
        "INSERT INTO waiting_verdicts VALUES ($1, clock_timestamp(), \
         'pending for 1.5 s: no node can take it now', \
         '[{\"node\": \"n1\", \"rejected\": [\"it has too little memory\"]}]', 0, \
         '[\"a node with more memory\"]')",
    )
    .bind(id("told").0)
    .execute(&pool)
    .await
    .unwrap();
    let why = async |name: &str| {
        let sql = format!("SELECT * FROM why('{}')", id(name).0);
        rows(&pool, &sql).await.remove(0)
    };
    let told = why("told").await;
    let alike = why("alike").await;
    assert_eq!(
        alike["summary"],
        "pending, as told, which wants the same: no node can take it now"
    );
    for column in ["candidates", "omitted", "would_help"] {
        assert_eq!(alike[column], told[column], "{column}");
    }
    assert_eq!(
        why("behind").await["summary"],
        "pending: it waits for told to complete (it is pending), alike to end (it is pending), \
         gone to complete (it is not known here)"
    );
    for other in ["pinned", "none"] {
        let why = why(other).await;
        assert_eq!(why["summary"], "it waits; nothing was told of it yet");
        assert_eq!(why["candidates"], Value::Null);
    }
    let sql = "SELECT client_id, why, rejected, would_help FROM why_pending ORDER BY client_id";
    let views = rows(&pool, sql).await;
    assert_eq!(views.len(), 5);
    assert_eq!(views[0]["why"], alike["summary"]);
    assert_eq!(
        views[0]["rejected"],
        "n1: rejected, it has too little memory"
    );
    assert_eq!(views[0]["would_help"], "a node with more memory");
}

#[tokio::test]
async fn a_quotas_history_says_from_what_to_what_and_until_when() {
    let db = database().await;
    let pool = db.pool.clone();
    sqlx::raw_sql(
        "INSERT INTO quota_changes VALUES
           (7, 'lab', '2026-01-01 10:00Z', 'ann', 4, NULL, NULL, NULL, NULL),
           (9, 'lab', '2026-01-01 11:00Z', 'bob', 4, 2, 1024, 3, 200),
           (8, 'ops', '2026-01-01 10:30Z', 'ann', NULL, NULL, NULL, NULL, NULL)",
    )
    .execute(&pool)
    .await
    .unwrap();
    let sql =
        "SELECT before, after, until, who FROM quota_history WHERE tenant = 'lab' ORDER BY at";
    let history = rows(&pool, sql).await;
    assert_eq!(history[0]["before"], "no limits");
    assert_eq!(history[0]["after"], "4 running");
    assert_eq!(history[1]["before"], "4 running");
    let after = "4 running, 2 on devices, 1024 bytes of memory, 200 waiting, weight 3";
    assert_eq!(history[1]["after"], after);
    assert_eq!(
        (&history[1]["until"], &history[1]["who"]),
        (&Value::Null, &json!("bob"))
    );
    assert_ne!(history[0]["until"], Value::Null);
    let sql = "SELECT tenant, who, what, detail FROM operator_actions ORDER BY at";
    let actions = rows(&pool, sql).await;
    assert_eq!(actions.len(), 3);
    assert_eq!(actions[0]["detail"], "no limits → 4 running");
    assert_eq!(actions[1]["tenant"], "ops");
    assert!(actions.iter().all(|a| a["what"] == "quota"), "{actions:?}");
}
