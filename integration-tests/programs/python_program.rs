//! Programs in Python as packages, and at the other end of the Rust kit's frames.

#![allow(dead_code, reason = "each test file uses its own part of this module")]

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use fiec_kit::foreign::Package;
use fiec_kit::frames::{self, BoundaryReport, Merge, Order, Report, Run, SOCKET_ENV, Shares};
use fiec_kit::{Inputs, child};
use fiec_schemas::package::{Grant, Manifest};
use fiec_schemas::programs::TileRange;
use fiec_schemas::{BoundaryIndex, ClientId, CommitPolicy, ExecutionId, Tenant};
use serde_json::{Value, json};

use crate::stage::BINARY;
use crate::stage::python::{Python, copy, root, success};

const PATIENCE: Duration = Duration::from_secs(60);

/// A package's folder in a test's own: the program, the kit beside it, and a manifest.
pub fn package(folder: &Path, program: &Path, entry: &[&str], protocol: &str, outputs: &[&str]) {
    copy(&root().join("workers/python/fiec"), &folder.join("fiec"));
    std::fs::copy(program, folder.join(program.file_name().unwrap())).unwrap();
    let manifest = json!({"entry": entry, "protocol": protocol, "outputs": outputs});
    std::fs::write(folder.join("fiec.json"), manifest.to_string()).unwrap();
}

pub fn sums() -> PathBuf {
    root().join("workers/python/tests/programs/sums.py")
}

/// Runs `fiec run --local`; gives the result of the undisturbed run.
#[track_caller]
pub fn run_local(folder: &Path, params: &Value, more: &[&str]) -> Value {
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

/// A Python program at the other end of the Rust kit's frames.
pub struct Program {
    /// None where the kit's child has it, and speaks JSON lines with it.
    process: Option<Child>,
    socket: UnixStream,
    package: Option<Package>,
}

impl Drop for Program {
    fn drop(&mut self) {
        // A child of the kit ends with its socket.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        if let Some(process) = &mut self.process {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

impl Program {
    pub fn start() -> Self {
        Self::start_script(&sums())
    }

    pub fn start_script(script: &Path) -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let process = Python::get()
            .command(&["-B", script.to_str().unwrap()])
            // The descriptor that a child has anyway.
            .stdin(OwnedFd::from(theirs))
            .env(SOCKET_ENV, "0")
            .spawn()
            .unwrap();
        Self::ready(Some(process), ours, None)
    }

    /// The same program as a package that speaks JSON lines, behind the Rust kit's child.
    pub fn over_lines(folder: &Path, script: &Path) -> Self {
        let entry = [
            "python3",
            "-B",
            script.file_name().unwrap().to_str().unwrap(),
        ];
        package(folder, script, &entry, "json_lines", &["*"]);
        let (ours, theirs) = UnixStream::pair().unwrap();
        let inputs = Inputs::in_folder(folder);
        std::thread::spawn(move || child::serve(theirs, inputs));
        let manifest = std::fs::read(folder.join("fiec.json")).unwrap();
        let package = Package {
            folder: folder.to_owned(),
            manifest: Manifest::parse(&manifest).unwrap(),
            program: "test@1".to_owned(),
            values: fiec_kit::launch::Values::default(),
        };
        Self::ready(None, ours, Some(package))
    }

    fn ready(process: Option<Child>, socket: UnixStream, package: Option<Package>) -> Self {
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let program = Self {
            process,
            socket,
            package,
        };
        assert_eq!(program.next().0, Report::Ready);
        program
    }

    /// Passes over what comes before a report.
    pub fn until(&self, wanted: &Report) {
        while self.next().0 != *wanted {}
    }

    pub fn next(&self) -> (Report, Vec<u8>) {
        frames::read(&self.socket)
            .expect("a frame in time")
            .expect("the program's socket is open")
    }

    pub fn order(&self, order: &Order, body: &[u8]) {
        frames::write(&self.socket, order, &[body]).unwrap();
    }

    pub fn run(&self, params: &Value, commit: CommitPolicy, from: Option<(BoundaryIndex, &[u8])>) {
        self.run_sharing(params, commit, from, None, None);
    }

    /// The same of a range that is shared; `merge`: a part is taken back first, whose σ this is.
    pub fn run_sharing(
        &self,
        params: &Value,
        commit: CommitPolicy,
        from: Option<(BoundaryIndex, &[u8])>,
        spread: Option<Shares>,
        merge: Option<(TileRange, Option<&[u8]>)>,
    ) {
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
            package: self.package.clone(),
            grant: Grant {
                threads: Some(2),
                ..Grant::default()
            },
            spread,
            merge: merge.map(|(range, part)| Merge {
                from: range.from,
                to: range.to,
                bytes: part.map(|part| part.len() as u64),
            }),
            crashes: 0,
        };
        let state = from.map_or(&[][..], |(_, state)| state);
        let part = merge.and_then(|(_, part)| part).unwrap_or_default();
        self.order(&Order::Run(Box::new(run)), &[state, part].concat());
    }

    /// Reports to the end of the run; commits are acknowledged.
    pub fn finish(&self) -> Vec<(Report, Vec<u8>)> {
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

/// What a boundary's report says, and its σ.
pub fn boundary(of: &(Report, Vec<u8>)) -> (BoundaryReport, &[u8]) {
    let (Report::Boundary(report), body) = of else {
        panic!("{:?} is no boundary", of.0);
    };
    let size = usize::try_from(report.bytes).unwrap();
    let outputs: u64 = report.outputs.iter().map(|o| o.bytes).sum();
    assert_eq!(report.bytes + outputs, body.len() as u64);
    ((**report).clone(), &body[..size])
}
