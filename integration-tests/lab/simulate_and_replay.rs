//! `fiec simulate` and `fiec replay` as people call them: exit codes, errors, and a real history
//! played again under its own policy and under another.

use std::path::Path;

use crate::stage::{BINARY, Lab, Ran, run, slots, until, workers_with_history};
use fiec_lab::cluster::ClusterOptions;
use serde_json::{Value, json};

async fn simulate(list: &[&str]) -> Ran {
    let mut command = tokio::process::Command::new(BINARY);
    command
        .arg("simulate")
        .args(list)
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
    run(command).await
}

fn scenario(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../simulator/scenarios");
    folder.join(name).display().to_string()
}

#[tokio::test]
async fn a_scenario_is_played_and_a_bad_one_is_named_with_its_field() {
    let ran = simulate(&[&scenario("pressure.json"), "--json"])
        .await
        .expect(0);
    let line = &ran.json_lines()[0];
    assert_eq!(line["violation"], Value::Null);
    let summary = &line["summary"];
    assert_eq!(summary["completed"], summary["submitted"]);
    assert!(
        summary["rebindings"]["pressure"].as_u64().unwrap() > 0,
        "{summary}"
    );

    // A longer dwell moves less; the same seed otherwise.
    let file = scenario("pressure.json");
    let patient = simulate(&[&file, "--json", "--set", "dwell_ms=60000"])
        .await
        .expect(0);
    let patient = &patient.json_lines()[0]["summary"];
    let moves = |s: &Value| s["rebindings"]["pressure"].as_u64().unwrap_or(0);
    assert!(moves(patient) < moves(summary), "{patient}");

    let table = simulate(&[&scenario("calm.json")]).await.expect(0).stdout;
    assert!(
        table.contains("utilization") && table.contains("makespan"),
        "{table}"
    );

    let dir = tempfile::tempdir().unwrap();
    let bad = dir.path().join("bad.json");
    std::fs::write(
        &bad,
        r#"{"duration_ms": 1, "nodes": [{"name": "n", "slots": 0}], "workloads": []}"#,
    )
    .unwrap();
    let ran = simulate(&[bad.to_str().unwrap()]).await.expect(2);
    assert!(
        ran.stderr
            .contains("bad.json: nodes[0].slots: must be from 1"),
        "{}",
        ran.stderr
    );
    let missing = simulate(&["/nowhere.json"]).await.expect(2);
    assert!(
        missing.stderr.contains("/nowhere.json"),
        "{}",
        missing.stderr
    );
    let ran = simulate(&[&scenario("calm.json"), "--set", "dwel=1"])
        .await
        .expect(2);
    assert!(ran.stderr.contains("is no setting"), "{}", ran.stderr);
}

async fn trace(list: &[&str]) -> Ran {
    let mut command = tokio::process::Command::new(BINARY);
    command
        .arg("trace")
        .args(list)
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
    run(command).await
}

#[tokio::test]
async fn a_trace_is_printed_written_and_replayed() {
    let file = scenario("calm.json");
    let printed = trace(&[&file]).await.expect(0).stdout;
    assert!(printed.starts_with("0 p0 in new {"), "{printed}");
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().to_str().unwrap();
    trace(&[&file, "seed:7", "--out", folder]).await.expect(0);
    let written = std::fs::read_to_string(dir.path().join("calm.txt")).unwrap();
    assert!(written == printed, "the file has what was printed");
    for name in ["calm.txt", "seed-7.txt"] {
        let written = dir.path().join(name);
        let again = trace(&["--replay", written.to_str().unwrap()]).await;
        let again = again.expect(0).stdout;
        assert!(
            again == std::fs::read_to_string(&written).unwrap(),
            "{name}"
        );
    }
    let bad = dir.path().join("bad.txt");
    std::fs::write(&bad, "0 p0 in tick\n").unwrap();
    for (list, words) in [
        (
            vec!["--replay", bad.to_str().unwrap()],
            "line 1 of the trace",
        ),
        (vec!["/nowhere.json"], "/nowhere.json"),
        (vec!["--list"], "in the root of FIEC's sources"),
    ] {
        let ran = trace(&list).await.expect(2);
        assert!(ran.stderr.contains(words), "{}", ran.stderr);
    }
}

fn options() -> ClusterOptions {
    ClusterOptions {
        worker_args: slots(2),
        ..workers_with_history(2)
    }
}

#[tokio::test]
async fn what_really_happened_is_played_again_under_another_policy() {
    let lab = Lab::start(options()).await;
    for n in 0..6 {
        let line = json!({"id": format!("job-{n}"), "program": "synthetic@1",
            "params": {"capsules": 20, "rest_us": 20_000, "state_bytes": 4_096},
            "commit": {"every": 5}});
        lab.publish_json(&line).await;
    }
    lab.recorded(6).await;
    until("both nodes' vectors are in PostgreSQL", async || {
        let query = "SELECT count(DISTINCT node) FROM hardware_vectors WHERE memory IS NOT NULL";
        (lab.count(query).await == 2).then_some(())
    })
    .await;

    // No memory at all may be in use: then no node is viable, and nothing is ever placed.
    let file = lab.path("recorded.json");
    let set = [
        "--set",
        "low.memory=0.0000001",
        "--set",
        "high.memory=0.0000002",
        "--set",
        "dwell_ms=0",
    ];
    let mut list = vec![
        "replay",
        "--since",
        "1h",
        "--json",
        "--save",
        file.to_str().unwrap(),
    ];
    list.extend(set);
    let ran = lab.fiec(&list).await.expect(0);
    let told = &ran.json_lines()[0];
    let found = &told["found"];
    assert_eq!(
        (found["executions"].as_u64(), found["nodes"].as_u64()),
        (Some(6), Some(2))
    );
    assert_eq!(found["completed"], 6, "{found}");
    let (was, changed) = (&told["as_it_was"], &told["changed"]);
    assert_eq!(
        (was["completed"].as_u64(), was["submitted"].as_u64()),
        (Some(6), Some(6)),
        "{was}"
    );
    // Six times 20 capsules of 20 ms: what was recorded is what is played.
    let lasted = was["lasted"]["mean_ms"].as_f64().unwrap();
    assert!((350.0..5_000.0).contains(&lasted), "{was}");
    assert_eq!(changed["completed"], 0, "{changed}");
    assert_eq!(
        changed["unfinished"][0]["why"],
        "waits for a node with room"
    );
    assert!(told["modelled"].as_array().unwrap().len() > 3);
    assert!(told["recorded"].as_array().unwrap().len() > 3);

    // The saved scenario is one that `fiec simulate` plays, to the same end.
    let again = simulate(&[file.to_str().unwrap(), "--json"])
        .await
        .expect(0);
    let again = &again.json_lines()[0]["summary"];
    for key in ["completed", "makespan_ms", "bindings", "lost_ms", "waited"] {
        assert_eq!(again[key], was[key], "{key}");
    }

    let words = lab
        .fiec(&["replay", "--since", "1h", "--set", "balance_ms=50"])
        .await
        .expect(0);
    for word in [
        "It really took",
        "Modelled:",
        "Recorded, and taken as it is:",
        "rebindings",
    ] {
        assert!(words.stdout.contains(word), "{word}: {}", words.stdout);
    }
    let bad = lab
        .fiec(&["replay", "--set", "high.memory=2"])
        .await
        .expect(2);
    assert!(
        bad.stderr.contains("must be above 0 and at most 1"),
        "{}",
        bad.stderr
    );
    let none = lab
        .fiec(&[
            "replay",
            "--since",
            "2020-01-01T00:00:00Z",
            "--until",
            "2020-01-02T00:00:00Z",
            "--set",
            "balance_ms=1",
        ])
        .await
        .expect(1);
    assert!(
        none.stderr.contains("no execution was submitted"),
        "{}",
        none.stderr
    );
    lab.stop().await;
}

#[tokio::test]
async fn the_company_in_which_it_ran_is_played_again_gangs_batches_quotas_and_what_was_waited_for()
{
    let lab = Lab::start(options()).await;
    let quota = ["quota", "set", "lab", "--running", "2"];
    lab.fiec(&quota).await.expect(0);
    let params = r#""params": {"capsules": 20, "rest_us": 20000, "state_bytes": 4096}"#;
    let lines = [
        format!(r#"{{"id": "data", "batch": "study", "program": "synthetic@1", {params}}}"#),
        format!(
            r#"{{"id": "part", "batch": "study", "program": "synthetic@1", "array": {{"count": 3}},
                "at_once": 1, "after": [{{"id": "data"}}], {params}}}"#
        ),
        format!(
            r#"{{"id": "solve", "batch": "solve", "program": "synthetic@1", "array": {{"count": 2}},
                "gang": {{"name": "solvers", "size": 2}}, "after": [{{"id": "part-0"}},
                {{"id": "part-1"}}, {{"id": "part-2"}}], {params}}}"#
        ),
    ];
    let lines = lines.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    let file = lab.file("study.jsonl", lines.join("\n"));
    lab.fiec(&["submit", file.to_str().unwrap()])
        .await
        .expect(0);
    lab.recorded(6).await;
    // Changed while nothing runs any more: it is in the history, and changes nothing.
    lab.fiec(&["quota", "set", "lab", "--running", "7"])
        .await
        .expect(0);
    until("vectors and quotas are in PostgreSQL", async || {
        let vectors = "SELECT count(DISTINCT node) FROM hardware_vectors WHERE memory IS NOT NULL";
        let quotas = "SELECT count(*) FROM quota_changes WHERE tenant = 'lab'";
        let both = (lab.count(vectors).await, lab.count(quotas).await);
        (both == (2, 2)).then_some(())
    })
    .await;
    let file = lab.path("company.json");
    let ran = lab
        .fiec(&[
            "replay",
            "--since",
            "1h",
            "--json",
            "--set",
            "quota.lab.running=1",
            "--save",
            file.to_str().unwrap(),
        ])
        .await
        .expect(0);
    let told = &ran.json_lines()[0];
    let (found, was, changed) = (&told["found"], &told["as_it_was"], &told["changed"]);
    for (what, count) in [
        ("executions", 6),
        ("in_gangs", 2),
        ("at_once", 3),
        ("after", 5),
        ("quotas", 2),
    ] {
        assert_eq!(found[what], count, "{what}: {found}");
    }
    assert_eq!(was["completed"], 6, "{was}");
    assert!(was["reservations"].as_u64().unwrap() >= 4, "{was}");
    // One, three of which one runs at once, and two together: five rounds of 400 ms.
    let makespan = |s: &Value| s["makespan_ms"].as_f64().unwrap();
    assert!((1_900.0..10_000.0).contains(&makespan(was)), "{was}");
    let off = told["model_error"]["makespan_ms"].as_f64().unwrap();
    let really = found["makespan_ms"].as_f64().unwrap();
    assert!((makespan(was) - really - off).abs() < 1e-3, "{told}");
    // With one at a time the gang of two never has its places.
    assert_eq!(changed["completed"], 4, "{changed}");
    assert_eq!(changed["unfinished"][0]["count"], 2, "{changed}");

    let saved: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let quotas = saved["quotas"].as_array().unwrap();
    let running: Vec<_> = quotas.iter().map(|q| &q["running"]).collect();
    assert_eq!(running, [&json!(2), &json!(7)]);
    let workloads = saved["workloads"].as_array().unwrap();
    let gangs = workloads
        .iter()
        .filter(|w| w["submission"]["gang"]["size"] == 2);
    assert_eq!(gangs.count(), 2, "{saved}");

    let words = lab
        .fiec(&["replay", "--since", "1h", "--set", "quota.lab.running=none"])
        .await
        .expect(0);
    for word in [
        "2 started in gangs",
        "3 are of batches of which only some run at once",
        "5 waited for others",
        "2 quotas",
        "the model is off what really happened by",
    ] {
        assert!(words.stdout.contains(word), "{word}: {}", words.stdout);
    }
    lab.stop().await;
}
