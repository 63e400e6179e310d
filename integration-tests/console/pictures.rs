//! Pictures of a cluster at work, for people and for services/console/screenshots.

use std::path::Path;

use serde_json::json;

use crate::browser::{Browser, Console};
use crate::stage::{Lab, args, slots, until, workers_with_history};
use fiec_lab::cluster::ClusterOptions;

const GIB: u64 = 1 << 30;

/// A node with one device, whose memory is used to this percentage.
fn write_device(file: &Path, percent: u64) {
    let id = file.file_stem().unwrap().to_str().unwrap();
    let device = json!({"id": format!("GPU-{id}"), "kind": "gpu", "name": "Emulated 48 GiB device",
        "memory_bytes": 48 * GIB, "used_bytes": 48 * GIB * percent / 100,
        "device": {"compute_capability": "8.6", "multiprocessors": 84}});
    // The worker may read it at this moment.
    let new = file.with_extension("new");
    std::fs::write(&new, json!([device]).to_string()).unwrap();
    std::fs::rename(new, file).unwrap();
}

#[tokio::test]
#[ignore = "makes pictures for people: FIEC_SCREENSHOTS=DIR"]
async fn pictures_of_a_cluster_at_work() {
    let folder = tempfile::tempdir().unwrap();
    let mut worker_args = slots(3);
    worker_args.extend(args(&["--threshold", "memory=0.9:0.7:1000"]));
    let mut lab = Lab::start(ClusterOptions {
        worker_args,
        ..workers_with_history(2)
    })
    .await;
    let files = ["n3", "n4"].map(|name| folder.path().join(format!("{name}.json")));
    for file in &files {
        write_device(file, 20);
        let more = args(&["--device-file", file.to_str().unwrap()]);
        lab.start_worker(&more).unwrap();
    }
    lab.ready().await.unwrap();
    let console = Console::start(&lab).await;
    let Some(browser) = Browser::start().await else {
        return lab.end().await;
    };
    let solve = |id: &str, n: u32, cases: u32| {
        json!({"id": id, "program": "cg@1", "commit": {"every": 40},
            "params": {"matrix": {"poisson2d": {"n": n}}, "tolerance": 1e-8,
                "iterations_per_capsule": 1, "load_cases": cases}})
    };
    // It moves because its device presses.
    let mut heat = solve("heat-flow", 220, 400);
    heat["requires"] = json!({"device": {"memory_bytes": GIB}});
    let moved = lab.publish_json(&heat).await;
    let from = lab.journal.computing(moved, 4).await;
    let mut live = vec![moved];
    for (id, n) in [("bridge", 200), ("turbine", 160)] {
        live.push(lab.publish_json(&solve(id, n, 2_000)).await);
    }
    let mut wrong = solve("too-strict", 16, 1);
    wrong["params"]["max_iterations"] = json!(8);
    let failed = lab.publish_json(&wrong).await;
    let mut paused = solve("on-hold", 120, 2_000);
    paused["priority"] = json!(5);
    live.push(lab.publish_json(&paused).await);
    let members = 48;
    for n in 0..members {
        let tolerance = 10f64.powf(-2.0 - f64::from(n % 10));
        let line = json!({"id": format!("member-{n}"), "batch": "tolerances", "program": "cg@1",
            "commit": {"every": 10}, "params": {"matrix": {"poisson3d": {"n": 30}},
            "tolerance": tolerance, "seed": n, "load_cases": 2, "iterations_per_capsule": 1}});
        lab.publish_json(&line).await;
    }
    // No node has a device of that size.
    let large = json!({"id": "too-large", "program": "cg@1",
        "requires": {"device": {"memory_bytes": 90 * GIB}}, "params": solve("x", 8, 1)["params"]});
    let large = lab.publish_json(&large).await;
    lab.journal.ended(failed, "failed").await;
    let on_hold = live[3];
    lab.journal.computing(on_hold, 2).await;
    lab.fiec(&["pause", "on-hold"]).await.expect(0);

    let hot = if from.as_str() == "n3" { 0 } else { 1 };
    write_device(&files[hot], 96);
    let gone = format!("SELECT count(*) FROM rebindings WHERE execution = '{moved}'");
    until("it has moved", async || {
        (lab.count(gone.as_str()).await >= 1).then_some(())
    })
    .await;
    let some = "SELECT count(*) FROM executions WHERE batch_id IS NOT NULL AND phase = 'completed'";
    until("a part of the batch is computed", async || {
        (lab.count(some).await >= 10).then_some(())
    })
    .await;
    browser.open(&console.entrance).await;
    let counted = "return !!document.querySelector('.tile.completed b')";
    browser.until("the overview is there", counted).await;
    let origin = console.origin();
    browser.pictures("overview").await;
    browser
        .open(&format!("{origin}/executions/heat-flow"))
        .await;
    browser.pictures("execution").await;
    let batch = lab
        .sql("SELECT batch::text AS b FROM batch_summary WHERE name = 'tolerances'")
        .await;
    let batch = batch.get(0, "b").unwrap().to_owned();
    browser
        .open(&format!(
            "{origin}/batches/{batch}?name=residual&by=tolerance"
        ))
        .await;
    browser.pictures("batch").await;
    for page in [
        "nodes",
        "executions",
        "batches",
        "executions/too-large",
        "executions/too-strict",
        "sql",
    ] {
        browser.open(&format!("{origin}/{page}")).await;
        browser.pictures(&page.replace('/', "-")).await;
    }
    browser
        .open(&format!("{origin}/act?what=cancel&whole_batch={batch}"))
        .await;
    browser.pictures("asked").await;
    live.push(large);
    for id in &live {
        lab.fiec(&["cancel", &id.to_string()]).await.expect(0);
    }
    lab.fiec(&["batch", "cancel", "tolerances"]).await;
    for id in live {
        lab.journal.ended(id, "cancelled").await;
    }
    browser.end().await;
    console.end().await;
    lab.end().await;
}
