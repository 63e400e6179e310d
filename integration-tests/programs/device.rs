//! `fiec device` and `fiec run --local --device`, with real processes: on this machine as it is, and
//! with an emulated driver (workers/cuda/tests/emulator) in place of NVIDIA's.
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

const EMULATED: &str = "GPU-00112233-4455-6677-8899-aabbccddeeff";

fn fiec(arguments: &[&str], libraries: Option<&Path>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fiec-lab"));
    command.args(arguments);
    if let Some(folder) = libraries {
        command.env("LD_LIBRARY_PATH", folder);
    }
    command.output().unwrap()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        panic!(
            "{error}: {}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        )
    })
}

/// A folder with the emulated driver; none, and a line, where there is no g++.
fn emulator() -> Option<PathBuf> {
    let folder =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cuda-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let source =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../workers/cuda/tests/emulator/driver.cpp");
    let done = Command::new("g++")
        .args(["-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared"])
        .args(["-Wno-unknown-pragmas", "-march=native", "-o"])
        .arg(folder.join("libcuda.so"))
        .arg(source)
        .output();
    match done {
        Err(error) => {
            eprintln!("SKIPPED: no device is emulated, as there is no g++ here ({error})");
            None
        }
        Ok(done) => {
            let words = String::from_utf8_lossy(&done.stderr).into_owned();
            assert!(done.status.success(), "{words}");
            Some(folder)
        }
    }
}

#[test]
fn a_machine_lists_its_devices_or_says_why_there_is_none() {
    let listed = fiec(&["--json", "device"], None);
    let found = json(&listed);
    let test = fiec(&["device", "test", "--uuid", "GPU-none"], None);
    let words = String::from_utf8_lossy(&test.stderr);
    if found["devices"].as_array().unwrap().is_empty() {
        assert_eq!(listed.status.code(), Some(5));
        let why = found["why"].as_str().unwrap();
        assert!(why.contains("driver"), "{why}");
        assert_eq!(test.status.code(), Some(5), "{words}");
        assert!(words.contains("no device to compute on"), "{words}");
        let bench = fiec(&["--json", "bench", "device"], None);
        let words = String::from_utf8_lossy(&bench.stderr);
        assert_eq!(bench.status.code(), Some(5), "{words}");
        assert!(bench.stdout.is_empty());
        assert!(words.contains("left out: device: no device"), "{words}");
    } else {
        assert_eq!(listed.status.code(), Some(0));
        assert_eq!(test.status.code(), Some(2), "{words}");
    }
}

#[test]
fn a_driver_that_lacks_what_is_called_is_an_error_in_words_and_no_panic() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("empty.cpp"), "").unwrap();
    let done = Command::new("g++")
        .args(["-shared", "-o"])
        .arg(folder.path().join("libcuda.so"))
        .arg(folder.path().join("empty.cpp"))
        .output();
    if let Err(error) = done {
        eprintln!("SKIPPED: no driver can be made, as there is no g++ here ({error})");
        return;
    }
    let listed = fiec(&["device"], Some(folder.path()));
    let words = String::from_utf8_lossy(&listed.stderr);
    assert_eq!(listed.status.code(), Some(5), "{words}");
    assert!(
        words.contains("too old") && words.contains("cuInit"),
        "{words}"
    );
    assert!(!words.contains("panicked"), "{words}");
}

#[test]
fn a_run_on_a_device_that_is_not_there_fails_and_says_so() {
    let params = r#"{"matrix": {"random": {"n": 20}}}"#;
    let run = [
        "run", "--local", "lu@1", "-p", params, "--device", "GPU-none",
    ];
    let run = fiec(&run, None);
    let words = String::from_utf8_lossy(&run.stderr);
    assert_eq!(run.status.code(), Some(1), "{words}");
    assert!(words.contains("no device to compute on"), "{words}");
}

#[test]
fn a_run_on_an_emulated_device_cut_at_its_boundaries_has_the_bits_of_the_host() {
    let Some(folder) = emulator() else { return };
    let listed = json(&fiec(&["--json", "device"], Some(&folder)));
    assert_eq!(listed["devices"][0]["uuid"], EMULATED);
    for (program, params) in [
        ("lu@1", r#"{"matrix": {"random": {"n": 90}}, "block": 24}"#),
        (
            "cg@1",
            r#"{"matrix": {"poisson2d": {"n": 20}}, "iterations_per_capsule": 9}"#,
        ),
    ] {
        let common = ["--json", "run", "--local", program, "-p", params];
        let host = json(&fiec(&common, Some(&folder)));
        let device = [
            "--device",
            EMULATED,
            "--device-memory",
            "2MiB",
            "--yield-every",
            "2",
        ];
        let output = fiec(&[&common[..], &device[..]].concat(), Some(&folder));
        let on_device = json(&output);
        assert_eq!(output.status.code(), Some(0), "{on_device}");
        assert_eq!(on_device["equal"], true, "{on_device}");
        assert_eq!(
            on_device["undisturbed"]["result"], host["undisturbed"]["result"],
            "{program}"
        );
    }
    // The suite; there is no cuBLAS and no NVML, and that is no failure.
    let mut suite = vec!["device", "test", "--threads", "1", "--order", "70"];
    suite.extend(["--factor", "60", "--grid", "12"]);
    let output = fiec(&suite, Some(&folder));
    let table = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{table}");
    for words in [
        "gemm bitwise",
        "qr bitwise",
        "cg bitwise",
        "passed",
        "not run",
    ] {
        assert!(table.contains(words), "{words} is not in:\n{table}");
    }
    assert!(!table.contains("FAILED"), "{table}");
    println!("{table}");
    // The same as figures, and what moves.
    let output = fiec(&["--json", "bench", "device", "--quick"], Some(&folder));
    let words = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{words}");
    let lines = String::from_utf8_lossy(&output.stdout).into_owned();
    let figures: Vec<Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let figure = |case: &str, metric: &str| {
        let of =
            |f: &&Value| f["case"].as_str().unwrap().starts_with(case) && f["metric"] == metric;
        let found = figures.iter().find(of);
        found.unwrap_or_else(|| panic!("{case}, {metric} is not in:\n{lines}"))
    };
    assert!(figure("gemm bitwise", "gflops")["value"].as_f64() > Some(0.0));
    assert!(figure("context, warm", "open_ms")["floor"].as_f64() > Some(0.0));
    for program in ["gemm@1", "lu@1", "qr@1"] {
        let moved = figure(program, "moved_bytes");
        assert!(moved["ratio"].as_f64() < Some(0.5), "{moved}");
    }
    assert!(words.contains("left out: gemm bounded"), "{words}");
    std::fs::remove_dir_all(folder).unwrap();
}
