//! Devices of a node, their slices, and the executions that hold them.

use serde_json::json;

use crate::browser::{Browser, Console};
use crate::stage::{Lab, args, workers_with_history};
use fiec_lab::cluster::ClusterOptions;

const GIB: u64 = 1 << 30;

#[tokio::test]
async fn devices_their_slices_and_their_holders_are_shown() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("devices.json");
    let device = |id: &str, kind: &str, whole: Option<&str>, gib: u64| {
        json!({"id": id, "kind": kind, "name": "Simulated H100", "memory_bytes": gib * GIB,
            "used_bytes": gib * GIB / 4,
            "device": {"compute_capability": "9.0", "multiprocessors": 132, "whole": whole}})
    };
    let all = json!([
        device("GPU-0", "gpu", None, 80),
        device("GPU-1", "gpu", None, 80),
        device("MIG-0", "mig", Some("GPU-1"), 10),
    ]);
    std::fs::write(&file, all.to_string()).unwrap();
    let mut worker_args = args(&["--device-file", file.to_str().unwrap()]);
    worker_args.extend(crate::stage::slots(2));
    let lab = Lab::start(ClusterOptions {
        worker_args,
        ..workers_with_history(1)
    })
    .await;
    let console = Console::start(&lab).await;
    let Some(browser) = Browser::start().await else {
        return lab.end().await;
    };
    let line = json!({"id": "dam", "program": "synthetic@1", "commit": {"every": 5},
        "requires": {"device": {"memory_bytes": 40 * GIB}},
        "params": {"capsules": 100_000, "rest_us": 20_000}});
    let id = lab.publish_json(&line).await;
    lab.journal.computing(id, 1).await;
    browser.open(&console.entrance).await;
    browser.open(&format!("{}/nodes", console.origin())).await;
    let order = "return [...document.querySelectorAll('.device')].map((d) => d.dataset.device).join() === 'GPU-0,GPU-1,MIG-0' \
                 && document.querySelectorAll('.device.below').length === 1";
    browser
        .until("each device is there, the slice below its device", order)
        .await;
    let memory = "const d = document.querySelector('.device.below'); \
                  return d.textContent.includes('10.0 GiB') && d.textContent.includes('2.5 GiB of 10.0 GiB')";
    browser
        .until("the slice has its memory and its reading", memory)
        .await;
    let held = "const held = [...document.querySelectorAll('.device')].map((d) => d.querySelector('.runs a')?.textContent ?? ''); \
                return held.filter((h) => h === 'dam').length === 1 && held[2] === ''";
    browser
        .until("one whole device is held, and nothing else", held)
        .await;
    browser.pictures("devices").await;
    lab.fiec(&["cancel", "dam"]).await.expect(0);
    lab.journal.ended(id, "cancelled").await;
    browser
        .until(
            "nobody holds it any more",
            "return document.querySelectorAll('.device .runs').length === 0",
        )
        .await;
    browser.end().await;
    console.end().await;
    lab.end().await;
}
