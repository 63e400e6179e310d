//! Workflows as they are published: wide joins, long ids with dots, more lines than one request
//! takes, in any order.

use std::fmt::Write as _;

use crate::stage::{Lab, slots, workers_with_history};
use fiec_lab::cluster::ClusterOptions;

/// The tasks of each of the two wide levels.
const FIRST: usize = 1_100;
const SECOND: usize = 1_020;

/// The id of a task, as a published mosaic of the sky has them.
fn task(kind: &str, n: usize) -> String {
    format!("{kind}_2mass-atlas-990322h-j0110057.fits-region-0.5d_ID{n:07}")
}

fn line(text: &mut String, id: &str, after: &[String]) {
    let after: Vec<String> = after.iter().map(|a| format!(r#"{{"id":"{a}"}}"#)).collect();
    writeln!(
        text,
        r#"{{"id":"{id}","batch":"montage-2mass-0.5d","program":"synthetic@1","params":{{"capsules":1,"state_bytes":0}},"labels":{{"task":"{id}"}},"after":[{}]}}"#,
        after.join(",")
    )
    .unwrap();
}

/// Two wide levels, each with a join. The last line waits for nothing, the first one for all others.
fn workflow() -> String {
    let first: Vec<String> = (0..FIRST).map(|n| task("mProject", n)).collect();
    let second: Vec<String> = (0..SECOND).map(|n| task("mBackground", n)).collect();
    let (fit, add) = (task("mConcatFit", 0), task("mAdd", 0));
    let mut text = String::new();
    line(&mut text, &add, &second);
    for id in &second {
        line(&mut text, id, std::slice::from_ref(&fit));
    }
    line(&mut text, &fit, &first);
    for id in &first {
        line(&mut text, id, &[]);
    }
    text
}

#[tokio::test]
async fn two_thousand_lines_with_joins_of_a_thousand_run_in_their_order() {
    let lab = Lab::start(ClusterOptions {
        worker_args: slots(8),
        ..workers_with_history(2)
    })
    .await;
    let text = workflow();
    assert_eq!(text.lines().count(), 2_122);
    assert!(
        text.len() > 640 * 1024,
        "one request takes {} bytes",
        text.len()
    );
    let file = lab.file("montage.jsonl", text);
    let file = file.to_str().unwrap();
    let submit = ["submit", file, "--wait", "--json"];
    let lines = lab.fiec(&submit).await.expect(0).json_lines();
    let taken = lines.iter().filter(|line| line["line"].is_u64()).count();
    assert_eq!(taken, 2_122);
    lab.recorded(2_122).await;
    let in_order = lab
        .count(
            "WITH level AS (SELECT split_part(client_id, '_', 1) AS kind,
                                   min(bound_at) AS begun, max(finished_at) AS ended
                            FROM executions GROUP BY 1)
             SELECT count(*) FROM level a JOIN level b ON (a.kind, b.kind) IN
               (('mProject', 'mConcatFit'), ('mConcatFit', 'mBackground'), ('mBackground', 'mAdd'))
             WHERE a.ended <= b.begun",
        )
        .await;
    assert_eq!(in_order, 3, "something was bound before what it waits for");
    let id = task("mAdd", 0);
    let status = lab.fiec(&["status", &id, "--json"]).await.expect(0);
    assert_eq!(status.json_lines()[0]["state"]["phase"]["is"], "completed");
    lab.stop().await;
}

#[tokio::test]
async fn executions_wait_for_batches_arrays_and_ids_that_begin_alike() {
    let lab = Lab::start(ClusterOptions {
        worker_args: slots(8),
        policies: 2,
        ..workers_with_history(2)
    })
    .await;
    let small = r#""program":"synthetic@1","params":{"capsules":2,"work_us":1000,"state_bytes":0}"#;
    let fails = r#""program":"synthetic@1","retries":0,"params":{"capsules":2,"state_bytes":0,"crash_at":1}"#;
    let file = lab.file(
        "sweep.jsonl",
        format!(
            r#"{{"id":"seed","batch":"sweep",{small},"array":{{"count":300}}}}
{{"id":"mixed","batch":"mixed",{small},"array":{{"count":3}}}}
{{"id":"broken","batch":"mixed",{fails}}}
"#
        ),
    );
    let file = file.to_str().unwrap();
    let submit = ["submit", file, "--wait"];
    lab.fiec(&submit).await.expect(1);
    // Members that ended long before count, and those that are submitted with the waiting ones.
    let file = lab.file(
        "waiting.jsonl",
        format!(
            r#"{{"id":"of-batch","batch":"joins",{small},"after":[{{"batch":"late"}},{{"batch":"sweep"}}]}}
{{"id":"of-array","batch":"joins",{small},"after":[{{"array":"late"}}]}}
{{"id":"of-prefix","batch":"joins",{small},"array":{{"count":50}},"after":[{{"id":"late-*"}},{{"id":"seed-29*"}}]}}
{{"id":"late","batch":"late",{small},"array":{{"count":300}}}}
{{"id":"of-most","batch":"joins",{small},"after":[{{"batch":"mixed","on":{{"at_least":0.75}}}}]}}
{{"id":"of-any","batch":"joins",{small},"after":[{{"batch":"mixed","on":"any"}}]}}
{{"id":"of-more","batch":"vain",{small},"after":[{{"batch":"mixed","on":{{"at_least":0.8}}}}]}}
{{"id":"of-all","batch":"vain",{small},"after":[{{"batch":"mixed"}}]}}
"#
        ),
    );
    let file = file.to_str().unwrap();
    lab.fiec(&["submit", file, "--wait"]).await.expect(1);
    lab.recorded(304 + 300 + 56).await;
    let joins = "FROM executions WHERE client_id ~ '^of-(batch|array|prefix)'";
    let late = "SELECT max(finished_at) FROM executions WHERE client_id ~ '^late-'";
    let all = lab.count(format!("SELECT count(*) {joins}")).await;
    let early = format!("SELECT count(*) {joins} AND first_started_at < ({late})");
    assert_eq!((all, lab.count(early).await), (52, 0));
    let phase = async |id: &str| {
        let status = lab.fiec(&["status", id, "--json"]).await.expect(0);
        status.json_lines()[0]["state"]["phase"].clone()
    };
    for id in ["of-batch", "of-array", "of-prefix-49", "of-most", "of-any"] {
        assert_eq!(phase(id).await["is"], "completed", "{id}");
    }
    for (id, words) in [
        ("of-all", "batch mixed, of which 1 of 4 did not complete"),
        ("of-more", "1 of 4 did not complete; a share of 0.8 must"),
    ] {
        assert_eq!(phase(id).await["is"], "failed", "{id}");
        let why = lab.fiec(&["why", id]).await.expect(0).stdout;
        let why = why.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(why.contains(words), "{why}");
    }
    for (line, words) in [
        (
            format!(r#"{{{small},"after":[{{"batch":"nobody"}}]}}"#),
            "field after[0].batch: tenant lab has no execution of batch nobody",
        ),
        (
            format!(r#"{{"id":"late-x",{small},"after":[{{"id":"late-*"}}]}}"#),
            "field after[0].id: it cannot wait for itself: late-x is among late-*",
        ),
        (
            format!(r#"{{{small},"after":[{{"id":"of-all","on":{{"at_least":0.5}}}}]}}"#),
            "field after[0].on: at_least is for a batch",
        ),
    ] {
        let file = lab.file("bad.jsonl", line);
        let submit = ["submit", file.to_str().unwrap()];
        let refused = lab.fiec(&submit).await.expect(2);
        assert!(refused.stderr.contains(words), "{}", refused.stderr);
    }
    lab.stop().await;
}
