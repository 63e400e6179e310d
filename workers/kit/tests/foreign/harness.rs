//! A package made of a few files, and a child that runs it, driven as an agent drives it.

use std::num::NonZeroU64;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Duration;

use fiec_kit::child;
use fiec_kit::foreign::Package;
use fiec_kit::frames::{
    self, BoundaryReport, FrameError, Merge, Order, Reason, Report, Run, Shares, Yield,
};
use fiec_kit::launch::Values;
use fiec_kit::program::Inputs;
use fiec_schemas::package::{Grant, MANIFEST_FILE, Manifest};
use fiec_schemas::{CommitPolicy, ExecutionId, Fault};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Nothing here takes so long unless it hangs.
const PATIENCE: Duration = Duration::from_secs(280);

/// A package in a temporary folder.
pub struct Made {
    pub folder: TempDir,
    pub package: Package,
}

/// A package with this manifest and these files; all are executable.
pub fn package(manifest: &Value, files: &[(&str, &str)]) -> Made {
    let folder = tempfile::tempdir().unwrap();
    let text = manifest.to_string();
    std::fs::write(folder.path().join(MANIFEST_FILE), text).unwrap();
    for (name, text) in files {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let package = Package {
        folder: folder.path().to_owned(),
        manifest: Manifest::parse(manifest.to_string().as_bytes()).unwrap(),
        program: "test@1".to_owned(),
        values: Values::default(),
    };
    Made { folder, package }
}

/// One that keeps its state in a folder: a shell script. `more` goes into the manifest.
pub fn state_dir(script: &str, more: Value) -> Made {
    let mut manifest = json!({ "entry": ["./run.sh"], "protocol": "state_dir" });
    extend(&mut manifest, more);
    package(&manifest, &[("run.sh", &format!("#!/bin/sh\n{script}"))])
}

/// What a Python program of JSON lines begins with: `hear()` and `say(**fields)`.
const PYTHON: &str = r#"
import base64, json, os, socket, sys, time
link = socket.socket(socket.AF_UNIX)
link.connect(os.environ["FIEC_SOCKET"])
lines = link.makefile("rwb")
def hear():
    line = lines.readline()
    if not line:
        sys.exit(9)
    return json.loads(line)
def say(**fields):
    lines.write(json.dumps(fields).encode() + b"\n")
    lines.flush()
def pack(value):
    return base64.b64encode(json.dumps(value).encode()).decode()
def unpack(text):
    return json.loads(base64.b64decode(text))
"#;

/// One that speaks JSON lines: a Python program.
pub fn json_lines(script: &str, more: Value) -> Made {
    let mut manifest = json!({ "entry": ["python3", "run.py"], "protocol": "json_lines" });
    extend(&mut manifest, more);
    package(&manifest, &[("run.py", &format!("{PYTHON}{script}"))])
}

fn extend(manifest: &mut Value, more: Value) {
    let fields = manifest.as_object_mut().unwrap();
    fields.extend(more.as_object().unwrap().clone());
}

/// A child and the agent's end of its socket.
pub struct Child {
    pub socket: UnixStream,
    thread: Option<JoinHandle<Result<(), FrameError>>>,
}

/// A boundary or an end.
#[derive(Debug)]
pub enum Next {
    Boundary(BoundaryReport, Vec<u8>),
    End(Report, Vec<u8>),
}

pub fn every(k: u64) -> CommitPolicy {
    CommitPolicy::Every(NonZeroU64::new(k).unwrap())
}

impl Child {
    pub fn start() -> Self {
        Self::start_in(Path::new(""))
    }

    pub fn start_in(data: &Path) -> Self {
        let (socket, theirs) = UnixStream::pair().unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let inputs = Inputs::in_folder(data);
        let thread = std::thread::spawn(move || child::serve(theirs, inputs));
        let child = Self {
            socket,
            thread: Some(thread),
        };
        assert_eq!(child.hear().0, Report::Ready);
        child
    }

    pub fn send(&self, order: &Order) {
        frames::write(&self.socket, order, &[]).unwrap();
    }

    pub fn hear(&self) -> (Report, Vec<u8>) {
        frames::read(&self.socket)
            .expect("a frame in time")
            .expect("the child is there")
    }

    pub fn run(&self, package: &Package, params: &Value, from: Option<(u64, &[u8])>) {
        self.run_with(package, params, from, every(1), Grant::default());
    }

    pub fn run_with(
        &self,
        package: &Package,
        params: &Value,
        from: Option<(u64, &[u8])>,
        commit: CommitPolicy,
        grant: Grant,
    ) {
        self.run_shared(package, params, from, (commit, grant), (None, None));
    }

    /// With a range that is shared, and a part that is to be taken back with its σ.
    pub fn run_shared(
        &self,
        package: &Package,
        params: &Value,
        from: Option<(u64, &[u8])>,
        (commit, grant): (CommitPolicy, Grant),
        (spread, merge): (Option<Shares>, Option<(Merge, &[u8])>),
    ) {
        let run = Run {
            execution: ExecutionId(uuid::Uuid::now_v7()),
            epoch: 1,
            program: package.program.clone(),
            params: params.clone(),
            commit,
            boundary: from.map(|(index, _)| index),
            lease_ms: 60_000,
            interval_ms: 0,
            package: Some(package.clone()),
            grant,
            spread,
            merge: merge.map(|(merge, _)| merge),
            crashes: 0,
        };
        let state = from.map_or(&[][..], |(_, state)| state);
        let part = merge.map_or(&[][..], |(_, state)| state);
        frames::write(&self.socket, &Order::Run(Box::new(run)), &[state, part]).unwrap();
    }

    pub fn order_yield(&self, deadline_ms: Option<u32>) {
        self.send(&Order::Yield(Yield {
            cause: Some("memory pressure".to_owned()),
            deadline_ms,
            at: None,
        }));
    }

    /// The next boundary or the end; acknowledges commits.
    pub fn next(&self) -> Next {
        loop {
            match self.hear() {
                (Report::Boundary(report), body) => {
                    if report.reason == Reason::Commit {
                        self.send(&Order::Committed {
                            index: report.index,
                        });
                    }
                    return Next::Boundary(*report, body);
                }
                (report, body) if report.ends_run() => return Next::End(report, body),
                _ => {}
            }
        }
    }

    /// Everything up to the end.
    pub fn all(&self) -> Outcome {
        let mut boundaries = Vec::new();
        loop {
            match self.next() {
                Next::Boundary(report, body) => {
                    let yielded = report.reason == Reason::Yield;
                    boundaries.push((report, body));
                    if yielded {
                        return Outcome {
                            boundaries,
                            end: None,
                        };
                    }
                }
                Next::End(report, body) => {
                    return Outcome {
                        boundaries,
                        end: Some((report, body)),
                    };
                }
            }
        }
    }

    /// Runs to the end.
    pub fn outcome(package: &Package, params: &Value, from: Option<(u64, &[u8])>) -> Outcome {
        let child = Self::start();
        child.run(package, params, from);
        child.all()
    }
}

/// All that a run reported.
#[derive(Debug)]
pub struct Outcome {
    pub boundaries: Vec<(BoundaryReport, Vec<u8>)>,
    pub end: Option<(Report, Vec<u8>)>,
}

impl Outcome {
    pub fn state(&self, at: usize) -> &[u8] {
        let (report, body) = &self.boundaries[at];
        &body[..report.bytes as usize]
    }

    pub fn result(&self) -> (&Value, u64) {
        match &self.end {
            Some((
                Report::Completed {
                    result, capsules, ..
                },
                _,
            )) => (result, *capsules),
            end => panic!("not completed: {end:?}"),
        }
    }

    /// The fault, if its adaptor knows it.
    pub fn fault(&self) -> Option<&Fault> {
        match &self.end {
            Some((Report::Failed { fault, .. }, _)) => fault.as_deref(),
            end => panic!("not failed: {end:?}"),
        }
    }

    pub fn failure(&self) -> (bool, &str) {
        match &self.end {
            Some((
                Report::Failed {
                    permanent, reason, ..
                },
                _,
            )) => (*permanent, reason),
            end => panic!("not failed: {end:?}"),
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.socket.shutdown(std::net::Shutdown::Both).unwrap();
        let _ = self.thread.take().unwrap().join().unwrap();
    }
}

/// Whether a process runs (and is no zombie).
pub fn runs(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit(')').next().unwrap().trim().starts_with('Z'))
}

/// Waits for a condition.
pub fn until(what: &str, mut met: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !met() {
        assert!(start.elapsed() < PATIENCE, "{what} did not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}
