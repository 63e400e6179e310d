//! Scenarios: the committed schema, and errors that name field and rule.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::Path;

use fiec_simulator::Scenario;

#[test]
fn the_committed_schema_is_that_of_the_type() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("scenario.schema.json");
    let schema = fiec_simulator::scenario::schema();
    let text = format!("{}\n", serde_json::to_string_pretty(&schema).unwrap());
    if std::env::var_os("FIEC_UPDATE").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == text,
        "{} is stale: run FIEC_UPDATE=1 cargo test -p fiec-simulator and read the difference",
        path.display()
    );
}

const GOOD: &str = r#"{"duration_ms": 1000, "nodes": [{"name": "n"}], "workloads": [
    {"name": "w", "arrivals": {"at_once": {"count": 1}}, "work_ms": {"fixed": 5}}]}"#;

#[test]
fn a_small_scenario_is_enough_and_reads_as_it_is_written() {
    let scenario = Scenario::parse(GOOD.as_bytes()).unwrap();
    let again = Scenario::parse(scenario.to_json().as_bytes()).unwrap();
    assert_eq!(again, scenario);
}

#[test]
fn each_mistake_is_named_with_its_field_and_rule() {
    for (from, to, field, word) in [
        ("1000", "0", "duration_ms", "from 1 to"),
        (
            r#""name": "n""#,
            r#""name": "n.1""#,
            "nodes[0].name",
            "a dot would split",
        ),
        (
            r#""name": "n""#,
            r#""name": "n", "count": 0"#,
            "nodes[0].count",
            "from 1",
        ),
        (
            r#""name": "n""#,
            r#""name": "n", "slot": 1"#,
            "nodes[0].slot",
            "unknown field `slot`",
        ),
        (
            r#"{"fixed": 5}"#,
            r#"{"fixed": -1}"#,
            "workloads[0].work_ms.fixed",
            "0.001",
        ),
        (
            r#"{"fixed": 5}"#,
            r#"{"pareto": {"low": 5, "high": 1, "alpha": 1}}"#,
            "workloads[0].work_ms.pareto.high",
            "from 5",
        ),
        (
            r#"{"fixed": 5}"#,
            r#"{"normal": 5}"#,
            "workloads[0].work_ms",
            "unknown variant `normal`",
        ),
        (
            r#"{"fixed": 5}"#,
            r#"{"fixed": 5}, "submission": {"program": "synthetic@1",
          "viability": {"memory": {"high": 0.5, "low": 0.9, "dwell_ms": 1}}}"#,
            "workloads[0].submission.viability.memory.low",
            "below high",
        ),
        (
            r#""nodes": ["#,
            r#""faults": [{"loss": {"node": "m", "at_ms": 1}}], "nodes": ["#,
            "faults[0].loss.node",
            "there is no node m",
        ),
        (
            r#""nodes": ["#,
            r#""faults": [{"cannot_start": {"node": "n", "program": "a@1", "at_ms": 1}}], "nodes": ["#,
            "faults[0].cannot_start.program",
            "no workload of the program a@1",
        ),
        (
            r#""nodes": ["#,
            r#""faults": [{"kills": {"program": "synthetic@1", "boundary": 0, "for_ms": 1}}], "nodes": ["#,
            "faults[0].kills.boundary",
            "from 1 to",
        ),
        (
            r#""nodes": ["#,
            r#""network": {"loss": 0.9}, "nodes": ["#,
            "network.loss",
            "[0, 0.5]",
        ),
        (
            r#""nodes": ["#,
            r#""network": [300], "nodes": ["#,
            "network",
            "must be an object",
        ),
        (
            r#""nodes": ["#,
            r#""telemetry": {"heartbeat_ms": 9000}, "nodes": ["#,
            "telemetry.heartbeat_ms",
            "half of the policy's liveness_ms",
        ),
        (
            r#"{"duration_ms""#,
            r#"{"duration_ms" 5"#,
            "",
            "not valid JSON",
        ),
    ] {
        let text = GOOD.replacen(from, to, 1);
        assert_ne!(text, GOOD, "{from}");
        let error = Scenario::parse(text.as_bytes()).unwrap_err();
        assert_eq!(error.field, field, "{to}: {error}");
        assert!(error.reason.contains(word), "{to}: {error}");
    }
}
