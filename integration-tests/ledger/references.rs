//! The oracle of objects reads a real cluster: it tells what nothing refers to from what a live
//! execution, an ended one or a program needs.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::stage::{Lab, Line, oracles, workers_with_history};
use fiec_lab::judge::oracles::objects::Collection;
use fiec_schemas::{Digest, Submission};
use serde_json::json;

/// The digests of these objects that would count as leaks if no grace protected them.
async fn left(lab: &Lab, of: &[Digest]) -> BTreeSet<Digest> {
    let pool = lab.pool.as_ref().unwrap();
    let grace = Duration::ZERO;
    let found = oracles::objects::observe(&lab.broker, Collection { pool, grace }).await;
    let words: Vec<String> = found.unwrap().iter().map(ToString::to_string).collect();
    let is_found = |digest: &&Digest| {
        let digest = digest.to_string();
        words.iter().any(|words| words.contains(&digest))
    };
    let found: BTreeSet<Digest> = of.iter().filter(is_found).copied().collect();
    assert_eq!(found.len(), words.len(), "{words:?}");
    found
}

#[tokio::test]
async fn exactly_the_objects_to_which_nothing_refers_count_as_leaks() {
    let lab = Lab::start(workers_with_history(1)).await;
    let push = async |text: &str| {
        let file = lab.file(text, text).display().to_string();
        lab.fiec(&["data", "push", &file]).await.expect(0);
        Digest::of(text.as_bytes())
    };
    let unused = push("unused").await;
    let input = push("input").await;
    let package = lab.path("own");
    std::fs::create_dir(&package).unwrap();
    lab.file("own/run.sh", "exit 0");
    lab.file(
        "own/fiec.json",
        r#"{"entry":["sh","run.sh"],"protocol":"state_dir"}"#,
    );
    let package = package.display().to_string();
    lab.fiec(&["program", "push", "own@1", &package])
        .await
        .expect(0);

    // It waits for ever. It is too large for a ledger message, so that its submission is an object.
    let labels: BTreeMap<String, String> = (0..30)
        .map(|n| (format!("l{n}"), "x".repeat(100)))
        .collect();
    let waits = json!({"id": "waits", "program": "cg@1", "labels": labels,
        "params": {"matrix": {"object": input}}, "requires": {"labels": {"no": "such"}}});
    let submission = Submission::parse(waits.to_string().as_bytes()).unwrap();
    let submission = Digest::of(&submission.to_json());
    let waits = lab.publish_json(&waits).await;
    let pending = |line: &Line| (line.phase() == "pending").then_some(());
    lab.journal.find(waits, "it waits", pending).await;
    let solved = json!({"matrix": {"poisson2d": {"n": 8}}});
    let solved = lab.publish("solved", "cg@1", &solved).await;
    lab.journal.ended(solved, "completed").await;

    let all = [unused, input, submission];
    assert_eq!(left(&lab, &all).await, BTreeSet::from([unused]));
    lab.fiec(&["cancel", "waits"]).await.expect(0);
    lab.journal.ended(waits, "cancelled").await;
    assert_eq!(left(&lab, &all).await, BTreeSet::from(all));
    lab.end().await;
}
