//! Wherever a program is cut and resumed, its result has the same bits; alone and in a child.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::num::NonZeroU64;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::JoinHandle;

use fiec_kit::child;
use fiec_kit::frames::{self, BoundaryReport, FrameError, Order, Reason, Report, Run};
use fiec_kit::local::{run_cut, run_local};
use fiec_kit::program::Inputs;
use fiec_schemas::programs::{CG, SYNTHETIC};
use fiec_schemas::{CommitPolicy, Digest, ExecutionId};
use serde_json::{Value, json};

fn programs() -> [(&'static str, Value); 4] {
    let matrix = json!({ "poisson2d": { "n": 12 } });
    [
        (SYNTHETIC, json!({ "capsules": 9, "state_bytes": 1000 })),
        (SYNTHETIC, json!({ "capsules": 0 })),
        (
            CG,
            json!({ "matrix": matrix, "iterations_per_capsule": 4, "load_cases": 3, "seed": 5 }),
        ),
        (
            CG,
            json!({ "matrix": matrix, "iterations_per_capsule": 7, "threads": 2 }),
        ),
    ]
}

struct Child {
    socket: UnixStream,
    thread: Option<JoinHandle<Result<(), FrameError>>>,
}

impl Child {
    fn start() -> Self {
        let (socket, theirs) = UnixStream::pair().unwrap();
        let thread = std::thread::spawn(move || child::serve(theirs, Inputs::anywhere()));
        let child = Self {
            socket,
            thread: Some(thread),
        };
        assert_eq!(child.hear().0, Report::Ready);
        child
    }

    fn send(&self, order: &Order, body: &[u8]) {
        frames::write(&self.socket, order, &[body]).unwrap();
    }

    fn hear(&self) -> (Report, Vec<u8>) {
        frames::read(&self.socket)
            .unwrap()
            .expect("the child is there")
    }

    fn run(&self, program: &str, params: &Value, from: Option<(u64, &[u8])>, commit: CommitPolicy) {
        let run = Run {
            execution: ExecutionId(uuid()),
            epoch: 1,
            program: program.to_owned(),
            params: params.clone(),
            commit,
            boundary: from.map(|(index, _)| index),
            lease_ms: 60_000,
            interval_ms: 0,
            package: None,
            grant: fiec_schemas::package::Grant::default(),
            spread: None,
            merge: None,
            crashes: 1,
        };
        self.send(
            &Order::Run(Box::new(run)),
            from.map_or(&[], |(_, state)| state),
        );
    }

    /// The next boundary or the end; acknowledges commits.
    fn next(&self) -> Next {
        loop {
            match self.hear() {
                (Report::Boundary(report), body) => {
                    if report.reason == Reason::Commit {
                        self.send(
                            &Order::Committed {
                                index: report.index,
                            },
                            &[],
                        );
                    }
                    return Next::Boundary(*report, body);
                }
                (report, body) if report.ends_run() => return Next::End(report, body),
                _ => {}
            }
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.socket.shutdown(std::net::Shutdown::Both).unwrap();
        let _ = self.thread.take().unwrap().join().unwrap();
    }
}

enum Next {
    Boundary(BoundaryReport, Vec<u8>),
    End(Report, Vec<u8>),
}

fn uuid() -> uuid::Uuid {
    uuid::Uuid::now_v7()
}

fn every(k: u64) -> CommitPolicy {
    CommitPolicy::Every(NonZeroU64::new(k).unwrap())
}

#[test]
fn an_execution_that_has_crashed_as_often_as_it_is_to_goes_on() {
    let params = json!({ "capsules": 3, "crash_at": 1, "crash_attempts": 1 });
    let child = Child::start();
    child.run(SYNTHETIC, &params, None, every(9));
    let Next::End(Report::Completed { result, .. }, _) = child.next() else {
        panic!("it has not completed")
    };
    let whole = run_local(SYNTHETIC, &json!({ "capsules": 3 })).unwrap();
    assert_eq!(result, whole.result);
}

#[test]
fn a_run_that_is_cut_at_every_boundary_gives_the_undisturbed_digest() {
    for (program, params) in programs() {
        let whole = run_local(program, &params).unwrap();
        assert!(whole.digest.is_some());
        for every in [1, 2, 3] {
            let cut =
                run_cut(program, &params, &mut Inputs::default(), |i| i % every == 0).unwrap();
            assert_eq!(
                (&cut.result, cut.capsules),
                (&whole.result, whole.capsules),
                "{program} {params}"
            );
            assert_eq!(cut.outputs, whole.outputs);
        }
    }
}

#[test]
fn every_committed_boundary_resumes_in_another_child_to_the_same_end() {
    for (program, params) in programs() {
        let whole = run_local(program, &params).unwrap();
        let child = Child::start();
        child.run(program, &params, None, every(1));
        let mut boundaries = Vec::new();
        while let Next::Boundary(report, body) = child.next() {
            assert_eq!(report.digest, Some(Digest::of(&body)));
            boundaries.push((report.index, body));
        }
        assert_eq!(boundaries.len() as u64, whole.capsules - 1);
        // One child serves them all, as a warm one does.
        let other = Child::start();
        for (index, state) in &boundaries {
            other.run(program, &params, Some((*index, state)), every(100));
            let Next::End(
                Report::Completed {
                    result, capsules, ..
                },
                _,
            ) = other.next()
            else {
                panic!("{program} from boundary {index} did not complete")
            };
            assert_eq!((result, capsules), (whole.result.clone(), whole.capsules));
        }
    }
}

#[test]
fn a_yield_ends_the_run_at_a_boundary_from_which_it_goes_on() {
    let params = json!({ "capsules": 400, "state_bytes": 300_000 });
    let whole = run_local(SYNTHETIC, &params).unwrap();
    let child = Child::start();
    // Its bits do not depend on how long a capsule takes.
    let slow = json!({ "capsules": 400, "rest_us": 10_000, "state_bytes": 300_000 });
    child.run(SYNTHETIC, &slow, None, CommitPolicy::Auto);
    assert!(matches!(child.hear().0, Report::Began { .. }));
    child.send(&Order::Yield(frames::Yield::default()), &[]);
    let Next::Boundary(report, state) = child.next() else {
        panic!("no boundary")
    };
    assert_eq!(
        (report.reason, report.digest),
        (Reason::Yield, Some(Digest::of(&state)))
    );
    assert!(report.index < 400);
    child.run(
        SYNTHETIC,
        &params,
        Some((report.index, &state)),
        CommitPolicy::Auto,
    );
    let Next::End(Report::Completed { result, .. }, _) = child.next() else {
        panic!("not completed")
    };
    assert_eq!(result, whole.result);
}

#[test]
fn a_cancel_ends_the_run_without_a_commit_and_the_child_serves_on() {
    let child = Child::start();
    child.run(
        SYNTHETIC,
        &json!({ "capsules": 1_000_000, "rest_us": 100 }),
        None,
        every(1_000_000),
    );
    assert!(matches!(child.hear().0, Report::Began { .. }));
    child.send(&Order::Cancel, &[]);
    assert!(matches!(child.next(), Next::End(Report::Cancelled, _)));
    child.run(SYNTHETIC, &json!({ "capsules": 1 }), None, every(1));
    assert!(matches!(
        child.next(),
        Next::End(Report::Completed { .. }, _)
    ));
}

#[test]
fn commits_wait_when_nobody_acknowledges_them() {
    let child = Child::start();
    child.run(SYNTHETIC, &json!({ "capsules": 10 }), None, every(1));
    let mut unacknowledged = 0;
    while unacknowledged < fiec_kit::commit::WINDOW {
        unacknowledged += usize::from(matches!(child.hear().0, Report::Boundary(_)));
    }
    child
        .socket
        .set_read_timeout(Some(std::time::Duration::from_millis(300)))
        .unwrap();
    let more = frames::read::<Report>(&child.socket);
    assert!(more.is_err(), "one more than may wait: {more:?}");
}

#[test]
fn bad_input_is_a_permanent_failure_that_names_file_line_and_rule() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bad.mtx");
    std::fs::write(
        &path,
        "%%MatrixMarket matrix coordinate real symmetric\n2 2 2\n1 1 4\n9 1 1\n",
    )
    .unwrap();
    let child = Child::start();
    for (params, words) in [
        (
            json!({ "matrix": { "file": path } }),
            &["bad.mtx:4", "outside"][..],
        ),
        (
            json!({ "matrix": { "file": Path::new("/nowhere.mtx") } }),
            &["/nowhere.mtx", "cannot be read"],
        ),
        (
            json!({ "matrix": { "poisson2d": { "n": 20 } }, "max_iterations": 3 }),
            &["max_iterations"],
        ),
        (
            json!({ "matrix": { "poisson2d": { "n": 20 } }, "colour": 1 }),
            &["colour"],
        ),
    ] {
        child.run(CG, &params, None, every(1));
        loop {
            match child.next() {
                Next::Boundary(..) => {}
                Next::End(
                    Report::Failed {
                        permanent, reason, ..
                    },
                    _,
                ) => {
                    assert!(
                        permanent && words.iter().all(|w| reason.contains(w)),
                        "{reason}"
                    );
                    break;
                }
                Next::End(report, _) => panic!("{report:?}"),
            }
        }
    }
    child.run("nope@1", &json!({}), None, every(1));
    assert!(matches!(
        child.next(),
        Next::End(
            Report::Failed {
                permanent: true,
                ..
            },
            _
        )
    ));
}

#[test]
fn a_prepared_matrix_is_read_again_when_its_file_has_changed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.mtx");
    let params = json!({ "matrix": { "file": path } });
    let child = Child::start();
    for (size, text) in [(1, "1 1 1\n1 1 4\n"), (2, "2 2 2\n1 1 4\n2 2 5\n")] {
        std::fs::write(
            &path,
            format!("%%MatrixMarket matrix coordinate real symmetric\n{text}"),
        )
        .unwrap();
        child.send(
            &Order::Prepare {
                program: CG.to_owned(),
                params: params.clone(),
                package: None,
                device: None,
            },
            &[],
        );
        assert_eq!(child.hear().0, Report::Prepared { error: None });
        child.run(CG, &params, None, every(100));
        let Next::End(
            Report::Completed {
                result, outputs, ..
            },
            body,
        ) = child.next()
        else {
            panic!()
        };
        assert_eq!(result["n"], json!(size));
        assert_eq!(
            (outputs[0].name.as_str(), outputs[0].digest),
            ("solution", Some(Digest::of(&body)))
        );
        assert_eq!(
            (&body[..6], (body.len() - 8 * size) % 64),
            (&b"\x93NUMPY"[..], 0)
        );
    }
}

#[test]
fn long_capsules_do_not_make_auto_commits_rarer() {
    // Its acknowledgement waits for the end of a capsule: that is not what the commit took.
    let child = Child::start();
    let params = json!({ "capsules": 1_000, "rest_us": 100_000 });
    child.run(SYNTHETIC, &params, None, CommitPolicy::Auto);
    let mut indices: Vec<u64> = Vec::new();
    // One that was really late makes the next rare.
    let near = |all: &[u64]| all.windows(2).any(|two| two[1] - two[0] < 50);
    while indices.len() < 4 && !near(&indices) {
        match child.next() {
            Next::Boundary(report, _) => indices.push(report.index),
            Next::End(report, _) => panic!("{report:?}"),
        }
    }
    assert!(near(&indices), "{indices:?} of 100 ms each");
}

#[test]
fn a_resumed_program_begins_before_its_cold_pages_have_come_and_fetches_those_it_touches() {
    // 64 pages, of which a capsule changes 64 bytes of one: 16 capsules a page.
    let params = json!({ "capsules": 40, "state_bytes": 65_536 + 24, "page_bytes": 1024 });
    let whole = run_local(SYNTHETIC, &params).unwrap();
    let first = Child::start();
    first.run(SYNTHETIC, &params, None, every(10));
    let Next::Boundary(report, body) = first.next() else {
        panic!("it ended before a commit");
    };
    let (state, mut rest) = body.split_at(report.bytes as usize);
    assert!(state.len() < 64 * 32 + 100, "σ has {} bytes", state.len());
    let mut stored = std::collections::HashMap::new();
    for output in &report.outputs {
        let (bytes, behind) = rest.split_at(output.bytes as usize);
        stored.insert(output.digest.unwrap(), bytes.to_vec());
        rest = behind;
    }
    assert_eq!(stored.len(), 64, "the first commit stores every page");

    let second = Child::start();
    let from = Some((report.index, state));
    second.run(SYNTHETIC, &params, from, every(1_000));
    // Its first capsule has begun, and nothing has been asked for, let alone come.
    assert!(matches!(second.hear().0, Report::Began { .. }));
    let mut fetched = Vec::new();
    let result = loop {
        match second.hear().0 {
            Report::Fetch { digest, bytes } => {
                assert_eq!(bytes, 1024);
                fetched.push(digest);
                let order = Order::Data {
                    digest,
                    error: None,
                    permanent: false,
                };
                second.send(&order, &stored[&digest]);
            }
            Report::Completed { result, .. } => break result,
            Report::Failed { reason, .. } => panic!("{reason}"),
            _ => {}
        }
    };
    assert_eq!(result, whole.result);
    assert_eq!(fetched.len(), 3, "pages 0, 1 and 2 of 64: {fetched:?}");
}
