//! Commands about all executions of an array, of a batch, or with ids that begin alike.

use crate::stage::{Lab, slots, workers, workers_with_history};
use fiec_lab::cluster::ClusterOptions;
use fiec_schemas::ExecutionId;
use serde_json::json;

const LINES: &str = r#"
{"id":"lu","batch":"study","program":"lu@1","array":{"count":12},"params":{"matrix":{"random":{"n":8,"seed":"{index}"}}}}
{"id":"bad","batch":"study","program":"synthetic@1","retries":0,"array":{"from":5,"to":7},"params":{"capsules":2,"crash_at":1,"state_bytes":0}}
"#;

fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[tokio::test]
async fn an_array_a_batch_and_ids_that_begin_alike_are_named_at_once() {
    let lab = Lab::start(ClusterOptions {
        worker_args: slots(4),
        ..workers_with_history(2)
    })
    .await;
    let file = lab.file("study.jsonl", LINES.trim_start());
    let taken = lab.fiec(&["submit", file.to_str().unwrap()]).await;
    let taken = words(&taken.expect(0).stdout);
    assert!(
        taken.contains(" lu-11 ") && taken.ends_with(" bad-7"),
        "{taken}"
    );
    lab.fiec(&["wait", "lu"]).await.expect(0);
    let waited = lab.fiec(&["wait", "lu-1*", "--batch", "study"]).await;
    let waited = waited.expect(1).stderr;
    for n in 5..8 {
        assert!(waited.contains(&format!("failed bad-{n}")), "{waited}");
    }
    let status = lab.fiec(&["status", "lu", "bad"]).await.expect(0).stdout;
    assert_eq!(words(&status), "12 completed 3 failed");
    let batch = lab.fiec(&["batch", "status", "study"]).await.expect(0);
    assert_eq!(words(&batch.stdout), "12 completed, 3 failed");
    assert!(batch.stderr.contains("failed bad-6"), "{}", batch.stderr);

    let results = lab.fiec(&["result", "lu"]).await.expect(0).stdout;
    let results: Vec<serde_json::Value> = serde_json::from_str(&results).unwrap();
    let ids: Vec<_> = results.iter().map(|r| r["id"].as_str().unwrap()).collect();
    let expected: Vec<_> = (0..12).map(|n| format!("lu-{n}")).collect();
    assert_eq!(ids, expected, "as people count");
    assert!(results.iter().all(|r| r["result"].is_object()));
    let table = lab.fiec(&["result", "--batch", "study", "--csv"]).await;
    let table = table.expect(1).stdout;
    let rows: Vec<&str> = table.lines().collect();
    assert_eq!(rows.len(), 1 + 15);
    assert!(rows[0].starts_with("id,phase,") && rows[0].ends_with(",failure"));
    assert!(rows[1].starts_with("bad-5,failed,"), "{}", rows[1]);
    let folder = lab.path("results");
    let fetch = ["result", "lu-1*", "--output", folder.to_str().unwrap()];
    lab.fiec(&fetch).await.expect(0);
    let fetched = |name: &str| std::fs::read_dir(folder.join(name)).map_or(0, Iterator::count);
    assert!(fetched("lu-1") > 0 && fetched("lu-11") > 0 && fetched("lu-2") == 0);

    let outputs = lab.fiec(&["--json", "output", "lu"]).await.expect(0);
    let outputs = outputs.json_lines();
    assert!(
        outputs.len() >= 12 && outputs[0]["id"] == "lu-0",
        "{outputs:?}"
    );
    let name = outputs[0]["name"].as_str().unwrap();
    let folder = lab.path("outputs");
    let fetch = ["output", "lu", name, "-o", folder.to_str().unwrap()];
    lab.fiec(&fetch).await.expect(0);
    assert!(folder.join("lu-11").join(name).exists());

    let retried = lab.fiec(&["retry", "bad"]).await.expect(0).stdout;
    assert!(retried.starts_with("retry: 3 done"), "{retried}");
    lab.fiec(&["wait", "bad"]).await.expect(1);
    let unknown = lab.fiec(&["wait", "nobody"]).await.expect(2).stderr;
    assert!(unknown.contains("has no execution nobody"), "{unknown}");
    let unknown = lab.fiec(&["wait", "--batch", "nobody"]).await.expect(2);
    assert!(
        unknown.stderr.contains("no execution of batch nobody"),
        "{}",
        unknown.stderr
    );
    lab.stop().await;
}

#[tokio::test]
async fn an_order_for_what_was_submitted_a_moment_ago_waits_until_that_is_taken_in() {
    let lab = Lab::start(workers_with_history(1)).await;
    let line = r#"{"id":"m","program":"synthetic@1","array":{"count":3000},"params":{"capsules":1000000,"work_us":1000,"state_bytes":0}}"#;
    let file = lab.file("many.jsonl", line);
    let taken = lab.fiec(&["submit", file.to_str().unwrap()]).await;
    let taken = taken.expect(0).stdout;
    assert_eq!(taken.lines().count(), 3, "{taken}");
    assert!(
        taken.contains(
            "m-0
… 2998 more
"
        ),
        "{taken}"
    );
    let cancelled = lab.fiec(&["cancel", "m-2990"]).await.expect(0).stdout;
    assert!(!cancelled.is_empty());
    lab.fiec(&["wait", "m-2990"]).await.expect(3);
    lab.fiec(&["cancel", "m"]).await.expect(0);
    lab.fiec(&["wait", "m"]).await.expect(3);
    lab.stop().await;
}

#[tokio::test]
async fn an_array_whose_answer_does_not_list_it_is_submitted_cancelled_and_waited_for() {
    let lab = Lab::start(workers(1)).await;
    let lines = r#"{"id":"wide","program":"synthetic@1","not_before":"2099-01-01T00:00:00Z","array":{"from":1,"to":10001}}
{"id":"sum","program":"synthetic@1","after":[{"array":"wide","on":"any"}]}
"#;
    let file = lab.file("wide.jsonl", lines);
    let submit = ["submit", file.to_str().unwrap(), "--json"];
    let taken = lab.fiec(&submit).await.expect(0).json_lines();
    assert_eq!(taken.len(), 10_002);
    assert_eq!(taken[10_000]["client_id"], "wide-10001");
    let id = ExecutionId::from_client(&lab.tenant, &"wide-10001".parse().unwrap());
    assert_eq!(taken[10_000]["id"], json!(id));
    lab.fiec(&["cancel", "wide"]).await.expect(0);
    lab.fiec(&["wait", "sum"]).await.expect(0);
    // All of them were there before, and are looked at together.
    let submit = ["submit", file.to_str().unwrap(), "--json", "--wait"];
    let again = lab.fiec(&submit).await.expect(3).json_lines();
    assert!(again.iter().all(|line| line["existing"] == true));
    lab.end().await;
}
