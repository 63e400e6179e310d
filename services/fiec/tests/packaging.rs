//! `fiec completions` in real shells, and the pages of `fiec man` through a real `man`.
//!
//! bash is needed. A test that needs another program says on stderr if it is missing.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use fiec::lab;

const BINARY: &str = env!("CARGO_BIN_EXE_fiec");

fn success(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn fiec(args: &[&str]) -> String {
    success(&Command::new(BINARY).args(args).output().unwrap())
}

/// True if the program is there; says so on stderr if not.
fn has(program: &str) -> bool {
    let is_there = lab::on_path(program).is_some();
    if !is_there {
        // A closed stderr has no reader to inform.
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED: {program} is not on PATH: FIEC is not tested with it"
        );
    }
    is_there
}

/// The script of a shell, in a file.
fn script(shell: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = folder.path().join(shell);
    std::fs::write(&file, fiec(&["completions", shell])).unwrap();
    (folder, file)
}

/// The words that bash offers for the last word of a command line.
fn offered_by_bash(script: &Path, line: &[&str]) -> BTreeSet<String> {
    let complete = r#"
        source "$1"; shift
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
        [[ "$(complete -p fiec)" =~ -F\ ([^ ]+) ]] || exit 9
        "${BASH_REMATCH[1]}" fiec "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
        printf '%s\n' "${COMPREPLY[@]}"
    "#;
    let mut bash = Command::new("bash");
    bash.args(["--norc", "--noprofile", "-c", complete, "bash"]);
    let output = bash.arg(script).args(line).output().unwrap();
    let text = success(&output);
    assert!(output.stderr.is_empty(), "{output:?}");
    text.split_whitespace().map(str::to_owned).collect()
}

fn words(all: &[&str]) -> BTreeSet<String> {
    all.iter().map(|word| (*word).to_owned()).collect()
}

#[test]
fn bash_completes_commands_of_the_product_and_of_the_lab_options_and_values() {
    let (_folder, file) = script("bash");
    let parsed = Command::new("bash").arg("-n").arg(&file).output().unwrap();
    assert_eq!(success(&parsed), "");

    let offered = |line: &[&str]| offered_by_bash(&file, line);
    assert_eq!(offered(&["fiec", "dra"]), words(&["drain"]));
    assert_eq!(offered(&["fiec", "sim"]), words(&["simulate"]));
    assert_eq!(
        offered(&["fiec", "uncordon", "--dat"]),
        words(&["--database"])
    );
    assert_eq!(offered(&["fiec", "node", "rev"]), words(&["revoke"]));
    assert_eq!(
        offered(&["fiec", "policy", "--disc"]),
        words(&["--discipline"])
    );
    assert_eq!(offered(&["fiec", "completions", "z"]), words(&["zsh"]));
    let all = offered(&["fiec", ""]);
    for name in ["submit", "up", "demo", "completions"] {
        assert!(all.contains(name), "{name}: {all:?}");
    }
    for hidden in ["burn", "program-child"] {
        assert!(!all.contains(hidden), "{hidden}: {all:?}");
    }
}

#[test]
fn zsh_parses_its_script() {
    let (_folder, file) = script("zsh");
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(text.starts_with("#compdef fiec\n"), "{text:.200}");
    if has("zsh") {
        success(&Command::new("zsh").arg("-n").arg(&file).output().unwrap());
    }
}

#[test]
fn fish_completes_a_command_with_its_description() {
    let (_folder, file) = script("fish");
    if !has("fish") {
        return;
    }
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let line = format!("source {}; complete -C 'fiec drai'", file.display());
    let mut fish = Command::new("fish");
    fish.args(["--no-config", "-c", &line]);
    let output = fish.env("HOME", home.path()).output().unwrap();
    assert_eq!(
        success(&output).trim(),
        "drain\tCordon a node, and move its executions away at their next boundaries"
    );
}

#[test]
fn an_unknown_shell_is_refused_with_the_shells_that_there_are() {
    let output = Command::new(BINARY)
        .args(["completions", "tcsh"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        said.contains("[possible values: bash, zsh, fish]"),
        "{said}"
    );
}

/// The commands that `fiec --help` or `fiec COMMAND --help` lists.
fn listed(command: &[&str]) -> Vec<String> {
    let help = fiec(&[command, &["--help"]].concat());
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    lines
        .take_while(|line| !line.is_empty())
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .map(str::to_owned)
        .collect()
}

/// The words of the page as a reader sees it. A warning of groff fails the test.
fn rendered(page: &Path) -> String {
    let output = Command::new("man")
        .args(["--warnings=w", "-l"])
        .arg(page)
        .env("MANWIDTH", "100")
        .env("MANPAGER", "cat")
        .env("LC_ALL", "C.UTF-8")
        .output()
        .unwrap();
    let text = success(&output);
    assert!(output.stderr.is_empty(), "{}: {output:?}", page.display());
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn every_command_that_is_listed_has_a_page_and_each_page_renders() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let pages = folder.path().join("share/man1");
    fiec(&["man", pages.to_str().unwrap()]);

    let mut expected = BTreeSet::from(["fiec.1".to_owned()]);
    let commands = listed(&[]);
    assert!(commands.len() > 40, "{commands:?}");
    for command in &commands {
        expected.insert(format!("fiec-{command}.1"));
        if !lab::has(command) {
            let own = listed(&[command]);
            expected.extend(own.iter().map(|sub| format!("fiec-{command}-{sub}.1")));
        }
    }
    let found: BTreeSet<String> = std::fs::read_dir(&pages)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(found, expected);
    assert!(found.contains("fiec-node-revoke.1"));

    let raw = std::fs::read_to_string(pages.join("fiec-worker.1")).unwrap();
    assert!(raw.contains("FIEC_SLOTS"), "{raw}");
    if !has("man") || !has("groff") {
        return;
    }
    for page in &found {
        let text = rendered(&pages.join(page));
        assert!(
            text.contains("NAME") && text.contains("SYNOPSIS"),
            "{page}: {text}"
        );
    }
    let text = rendered(&pages.join("fiec-drain.1"));
    assert!(text.contains("fiec drain"), "{text}");
    assert!(text.contains("--within"), "{text}");
}

#[test]
fn a_folder_that_cannot_be_made_is_named() {
    let output = Command::new(BINARY)
        .args(["man", "/proc/version/man1"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        said.contains("cannot write the manual pages to /proc/version/man1"),
        "{said}"
    );
}
