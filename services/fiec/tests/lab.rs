//! The real `fiec` starts `fiec-lab`. Here a script that prints its arguments replaces it.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};

/// The binary under test in a folder of its own.
struct Installed {
    folder: tempfile::TempDir,
}

impl Installed {
    fn new() -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let fiec = folder.path().join("fiec");
        std::fs::hard_link(env!("CARGO_BIN_EXE_fiec"), &fiec).unwrap();
        Self { folder }
    }

    fn command(&self) -> Command {
        let mut command = Command::new(self.folder.path().join("fiec"));
        command.env("PATH", "/usr/bin:/bin").stdin(Stdio::null());
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.command().args(args).output().unwrap()
    }
}

fn script(folder: &Path, text: &str) -> PathBuf {
    let path = folder.join("fiec-lab");
    std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn the_lab_gets_the_arguments_as_they_are_and_its_exit_code_is_the_command_s() {
    let fiec = Installed::new();
    script(fiec.folder.path(), "printf '<%s>' \"$@\"; exit 7");
    for args in [
        &["simulate", "a b.json", "--set", "dwell_ms=1", "--set", ""][..],
        &["--json", "--log", "warn", "bench", "policy", "--quick"],
        &["--nats", "nats://x", "up", "--workers", "2"],
        &["bench", "--help"],
        &["replay", "--json", "--", "--version", "-x"],
        &["experiment"],
        &["demo", "--load-cases", "-1"],
        &["pressure", "--share", "0.5"],
        &["burn", "--threads", "1"],
    ] {
        let output = fiec.run(args);
        let expected: String = args.iter().map(|arg| format!("<{arg}>")).collect();
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
        assert_eq!(output.status.code(), Some(7), "{output:?}");
    }
}

#[test]
fn the_lab_takes_the_place_of_the_process_so_that_signals_reach_it() {
    let fiec = Installed::new();
    script(fiec.folder.path(), "echo $$; exec sleep 60");
    let mut command = fiec.command();
    let mut child = command.arg("up").stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    stdout.read_line(&mut line).unwrap();
    assert_eq!(line.trim(), child.id().to_string());
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(Signal::TERM.as_raw()));
}

#[test]
fn the_lab_is_looked_for_beside_the_program_and_then_on_the_path() {
    let fiec = Installed::new();
    let elsewhere = tempfile::tempdir().unwrap();
    script(elsewhere.path(), "echo path");
    let says = || {
        let mut command = fiec.command();
        command.env("PATH", elsewhere.path());
        let output = command.arg("demo").output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(says(), "path\n");
    let beside = script(fiec.folder.path(), "echo beside");
    assert_eq!(says(), "beside\n");
    std::fs::set_permissions(&beside, std::fs::Permissions::from_mode(0o644)).unwrap();
    assert_eq!(says(), "path\n");
}

#[test]
fn without_the_lab_its_commands_are_listed_and_say_how_to_get_it() {
    let fiec = Installed::new();
    let output = fiec.run(&["bench", "policy"]);
    let words = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{words}");
    for wanted in [
        "`fiec bench` is a command of fiec-lab",
        "cargo build --release --package fiec-lab",
    ] {
        assert!(words.contains(wanted), "{words}");
    }

    let output = fiec.run(&["--help"]);
    let help = String::from_utf8_lossy(&output.stdout);
    for listed in [
        "demo",
        "up",
        "bench",
        "experiment",
        "simulate",
        "replay",
        "pressure",
    ] {
        let is_marked = |line: &str| {
            let mut words = line.split_whitespace();
            words.next() == Some(listed) && words.next() == Some("[fiec-lab]")
        };
        assert!(help.lines().any(is_marked), "{listed}: {help}");
    }
    assert!(!help.contains("burn"), "{help}");

    let output = fiec.run(&["doctor", "--json"]);
    let checks = String::from_utf8_lossy(&output.stdout);
    assert!(checks.contains("\"fiec-lab\""), "{checks}");
}
