//! A run that waits at a boundary goes on where it is, with the same bits; and a capsule that asks
//! for more is told what it gets.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::num::NonZeroU64;
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;
use std::time::Duration;

use fiec_kit::child;
use fiec_kit::frames::{self, FrameError, Order, Park, Reason, Report, Run};
use fiec_kit::local::run_local;
use fiec_kit::program::Inputs;
use fiec_kit::{Reserve, Reserved};
use fiec_schemas::package::Grant;
use fiec_schemas::programs::{CG, SYNTHETIC};
use fiec_schemas::{CommitPolicy, ExecutionId};
use serde_json::{Value, json};

struct Child {
    socket: UnixStream,
    thread: Option<JoinHandle<Result<(), FrameError>>>,
}

impl Child {
    fn start() -> Self {
        let (socket, theirs) = UnixStream::pair().unwrap();
        let thread = std::thread::spawn(move || child::serve(theirs, Inputs::default()));
        let child = Self {
            socket,
            thread: Some(thread),
        };
        assert_eq!(child.hear().0, Report::Ready);
        child
    }

    fn send(&self, order: &Order) {
        frames::write(&self.socket, order, &[]).unwrap();
    }

    fn hear(&self) -> (Report, Vec<u8>) {
        let heard = frames::read(&self.socket).unwrap();
        heard.expect("the child is there")
    }

    fn run(&self, program: &str, params: &Value, every: u64) {
        self.send(&Order::Run(Box::new(Run {
            execution: ExecutionId(uuid::Uuid::now_v7()),
            epoch: 1,
            program: program.to_owned(),
            params: params.clone(),
            commit: CommitPolicy::Every(NonZeroU64::new(every).unwrap()),
            boundary: None,
            lease_ms: 60_000,
            interval_ms: 0,
            package: None,
            grant: Grant::default(),
            spread: None,
            merge: None,
            crashes: 0,
        })));
    }

    /// Reports until this one; commits are acknowledged.
    fn until(&self, is: impl Fn(&Report) -> bool) -> Report {
        loop {
            let (report, _) = self.hear();
            if let Report::Boundary(boundary) = &report {
                let index = boundary.index;
                self.send(&Order::Committed { index });
            }
            if is(&report) {
                return report;
            }
            assert!(!report.ends_run(), "{report:?}");
        }
    }

    fn is_silent(&self) -> bool {
        let quiet = Some(Duration::from_millis(300));
        self.socket.set_read_timeout(quiet).unwrap();
        let heard = frames::read::<Report>(&self.socket);
        self.socket.set_read_timeout(None).unwrap();
        heard.is_err()
    }

    /// Has it parked.
    fn park(&self, grant: Option<Grant>) {
        let cause = Some("others go first".to_owned());
        self.send(&Order::Park(Park { cause, grant }));
        self.until(|r| matches!(r, Report::Boundary(b) if b.reason == Reason::Park));
        self.until(|r| *r == Report::Aside);
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.socket.shutdown(std::net::Shutdown::Both).unwrap();
        let _ = self.thread.take().unwrap().join().unwrap();
    }
}

fn is_end(report: &Report) -> bool {
    report.ends_run()
}

#[test]
fn a_parked_run_computes_nothing_and_goes_on_where_it_is_with_the_same_bits() {
    let work = json!({ "capsules": 3_000, "rest_us": 1_000, "state_bytes": 5_000 });
    let solve = json!({
        "matrix": { "poisson2d": { "n": 30 } }, "iterations_per_capsule": 1, "load_cases": 300,
    });
    for (program, params) in [(SYNTHETIC, work), (CG, solve)] {
        let whole = run_local(program, &params).unwrap();
        let child = Child::start();
        child.run(program, &params, 1_000);
        for grant in [None, Some(Grant::default())] {
            child.park(grant);
            assert!(child.is_silent(), "it computes while it is parked");
            child.send(&Order::Unpark {
                grant: Some(Grant {
                    threads: Some(1),
                    ..Grant::default()
                }),
            });
        }
        let Report::Completed {
            result, capsules, ..
        } = child.until(is_end)
        else {
            panic!("not completed")
        };
        assert_eq!((result, capsules), (whole.result, whole.capsules));
    }
}

#[test]
fn a_parked_run_ends_where_it_stands_and_the_child_serves_on() {
    let child = Child::start();
    for order in [Order::Cancel, Order::Yield(frames::Yield::default())] {
        let params = json!({ "capsules": 1_000_000, "rest_us": 100 });
        child.run(SYNTHETIC, &params, 1_000_000);
        child.park(None);
        child.send(&order);
        assert_eq!(child.until(is_end), Report::Cancelled);
    }
    child.run(SYNTHETIC, &json!({ "capsules": 1 }), 1);
    assert!(matches!(child.until(is_end), Report::Completed { .. }));
}

#[test]
fn an_order_to_go_on_that_comes_before_the_boundary_takes_the_order_to_park_back() {
    let child = Child::start();
    let params = json!({ "capsules": 20, "rest_us": 20_000 });
    child.run(SYNTHETIC, &params, 1_000);
    assert!(matches!(child.hear().0, Report::Began { parks: true, .. }));
    child.send(&Order::Park(Park::default()));
    child.send(&Order::Unpark { grant: None });
    let end = child.until(is_end);
    assert!(matches!(end, Report::Completed { .. }), "{end:?}");
}

#[test]
fn a_capsule_that_asks_for_more_waits_for_the_answer_and_changes_no_bits() {
    let params = json!({ "capsules": 10, "reserve": { "at": 4, "memory_bytes": 4_096 } });
    let whole = run_local(SYNTHETIC, &json!({ "capsules": 10 })).unwrap();
    let answers = [
        Reserved::Granted {
            grant: Grant {
                memory_bytes: Some(4_096),
                ..Grant::default()
            },
        },
        Reserved::Moves {
            reason: "not here".to_owned(),
        },
        Reserved::Refused {
            reason: "nowhere".to_owned(),
        },
    ];
    for answer in answers {
        let child = Child::start();
        child.run(SYNTHETIC, &params, 5);
        let asked = child.until(|r| matches!(r, Report::Reserve(_)));
        assert_eq!(asked, Report::Reserve(Reserve::memory(4_096)));
        assert!(child.is_silent(), "it went on without an answer");
        // Other orders may come first.
        child.send(&Order::Stretch { interval_ms: 1 });
        child.send(&Order::Reserved(answer.clone()));
        let next = child.until(|r| matches!(r, Report::Boundary(_)));
        let Report::Boundary(next) = next else {
            panic!("no boundary")
        };
        let told = serde_json::to_value(&answer).unwrap();
        let word = format!("reserve: {}", told["answer"].as_str().unwrap());
        assert_eq!(next.note.as_deref(), Some(&*word));
        let Report::Completed { result, .. } = child.until(is_end) else {
            panic!("not completed")
        };
        assert_eq!(result, whole.result);
    }
}
