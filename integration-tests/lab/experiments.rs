//! The published experiments as people run them, each in its quick form: real processes, real
//! pressure, bits that stay the same, and the files that are left.

use std::path::Path;
use std::time::Duration;

use fiec_kit::foreign::container::Engine;
use serde_json::Value;

use crate::{HOST, Lock};

/// An experiment takes some tens of seconds.
const PATIENCE: Duration = Duration::from_secs(400);

/// Experiments with emulated devices, whose pressure the host does not feel.
static DEVICES: Lock = Lock::const_new(());

/// The rows of the summary, and the last line with the claims.
async fn experiment(name: &str, more: &[&str], out: &Path) -> (Vec<Value>, Value) {
    // `trigger1` compares speeds, so no other experiment may run beside it.
    let (host, devices) = match name {
        "trigger1" => (true, true),
        "trigger2" | "trigger3" => (false, true),
        _ => (true, false),
    };
    let _host = if host { Some(HOST.lock().await) } else { None };
    let _devices = if devices {
        Some(DEVICES.lock().await)
    } else {
        None
    };
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_fiec-lab"));
    command
        .args(["experiment", name, "--quick", "--json", "--out"])
        .arg(out)
        .args(more)
        .stdin(std::process::Stdio::null())
        .kill_on_drop(true);
    let output = tokio::time::timeout(PATIENCE, command.output())
        .await
        .unwrap_or_else(|_| panic!("{name} took more than {PATIENCE:?}"))
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        output.status.code(),
        Some(0),
        "stdout:\n{stdout}\nstderr:\n{stderr}"
    );
    let mut lines: Vec<Value> = stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}")))
        .collect();
    let last = lines.pop().unwrap();
    assert_eq!(last["ok"], true, "{last}");
    (lines, last)
}

fn kept_bits_and_moved_for_memory(rows: &[Value], workloads: &[&str]) {
    for row in rows {
        assert_eq!(row["monotonic"], true, "{row}");
        assert_eq!(row["same_bits"], true, "{row}");
        let moved = row["variant"] == "with rebinding";
        assert_eq!(row["rebindings"].as_u64().unwrap() > 0, moved, "{row}");
        if moved {
            let causes = row["causes"].as_array().unwrap();
            assert!(causes.contains(&"pressure: memory".into()), "{row}");
            assert!(row["state_bytes"][0].as_u64().unwrap() > 0, "{row}");
        }
    }
    for name in workloads {
        assert!(rows.iter().any(|r| r["workload"] == *name), "{name}");
    }
}

fn left_files(out: &Path, workloads: &[&str], figures: &[&str]) {
    let read = |name: &str| {
        std::fs::read(out.join(name)).unwrap_or_else(|e| panic!("{name} in {out:?}: {e}"))
    };
    for (name, column) in [
        ("capsules.csv", "capsules"),
        ("pressure.csv", "offered"),
        ("location.csv", "node"),
        ("rebindings.csv", "gap_ms"),
        ("summary.csv", "monotonic"),
    ] {
        let text = String::from_utf8(read(name)).unwrap();
        assert!(text.lines().next().unwrap().contains(column), "{name}");
        assert!(text.lines().count() > 1, "{name} has no rows");
    }
    for workload in workloads {
        for figure in figures {
            let svg = String::from_utf8(read(&format!("{workload}-{figure}.svg"))).unwrap();
            assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
            let png = read(&format!("{workload}-{figure}.png"));
            assert!(png.starts_with(b"\x89PNG\r\n\x1a\n") && png.len() > 1_000);
        }
    }
    let report = String::from_utf8(read("report.md")).unwrap();
    assert!(report.contains("| agrees |"), "{report}");
}

const FIGURES: [&str; 3] = ["capsules", "pressure", "location"];

#[tokio::test]
async fn memory_pressure_moves_cg_and_costs_neither_progress_nor_bits() {
    let out = tempfile::tempdir().unwrap();
    let (rows, _) = experiment("trigger1", &["--only", "cg"], out.path()).await;
    kept_bits_and_moved_for_memory(&rows, &["cg"]);
    assert_eq!(rows.len(), 4);
    assert_eq!(rows[3]["variant"], "control: load on the other node");
    let progress = |n: usize| rows[n]["progress"].as_f64().unwrap();
    // The quick form is too short for the figure itself: one pause of the machine is a part of it.
    assert!(progress(2) > 0.7 * progress(1), "{rows:?}");
    left_files(out.path(), &["cg"], &FIGURES);
}

#[tokio::test]
async fn memory_pressure_moves_a_container_as_one_unit() {
    if let Err(why) = Engine::find() {
        eprintln!("SKIPPED: no container engine answers here ({why})");
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let (rows, _) = experiment("trigger1", &["--only", "container"], out.path()).await;
    kept_bits_and_moved_for_memory(&rows, &["container"]);
    left_files(out.path(), &["container"], &FIGURES);
}

#[tokio::test]
async fn an_execution_goes_over_three_nodes_and_back_under_one_identity() {
    let out = tempfile::tempdir().unwrap();
    let (rows, last) = experiment("multi-hop", &[], out.path()).await;
    kept_bits_and_moved_for_memory(&rows, &["cg"]);
    assert_eq!(rows[1]["rebindings"], 3, "{rows:?}");
    let claims = last["claims"].as_array().unwrap();
    let hops = |c: &&Value| c["claim"].as_str().unwrap().starts_with("it goes A, B, C");
    assert_eq!(claims.iter().find(hops).unwrap()["agrees"], true, "{last}");
    left_files(out.path(), &["cg"], &FIGURES);
}

#[tokio::test]
async fn device_pressure_moves_a_factorization_in_its_middle() {
    let out = tempfile::tempdir().unwrap();
    let (rows, _) = experiment("trigger2", &["--only", "lu"], out.path()).await;
    kept_bits_and_moved_for_memory(&rows, &["lu"]);
    left_files(out.path(), &["lu"], &FIGURES);
}

#[tokio::test]
async fn work_follows_the_memory_that_swinging_devices_offer() {
    let out = tempfile::tempdir().unwrap();
    let (rows, _) = experiment("trigger3", &["--only", "gemm"], out.path()).await;
    kept_bits_and_moved_for_memory(&rows, &["gemm"]);
    let figures = [
        "capsules",
        "pressure",
        "location",
        "envelopes",
        "power",
        "power-envelopes",
    ];
    left_files(out.path(), &["gemm"], &figures);
}

#[tokio::test]
async fn over_commit_and_reconfiguration_are_compared_played_and_for_real() {
    let out = tempfile::tempdir().unwrap();
    let (rows, _) = experiment("reallocation", &[], out.path()).await;
    let modes = ["reserved", "over-commit", "reconfigured"];
    for part in ["simulated-memory", "simulated-units", "real"] {
        for mode in modes {
            let row = rows.iter().find(|r| r["part"] == part && r["mode"] == mode);
            let row = row.unwrap_or_else(|| panic!("no {part}, {mode}: {rows:?}"));
            let run = &row["runs"][0];
            assert_eq!(run["unfinished"], 0, "{row}");
            assert!(run["mean_s"].as_f64().unwrap() > 0.0, "{row}");
            let utilization = run["utilization"].as_f64().unwrap();
            assert!(utilization > 0.0 && utilization <= 1.0, "{row}");
            if mode != "over-commit" {
                assert_eq!(run["killed"], 0, "{row}");
            }
            if part == "real" {
                // Every job of every run has the bits of an undisturbed one.
                assert_eq!(row["same_bits"], serde_json::json!([30, 30]), "{row}");
            }
        }
    }
    let csv = std::fs::read_to_string(out.path().join("runs.csv")).unwrap();
    assert!(csv.starts_with("part,mode,nodes,seed,"), "{csv}");
    assert!(
        csv.lines().any(|l| l.starts_with("real,reconfigured,1,1,")),
        "{csv}"
    );
    let report = std::fs::read_to_string(out.path().join("report.md")).unwrap();
    assert!(
        report.contains("## Real processes") && report.contains("emulated"),
        "{report}"
    );
    for figure in ["simulated-memory-mean_time", "real-lost"] {
        let svg = std::fs::read_to_string(out.path().join(format!("{figure}.svg"))).unwrap();
        assert!(svg.starts_with("<svg"));
    }
}

#[tokio::test]
async fn without_enough_devices_a_run_on_real_ones_is_refused_with_the_reason() {
    if fiec_cuda::list().is_ok_and(|found| found.len() >= 2) {
        eprintln!("SKIPPED: there are devices enough here for a run of minutes");
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let output = tokio::process::Command::new(env!("CARGO_BIN_EXE_fiec-lab"))
        .args(["experiment", "trigger2", "--devices", "real", "--out"])
        .arg(out.path().join("never"))
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(PATIENCE, output)
        .await
        .unwrap()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(5), "{stderr}");
    assert!(stderr.contains("--devices real"), "{stderr}");
    assert!(!out.path().join("never").exists());
}
