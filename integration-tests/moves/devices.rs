//! Devices end to end: a worker with two of them, a policy service, a recorder. The devices are
//! simulated by a file; everything else is real.

use std::path::Path;

use crate::stage;
use crate::stage::{
    Lab, args, audit, digest_of, undisturbed_synthetic, until, workers_with_history,
};
use fiec_lab::cluster::ClusterOptions;
use fiec_schemas::Cause;
use fiec_schemas::messages::ApiReply;
use serde_json::{Value, json};

const GIB: u64 = 1 << 30;

/// Two devices of 8 GiB, so full in per cent.
fn write_devices(file: &Path, full: [u64; 2]) {
    let device = |n: usize| {
        json!({"id": format!("GPU-{n}"), "kind": "gpu", "name": "Simulated H100",
            "memory_bytes": 8 * GIB, "used_bytes": 8 * GIB * full[n] / 100,
            "device": {"compute_capability": "9.0", "multiprocessors": 132}})
    };
    // The worker may be reading it at this moment.
    let new = file.with_extension("new");
    std::fs::write(&new, json!([device(0), device(1)]).to_string()).unwrap();
    std::fs::rename(new, file).unwrap();
}

fn long(id: &str, device: Value) -> Value {
    json!({"id": id, "program": "synthetic@1",
        "params": {"capsules": 1_200, "rest_us": 10_000, "state_bytes": 2_000},
        "commit": {"every_ms": 100}, "requires": {"device": device}})
}

#[tokio::test]
async fn an_execution_leaves_a_device_under_pressure_for_another_one_of_its_node() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("devices.json");
    write_devices(&file, [10, 10]);
    let lab = Lab::start(ClusterOptions {
        worker_args: args(&[
            "--slots",
            "3",
            "--threshold",
            "memory=0.9:0.7:300",
            "--device-file",
            file.to_str().unwrap(),
        ]),
        ..workers_with_history(1)
    })
    .await;
    let spec = long(
        "dam",
        json!({"kind": "Simulated*", "compute_capability": "8.0"}),
    );
    let id = lab.publish_json(&spec).await;
    lab.journal.computing(id, 2).await;
    let substrate = |line: &stage::Line| {
        let binding = line.state().phase.binding()?.clone();
        Some((binding.node, binding.substrate))
    };
    let all = lab.journal.of(id);
    let (node, from) = all.iter().find_map(substrate).unwrap();
    assert!(from.starts_with("GPU-"), "{from}");

    // One that no device suffices for waits, and says of each place why.
    let large = long("large", json!({"memory_bytes": 9 * GIB}));
    let waiting = lab.publish_json(&large).await;
    let why = until("the second one is known to wait", async || {
        let ran = lab.fiec(&["why", "large", "--json"]).await;
        let reply: ApiReply = serde_json::from_str(ran.stdout.lines().next()?).ok()?;
        reply.why
    })
    .await;
    let places: Vec<_> = why.candidates.iter().map(|c| c.substrate.clone()).collect();
    assert_eq!(places, [Some("GPU-0".into()), Some("GPU-1".into())]);
    let reason = &why.candidates[0].rejected[0];
    assert!(reason.contains("memory is 8589934592 bytes"), "{reason}");
    lab.fiec(&["cancel", "large"]).await.expect(0);
    lab.journal.ended(waiting, "cancelled").await;

    write_devices(&file, if from == "GPU-0" { [97, 10] } else { [10, 97] });
    let what = "it is bound to the other device because of pressure";
    let (evidence, to) = lab
        .journal
        .find(id, what, |line| {
            let evidence = line.message.events.iter().find_map(|event| match event {
                fiec_schemas::Event::Bound {
                    cause: Cause::Pressure { evidence },
                    ..
                } => Some((**evidence).clone()),
                _ => None,
            })?;
            Some((evidence, substrate(line)?))
        })
        .await;
    assert_eq!(evidence.device.as_deref(), Some(from.as_str()));
    assert_eq!(to.0, node);
    assert_ne!(to.1, from);
    let last = lab.journal.ended(id, "completed").await;
    assert_eq!(
        digest_of(&last),
        undisturbed_synthetic(&spec["params"]).await
    );
    audit(&lab.journal.of(id));

    lab.recorded(2).await;
    let placements =
        format!("SELECT substrate FROM placement_timeline WHERE execution = '{id}' ORDER BY epoch");
    let rows = lab.sql(placements).await;
    let places: Vec<_> = rows.rows.iter().map(|r| r[0].clone().unwrap()).collect();
    assert_eq!(places, [from, to.1]);
    let there = "SELECT substrate, compute_capability FROM node_substrates ORDER BY substrate";
    let rows = lab.sql(there).await;
    assert_eq!(rows.rows.len(), 3);
    assert_eq!(rows.get(0, "compute_capability"), Some("9.0"));

    let shown = lab
        .fiec(&["node", "profile", node.as_str(), "--json"])
        .await;
    let shown = shown.expect(0).json_lines().remove(0);
    assert_eq!(shown["substrates"][1]["id"], "GPU-0");
    assert!(shown["profile"]["measured"]["took_ms"].is_u64(), "{shown}");
    lab.stop().await;
}
