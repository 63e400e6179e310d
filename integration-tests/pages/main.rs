//! The commands of the pages, run as they stand.
//!
//! A comment above each block of `sh` says where it runs. A reader of the page does not see it.
//!
//! ```text
//! <!-- run: local -->                               programs on the PATH, files of the project
//! <!-- run: cluster -->                             and a cluster, as `fiec up` starts it
//! <!-- run: servers -->                             and NATS and PostgreSQL, with nothing set up
//! <!-- run: not here, because …; covered by NAME --> a test, or `the CI step "…"`, covers it
//! <!-- file: a/b.py -->                             any block: it is written to that file
//! ```
//!
//! Options after the place: `background, until: COMMAND` for one command that stays, `exits: 0 5`,
//! `needs: PROGRAM`. Blocks of a page run in order; pages of one stage share folder and cluster.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod blocks;
#[path = "../stage/python.rs"]
mod python_support;
mod stage;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use blocks::{Block, Marker, blocks};
use stage::{Stage, root};

/// Pages that run on one stage, in this order.
const FOR_USERS: [&str; 6] = [
    "README.md",
    "schemas/README.md",
    "workers/CONTRACT.md",
    "workers/python/README.md",
    "migrations/README.md",
    "examples/shell-counter/README.md",
];
/// The same on another one.
const FOR_OPERATORS: [&str; 4] = [
    "services/README.md",
    "workers/README.md",
    "services/lab/README.md",
    "broker-config/README.md",
];

/// The project's files with this ending, relative to it.
fn files(ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            let (path, name) = (entry.path(), entry.file_name());
            let is_ours = name != "target" && name != ".git";
            if entry.file_type().unwrap().is_dir() && is_ours {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == ending) {
                found.push(path.strip_prefix(root()).unwrap().to_owned());
            }
        }
    }
    found.sort();
    found
}

fn blocks_of(page: &Path) -> Vec<Block> {
    let text = std::fs::read_to_string(root().join(page)).unwrap();
    blocks(page, &text).unwrap_or_else(|why| panic!("{why}"))
}

async fn run(pages: &[&str]) {
    let mut stage = Stage::new().await;
    for page in pages {
        for block in blocks_of(Path::new(page)) {
            stage.perform(&block).await;
        }
    }
    stage.end().await;
}

#[tokio::test]
async fn the_commands_of_the_pages_for_users_run() {
    run(&FOR_USERS).await;
}

#[tokio::test]
async fn the_commands_of_the_pages_for_operators_run() {
    run(&FOR_OPERATORS).await;
}

#[test]
fn every_block_of_commands_says_where_it_runs() {
    let run: BTreeSet<PathBuf> = FOR_USERS
        .iter()
        .chain(&FOR_OPERATORS)
        .map(PathBuf::from)
        .collect();
    let mut wrong = Vec::new();
    for block in files("md").iter().flat_map(|page| blocks_of(page)) {
        match &block.marker {
            None if block.language == "sh" => {
                wrong.push(format!("{block}: no comment says where it runs"));
            }
            Some(Marker::Run(_)) if !run.contains(&block.page) => {
                wrong.push(format!("{block}: no stage runs this page"));
            }
            _ => {}
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The names of all tests in the project's sources.
fn tests() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for file in files("rs") {
        let text = std::fs::read_to_string(root().join(file)).unwrap();
        let mut is_test = false;
        for line in text.lines().map(str::trim) {
            is_test |= line.starts_with("#[test]") || line.starts_with("#[tokio::test");
            let function = line
                .strip_prefix("async ")
                .unwrap_or(line)
                .strip_prefix("fn ");
            if let Some(name) = function.and_then(|rest| rest.split('(').next()) {
                if is_test {
                    names.insert(name.to_owned());
                }
                is_test = false;
            }
        }
    }
    names
}

/// Returns the names of the options (`--name`) in a text.
fn options(text: &str) -> BTreeSet<String> {
    let parts = text.split("--").skip(1);
    let name = |part: &str| -> String {
        let is_name = |c: &char| c.is_ascii_lowercase() || c.is_ascii_digit() || *c == '-';
        part.chars().take_while(is_name).collect()
    };
    parts
        .map(name)
        .filter(|name| name.starts_with(|c: char| c.is_ascii_lowercase()))
        .collect()
}

/// The options of a command that are its own: not those of every command.
fn options_of(command: &str) -> BTreeSet<String> {
    let help = |arguments: &[&str]| {
        let output = std::process::Command::new(stage::BINARY)
            .args(arguments)
            .output();
        let text = String::from_utf8(output.unwrap().stdout).unwrap();
        let lines = text.lines().filter_map(|line| {
            let line = line.trim_start();
            line.starts_with('-').then(|| {
                line.split_whitespace()
                    .take(2)
                    .collect::<Vec<_>>()
                    .join(" ")
            })
        });
        options(&lines.collect::<Vec<_>>().join(" "))
    };
    &help(&[command, "--help"]) - &help(&["doctor", "--help"])
}

#[test]
fn the_tables_of_options_have_all_options_and_no_others() {
    // A table whose first heading is `fiec NAME`.
    let mut shown: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for page in files("md") {
        let text = std::fs::read_to_string(root().join(page)).unwrap();
        let mut command = None;
        for line in text.lines() {
            let Some(row) = line.strip_prefix('|') else {
                command = None;
                continue;
            };
            let first = row.split(" | ").next().unwrap_or_default().trim();
            if let Some(name) = first
                .strip_prefix("`fiec ")
                .and_then(|f| f.strip_suffix('`'))
            {
                command = Some(name.to_owned());
            } else if let Some(command) = &command {
                shown
                    .entry(command.clone())
                    .or_default()
                    .extend(options(first));
            }
        }
    }
    let commands: Vec<&str> = shown.keys().map(String::as_str).collect();
    assert_eq!(commands, ["policy", "recorder", "setup", "up", "worker"]);
    for (command, shown) in &shown {
        assert_eq!(
            *shown,
            options_of(command),
            "left the pages, right `fiec {command} --help`"
        );
    }
}

#[test]
fn what_is_not_run_here_is_covered_by_a_test_or_a_step_of_ci_that_exists() {
    let tests = tests();
    let ci = std::fs::read_to_string(root().join(".ci/run")).unwrap();
    let mut missing = Vec::new();
    for block in files("md").iter().flat_map(|page| blocks_of(page)) {
        let Some(Marker::NotHere { covered_by }) = &block.marker else {
            continue;
        };
        let step = covered_by
            .strip_prefix("the CI step \"")
            .and_then(|s| s.strip_suffix('"'));
        let exists = match step {
            Some(step) => ci.contains(&format!("say \"{step}\"")),
            None => tests.contains(covered_by),
        };
        if !exists {
            missing.push(format!("{block}: there is no {covered_by}"));
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}
