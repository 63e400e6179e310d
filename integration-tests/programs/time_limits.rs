//! Programs that compute as long as their submission allows, and hear of it before.

use super::python_program::package;
use crate::stage::python::root;
use crate::stage::{Lab, args, workers};
use fiec_schemas::Event;
use serde_json::json;

#[tokio::test]
async fn a_program_hears_of_its_limit_is_held_there_and_computes_as_long_again_after_a_retry() {
    let mut options = workers(1);
    options
        .worker_args
        .extend(args(&["--allow-program", "endless-*@1"]));
    let lab = Lab::start(options).await;
    for protocol in ["frames", "json_lines"] {
        let folder = tempfile::tempdir().unwrap();
        let endless = root().join("workers/python/tests/programs/endless.py");
        let entry = ["python3", "-B", "endless.py"];
        package(folder.path(), &endless, &entry, protocol, &[]);
        let program = format!("endless-{}@1", protocol.replace('_', "-"));
        let path = folder.path().display().to_string();
        lab.fiec(&["program", "push", &program, &path])
            .await
            .expect(0);
        let line = json!({"id": protocol, "program": program, "on_failure": "hold",
                          "limit": {"computed_s": 2}, "commit": {"every_ms": 100}});
        let id = lab.publish_json(&line).await;
        lab.journal
            .find(id, "it is held", |line| {
                (line.phase() == "held").then_some(())
            })
            .await;
        let why = lab.fiec(&["why", protocol]).await.expect(0).stdout;
        assert!(why.contains("limit.computed_s"), "{why}");

        let held = lab.journal.of(id).last().unwrap().state().clone();
        lab.fiec(&["retry", protocol]).await.expect(0);
        let again = lab
            .journal
            .find(id, "it is held again", |line| {
                let state = line.state();
                (line.phase() == "held" && state.epoch > held.epoch).then(|| state.clone())
            })
            .await;
        let computed = again.totals.compute_us - held.totals.compute_us;
        assert!(computed > 1_000_000, "{computed} µs");
        let ledger = lab.journal.of(id);
        let crashed = |event: &Event| matches!(event, Event::Crashed { .. });
        assert!(
            !ledger
                .iter()
                .any(|line| line.message.events.iter().any(crashed))
        );
        // A machine that pauses may miss the notice once.
        let logs = lab
            .fiec(&["logs", "--raw", protocol])
            .await
            .expect(0)
            .stdout;
        let notice = logs.lines().find(|line| line.contains("s are left"));
        let notice = notice.unwrap_or_else(|| panic!("it did not hear of its limit: {logs}"));
        let left: f64 = notice.split(' ').next().unwrap().parse().unwrap();
        assert!((0.0..=0.2).contains(&left), "{notice}");
        lab.fiec(&["cancel", protocol]).await.expect(0);
    }
    lab.end().await;
}
