//! A worker whose clock is an hour off, and is set while it runs: durations in SQL stay what they
//! were, the bits too, and everybody who should is told.

use std::path::PathBuf;

use crate::stage;
use crate::stage::{Lab, digest_of, run, undisturbed_synthetic, until, workers_with_history};
use fiec_schemas::{ExecutionId, NodeId};
use serde_json::json;

const HOUR: i64 = 3_600;

/// The wall clock of one worker and of its programs.
struct ShiftedClock {
    library: PathBuf,
    file: PathBuf,
}

impl ShiftedClock {
    async fn new(lab: &Lab, seconds: i64) -> Self {
        let clock = Self {
            library: lab.path("clock.so"),
            file: lab.path("shift"),
        };
        let source = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../integration-tests/ledger/clock.c"
        );
        // The linker of every Rust build.
        let mut compiler = tokio::process::Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O1", "-o"]);
        compiler.arg(&clock.library).arg(source);
        run(compiler).await.expect(0);
        std::fs::write(&clock.file, seconds.to_ne_bytes()).unwrap();
        clock
    }

    fn environment(&self) -> [(String, String); 3] {
        let path = |path: &PathBuf| path.display().to_string();
        [
            ("LD_PRELOAD".to_owned(), path(&self.library)),
            ("SHIFTED_CLOCK".to_owned(), path(&self.file)),
            // A node has one clock.
            (
                "FIEC_PASS_ENV".to_owned(),
                "LD_PRELOAD,SHIFTED_CLOCK".to_owned(),
            ),
        ]
    }

    /// Sets the clock of the running processes.
    fn set(&self, seconds: i64) {
        use std::os::unix::fs::FileExt as _;
        let file = std::fs::OpenOptions::new().write(true).open(&self.file);
        // In place: they have it mapped.
        file.unwrap().write_at(&seconds.to_ne_bytes(), 0).unwrap();
    }
}

async fn computes_on(lab: &Lab, id: ExecutionId, epoch: u64, node: &NodeId) {
    let what = "it computes there and has committed";
    let found = lab.journal.find(id, what, move |line| {
        let state = line.state();
        let node = line.started_on()?;
        let here = state.epoch == epoch && line.phase() == "started";
        (here && state.boundary.as_ref()?.ordinal > 0).then_some(node)
    });
    assert_eq!(found.await, *node);
}

#[tokio::test]
async fn a_clock_that_is_an_hour_off_changes_no_duration_and_is_reported() {
    let mut lab = Lab::start(workers_with_history(1)).await;
    let clock = ShiftedClock::new(&lab, HOUR).await;
    let n1: NodeId = "n1".parse().unwrap();
    let n2 = lab.start_worker_in(&clock.environment()).unwrap();
    lab.ready().await.unwrap();

    let params = json!({"capsules": 2_500, "rest_us": 4_000, "state_bytes": 2_048});
    let body = json!({"id": "moved", "program": "synthetic@1", "params": params,
        "requires": {"nodes": [n1, n2]}, "commit": {"every_ms": 100}});
    let id = lab.publish_json(&body).await;
    let first = lab.journal.computing(id, 1).await;
    let mut at = first;
    for epoch in 2..=5 {
        let to = if at == n1 { &n2 } else { &n1 };
        lab.fiec(&["yield", "moved", "--to", to.as_str()])
            .await
            .expect(0);
        computes_on(&lab, id, epoch, to).await;
        at = to.clone();
        if epoch == 3 {
            // Its clock is set back by two hours while it holds an execution, or before it has it.
            clock.set(-HOUR);
        }
    }
    let last = lab.journal.ended(id, "completed").await;
    assert_eq!(digest_of(&last), undisturbed_synthetic(&params).await);
    lab.recorded(1).await;

    let gaps = lab
        .sql(format!(
            "SELECT gap_ms FROM rebinding_history WHERE execution = '{id}' ORDER BY epoch"
        ))
        .await;
    let gaps: Vec<f64> = (0..4)
        .map(|row| gaps.get(row, "gap_ms").unwrap().parse().unwrap())
        .collect();
    assert!(
        gaps.iter().all(|gap| (-20.0..5_000.0).contains(gap)),
        "gaps in ms: {gaps:?}"
    );
    let wrong = lab
        .sql(format!(
            "SELECT 'placement ' || epoch, waited, held FROM placement_timeline \
             WHERE execution = '{id}' AND (waited NOT BETWEEN interval '-20 ms' AND interval '60 s' \
             OR held NOT BETWEEN interval '0 s' AND interval '120 s') \
             UNION ALL SELECT 'execution', waited, ran FROM execution_summary \
             WHERE execution = '{id}' AND (waited NOT BETWEEN interval '-20 ms' AND interval '60 s' \
             OR ran NOT BETWEEN interval '0 s' AND interval '120 s') \
             UNION ALL SELECT 'boundary ' || index, computed_at - committed_at, NULL FROM boundaries \
             WHERE execution = '{id}' AND abs(extract(epoch FROM committed_at - computed_at)) > 60 \
             UNION ALL SELECT 'vector of ' || node, at - now(), NULL FROM hardware_vectors \
             WHERE abs(extract(epoch FROM at - now())) > 300"
        ))
        .await;
    assert!(wrong.rows.is_empty(), "{wrong:?}");

    reported(&lab, &n2).await;
    lab.end().await;
}

/// The clock of this node, and of no other, is reported wherever somebody may look.
async fn reported(lab: &Lab, far: &NodeId) {
    let status = lab.status_of(far).await.unwrap();
    let reading = status.vector.unwrap().clock.unwrap();
    let off_by_us = reading.ahead_us + HOUR * 1_000_000;
    assert!(off_by_us.abs() < 50_000, "{reading:?}");
    let nodes = lab.fiec(&["nodes"]).await.expect(0).stdout;
    let words = format!("{far}: its clock is 3600.0 s behind the broker's");
    let said: Vec<_> = nodes.lines().filter(|l| l.contains("its clock")).collect();
    assert!(said.len() == 1 && said[0].starts_with(&words), "{nodes}");

    let doctor = lab.fiec(&["doctor", "--json"]).await;
    let checks = doctor.json_lines();
    let check = checks.iter().find(|check| check["check"] == "clocks");
    let check = check.unwrap_or_else(|| panic!("{checks:?}"));
    assert_eq!(check["status"], "warning");
    let detail = check["detail"].as_str().unwrap();
    assert!(
        detail.contains(&format!("the clock of {far} is 3600.0 s behind")),
        "{detail}"
    );
    let check = checks.iter().find(|c| c["check"] == "PostgreSQL's clock");
    assert_eq!(check.unwrap()["status"], "ok", "{check:?}");

    let skewed = until("SQL has the clock as it is now", async || {
        let query = "SELECT node, ahead_ms FROM node_clocks WHERE far AND ahead_ms < 0";
        let rows = lab.sql(query).await;
        (!rows.rows.is_empty()).then_some(rows)
    })
    .await;
    assert_eq!(skewed.rows.len(), 1, "{skewed:?}");
    assert_eq!(skewed.get(0, "node"), Some(far.as_str()));
    assert_eq!(lab.count("SELECT count(*) FROM node_clocks").await, 2);

    let log = std::fs::read_to_string(&lab.policies[0].log).unwrap();
    let line = log.lines().find(|line| line.contains("serving /metrics"));
    let port = line.unwrap().split("127.0.0.1:").nth(1).unwrap();
    let port: String = port.chars().take_while(char::is_ascii_digit).collect();
    let metric = format!("fiec_policy_node_clock_skew_seconds{{node=\"{far}\"}} -3");
    until("the policy service shows it", async || {
        let page = stage::get(&format!("127.0.0.1:{port}"), "/metrics").await;
        page.contains(&metric).then_some(())
    })
    .await;
}
