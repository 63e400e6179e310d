//! Programs without any server: `fiec run --local` and `fiec check`, with real processes.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use fiec::local::{self, Event, Session, Subject};
use fiec_schemas::package::Protocol;
use serde_json::{Value, json};

use crate::stage::python::say;

const FIEC: &str = env!("CARGO_BIN_EXE_fiec-lab");

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn fiec(words: &[&str]) -> Output {
    Command::new(FIEC)
        .args(words)
        .current_dir(repository())
        .output()
        .unwrap()
}

/// What a command with `--json` says, and its exit status.
fn said(words: &[&str]) -> (Value, i32) {
    let output = fiec(&[words, &["--json"]].concat());
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    let value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text} {errors}"));
    (value, output.status.code().unwrap())
}

/// A package with one file.
fn package(protocol: &str, file: &str, text: &str, more: Value) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(file);
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut manifest = json!({ "entry": [format!("./{file}")], "protocol": protocol });
    let fields = manifest.as_object_mut().unwrap();
    fields.extend(more.as_object().unwrap().clone());
    std::fs::write(folder.path().join("fiec.json"), manifest.to_string()).unwrap();
    folder
}

fn shell(text: &str, more: Value) -> tempfile::TempDir {
    package("state_dir", "run.sh", &format!("#!/bin/sh\n{text}"), more)
}

const COUNT: &str = r#"
n=0; [ ! -f "$FIEC_STATE_DIR/n" ] || read -r n < "$FIEC_STATE_DIR/n"
n=$((n + 1)); echo $n > "$FIEC_STATE_DIR/n"
"#;

/// A Python program of JSON lines that counts to 4: `state()` and `take(state)` are what it keeps.
fn python(state_and_take: &str) -> tempfile::TempDir {
    let text = format!(
        r#"#!/usr/bin/env python3
import base64, json, os, socket, sys
link = socket.socket(socket.AF_UNIX)
link.connect(os.environ["FIEC_SOCKET"])
lines = link.makefile("rwb")
def hear():
    return json.loads(lines.readline())
def say(**fields):
    lines.write(json.dumps(fields).encode() + b"\n")
    lines.flush()
n, hidden = 0, 0
def capsule(): pass
def outputs(): return []
{state_and_take}
run = hear()
if run["state"]:
    take(json.loads(base64.b64decode(run["state"])))
while n < 4:
    n, hidden = n + 1, hidden + n
    capsule()
    say(**{{"is": "boundary"}})
    while True:
        told = hear()
        if told["is"] == "go":
            break
        if told["is"] != "state":
            sys.exit(0)
        text = json.dumps(state()).encode()
        say(**{{"is": "state", "state": base64.b64encode(text).decode(), "outputs": outputs()}})
say(**{{"is": "completed", "result": {{"n": n, "hidden": hidden}}, "outputs": outputs()}})
"#
    );
    package("json_lines", "run.py", &text, json!({"outputs": ["at-*"]}))
}

fn complete() -> tempfile::TempDir {
    python(
        "def state(): return [n, hidden]\n\
         def take(state):\n    global n, hidden\n    n, hidden = state",
    )
}

fn incomplete() -> tempfile::TempDir {
    python("def state(): return [n]\ndef take(state):\n    global n\n    n = state[0]")
}

#[test]
fn built_in_programs_and_packages_have_the_same_bits_however_they_are_cut() {
    let python = complete();
    let python = python.path().to_str().unwrap();
    let cg =
        r#"{"matrix": {"poisson2d": {"n": 20}}, "iterations_per_capsule": 5, "load_cases": 2}"#;
    for (program, params, every, compared) in [
        (
            "synthetic@1",
            r#"{"capsules": 7, "state_bytes": 300000}"#,
            "2",
            3,
        ),
        ("cg@1", cg, "3", 4),
        (
            "examples/shell-counter",
            r#"{"upto": 6000, "step": 1000}"#,
            "1",
            5,
        ),
        (
            "examples/shell-counter",
            r#"{"upto": 6000, "step": 1000}"#,
            "2",
            2,
        ),
        (python, "{}", "1", 4),
    ] {
        let words = [
            "run",
            "--local",
            program,
            "-p",
            params,
            "--yield-every",
            every,
        ];
        let (value, status) = said(&words);
        assert_eq!((&value["equal"], status), (&json!(true), 0), "{value}");
        let found = value["boundaries_compared"].as_u64().unwrap();
        assert!(found >= compared, "{program}: {found} boundaries");
        assert_eq!(value["undisturbed"]["processes"], json!(1));
        assert_eq!(value["cut"]["processes"].as_u64().unwrap(), found + 1);
    }
}

/// A walk by the Python kit, which speaks both protocols.
const WALK: &str = r#"
import random, fiec

def main(run: fiec.Run):
    state = run.state(rng=random.Random(7), at=0.0, best=[])
    for step in run.steps(until=run.params["steps"]):
        state.at += state.rng.gauss(0, 1)
        state.best.append(state.at)
        run.progress(f"at {state.at:.3f}")
        if step % 3 == 2:
            run.output(f"walk-{step}", "\n".join(map(repr, state.best)))
    return {"at": state.at}

if __name__ == "__main__":
    fiec.main(main)
"#;

#[test]
fn a_program_of_the_python_kit_runs_and_keeps_the_rules_by_frames_and_by_lines() {
    let kit = repository().join("workers/python").canonicalize().unwrap();
    for protocol in ["frames", "json_lines"] {
        let walk = package(
            protocol,
            "walk.py",
            WALK,
            json!({ "entry": ["python3", "-B", "walk.py"], "outputs": ["walk-*"] }),
        );
        let path = walk.path().to_str().unwrap();
        let with_kit = |words: &[&str]| -> (Value, Option<i32>) {
            let output = Command::new(FIEC)
                .args(words)
                .args([path, "-p", r#"{"steps": 7}"#, "--json"])
                .env("PYTHONPATH", &kit)
                .output()
                .unwrap();
            let errors = String::from_utf8_lossy(&output.stderr);
            let value = serde_json::from_slice(&output.stdout)
                .unwrap_or_else(|error| panic!("{protocol}: {error}: {errors}"));
            (value, output.status.code())
        };
        let (value, status) = with_kit(&["run", "--local", "--yield-every", "2"]);
        assert_eq!(
            (&value["equal"], status),
            (&json!(true), Some(0)),
            "{value}"
        );
        assert_eq!(value["cut"]["processes"], json!(4), "{value}");
        assert_eq!(
            value["undisturbed"]["outputs"].as_object().unwrap().len(),
            2
        );
        let (value, status) = with_kit(&["check"]);
        assert_eq!((&value["broken"], status), (&json!({}), Some(0)), "{value}");
        assert_eq!(value["resumed"], json!(7), "{value}");
        // The same with an output that is not declared.
        let manifest = json!({ "entry": ["python3", "-B", "walk.py"], "protocol": protocol });
        std::fs::write(walk.path().join("fiec.json"), manifest.to_string()).unwrap();
        let output = Command::new(FIEC)
            .args(["run", "--local", path, "-p", r#"{"steps": 4}"#])
            .env("PYTHONPATH", &kit)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            text.contains("\"walk-2\"") && text.contains("not declare"),
            "{text}"
        );
        assert_eq!(output.status.code(), Some(1));
    }
}

#[test]
fn the_shell_example_finds_the_primes_and_its_lists_are_outputs() {
    let params = r#"{"upto": 6000, "step": 1000}"#;
    let example = "examples/shell-counter";
    let words = [
        "run",
        "--local",
        example,
        "-p",
        params,
        "--yield-every",
        "2",
    ];
    let (value, _) = said(&words);
    let primes: Vec<u64> = (2..=6000u64)
        .filter(|n| (2..*n).take_while(|d| d * d <= *n).all(|d| n % d != 0))
        .collect();
    let result = &value["cut"]["result"];
    assert_eq!(result["primes"], json!(primes.len()));
    assert_eq!(result["sum"], json!(primes.iter().sum::<u64>()));
    assert_eq!(value["cut"]["outputs"].as_object().unwrap().len(), 6);
    let text = fiec(&words);
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(
        text.contains("equal: σ at 2 boundaries, 6 outputs"),
        "{text}"
    );
}

#[test]
fn a_program_whose_state_is_not_complete_is_not_equal_and_the_place_is_named() {
    let folder = incomplete();
    let path = folder.path().to_str().unwrap();
    let (value, status) = said(&["run", "--local", path, "--yield-every", "2"]);
    assert_eq!((&value["equal"], status), (&json!(false), 1));
    assert_eq!(value["differences"], json!(["result: hidden is 6 and 0"]));
}

#[test]
fn what_is_wrong_is_said_with_a_fitting_exit_status() {
    let failing = shell("echo 'row 7 is empty' >&2; exit 65", json!({}));
    let crashing = shell(
        &format!("{COUNT}\n[ $n = 2 ] && exit 3\nexit 85"),
        json!({}),
    );
    let bad = tempfile::tempdir().unwrap();
    std::fs::write(bad.path().join("fiec.json"), r#"{"entry":[]}"#).unwrap();
    let path = |folder: &tempfile::TempDir| folder.path().to_str().unwrap().to_owned();
    for (words, status, expected) in [
        (vec![path(&failing)], 1, "row 7 is empty"),
        (vec![path(&crashing)], 1, "exit status 3"),
        (vec![path(&bad)], 2, "fiec.json is no manifest"),
        (
            vec!["nothing@1".to_owned()],
            2,
            "neither a path nor a built-in",
        ),
        (vec!["README.md".to_owned()], 2, "--protocol"),
        (
            vec!["synthetic@1".into(), "-p".into(), "{".into()],
            2,
            "not JSON",
        ),
        (vec!["cg@1".into(), "-p".into(), "{}".into()], 2, "matrix"),
    ] {
        let all: Vec<&str> = ["run", "--local"]
            .into_iter()
            .chain(words.iter().map(String::as_str))
            .collect();
        let output = fiec(&all);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(status), "{words:?}: {text}");
        assert!(text.contains(expected), "{words:?}: {text}");
    }
}

#[test]
fn a_single_file_runs_with_its_protocol() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("count.sh");
    let text = format!("#!/bin/sh\n{COUNT}\n[ $n -lt 3 ] && exit 85; echo $n > $FIEC_RESULT");
    std::fs::write(&file, text).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = file.to_str().unwrap();
    let (value, status) = said(&["run", "--local", path, "--protocol", "state_dir"]);
    assert_eq!((&value["undisturbed"]["result"], status), (&json!(3), 0));
}

#[test]
fn an_object_is_found_by_its_digest() {
    let program = shell("cat $FIEC_OBJECTS/* > $FIEC_RESULT", json!({}));
    let file = program.path().join("object");
    std::fs::write(&file, "[1, 2]").unwrap();
    let digest = fiec_schemas::Digest::of(b"[1, 2]");
    let params = json!({ "in": { "object": digest } }).to_string();
    let path = program.path().to_str().unwrap();
    let words = ["run", "--local", path, "-p", &params];
    let (value, _) = said(&[&words[..], &["--object", file.to_str().unwrap()]].concat());
    assert_eq!(value["undisturbed"]["result"], json!([1, 2]));
    let without = fiec(&words);
    let text = String::from_utf8_lossy(&without.stderr).into_owned();
    assert!(text.contains("--object"), "{text}");
}

#[track_caller]
fn check(program: &str, more: &[&str]) -> (Value, i32) {
    said(&[&["check", program], more].concat())
}

#[test]
fn programs_that_keep_the_rules_pass_all_four_invariants() {
    let python = complete();
    let synthetic = r#"{"capsules": 5, "state_bytes": 5000}"#;
    for (program, params, boundaries) in [
        ("synthetic@1", synthetic, 4),
        ("examples/shell-counter", r#"{"upto": 500, "step": 100}"#, 4),
        (python.path().to_str().unwrap(), "{}", 4),
    ] {
        let (value, status) = check(program, &["-p", params]);
        assert_eq!((&value["broken"], status), (&json!({}), 0), "{value}");
        assert_eq!(value["boundaries"], json!(boundaries), "{value}");
        assert_eq!(value["resumed"], json!(boundaries));
    }
}

/// Checks that exactly one invariant is broken; the first finding.
#[track_caller]
fn broken(program: &tempfile::TempDir, invariant: &str) -> (Option<u64>, String) {
    let (value, status) = check(program.path().to_str().unwrap(), &[]);
    assert_eq!(status, 1, "{value}");
    let all = value["broken"].as_object().unwrap();
    assert_eq!(all.keys().collect::<Vec<_>>(), [invariant], "{value}");
    let first = &all[invariant][0];
    (
        first["boundary"].as_u64(),
        first["what"].as_str().unwrap().to_owned(),
    )
}

#[test]
fn a_program_whose_bits_depend_on_its_processors_breaks_determinism_at_the_capsule_that_does() {
    let here = std::thread::available_parallelism().unwrap().get();
    if here == 1 {
        return say("SKIPPED: this machine has one processor\n");
    }
    let program = shell(
        &format!(
            "{COUNT}\n[ $n = 3 ] && grep Cpus_allowed: /proc/self/status > $FIEC_STATE_DIR/cpus
[ $n -ge 4 ] || exit 85"
        ),
        json!({}),
    );
    let (boundary, what) = broken(&program, "determinism");
    assert_eq!(boundary, Some(3), "{what}");
    let words = format!("on one processor other than on {here}: σ differs");
    assert!(what.starts_with(&words), "{what}");
}

#[test]
fn a_program_that_writes_the_time_into_its_state_breaks_determinism() {
    let program = shell(
        &format!(
            "{COUNT}\n[ $n = 2 ] && date +%s%N > $FIEC_STATE_DIR/when\n[ $n -ge 4 ] || exit 85"
        ),
        json!({}),
    );
    let (boundary, what) = broken(&program, "determinism");
    assert_eq!(boundary, Some(2));
    assert!(what.contains("state file \"when\""), "{what}");
}

#[test]
fn a_program_that_keeps_something_in_memory_only_breaks_boundary_completeness() {
    let (boundary, what) = broken(&incomplete(), "boundary_completeness");
    // Its sums are 0, 1, 3, 6: the first that a fresh process cannot know shows at the end.
    assert_eq!(boundary, Some(5));
    assert!(
        what.contains("resumed from boundary 4") && what.contains("hidden is 6 and 0"),
        "{what}"
    );
}

#[test]
fn a_program_that_writes_elsewhere_breaks_isolation() {
    let elsewhere = tempfile::tempdir().unwrap();
    let elsewhere = elsewhere.path().join("log");
    let elsewhere = elsewhere.to_str().unwrap();
    let traced = Command::new("strace")
        .args(["-o", "/dev/null", "true"])
        .output();
    let traced = traced.is_ok_and(|output| output.status.success());
    for (place, words) in [
        ("$HOME/log", "HOME"),
        ("./log", "package's folder"),
        ("$TMPDIR/log", "TMPDIR"),
        (elsewhere, elsewhere),
    ] {
        if place == elsewhere && !traced {
            use std::io::Write as _;
            let text = "SKIPPED: writes elsewhere are seen by strace only, which is not here\n";
            std::io::stderr().write_all(text.as_bytes()).unwrap();
            continue;
        }
        let program = shell(
            &format!("{COUNT}\necho x > {place}\n[ $n -ge 3 ] || exit 85"),
            json!({}),
        );
        let (_, what) = broken(&program, "isolation");
        assert!(
            what.contains(words) && what.contains("log"),
            "{place}: {what}"
        );
    }
}

#[test]
fn a_program_that_makes_an_output_again_breaks_forward_independence() {
    let program = shell(
        &format!("{COUNT}\necho $n > $FIEC_OUTPUTS/latest\n[ $n -ge 4 ] || exit 85"),
        json!({ "outputs": ["latest"] }),
    );
    let (boundary, what) = broken(&program, "forward_independence");
    assert_eq!(boundary, Some(2));
    assert!(what.contains("\"latest\", made at boundary 1"), "{what}");
}

#[test]
fn an_output_that_is_named_only_at_its_own_boundary_breaks_determinism() {
    let program = |outputs: &str| {
        python(&format!(
            r#"
def state(): return [n, hidden]
def take(state):
    global n, hidden
    n, hidden = state
made = []
def capsule():
    if n == 2:
        with open(run["outputs"] + "/at-2", "w") as file:
            file.write("2")
        made.append("at-2")
def outputs():
    {outputs}"#
        ))
    };
    let (boundary, what) = broken(&program("return ['at-2'] if n == 2 else []"), "determinism");
    assert_eq!(boundary, None);
    let words = "without commits before the end: output \"at-2\" is missing. Name an output";
    assert!(what.starts_with(words), "{what}");
    let kept = program("named = list(made); made.clear(); return named");
    let (value, status) = check(kept.path().to_str().unwrap(), &[]);
    assert_eq!((&value["broken"], status), (&json!({}), 0), "{value}");
}

#[test]
fn a_check_says_in_words_what_it_covered() {
    let output = fiec(&[
        "check",
        "synthetic@1",
        "-p",
        r#"{"capsules": 40}"#,
        "--resume-at-most",
        "4",
    ]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("holds   forward independence"), "{text}");
    assert!(text.contains("resumed at 4 of 39 boundaries"), "{text}");
    // One capsule has no boundary at which it could be resumed.
    let output = fiec(&["check", "synthetic@1", "-p", r#"{"capsules": 1}"#]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("holds   determinism"), "{text}");
    assert!(text.contains("not tested  boundary completeness"), "{text}");
}

/// A program of frames that stops at each boundary, whatever it was asked.
const HASTY: &str = r#"#!/usr/bin/env python3
import json, os, socket, struct, sys
link = socket.socket(fileno=int(os.environ["FIEC_SOCKET_FD"])).makefile("rwb")
def hear():
    sizes = link.read(12)
    if len(sizes) < 12:
        sys.exit(0)
    head, body = struct.unpack("<IQ", sizes)
    return json.loads(link.read(head)), link.read(body)
def say(head, body=b""):
    head = json.dumps(head).encode()
    link.write(struct.pack("<IQ", len(head), len(body)) + head + body)
    link.flush()
now = "2026-05-01T12:00:00.000001Z"
say({"is": "ready"})
while True:
    told, state = hear()
    if told["is"] == "prepare":
        say({"is": "prepared"})
    if told["is"] != "run":
        continue
    n = (told["boundary"] or 0) + 1
    say({"is": "began", "at": now, "parks": False})
    if n < 20:
        say({"is": "boundary", "index": n, "bytes": 1, "computed_at": now, "compute_us": 1,
             "outputs": [], "reason": "yield"}, b"s")
    else:
        say({"is": "completed", "result": {"n": n}, "capsules": n, "computing_since": now,
             "computed_until": now, "outputs": []})
"#;

#[test]
fn a_program_that_stops_where_it_was_not_asked_to_is_not_approved() {
    let hasty = package("frames", "hasty.py", HASTY, json!({}));
    let path = hasty.path().to_str().unwrap();
    let output = fiec(&["run", "--local", path, "--yield-every", "7"]);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(
        errors.contains("the program yielded at boundary 1 without an order"),
        "{errors}"
    );
    let output = fiec(&["check", path]);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(
        errors.contains("fails undisturbed: it yielded at boundary 1 without an order"),
        "{errors}"
    );
}

/// Whether a process runs (and is no zombie).
fn runs(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit(')').next().unwrap().trim().starts_with('Z'))
}

fn until(what: &str, mut met: impl FnMut() -> bool) {
    let start = Instant::now();
    while !met() {
        assert!(
            start.elapsed() < Duration::from_secs(30),
            "{what} did not come"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn subject(program: &tempfile::TempDir, params: Value) -> Subject {
    let path = program.path().to_str().unwrap();
    let mut subject = Subject::open(path, None, params, program.path()).unwrap();
    subject.child = vec![FIEC.to_owned(), "program-child".to_owned()];
    subject
}

fn pid_in(path: &Path) -> Option<u32> {
    let text = std::fs::read_to_string(path).ok()?;
    text.strip_suffix('\n')?.trim().parse().ok()
}

#[test]
fn processes_that_leave_the_group_of_their_capsule_are_ended_with_it() {
    let out = tempfile::tempdir().unwrap();
    let pid = out.path().join("pid");
    let program = shell(
        "setsid sh -c 'echo $$ > \"$1\"; exec sleep 600' sh \"$(sed 's/.*:\"//; s/\".*//' $FIEC_PARAMS)\" &\n\
         while ! [ -s \"$(sed 's/.*:\"//; s/\".*//' $FIEC_PARAMS)\" ]; do sleep 0.01; done; exit 85",
        json!({}),
    );
    let subject = subject(&program, json!({ "pid": pid }));
    let mut session = Session::start(&subject).unwrap();
    session.run(None, Some(1), Some(1)).unwrap();
    assert!(matches!(
        session.hear().unwrap(),
        Event::Boundary { index: 1, .. }
    ));
    let pid = pid_in(&pid).expect("the process that left");
    until("its end", || !runs(pid));
}

#[test]
fn when_a_child_is_killed_its_program_and_folders_go_too() {
    let out = tempfile::tempdir().unwrap();
    let pid = out.path().join("pid");
    // A grandchild, which no parent-death signal reaches.
    let program = shell(
        "sh -c 'echo $$ > \"$1\"; exec sleep 600' sh \"$(sed 's/.*:\"//; s/\".*//' $FIEC_PARAMS)\" & wait",
        json!({}),
    );
    let subject = subject(&program, json!({ "pid": pid }));
    let mut session = Session::start(&subject).unwrap();
    session.run(None, Some(1), None).unwrap();
    until("the program", || pid_in(&pid).is_some());
    let pid = pid_in(&pid).unwrap();
    assert!(runs(pid));
    let tmp = session.sandbox.folder("tmp");
    assert_eq!(std::fs::read_dir(&tmp).unwrap().count(), 1);
    session.kill();
    until("the end of the program", || !runs(pid));
    until("the end of its folders", || {
        std::fs::read_dir(&tmp).unwrap().count() == 0
    });
}

#[test]
fn the_library_runs_a_file_with_a_protocol_and_compares_records() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("count");
    std::fs::write(
        &file,
        format!("#!/bin/sh\n{COUNT}\n[ $n -ge 5 ] || exit 85"),
    )
    .unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = file.to_str().unwrap();
    let protocol = Some(Protocol::StateDir);
    let mut subject = Subject::open(path, protocol, json!({}), folder.path()).unwrap();
    subject.child = vec![FIEC.to_owned(), "program-child".to_owned()];
    let whole = local::run(&subject, Some(2), false, &mut |_| {}).unwrap();
    let mut told = 0;
    let mut cut = local::run(&subject, Some(2), true, &mut |_| told += 1).unwrap();
    assert_eq!((cut.capsules, cut.processes), (5, 3));
    assert!(told >= 2);
    assert!(whole.differences(&cut).is_empty());
    cut.boundaries.insert(4, fiec_schemas::Digest::of(b"other"));
    assert!(whole.differences(&cut)[0].starts_with("σ at boundary 4"));
}

#[test]
fn a_reader_that_has_gone_is_no_reason_for_a_trace() {
    let params = r#"{"capsules": 3}"#;
    let mut child = Command::new(FIEC)
        .args(["run", "--local", "synthetic@1", "-p", params])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(errors.contains("undisturbed"), "{errors}");
    assert!(!errors.contains("panicked"), "{errors}");
}
