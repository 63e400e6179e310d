//! A program in a real container, where an engine is there.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use fiec_kit::foreign::Package;
use fiec_kit::foreign::container::Engine;
use fiec_kit::frames::{Order, Report};
use fiec_kit::launch::Values;
use fiec_schemas::Fault;
use fiec_schemas::package::{Grant, Manifest};
use serde_json::json;

use crate::harness::{Child, Next, Outcome, every, json_lines, package, until};

const IMAGE: &str = "localhost/fiec-test-shell:1";
const SMALL_IMAGE: &str = "localhost/fiec-test-small:1";
const PYTHON_IMAGE: &str = "localhost/fiec-test-python:1";

/// The example, which makes its image by a script of its own.
#[test]
fn the_example_in_a_container_completes_and_goes_on_in_another_one_to_the_same_end() {
    let engine = match Engine::find() {
        Ok(engine) => engine,
        Err(reason) => return skipped(&reason),
    };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/container");
    let folder = folder.canonicalize().unwrap();
    let made = Command::new(folder.join("image.sh"))
        .arg(&engine.program)
        .output()
        .unwrap();
    if !made.status.success() {
        let words = String::from_utf8_lossy(&made.stderr).into_owned();
        return skipped(&format!(
            "{:?} cannot import an image: {words}",
            engine.kind
        ));
    }
    let manifest = std::fs::read(folder.join("fiec.json")).unwrap();
    let package = Package {
        manifest: Manifest::parse(&manifest).unwrap(),
        program: "collatz@1".to_owned(),
        values: Values::default(),
        folder,
    };
    let params = json!({ "upto": 600, "step": 250 });
    let whole = Child::outcome(&package, &params, None);
    if let Some((Report::Failed { reason, .. }, _)) = &whole.end
        && engine.flags.is_empty()
        && asked(
            &engine,
            &[
                "run",
                "--rm",
                "localhost/fiec-example-shell:1",
                "sh",
                "-c",
                ":",
            ],
        )
        .is_err()
    {
        return skipped(&format!(
            "{:?} runs no container here: {reason}",
            engine.kind
        ));
    }
    let length = |mut n: u64| {
        let mut steps = 1;
        while n != 1 {
            n = if n.is_multiple_of(2) {
                n / 2
            } else {
                3 * n + 1
            };
            steps += 1;
        }
        steps
    };
    let (start, longest) = (1..=600u64)
        .map(|n| (n, length(n)))
        .rev()
        .max_by_key(|(_, length)| *length)
        .unwrap();
    let expected = json!({ "upto": 600, "start": start, "length": longest });
    assert_eq!(whole.result(), (&expected, 3));
    assert_eq!(whole.boundaries[0].0.emits[0].name, "record");
    let rest = Child::outcome(&package, &params, Some((1, whole.state(0))));
    assert_eq!(rest.result(), whole.result());
    assert_eq!(rest.end.unwrap().1, whole.end.unwrap().1, "the output");
}

/// The system's Python: one in somebody's home folder is out of a container's search path.
fn python() -> &'static str {
    match Path::new("/usr/bin/python3").exists() {
        true => "/usr/bin/python3",
        false => "python3",
    }
}

/// Python as this machine has it: the interpreter, its libraries and its modules.
fn python_image(engine: &Engine, folder: &Path) -> Result<(), String> {
    let asked_python = |code: &str| {
        let output = Command::new(python()).args(["-c", code]).output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    let python = asked_python("import os, sys; print(os.path.realpath(sys.executable))");
    let modules = asked_python("import sysconfig; print(sysconfig.get_path('stdlib'))");
    let native = asked_python(
        "import _socket, _json, glob, os; print(*glob.glob(os.path.dirname(_json.__file__) + '/*.so') if hasattr(_json, '__file__') else [])",
    );
    let mut files: Vec<PathBuf> = std::iter::once(python.as_str())
        .chain(native.split_whitespace())
        .flat_map(with_libraries)
        .collect();
    files.retain(|file| !file.starts_with(&modules));
    files.push(PathBuf::from(&modules));
    files.sort();
    files.dedup();
    let archive = folder.join("python.tar");
    let mut tar = Command::new("tar");
    tar.args(["-chf", archive.to_str().unwrap(), "--hard-dereference"]);
    for left_out in [
        "site-packages",
        "dist-packages",
        "test",
        "idlelib",
        "config-*",
        "__pycache__",
    ] {
        tar.arg(format!("--exclude={left_out}"));
    }
    tar.args(["-C", "/"]);
    tar.args(files.iter().map(|file| file.strip_prefix("/").unwrap()));
    let packed = tar.output().unwrap();
    assert!(
        packed.status.success(),
        "{}",
        String::from_utf8_lossy(&packed.stderr)
    );
    asked(engine, &["import", archive.to_str().unwrap(), PYTHON_IMAGE]).map(drop)
}

#[test]
fn a_container_speaks_json_lines_and_is_resumed_in_another_one() {
    let engine = match Engine::find() {
        Ok(engine) => engine,
        Err(reason) => return skipped(&reason),
    };
    let folder = tempfile::tempdir().unwrap();
    if let Err(reason) = python_image(&engine, folder.path()) {
        return skipped(&format!(
            "{:?} cannot import an image: {reason}",
            engine.kind
        ));
    }
    let script = r#"
run = hear()
n = unpack(run["state"]) if run["state"] else 0
assert n == (run["boundary"] or 0)
assert run["inputs"] == "/fiec/inputs" and open("/fiec/inputs/in.txt").read() == "input"
while n < 4:
    n += 1
    with open(run["outputs"] + "/out-%d" % n, "w") as out:
        out.write(str(n))
    say(**{"is": "boundary", "of": 4, "emit": [{"name": "n", "text": str(n)}]})
    while (told := hear())["is"] != "go":
        if told["is"] == "yield":
            sys.exit(0)
        say(**{"is": "state", "state": pack(n), "outputs": ["out-%d" % n]})
say(**{"is": "completed", "result": {"n": n}})
"#;
    let python = Command::new(python())
        .args([
            "-c",
            "import os, sys; print(os.path.realpath(sys.executable), end='')",
        ])
        .output()
        .unwrap();
    let python = String::from_utf8(python.stdout).unwrap();
    // An entry without a slash is looked up in the image's PATH.
    let name = Path::new(&python).file_name().unwrap().to_str().unwrap();
    let made = json_lines(
        script,
        json!({ "entry": [name, "run.py"], "image": id(&engine, PYTHON_IMAGE), "outputs": ["out-*"] }),
    );
    let data = tempfile::tempdir().unwrap();
    std::fs::write(data.path().join("in.txt"), "input").unwrap();
    let child = Child::start_in(data.path());
    child.run(&made.package, &json!({}), None);
    let whole = child.all();
    assert_eq!(whole.result(), (&json!({ "n": 4 }), 5));
    assert_eq!(whole.boundaries.len(), 4);
    let (report, body) = &whole.boundaries[2];
    assert_eq!(report.emits[0].name, "n");
    assert_eq!(report.outputs[0].name, "out-3");
    assert_eq!(&body[report.bytes as usize..], b"3");
    child.run(&made.package, &json!({}), Some((2, whole.state(1))));
    let rest = child.all();
    assert_eq!(rest.result(), whole.result());
    assert_eq!(rest.boundaries.len(), 2);
}

/// The image's id as a manifest says it.
fn id(engine: &Engine, image: &str) -> String {
    let said = asked(engine, &["image", "inspect", "--format", "{{.Id}}", image]).unwrap();
    let hex = said.trim().trim_start_matches("sha256:");
    format!("sha256:{hex}")
}

fn skipped(reason: &str) {
    // Past the capture of a test's output: nobody shall take a skip for a pass.
    let text = format!("SKIPPED: the container test: {reason}\n");
    std::io::stderr().write_all(text.as_bytes()).unwrap();
}

/// A command and the libraries that it needs.
fn with_libraries(command: &str) -> Vec<PathBuf> {
    let listed = Command::new("ldd").arg(command).output().unwrap();
    let text = String::from_utf8(listed.stdout).unwrap();
    let libraries = text
        .split_whitespace()
        .filter(|word| word.starts_with('/'))
        .map(PathBuf::from);
    std::iter::once(PathBuf::from(command))
        .chain(libraries)
        .collect()
}

/// Makes the image out of this machine's own shell and `cat`, so that nothing is fetched.
/// Images of other names are other images.
fn make_image(engine: &Engine, folder: &Path, name: &str) -> Result<(), String> {
    let root = folder.join("root");
    std::fs::create_dir_all(root.join("etc")).unwrap();
    std::fs::write(root.join("etc/name"), name).unwrap();
    for file in ["/bin/sh", "/bin/cat"]
        .iter()
        .flat_map(|c| with_libraries(c))
    {
        let to = root.join(file.strip_prefix("/").unwrap());
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(&file, &to).unwrap();
    }
    let archive = folder.join("image.tar");
    let packed = Command::new("tar")
        .args([
            "-cf",
            archive.to_str().unwrap(),
            "-C",
            root.to_str().unwrap(),
            ".",
        ])
        .status()
        .unwrap();
    assert!(packed.success());
    asked(engine, &["import", archive.to_str().unwrap(), name])?;
    let flags: Vec<&str> = engine.flags.iter().map(String::as_str).collect();
    let plain = [
        "--rm",
        "--network",
        "none",
        "--entrypoint",
        "sh",
        name,
        "-c",
        ":",
    ];
    asked(engine, &[&["run"], &flags[..], &plain].concat())?;
    Ok(())
}

/// What the engine answers to a command of ours.
fn asked(engine: &Engine, words: &[&str]) -> Result<String, String> {
    let output = Command::new(&engine.program).args(words).output().unwrap();
    match output.status.success() {
        true => Ok(String::from_utf8(output.stdout).unwrap()),
        false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
    }
}

const SCRIPT: &str = r#"#!/bin/sh
n=0
[ -f "$FIEC_STATE_DIR/n" ] && read -r n < "$FIEC_STATE_DIR/n"
[ "$n" = "$FIEC_BOUNDARY" ] || exit 65
n=$((n + 1)); echo $n > "$FIEC_STATE_DIR/n"
(echo x > /fiec/package/x) 2> /dev/null && exit 65
(echo x > /x) 2> /dev/null && { echo "its root can be written" >&2; exit 65; }
echo x > /tmp/x || exit 65
# Whatever flags this machine needs: no rights, and no network but its own.
caps=none
while read -r key value; do [ "$key" = CapEff: ] && caps=$value; done < /proc/self/status
[ "$caps" = 0000000000000000 ] || { echo "rights: $caps" >&2; exit 65; }
while read -r name rest; do
    case $name in lo:*) ;; *:*) echo "network: $name" >&2; exit 65 ;; esac
done < /proc/net/dev
[ "$TOKEN" = '"a" #b $HOME' ] || { echo "variable: $TOKEN" >&2; exit 65; }
[ "$OMP_NUM_THREADS$MKL_NUM_THREADS" = 12 ] || { echo "threads: $OMP_NUM_THREADS" >&2; exit 65; }
[ $n -lt 3 ] && exit 85
echo $n > "$FIEC_RESULT"; cat "$FIEC_INPUTS/in.txt" > "$FIEC_OUTPUTS/out"
"#;

#[test]
fn a_container_runs_a_state_folder_where_an_engine_answers() {
    let made = |image: &str| {
        package(
            &json!({ "entry": ["sh", "./run.sh"], "protocol": "state_dir", "image": image,
                     "outputs": ["out"] }),
            &[("run.sh", SCRIPT)],
        )
    };
    let engine = match Engine::find() {
        Ok(engine) => engine,
        Err(reason) => {
            skipped(&reason);
            // What a person is told then.
            let made = made(&format!("sha256:{}", "0".repeat(64)));
            let outcome = Child::outcome(&made.package, &json!({}), None);
            let (permanent, found) = outcome.failure();
            assert!(
                permanent && found.contains("no container engine"),
                "{found}"
            );
            return;
        }
    };
    let folder = tempfile::tempdir().unwrap();
    if let Err(reason) = make_image(&engine, folder.path(), IMAGE) {
        return skipped(&format!(
            "{:?} cannot run an image of this machine: {reason}",
            engine.kind
        ));
    }
    let image = id(&engine, IMAGE);
    let mut made = made(&image);
    let values = [("TOKEN", "\"a\" #b $HOME"), ("MKL_NUM_THREADS", "2")];
    let values = values.map(|(name, value)| (name.to_owned(), value.into()));
    made.package.values = values.into_iter().collect();
    let data = tempfile::tempdir().unwrap();
    std::fs::write(data.path().join("in.txt"), "input").unwrap();
    let child = Child::start_in(data.path());
    child.run(&made.package, &json!({}), None);
    let outcome = child.all();
    assert_eq!(outcome.result(), (&json!(3), 3));
    child.run(&made.package, &json!({}), Some((1, outcome.state(0))));
    let rest = child.all();
    assert_eq!(rest.result(), outcome.result());
    assert_eq!(rest.end.unwrap().1, b"input");
    // The first process of a container ignores SIGTERM unless it says otherwise.
    std::fs::write(made.folder.path().join("run.sh"), "while :; do :; done").unwrap();
    child.run(&made.package, &json!({}), None);
    let containers = ["ps", "--all", "--quiet", "--filter"];
    // A container that was started by an image's id is not found by the image's name.
    let filter = format!("ancestor={}", image.trim_start_matches("sha256:"));
    let there = || asked(&engine, &[&containers[..], &[&filter]].concat()).unwrap();
    until("a container", || !there().is_empty());
    child.send(&Order::Cancel);
    assert!(matches!(child.next(), Next::End(Report::Cancelled, _)));
    assert_eq!(there(), "");
}

/// What a program in a container with 64 MiB ends with: its result, or its failure.
fn outcome_with_64_mib(script: &str) -> Option<Outcome> {
    let engine = match Engine::find() {
        Ok(engine) => engine,
        Err(reason) => {
            skipped(&reason);
            return None;
        }
    };
    let folder = tempfile::tempdir().unwrap();
    if let Err(reason) = make_image(&engine, folder.path(), SMALL_IMAGE) {
        skipped(&format!("{:?} cannot run an image: {reason}", engine.kind));
        return None;
    }
    let made = package(
        &json!({ "entry": ["sh", "./run.sh"], "protocol": "state_dir",
                 "image": id(&engine, SMALL_IMAGE), "limits": { "boundary_ms": 15_000 } }),
        &[("run.sh", script)],
    );
    let child = Child::start();
    let grant = Grant {
        memory_bytes: Some(64 << 20),
        ..Grant::default()
    };
    child.run_with(&made.package, &json!({}), None, every(1), grant);
    Some(child.all())
}

#[test]
fn a_container_without_memory_is_told_so_with_its_limit() {
    let Some(outcome) = outcome_with_64_mib("x=aaaaaaaaaaaaaaaa; while :; do x=$x$x; done") else {
        return;
    };
    let Some((Report::Failed { reason, fault, .. }, _)) = &outcome.end else {
        panic!("{:?}", outcome.end)
    };
    let expected = Fault::OutOfMemory {
        limit_bytes: 64 << 20,
        peak_bytes: None,
    };
    assert_eq!(fault.as_deref(), Some(&expected), "{reason}");
    assert!(reason.contains("its container has 64 MiB"), "{reason}");
}

#[test]
fn a_fork_bomb_in_a_container_ends_at_its_limit() {
    // As the kernel knows it, in both hierarchies of control groups.
    let script = "cd /sys/fs/cgroup && cat pids/pids.max pids.max 2> /dev/null > \"$FIEC_RESULT\"
exit 0";
    let Some(outcome) = outcome_with_64_mib(script) else {
        return;
    };
    assert_eq!(outcome.result().0, &json!(4096));
}

#[test]
fn a_container_over_its_limit_fails_though_its_shell_ignores_sigterm() {
    let begun = Instant::now();
    let Some(outcome) = outcome_with_64_mib("while :; do :; done") else {
        return;
    };
    let (permanent, found) = outcome.failure();
    assert!(permanent && found.contains("boundary_ms"), "{found}");
    // A worker takes it for frozen 8 s after its limit.
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(60), "{took:?}");
}
