//! Programs in Python against the Rust kit's frames, in packages with the kit beside them, and
//! moved between nodes.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod python_support;
mod support;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use fiec_kit::frames::{self, BoundaryReport, Order, Reason, Report, Run, SOCKET_ENV, Yield};
use fiec_schemas::package::Grant;
use fiec_schemas::{BoundaryIndex, ClientId, CommitPolicy, Digest, Event, ExecutionId, Tenant};
use python_support::{Python, copy, root, success};
use serde_json::{Value, json};
use support::{BINARY, Lab, args, audit, workers};

const PATIENCE: Duration = Duration::from_secs(60);

/// A package's folder in a test's own: the program, the kit beside it, and a manifest.
fn package(folder: &Path, program: &Path, entry: &[&str], protocol: &str, outputs: &[&str]) {
    copy(&root().join("workers/python/fiec"), &folder.join("fiec"));
    std::fs::copy(program, folder.join(program.file_name().unwrap())).unwrap();
    let manifest = json!({"entry": entry, "protocol": protocol, "outputs": outputs});
    std::fs::write(folder.join("fiec.json"), manifest.to_string()).unwrap();
}

fn sums() -> PathBuf {
    root().join("workers/python/tests/programs/sums.py")
}

/// Runs `fiec run --local`; gives the result of the undisturbed run.
#[track_caller]
fn run_local(folder: &Path, params: &Value, more: &[&str]) -> Value {
    let inputs = tempfile::tempdir().unwrap();
    let mut command = Command::new(BINARY);
    command
        .args([
            "run",
            "--local",
            "--json",
            "--params",
            &params.to_string(),
            "--data-dir",
        ])
        .arg(inputs.path())
        .arg(folder)
        .args(more)
        .env_remove("PYTHONPATH");
    let (out, _) = success(command.output().unwrap());
    let said: Value = serde_json::from_str(&out).expect(&out);
    said["undisturbed"]["result"].clone()
}

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
    params["pause_ms"] = json!(15);

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
}

/// A Python program at the other end of the Rust kit's frames.
struct Program {
    process: Child,
    socket: UnixStream,
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Program {
    fn start() -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(PATIENCE)).unwrap();
        let script = sums();
        let process = Python::get()
            .command(&["-B", script.to_str().unwrap()])
            // The descriptor that a child has anyway.
            .stdin(OwnedFd::from(theirs))
            .env(SOCKET_ENV, "0")
            .spawn()
            .unwrap();
        let program = Self {
            process,
            socket: ours,
        };
        assert_eq!(program.next().0, Report::Ready);
        program
    }

    fn next(&self) -> (Report, Vec<u8>) {
        frames::read(&self.socket)
            .expect("a frame in time")
            .expect("the program's socket is open")
    }

    fn order(&self, order: &Order, body: &[u8]) {
        frames::write(&self.socket, order, &[body]).unwrap();
    }

    fn run(&self, params: &Value, commit: CommitPolicy, from: Option<(BoundaryIndex, &[u8])>) {
        let tenant = Tenant::new("lab").unwrap();
        let run = Run {
            execution: ExecutionId::from_client(&tenant, &ClientId::new("sums").unwrap()),
            epoch: 1,
            program: "sums@1".to_owned(),
            params: params.clone(),
            commit,
            boundary: from.map(|(index, _)| index),
            lease_ms: 60_000,
            interval_ms: 0,
            package: None,
            grant: Grant {
                threads: Some(2),
                ..Grant::default()
            },
        };
        let state = from.map_or(&[][..], |(_, state)| state);
        self.order(&Order::Run(Box::new(run)), state);
    }

    /// Reports to the end of the run; commits are acknowledged.
    fn finish(&self) -> Vec<(Report, Vec<u8>)> {
        let mut all = Vec::new();
        loop {
            let (report, body) = self.next();
            if let Report::Boundary(boundary) = &report {
                let index = boundary.index;
                self.order(&Order::Committed { index }, &[]);
            }
            let ends = report.ends_run();
            all.push((report, body));
            if ends {
                return all;
            }
        }
    }
}

fn total(report: &Report) -> String {
    let Report::Completed { result, .. } = report else {
        panic!("{report:?} is no completion");
    };
    result["total"].as_str().unwrap().to_owned()
}

fn boundary(of: &(Report, Vec<u8>)) -> (BoundaryReport, &[u8]) {
    let (Report::Boundary(report), body) = of else {
        panic!("{:?} is no boundary", of.0);
    };
    let size = usize::try_from(report.bytes).unwrap();
    let outputs: u64 = report.outputs.iter().map(|o| o.bytes).sum();
    assert_eq!(report.bytes + outputs, body.len() as u64);
    ((**report).clone(), &body[..size])
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
            &json!({"steps": 24, "sleep": 0.01}),
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
    let Report::Failed { permanent, reason } = failed else {
        panic!("{failed:?}");
    };
    assert!(permanent && reason.contains("no such object"), "{reason}");

    program.run(
        &json!({"steps": 400, "sleep": 0.002}),
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
