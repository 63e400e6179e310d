//! Numbers over time: one curve for each name, through a move, a crash and the loss of a node; in SQL,
//! in `fiec watch`, in the history and in the report.

use crate::stage::{self, Lab, args, workers_with_history};
use fiec_schemas::duty::Actor;
use serde_json::json;

/// A number each capsule, and a crash at the first call of capsule 40.
const METER: &str = r#"#!/bin/sh
n=$((FIEC_BOUNDARY + 1))
echo "{\"loss\": $n.5, \"half\": $((n / 2))}" > "$FIEC_NUMBERS"
if [ $n -eq 40 ] && mkdir "CRASHED" 2> /dev/null; then exit 1; fi
sleep 0.03
echo $n > "$FIEC_STATE_DIR/n"
[ $n -lt 240 ] && exit 85
exit 0
"#;

#[tokio::test]
async fn a_moved_and_restarted_execution_has_one_curve_without_a_seam() {
    let mut options = workers_with_history(3);
    options
        .worker_args
        .extend(args(&["--allow-program", "meter@*"]));
    let mut lab = Lab::start(options).await;
    let crashed = lab.path("crashed").display().to_string();
    std::fs::create_dir(lab.path("meter")).unwrap();
    lab.file("meter/run.sh", METER.replace("CRASHED", &crashed));
    let manifest = json!({"entry": ["sh", "./run.sh"], "protocol": "state_dir"});
    lab.file("meter/fiec.json", manifest.to_string());
    let folder = lab.path("meter").display().to_string();
    lab.fiec(&["program", "push", "meter@1", &folder])
        .await
        .expect(0);

    let submission = json!({"id": "curve", "program": "meter@1", "commit": {"every": 4}});
    let id = lab.publish_json(&submission).await;
    let first = lab.journal.computing(id, 3).await;
    let watch = lab.command(&["watch", "curve"]).spawn().unwrap();
    let to = ["n1", "n2"]
        .into_iter()
        .find(|node| *node != first.as_str());
    let moved = ["move", "curve", "--to", to.unwrap()];
    lab.fiec(&moved).await.expect(0);
    let what = "it computes elsewhere";
    let second = lab
        .journal
        .find(id, what, |line| {
            let node = line.state().phase.binding()?.node.clone();
            (node != first && line.state().boundary_index() > 60).then_some(node)
        })
        .await;
    // Its node is lost in the middle, with boundaries that were not committed.
    lab.worker(&second).kill();
    lab.killed_on_purpose(&[Actor::Worker]);
    lab.journal.ended(id, "completed").await;
    lab.recorded(1).await;

    let rows = lab
        .sql(
            "SELECT count(DISTINCT boundary) AS boundaries, sum(reports) AS reports, \
             min(boundary) AS first, max(boundary) AS last, count(DISTINCT epoch) AS epochs, \
             bool_and(value = boundary + 0.5 OR reports > 1) AS is_exact \
             FROM execution_series WHERE client_id = 'curve' AND name = 'loss'",
        )
        .await;
    let [row] = &rows.rows[..] else {
        panic!("{rows:?}")
    };
    let row: Vec<&str> = row.iter().map(|cell| cell.as_deref().unwrap()).collect();
    assert_eq!(row, ["240", "240", "1", "240", "3", "t"], "{rows:?}");

    let told = tokio::time::timeout(stage::PATIENCE, watch.wait_with_output()).await;
    let told = String::from_utf8(told.unwrap().unwrap().stdout).unwrap();
    let drawn = told.lines().rfind(|line| line.contains(" loss ")).unwrap();
    assert!(
        drawn.contains("loss 240.5 ▁") && drawn.contains("█"),
        "{drawn}"
    );
    assert!(drawn.contains("half 120 "), "{drawn}");

    let page = lab.path("report.html");
    lab.fiec(&["report", "curve", "-o", &page.display().to_string()])
        .await
        .expect(0);
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("<h2>half</h2>") && page.contains("<h2>loss</h2>"));

    let history = lab.fiec(&["history", "curve"]).await.expect(0).stdout;
    assert!(history.contains("\nNumbers ("), "{history}");
    lab.end().await;
}
