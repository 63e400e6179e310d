//! What people ask for first: which executions there are, when they end, what they came to, and
//! what was refused.

use crate::stage;
use crate::stage::{Lab, until, workers, workers_with_history};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};

#[tokio::test]
async fn executions_are_listed_waited_for_and_their_results_read() {
    let lab = Lab::start(workers_with_history(1)).await;
    let submit = [
        "submit",
        "--program",
        "synthetic@1",
        "-p",
        r#"{"capsules":3}"#,
    ];
    let ran = lab.fiec(&submit).await.expect(0);
    let id = ran.stdout.trim().to_owned();
    lab.fiec(&["wait", &id]).await.expect(0);
    let result = lab.fiec(&["result", &id]).await.expect(0);
    let result: Value = serde_json::from_str(&result.stdout).unwrap();
    assert!(result.is_object(), "{result}");
    let unknown = lab.fiec(&["wait", "nobody"]).await.expect(2);
    assert!(unknown.stderr.contains("nobody"), "{unknown:?}");

    lab.recorded(1).await;
    let live = lab.fiec(&["ls"]).await.expect(0);
    let words =
        "has no such live execution (a new one takes a moment); --all also lists ended ones";
    assert!(live.stderr.contains(words), "{live:?}");
    let ended = lab.fiec(&["status", &id]).await.expect(0).stdout;
    assert!(
        ended.contains("completed") && ended.contains("ended at"),
        "{ended}"
    );
    let more = format!("`fiec history {id}` has program");
    assert!(
        ended.contains("synthetic@1") || ended.contains(&more),
        "{ended}"
    );
    let done = [
        "ls",
        "--phase",
        "completed",
        "--program",
        "synthetic",
        "--json",
    ];
    let done = lab.fiec(&done).await.expect(0).json_lines();
    assert_eq!(done.len(), 1, "{done:?}");
    assert_eq!(
        (&done[0]["execution"], &done[0]["capsules"]),
        (&json!(id), &json!("3"))
    );
    let elsewhere = lab
        .fiec(&["ls", "-a", "--node", "n9", "--json"])
        .await
        .expect(0);
    assert_eq!(elsewhere.stdout, "");

    // Two that wait for a node that does not exist: one request for both.
    for name in ["a", "b"] {
        let line = json!({"id": name, "program": "synthetic@1", "requires": {"nodes": ["n9"]}});
        lab.publish_json(&line).await;
    }
    let both = lab.fiec(&["status", "a", "b", "--json"]).await.expect(0);
    assert_eq!(both.json_lines().len(), 2, "{both:?}");
    lab.fiec(&["cancel", "a", "b"]).await.expect(0);
    lab.fiec(&["wait", "a", "b"]).await.expect(3);
    lab.recorded(3).await;
    for command in [["history", "-n", "1"].as_slice(), &["ls", "-a", "-n", "1"]] {
        let last = lab.fiec(command).await.expect(0);
        let words = "these are the latest 1 of 3; `-n` lists more";
        assert!(last.stderr.contains(words), "{last:?}");
        let json = lab.fiec(&[command, &["--json"]].concat()).await.expect(0);
        assert_eq!(json.json_lines().len(), 1, "{json:?}");
    }

    // A line that nobody was told of.
    lab.publish_text(r#"{"id":"bad","program":7}"#).await;
    let listed = until("the refused line is listed", async || {
        let ran = lab.fiec(&["rejections", "--json"]).await.expect(0);
        ran.json_lines().into_iter().next()
    })
    .await;
    assert_eq!(listed["field"], json!("program"), "{listed}");
    let status = lab.fiec(&["status", "bad"]).await.expect(1);
    assert!(status.stderr.contains("refused at"), "{status:?}");
    assert!(status.stderr.contains("program"), "{status:?}");
    lab.end().await;
}

#[tokio::test]
async fn a_waiting_command_outlasts_an_outage_and_says_that_it_waits() {
    let mut lab = Lab::start(workers(1)).await;
    let steps = json!({"capsules": 200, "rest_us": 10_000});
    let id = lab.publish("long", "synthetic@1", &steps).await;
    lab.journal.computing(id, 0).await;
    let mut waiter = lab.command(&["wait", "long"]).spawn().unwrap();
    let mut said = BufReader::new(waiter.stderr.take().unwrap()).lines();
    lab.policies[0].kill();
    lab.policies.clear();
    let line = tokio::time::timeout(stage::PATIENCE, said.next_line()).await;
    let line = line.unwrap().unwrap().unwrap_or_default();
    assert!(line.contains("still waiting"), "{line}");
    lab.journal.ended(id, "completed").await;
    lab.start_policy().unwrap();
    let ended = tokio::time::timeout(stage::PATIENCE, waiter.wait()).await;
    assert_eq!(ended.unwrap().unwrap().code(), Some(0));
    lab.end().await;
}
