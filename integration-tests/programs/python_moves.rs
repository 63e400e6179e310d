//! Programs in Python against the Rust kit's frames, in packages with the kit beside them, and
//! moved between nodes.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;

use super::python_program::{Program, boundary, package, run_local, sums};
use crate::stage::python::{Python, root, success};
use crate::stage::{Lab, args, audit, workers};
use fiec_kit::frames::{Order, Reason, Report, Yield};
use fiec_kit::{Asked, GrantChange, Reserve, Reserved};
use fiec_schemas::package::Grant;
use fiec_schemas::{BoundaryIndex, CommitPolicy, Digest, Event};
use serde_json::{Value, json};

#[test]
fn a_package_in_python_has_equal_bits_however_it_is_cut_and_whatever_it_speaks() {
    let mut totals = Vec::new();
    for protocol in ["frames", "json_lines"] {
        let folder = tempfile::tempdir().unwrap();
        let entry = ["python3", "-B", "sums.py"];
        package(folder.path(), &sums(), &entry, protocol, &["last.txt"]);
        let params = json!({"steps": 10, "output": 3, "quiet": true});
        let result = run_local(folder.path(), &params, &["--yield-every", "3"]);
        totals.push(result["total"].as_str().unwrap().to_owned());
        assert!(!folder.path().join("fiec/__pycache__").exists());
    }
    assert_eq!(totals[0], totals[1]);
}

#[tokio::test]
async fn a_forked_pool_that_is_ended_early_does_not_hang_on_a_worker() {
    let mut options = workers(1);
    options
        .worker_args
        .extend(args(&["--allow-program", "pools-*@1"]));
    let lab = Lab::start(options).await;
    for protocol in ["frames", "json_lines"] {
        let folder = tempfile::tempdir().unwrap();
        let pools = root().join("workers/python/tests/programs/pools.py");
        let entry = ["python3", "-B", "pools.py"];
        package(folder.path(), &pools, &entry, protocol, &[]);
        let program = format!("pools-{}@1", protocol.replace('_', "-"));
        let path = folder.path().display().to_string();
        lab.fiec(&["program", "push", &program, &path])
            .await
            .expect(0);
        let params = json!({"steps": 5, "pad": 1 << 20});
        let id = lab.publish(protocol, &program, &params).await;
        lab.journal.ended(id, "completed").await;
        let ran = lab.fiec(&["result", &id.to_string()]).await.expect(0);
        let result: Value = serde_json::from_str(&ran.stdout).unwrap();
        assert_eq!(result["total"], 5, "{protocol}");
    }
    lab.end().await;
}

#[tokio::test]
async fn training_that_is_moved_between_nodes_ends_with_the_weights_of_one_that_is_not() {
    let python = Python::get();
    if !python.has_packages {
        return; // said by `fetch`
    }
    let folder = tempfile::tempdir().unwrap();
    let example = root().join("examples/python-training");
    let script = example.join("train.py");
    package(folder.path(), &script, &["./run.sh"], "frames", &[]);
    let manifest = std::fs::read(example.join("fiec.json")).unwrap();
    let mut manifest: Value = serde_json::from_slice(&manifest).unwrap();
    // As a node that has numpy installed.
    manifest["entry"] = json!(["./run.sh"]);
    std::fs::write(folder.path().join("fiec.json"), manifest.to_string()).unwrap();
    let path = python.path.display().to_string();
    let packages = path.split_once(':').unwrap().1;
    let run = folder.path().join("run.sh");
    let text = format!("#!/bin/sh\nPYTHONPATH='{packages}' exec python3 -B train.py\n");
    std::fs::write(&run, text).unwrap();
    std::fs::set_permissions(&run, PermissionsExt::from_mode(0o755)).unwrap();

    let mut params = json!({"epochs": 8, "keep": 4, "hidden": 8});
    let whole = run_local(folder.path(), &params, &[]);
    params["pause_ms"] = json!(60);

    let mut options = workers(2);
    options
        .worker_args
        .extend(args(&["--allow-program", "train@*"]));
    let lab = Lab::start(options).await;
    let path = folder.path().display().to_string();
    lab.fiec(&["program", "push", "train@1", &path])
        .await
        .expect(0);
    let body = json!({"id": "t", "program": "train@1", "params": params, "commit": {"every": 4}});
    let file = lab.file("t.json", body.to_string()).display().to_string();
    lab.fiec(&["submit", &file]).await.expect(0);
    let id = lab.id("t");
    for moves in 1..=2 {
        let commits = 2 * moves;
        let node = lab.journal.computing(id, commits).await;
        lab.fiec(&["yield", "t"]).await.expect(0);
        let what = "it computes on the other node";
        let other = lab.journal.find(id, what, |line| {
            let moved = line.state().epoch > moves;
            line.started_on().filter(|n| moved && *n != node)
        });
        other.await;
    }
    let last = lab.journal.ended(id, "completed").await;
    audit(&lab.journal.of(id));
    let result = last.message.events.iter().find_map(|event| match event {
        Event::Completed { result, .. } => Some(result.clone()),
        _ => None,
    });
    assert_eq!(result.unwrap(), whole);
    assert_eq!(last.state().totals.crashes, 0);
    let fetched = lab.path("weights.npy");
    let path = fetched.display().to_string();
    lab.fiec(&["output", "t", "weights.npy", "-o", &path])
        .await
        .expect(0);
    let words = "import hashlib, numpy, sys; \
                 print(hashlib.sha256(numpy.load(sys.argv[1]).tobytes()).hexdigest())";
    let (digest, _) = success(python.command(&["-c", words, &path]).output().unwrap());
    assert_eq!(whole["weights_sha256"], digest.trim());
    lab.end().await;
}

fn total(report: &Report) -> String {
    let Report::Completed { result, .. } = report else {
        panic!("{report:?} is no completion");
    };
    result["total"].as_str().unwrap().to_owned()
}

#[test]
fn a_program_in_python_speaks_the_frames_of_the_rust_kit() {
    let params = json!({"steps": 24, "output": 1});
    let every_fourth: CommitPolicy = serde_json::from_value(json!({"every": 4})).unwrap();
    let program = Program::start();
    program.order(
        &Order::Prepare {
            program: "sums@1".to_owned(),
            params: params.clone(),
            package: None,
            device: None,
        },
        &[],
    );
    assert_eq!(program.next().0, Report::Prepared { error: None });
    program.run(&params, every_fourth, None);
    let whole = program.finish();
    let (last, outputs) = whole.last().unwrap();
    let mut states = BTreeMap::new();
    for part in &whole {
        if matches!(part.0, Report::Boundary(_)) {
            let (report, state) = boundary(part);
            assert_eq!((report.reason, report.of), (Reason::Commit, Some(24)));
            assert_eq!((report.digest, report.outputs[0].digest), (None, None));
            assert!(report.note.is_some());
            states.insert(report.index, Digest::of(state));
        }
    }
    assert_eq!(
        states.keys().copied().collect::<Vec<_>>(),
        [4, 8, 12, 16, 20, 24]
    );
    assert!(outputs.is_empty());

    // Moved at certain boundaries, to a fresh process each time.
    let mut from: Option<(BoundaryIndex, Vec<u8>)> = None;
    for at in [8, 12, 20] {
        let program = Program::start();
        let place = from.as_ref().map(|(index, state)| (*index, &state[..]));
        program.run(
            &json!({"steps": 24, "sleep": 0.1}),
            CommitPolicy::Auto,
            place,
        );
        let wanted = Yield {
            cause: Some("a test".to_owned()),
            deadline_ms: Some(10_000),
            at: Some(at),
        };
        program.order(&Order::Yield(wanted), &[]);
        let parts = program.finish();
        let (report, state) = boundary(parts.last().unwrap());
        assert_eq!((report.index, report.reason), (at, Reason::Yield));
        assert_eq!(
            Digest::of(state),
            states[&at],
            "equal states have equal bytes"
        );
        from = Some((at, state.to_vec()));
    }
    let (index, state) = from.unwrap();
    let program = Program::start();
    program.run(&params, CommitPolicy::Auto, Some((index, &state)));
    let moved = program.finish();
    assert_eq!(total(&moved.last().unwrap().0), total(last));
}

#[test]
fn orders_of_the_rust_kit_are_understood_in_python() {
    let program = Program::start();
    let digest: Digest = "ab".repeat(32).parse().unwrap();
    let none = "cd".repeat(32).parse().unwrap();
    program.run(&json!({"mode": "fetch"}), CommitPolicy::Auto, None);
    assert!(matches!(program.next().0, Report::Began { .. }));
    assert_eq!(program.next().0, Report::Fetch { digest, bytes: 5 });
    program.order(&Order::Stretch { interval_ms: 5 }, &[]);
    let data = |digest, error, permanent| Order::Data {
        digest,
        error,
        permanent,
    };
    program.order(&data(digest, None, false), b"12345");
    let asked = program.next().0;
    assert_eq!(
        asked,
        Report::Fetch {
            digest: none,
            bytes: 0
        }
    );
    program.order(&data(none, Some("no such object".to_owned()), true), &[]);
    let (failed, _) = program.next();
    let Report::Failed {
        permanent, reason, ..
    } = failed
    else {
        panic!("{failed:?}");
    };
    assert!(permanent && reason.contains("no such object"), "{reason}");

    program.run(
        &json!({"steps": 2_000, "sleep": 0.002}),
        CommitPolicy::Auto,
        None,
    );
    assert!(matches!(program.next().0, Report::Began { .. }));
    let grant = Grant {
        threads: Some(7),
        ..Grant::default()
    };
    program.order(&Order::Reconfigure { grant }, &[]);
    let all = program.finish();
    let (Report::Completed { result, .. }, _) = all.last().unwrap() else {
        panic!("{all:?}");
    };
    assert_eq!(
        (&result["grants"], &result["threads"]),
        (&json!([7]), &json!(7))
    );

    program.run(
        &json!({"steps": 1_000_000, "sleep": 0.002}),
        CommitPolicy::Auto,
        None,
    );
    assert!(matches!(program.next().0, Report::Began { .. }));
    program.order(&Order::Cancel, &[]);
    assert_eq!(program.finish().last().unwrap().0, Report::Cancelled);
}

#[test]
fn a_program_in_python_looks_around_and_asks_whatever_it_speaks() {
    let folder = tempfile::tempdir().unwrap();
    let lines = Program::over_lines(folder.path(), &sums());
    for program in [Program::start(), lines] {
        program.run(&json!({"mode": "surroundings"}), CommitPolicy::Auto, None);
        let around = json!({"node": "n1", "offers": {"at": "2026-05-01T12:00:00.000001Z", "nodes":
            [{"node": "n2", "free_slots": 3, "slots": 4, "cores": 8}]}});
        let around = serde_json::from_value::<Box<_>>(around).unwrap();
        let nothing = json!({"node": "n1", "unknown": "nobody answers"});
        let nothing = serde_json::from_value::<Box<_>>(nothing).unwrap();
        for told in [around, nothing] {
            program.until(&Report::Surroundings);
            program.order(&Order::Surroundings(told), &[]);
        }
        let grant = Grant {
            threads: Some(3),
            ..Grant::default()
        };
        program.until(&Report::Ask(GrantChange::threads(3)));
        program.order(&Order::Asked(Asked::Granted { grant }), &[]);
        let more = GrantChange {
            cpus: vec![0, 1],
            memory_bytes: Some(5),
            ..GrantChange::default()
        };
        program.until(&Report::Ask(more));
        let reason = "no".to_owned();
        program.order(&Order::Asked(Asked::Refused { reason }), &[]);
        let all = program.finish();
        let (Report::Completed { result, .. }, _) = all.last().unwrap() else {
            panic!("{all:?}");
        };
        let seen = json!([["n1", 3, null, null], ["n1", null, null, "nobody answers"]]);
        let asked = json!([["granted", 3], ["refused", null]]);
        assert_eq!(*result, json!({"around": seen, "asked": asked}));

        program.run(&json!({"mode": "reserve"}), CommitPolicy::Auto, None);
        program.until(&Report::Reserve(Reserve::memory(8 << 30)));
        let grant = Grant {
            memory_bytes: Some(8 << 30),
            ..Grant::default()
        };
        program.order(&Order::Reserved(Reserved::Granted { grant }), &[]);
        program.until(&Report::Reserve(Reserve::device_memory(1)));
        let reason = "not here".to_owned();
        program.order(&Order::Reserved(Reserved::Moves { reason }), &[]);
        let all = program.finish();
        let (Report::Completed { result, .. }, _) = all.last().unwrap() else {
            panic!("{all:?}");
        };
        let answers = json!([["granted", true, null], ["moves", false, "not here"]]);
        assert_eq!(*result, json!({"answers": answers, "memory": 8u64 << 30}));
    }
}

/// Adds up numbers, for some seconds.
const ADDS: &str = "import time
import fiec

def main(run):
    state = run.state(total=0)
    for step in run.steps(until=40):
        time.sleep(0.05)
        state.total += step * step
    return {'total': state.total}

fiec.main(main)
";

#[tokio::test]
async fn a_program_is_verified_in_parts_while_it_runs_whatever_it_speaks() {
    let mut options = workers(3);
    options
        .worker_args
        .extend(args(&["--allow-program", "*@1"]));
    let lab = Lab::start(options).await;
    for protocol in ["frames", "json_lines"] {
        let folder = tempfile::tempdir().unwrap();
        let adds = lab.file("adds.py", ADDS);
        let entry = ["python3", "-B", "adds.py"];
        package(folder.path(), &adds, &entry, protocol, &[]);
        let program = format!("adds-{}@1", protocol.replace('_', "-"));
        let path = folder.path().display().to_string();
        lab.fiec(&["program", "push", &program, &path])
            .await
            .expect(0);
        let line = json!({"id": protocol, "program": program, "verify": "all",
            "commit": {"every": 5}});
        let id = lab.publish_json(&line).await;
        let last = lab.journal.ended(id, "completed").await;
        let segments = last.message.events.iter().find_map(|event| match event {
            Event::Verified { segments, .. } => Some(*segments),
            _ => None,
        });
        assert!(segments >= Some(2), "{protocol}: {segments:?}");
        assert_eq!(last.message.state.totals.steps_back, 0, "{protocol}");
    }
    lab.end().await;
}
