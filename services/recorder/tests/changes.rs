//! What was changed about live executions, field by field, against a real PostgreSQL.
use std::sync::Arc;

use crate::support::{Database, database, number, rows};
use fiec_recorder::lab_support::{LedgerWriter, project};
use fiec_schemas::scheduling::{Adjustment, Deadline, OnMiss};
use fiec_schemas::{ClientId, Event, ExecutionId, Submission, Tenant, Timestamp};
use serde_json::json;
use sqlx::PgPool;

/// The ledger of a client's execution that waits, with these messages after its submission.
async fn record(pool: &PgPool, spec: &str, messages: Vec<Vec<Event>>) {
    let tenant = Tenant::new("lab").unwrap();
    let spec = Submission::parse(spec.as_bytes()).unwrap();
    let client: ClientId = spec.id.clone().unwrap();
    let id = ExecutionId::from_client(&tenant, &client);
    let at = Timestamp::from_micros(1_800_000_000_000_000);
    let mut ledger = LedgerWriter::new(tenant, id, Arc::new(spec), at);
    let first = number(
        pool,
        "SELECT seq FROM recorder_checkpoint WHERE stream = 'FIEC_LEDGER'",
    );
    let mut seq = u64::try_from(first.await).unwrap();
    let mut items = Vec::new();
    for events in [vec![vec![Event::Submitted]], messages].concat() {
        seq += 1;
        items.push(ledger.append(events, "policy/x", at, seq).unwrap());
    }
    project(pool, items).await.unwrap();
}

fn due(within_s: u32, on_miss: OnMiss) -> Adjustment {
    let deadline = Deadline {
        within_s: Some(within_s),
        at: None,
        on_miss,
    };
    Adjustment {
        deadline: Some(deadline),
        ..Adjustment::default()
    }
}

fn adjusted(who: &str, change: Adjustment) -> Event {
    let who = who.to_owned();
    Event::Adjusted { who, change }
}

/// `client, seconds from submission to deadline, what happens then, who changed it`.
async fn deadlines(db: &Database) -> Vec<String> {
    let sql = "SELECT concat_ws(' ', client_id, \
               extract(epoch FROM due_at - submitted_at)::bigint, on_miss, changed_by) AS t \
               FROM late_executions ORDER BY client_id";
    let all = rows(&db.pool, sql).await;
    let text = all.iter().map(|row| row["t"].as_str().unwrap().to_owned());
    text.collect()
}

#[tokio::test]
async fn a_changed_deadline_is_the_events_own_whatever_its_sentence_says() {
    let db = database().await;
    let pool = &db.pool;
    let spec = r#"{"id":"a","program":"synthetic@1","deadline":{"within_s":60}}"#;
    let priority = Adjustment {
        priority: Some(-5),
        ..Adjustment::default()
    };
    let at = "2027-01-15T08:00:30.000000Z".parse::<Timestamp>().unwrap();
    let moment = Deadline {
        at: Some(at),
        ..Deadline::default()
    };
    let moment = Adjustment {
        deadline: Some(moment),
        ..priority.clone()
    };
    // Somebody whose name reads like a deadline.
    let name = "due 5 s after its submission";
    let first = vec![adjusted(name, due(7_200, OnMiss::Fail))];
    record(
        pool,
        spec,
        vec![first, vec![adjusted("bob", priority.clone())]],
    )
    .await;
    // Two that became true together: the later one holds.
    let both = vec![
        adjusted("ann", due(1, OnMiss::Fail)),
        adjusted("bob", due(90, OnMiss::GoOn)),
    ];
    record(pool, r#"{"id":"b","program":"synthetic@1"}"#, vec![both]).await;
    let b = r#"{"id":"c","program":"synthetic@1"}"#;
    record(pool, b, vec![vec![adjusted("ann", moment)]]).await;
    let expected = [
        format!("a 7200 fail {name}"),
        "b 90 go_on bob".to_owned(),
        "c 30 go_on ann".to_owned(),
    ];
    assert_eq!(deadlines(&db).await, expected);
    let kept = rows(
        pool,
        "SELECT who, change FROM execution_changes ORDER BY execution, ordinal, nth",
    );
    let kept = kept.await;
    assert_eq!(kept.len(), 5);
    let change = json!({"who": "bob", "change": {"priority": -5}});
    assert!(kept.contains(&change), "{kept:?}");
    sqlx::query("UPDATE execution_events SET detail = 'told in other words'")
        .execute(pool)
        .await
        .unwrap();
    assert_eq!(deadlines(&db).await, expected);
}
