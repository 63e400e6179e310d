//! The history as people read it: views, the committed questions of `examples/sql`, a role that
//! cannot write, the report, and the state of the last boundary.

use std::path::Path;

use crate::stage::{Lab, slots, until, workers_with_history};
use fiec::sql;
use fiec_lab::cluster::ClusterOptions;
use fiec_lab::process::Process;
use fiec_schemas::ExecutionId;
use serde_json::json;
use sqlx::postgres::PgPoolOptions;

fn options() -> ClusterOptions {
    ClusterOptions {
        worker_args: slots(4),
        ..workers_with_history(2)
    }
}

/// An execution that failed, and one that waited for it and was moved by an operator.
async fn a_story(lab: &Lab) -> ExecutionId {
    let crash = json!({"id": "failed", "program": "synthetic@1", "retries": 0,
        "params": {"crash_at": 0}});
    let failed = lab.publish_json(&crash).await;
    lab.journal.ended(failed, "failed").await;
    let params = json!({"capsules": 1_500, "rest_us": 5_000, "state_bytes": 2_048});
    let id = lab
        .publish_json(
            &json!({"id": "moved", "program": "synthetic@1", "params": params,
            "commit": {"every": 20}, "batch": "trials",
            "after": [{"id": "failed", "on": "any"}]}),
        )
        .await;
    lab.journal.computing(id, 2).await;
    lab.fiec(&["yield", "moved"]).await.expect(0);
    lab.publish_text(r#"{"program":"synthetic@1","colour":"red"}"#)
        .await;
    lab.journal.ended(id, "completed").await;
    lab.recorded(2).await;
    until("the rejection is in PostgreSQL", async || {
        (lab.count("SELECT count(*) FROM rejections").await == 1).then_some(())
    })
    .await;
    id
}

#[tokio::test]
async fn people_read_the_story_in_views_queries_and_a_report() {
    let lab = Lab::start(options()).await;
    let id = a_story(&lab).await;

    let url = lab.logins.as_ref().unwrap().reader.url();
    let reader = PgPoolOptions::new()
        .max_connections(1)
        .connect(&url)
        .await
        .unwrap();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/sql");
    let mut questions = 0;
    for file in std::fs::read_dir(&folder).unwrap() {
        let file = file.unwrap().path();
        if file.extension().is_some_and(|e| e == "sql") {
            let text = std::fs::read_to_string(&file).unwrap();
            let answer = sql::query(&reader, text).await;
            answer.unwrap_or_else(|e| panic!("{}: {e:#}", file.display()));
            questions += 1;
        }
    }
    assert!(
        questions >= 5,
        "{questions} questions in {}",
        folder.display()
    );
    for write in [
        "DELETE FROM executions",
        "INSERT INTO rejections VALUES (0, 'x', NULL, 1, '', '', '', now())",
        "SET default_transaction_read_only = off; UPDATE nodes SET cordoned = true",
        "SET default_transaction_read_only = off; SELECT fiec_drop_partitions(now()::date + 9)",
        "CREATE TABLE mine (x int)",
    ] {
        let error = sql::query(&reader, write.to_owned()).await;
        assert!(error.is_err(), "the reader could run {write}");
    }
    assert_eq!(lab.count("SELECT count(*) FROM executions").await, 2);
    reader.close().await;

    let moves = lab
        .sql(format!(
            "SELECT * FROM rebinding_history WHERE execution = '{id}'"
        ))
        .await;
    assert_eq!(
        (moves.rows.len(), moves.get(0, "cause")),
        (1, Some("operator"))
    );
    assert!(
        moves.get(0, "why").unwrap().contains('@'),
        "who asked is there: {moves:?}"
    );
    assert!(moves.get(0, "gap_ms").is_some() && moves.get(0, "boundary").is_some());
    let query = format!("SELECT * FROM placement_timeline WHERE execution = '{id}' ORDER BY epoch");
    let places = lab.sql(query).await;
    assert_eq!(places.rows.len(), 2);
    assert_eq!(places.get(0, "node"), moves.get(0, "from_node"));
    assert_eq!(places.get(1, "node"), moves.get(0, "to_node"));
    assert_eq!(places.get(1, "end_reason"), Some("completed"));
    let failed = lab
        .sql("SELECT * FROM execution_summary WHERE client_id = 'failed'")
        .await;
    assert_eq!(failed.get(0, "phase"), Some("failed"));
    assert!(
        failed.get(0, "stderr_tail").unwrap().contains("crashing"),
        "{failed:?}"
    );

    let said = lab.fiec(&["history", "moved"]).await.expect(0);
    assert!(
        said.stdout.contains("operator") && said.stdout.contains("completed"),
        "{said:?}"
    );
    let page = lab.path("report.html");
    lab.fiec(&["report", "moved", "-o", &page.display().to_string()])
        .await
        .expect(0);
    let moved = std::fs::read_to_string(&page).unwrap();
    is_self_contained(&moved, id);
    for fact in [
        "<th>batch</th><td>trials</td>",
        "<th>waits for</th><td>failed</td>",
    ] {
        assert!(moved.contains(fact), "{fact}");
    }
    let failed = &["report", "failed", "-o", &page.display().to_string()];
    lab.fiec(failed).await.expect(0);
    let failed = std::fs::read_to_string(&page).unwrap();
    assert!(failed.contains("<td class=\"bad\">failed</td>"));
    assert!(failed.contains("crash_at = "), "its parameters");
    for command in ["history", "report"] {
        let unknown = lab.fiec(&[command, "nobody"]).await.expect(1).stderr;
        assert!(
            unknown.contains("nobody is not in the history"),
            "{unknown}"
        );
    }
    let unknown = lab.fiec(&["history", "nobody"]).await.expect(1);
    assert!(unknown.stderr.contains("not in the history"), "{unknown:?}");
    lab.end().await;
}

fn is_self_contained(page: &str, id: ExecutionId) {
    assert!(page.contains(&id.to_string()) && page.contains("<svg"));
    assert!(
        page.matches("<svg").count() >= 3,
        "location, capsules and pressure over time"
    );
    for outside in [
        "<script src",
        "<link",
        "<img src=\"http",
        "url(http",
        "@import",
    ] {
        assert!(!page.contains(outside), "{outside} in the report");
    }
}

#[tokio::test]
async fn what_waits_is_explained_in_sql_and_states_are_copied() {
    let mut lab = Lab::start(options()).await;
    let pinned = json!({"id": "nowhere", "program": "synthetic@1",
        "requires": {"labels": {"rack": "7"}}});
    let file = lab.file("nowhere.json", pinned.to_string());
    lab.fiec(&["submit", &file.display().to_string()])
        .await
        .expect(0);
    let rows = until(
        "why_pending lists it, with the node that joined",
        async || {
            let rows = lab.sql("SELECT * FROM why_pending").await;
            let nodes = rows.rows.first().and_then(|_| rows.get(0, "nodes_known"));
            nodes.is_some_and(|n| n.contains("n1")).then_some(rows)
        },
    )
    .await;
    assert_eq!(rows.get(0, "client_id"), Some("nowhere"));

    // The state of a live execution is in PostgreSQL, byte for byte.
    let params = json!({"capsules": 800, "rest_us": 5_000, "state_bytes": 10_000});
    let id = lab
        .publish_json(
            &json!({"id": "live", "program": "synthetic@1", "params": params,
            "commit": {"every": 50}}),
        )
        .await;
    lab.journal.computing(id, 1).await;
    let hash = until("its state is in PostgreSQL", async || {
        let query = format!(
            "SELECT encode(state, 'hex') AS state, encode(digest, 'hex') AS digest \
             FROM boundary_state WHERE execution = '{id}' AND state IS NOT NULL"
        );
        let rows = lab.sql(query).await;
        Some((
            rows.get(0, "state")?.to_owned(),
            rows.get(0, "digest")?.to_owned(),
        ))
    })
    .await;
    let bytes: Vec<u8> = (0..hash.0.len() / 2)
        .map(|i| u8::from_str_radix(&hash.0[2 * i..2 * i + 2], 16).unwrap())
        .collect();
    assert_eq!(bytes.len(), 10_000);
    assert_eq!(fiec_schemas::Digest::of(&bytes).to_string(), hash.1);

    let nodes = lab
        .sql("SELECT node, status, descriptor::text AS d FROM nodes ORDER BY node")
        .await;
    assert_eq!((nodes.rows.len(), nodes.get(0, "status")), (2, Some("up")));
    until("hardware vectors are in PostgreSQL", async || {
        let query = "SELECT count(DISTINCT node) FROM hardware_vectors WHERE memory IS NOT NULL";
        (lab.count(query).await == 2).then_some(())
    })
    .await;
    lab.recorder.iter_mut().for_each(Process::kill);
    lab.start_recorder().unwrap();
    lab.fiec(&["cancel", "live"]).await.expect(0);
    lab.fiec(&["cancel", "nowhere"]).await.expect(0);
    lab.recorded(2).await;
    lab.end().await;
}
