//! A child that is frozen loses its slot when its program's time is up.

use std::os::unix::fs::PermissionsExt;

use crate::stage::{Lab, Line, args, digest_of, proc, undisturbed_synthetic, until, workers};
use fiec_schemas::{Cause, Event, Fault};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

/// Counts, one a capsule.
const COUNTS: &str = r#"#!/bin/sh
set -eu
steps=$(sed -n 's/.*"steps": *\([0-9]*\).*/\1/p' "$FIEC_PARAMS")
count=0
if [ -f "$FIEC_STATE_DIR/count" ]; then read -r count < "$FIEC_STATE_DIR/count"; fi
count=$((count + 1))
sleep 0.02
echo "$count" > "$FIEC_STATE_DIR/count"
if [ "$count" -lt "$steps" ]; then exit 85; fi
"#;

/// Why a line gives its binding back, if that is because of a frozen child.
fn frozen(line: &Line) -> Option<String> {
    line.message.events.iter().find_map(|event| match event {
        Event::Yielded {
            cause: Cause::NotTaken { reason, fault },
            ..
        } if fault.as_deref() == Some(&Fault::Frozen) => Some(reason.clone()),
        _ => None,
    })
}

#[tokio::test]
async fn a_child_that_is_stopped_loses_its_slot_once_its_boundary_is_overdue() {
    let mut options = workers(1);
    options
        .worker_args
        .extend(args(&["--allow-program", "counts@*"]));
    let lab = Lab::start(options).await;
    let folder = lab.path("counts");
    std::fs::create_dir_all(&folder).unwrap();
    let manifest = json!({"entry": ["./counts.sh"], "protocol": "state_dir",
        "limits": {"boundary_ms": 1_000}});
    std::fs::write(folder.join("fiec.json"), manifest.to_string()).unwrap();
    let script = folder.join("counts.sh");
    std::fs::write(&script, COUNTS).unwrap();
    std::fs::set_permissions(script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = folder.display().to_string();
    lab.fiec(&["program", "push", "counts@1", &path])
        .await
        .expect(0);

    let steps = json!({"steps": 1_000_000});
    let id = lab
        .publish_json(
            &json!({"id": "frozen", "program": "counts@1", "params": steps,
            "commit": {"every": 1}}),
        )
        .await;
    let node = lab.journal.computing(id, 3).await;
    // The child that has a child computes.
    let run = lab.data_dir().join("run").join(node.as_str());
    let child = until("its child runs the program", async || {
        let noted = std::fs::read_dir(&run).ok()?.flatten();
        let mut pids = noted.filter_map(|entry| {
            let name = entry.file_name();
            name.to_str()?.strip_prefix("child-")?.parse::<u32>().ok()
        });
        pids.find(|pid| !proc::descendants(*pid).is_empty())
    })
    .await;
    let pid = Pid::from_raw(i32::try_from(child).unwrap()).unwrap();
    kill_process(pid, Signal::STOP).unwrap();

    let other = lab.publish("next", "counts@1", &json!({"steps": 3})).await;
    let reason = lab.journal.find(id, "it is given back", frozen).await;
    assert!(
        reason.contains("boundary_ms") && reason.contains("frozen"),
        "{reason}"
    );
    lab.journal.ended(other, "completed").await;
    lab.fiec(&["cancel", "frozen"]).await.expect(0);
    lab.journal.ended(id, "cancelled").await;
    until("the frozen child is gone", async || {
        (!proc::is_alive(child)).then_some(())
    })
    .await;
    lab.stop().await;
}

#[tokio::test]
async fn a_child_without_a_limit_that_is_stopped_costs_no_attempt_and_nothing_is_lost() {
    let mut lab = Lab::start(workers(1)).await;
    let params = json!({"capsules": 600, "rest_us": 5_000, "state_bytes": 4_096});
    let id = lab
        .publish_json(
            &json!({"id": "stopped", "program": "synthetic@1", "params": params,
            "commit": {"every": 10}, "retries": 0}),
        )
        .await;
    let node = lab.journal.computing(id, 3).await;
    for child in proc::descendants(lab.worker(&node).pid()) {
        let pid = Pid::from_raw(i32::try_from(child).unwrap()).unwrap();
        kill_process(pid, Signal::STOP).unwrap();
    }
    let reason = lab.journal.find(id, "it is given back", frozen).await;
    assert!(reason.contains("stopped for 8 s"), "{reason}");
    let last = lab.journal.ended(id, "completed").await;
    let totals = last.message.state.totals;
    assert_eq!((totals.crashes, totals.node_faults), (0, 1));
    assert_eq!(digest_of(&last), undisturbed_synthetic(&params).await);
    lab.stop().await;
}
