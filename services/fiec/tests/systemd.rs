//! The units in `services/deploy/systemd`, by systemd's own checker and against the command that
//! they run. Nothing here starts a unit.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use fiec::lab;

const BINARY: &str = env!("CARGO_BIN_EXE_fiec");
/// The path of the command in the units.
const INSTALLED: &str = "/usr/local/bin/fiec";
/// Each unit with its command.
const UNITS: [(&str, &str); 3] = [
    ("fiec-policy.service", "policy"),
    ("fiec-recorder.service", "recorder"),
    ("fiec-worker@.service", "worker"),
];

fn units() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/systemd")
}

fn unit(name: &str) -> String {
    std::fs::read_to_string(units().join(name)).unwrap()
}

/// The values of a key, in order.
fn values<'a>(unit: &'a str, key: &str) -> Vec<&'a str> {
    let lines = unit.lines().filter_map(|line| line.split_once('='));
    lines
        .filter(|(k, _)| *k == key)
        .map(|(_, value)| value)
        .collect()
}

/// Runs `systemd-analyze` on a copy of the unit, with the binary under test in its place. Returns
/// its exit status and all that it printed. None, with a line on stderr, if it is missing.
fn analyze(args: &[&str], name: &str, text: &str) -> Option<(bool, String)> {
    if lab::on_path("systemd-analyze").is_none() {
        // A closed stderr has no reader to inform.
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED: the units are not checked: systemd-analyze is not on PATH"
        );
        return None;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = folder.path().join(name);
    std::fs::write(&file, text.replace(INSTALLED, BINARY)).unwrap();
    let mut command = Command::new("systemd-analyze");
    let output = command.args(args).arg(&file).output().unwrap();
    let printed = [output.stdout, output.stderr].concat();
    Some((
        output.status.success(),
        String::from_utf8_lossy(&printed).into_owned(),
    ))
}

const VERIFY: [&str; 2] = ["verify", "--man=no"];

#[test]
fn systemd_accepts_the_units_and_refuses_a_misspelt_one() {
    for (name, _) in UNITS {
        let Some((is_ok, printed)) = analyze(&VERIFY, name, &unit(name)) else {
            return;
        };
        // Units of the machine may have faults of their own.
        let of_ours: Vec<&str> = printed.lines().filter(|l| l.contains("fiec")).collect();
        assert!(is_ok && of_ours.is_empty(), "{name}: {printed}");

        let misspelt = unit(name).replace("NoNewPrivileges=", "NoNewPrivilegs=");
        let (_, printed) = analyze(&VERIFY, name, &misspelt).unwrap();
        assert!(printed.contains("NoNewPrivilegs"), "{name}: {printed}");
    }
}

#[test]
fn the_units_stay_below_an_exposure_as_systemd_counts_it() {
    for (name, threshold) in [
        ("fiec-policy.service", "20"),
        ("fiec-recorder.service", "20"),
        ("fiec-worker@.service", "50"),
    ] {
        let limit = format!("--threshold={threshold}");
        let args = ["security", "--offline=true", "--no-pager", &limit];
        let Some((is_ok, printed)) = analyze(&args, name, &unit(name)) else {
            return;
        };
        if printed.contains("unrecognized option") {
            // systemd before 250 cannot judge a file.
            return;
        }
        assert!(is_ok, "{name}: {printed}");
    }
}

#[test]
fn each_unit_runs_a_command_with_variables_and_options_that_it_has() {
    for (name, command) in UNITS {
        let text = unit(name);
        let output = Command::new(BINARY)
            .args([command, "--help"])
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        let help = String::from_utf8(output.stdout).unwrap();
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");

        let starts = values(&text, "ExecStart");
        assert_eq!(starts.len(), 1, "{name}");
        let words: Vec<&str> = starts[0].split(' ').collect();
        assert_eq!(words[..2], [INSTALLED, command], "{name}");
        for flag in words.iter().filter(|word| word.starts_with("--")) {
            assert!(help.contains(flag), "{name}: {flag}");
        }
        let set: Vec<&str> = values(&text, "Environment")
            .iter()
            .flat_map(|line| line.split(' '))
            .map(|variable| variable.split_once('=').unwrap().0)
            .collect();
        for variable in set {
            let is_read = ["=", "]"]
                .iter()
                .any(|end| help.contains(&format!("[env: {variable}{end}")));
            let is_expanded = starts[0].contains(&format!("${{{variable}}}"));
            assert!(is_read || is_expanded, "{name}: {variable}");
        }
        let files = values(&text, "EnvironmentFile");
        assert_eq!(files[0], "/etc/fiec/fiec.env", "{name}");
        assert_eq!(values(&text, "Restart"), ["always"], "{name}");
        assert_eq!(values(&text, "RestartPreventExitStatus"), ["2"], "{name}");
        assert_eq!(values(&text, "NoNewPrivileges"), ["yes"], "{name}");
        assert_eq!(values(&text, "ProtectSystem"), ["strict"], "{name}");
    }
}

#[test]
fn the_worker_unit_has_time_to_drain_and_a_cgroup_of_its_own() {
    let text = unit("fiec-worker@.service");
    let variables = values(&text, "Environment").join(" ");
    let drain = variables
        .split(' ')
        .find_map(|variable| variable.strip_prefix("FIEC_DRAIN_SECONDS="))
        .unwrap();
    let (drain, stop): (u32, u32) = (
        drain.parse().unwrap(),
        values(&text, "TimeoutStopSec")[0].parse().unwrap(),
    );
    assert!(stop > drain, "{stop} s to stop, {drain} s to drain");
    // Otherwise systemd sends SIGTERM to the programs, too.
    assert_eq!(values(&text, "KillMode"), ["mixed"]);
    assert_eq!(values(&text, "Delegate"), ["yes"]);
    // Otherwise one program that takes all memory ends the worker.
    assert_eq!(values(&text, "OOMPolicy"), ["continue"]);
    assert!(values(&text, "ProtectControlGroups").is_empty());
}
