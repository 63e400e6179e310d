//! A program in a real container, where an engine is there.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use fiec_kit::foreign::container::Engine;
use fiec_kit::frames::{Order, Report};
use serde_json::json;

use crate::harness::{Child, Next, package, until};

const IMAGE: &str = "localhost/fiec-test-shell:1";

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
fn make_image(engine: &Engine, folder: &Path) -> Result<(), String> {
    let root = folder.join("root");
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
    asked(engine, &["import", archive.to_str().unwrap(), IMAGE])?;
    let flags: Vec<&str> = engine.flags.iter().map(String::as_str).collect();
    let plain = [
        "--rm",
        "--network",
        "none",
        "--entrypoint",
        "sh",
        IMAGE,
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
# Whatever flags this machine needs: no rights, and no network but its own.
caps=none
while read -r key value; do [ "$key" = CapEff: ] && caps=$value; done < /proc/self/status
[ "$caps" = 0000000000000000 ] || { echo "rights: $caps" >&2; exit 65; }
while read -r name rest; do
    case $name in lo:*) ;; *:*) echo "network: $name" >&2; exit 65 ;; esac
done < /proc/net/dev
[ $n -lt 3 ] && exit 85
echo $n > "$FIEC_RESULT"; cat "$FIEC_INPUTS/in.txt" > "$FIEC_OUTPUTS/out"
"#;

#[test]
fn a_container_runs_a_state_folder_where_an_engine_answers() {
    let made = package(
        &json!({ "entry": ["sh", "./run.sh"], "protocol": "state_dir", "image": IMAGE,
                 "outputs": ["out"] }),
        &[("run.sh", SCRIPT)],
    );
    let engine = match Engine::find() {
        Ok(engine) => engine,
        Err(reason) => {
            skipped(&reason);
            // What a person is told then.
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
    if let Err(reason) = make_image(&engine, folder.path()) {
        return skipped(&format!(
            "{:?} cannot run an image of this machine: {reason}",
            engine.kind
        ));
    }
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
    let filter = format!("ancestor={IMAGE}");
    let there = || asked(&engine, &[&containers[..], &[&filter]].concat()).unwrap();
    until("a container", || !there().is_empty());
    child.send(&Order::Cancel);
    assert!(matches!(child.next(), Next::End(Report::Cancelled, _)));
    assert_eq!(there(), "");
}
