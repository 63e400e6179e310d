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
    // A long submission that ends at once is not in PostgreSQL, but its execution is.
    let (fit, add) = (lab.id(&task("mConcatFit", 0)), lab.id(&task("mAdd", 0)));
    let in_order = lab
        .count(format!(
            "WITH level AS (SELECT CASE id WHEN '{fit}' THEN 'mConcatFit' WHEN '{add}' THEN 'mAdd'
                                   ELSE split_part(client_id, '_', 1) END AS kind,
                                   min(bound_at) AS begun, max(finished_at) AS ended
                            FROM executions GROUP BY 1)
             SELECT count(*) FROM level a JOIN level b ON (a.kind, b.kind) IN
               (('mProject', 'mConcatFit'), ('mConcatFit', 'mBackground'), ('mBackground', 'mAdd'))
             WHERE a.ended <= b.begun"
        ))
        .await;
    assert_eq!(in_order, 3, "something was bound before what it waits for");
    let id = task("mAdd", 0);
    let status = lab.fiec(&["status", &id, "--json"]).await.expect(0);
    assert_eq!(status.json_lines()[0]["state"]["phase"]["is"], "completed");
    lab.stop().await;
}
