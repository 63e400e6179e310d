//! The map is true: each file and function that `ARCHITECTURE.md` and `CONTRIBUTING.md` name exists,
//! and each file that `services/lab/PAPER.md` names.
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The phrases in code type of a line.
fn phrases(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

/// True for a path of the tree rather than a word of code.
fn is_path(phrase: &str) -> bool {
    let folders = [
        "schemas/",
        "services/",
        "workers/",
        "broker-config/",
        "migrations/",
        "integration-tests/",
    ];
    let plain = |c: char| c.is_ascii_alphanumeric() || "/-_.".contains(c);
    folders.iter().any(|folder| phrase.starts_with(folder))
        && phrase.chars().all(plain)
        && !phrase.contains("NAME")
}

#[test]
fn every_path_of_the_map_exists() {
    for page in [
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "services/lab/PAPER.md",
    ] {
        let text = read(page);
        let paths: Vec<&str> = text
            .lines()
            .flat_map(phrases)
            .filter(|p| is_path(p))
            .collect();
        assert!(paths.len() >= 10, "{page} names {} paths only", paths.len());
        for path in paths {
            assert!(
                root().join(path).exists(),
                "{page} names {path}, which does not exist"
            );
        }
    }
}

#[test]
fn every_step_of_the_way_names_functions_of_its_files() {
    let text = read("ARCHITECTURE.md");
    let way = text.split("## The way of one capsule").nth(1).unwrap();
    let way = way.split("\n## ").next().unwrap();
    let invariants = text.split("\n## Invariants").nth(1).unwrap();
    let invariants = invariants.split("\n## ").next().unwrap();
    let rows = way.lines().chain(invariants.lines());
    let functions = functions_of(rows.filter(|line| line.starts_with('|')));
    assert!(functions >= 30, "the map names {functions} functions only");
}

/// Checks that each function that these rows name stands in its file. Returns their number.
fn functions_of<'a>(rows: impl Iterator<Item = &'a str>) -> usize {
    let mut functions = 0;
    for row in rows {
        for cell in row.split(" | ") {
            // Functions belong to the file before them in the same cell.
            let mut source = String::new();
            for phrase in phrases(cell) {
                if is_path(phrase) {
                    let is_file = phrase.ends_with(".rs");
                    source = if is_file { read(phrase) } else { String::new() };
                } else if !source.is_empty() {
                    let found = [format!("fn {phrase}("), format!("fn {phrase}<")];
                    assert!(
                        found.iter().any(|f| source.contains(f)),
                        "a page names the function {phrase}, which its file does not have: {row}"
                    );
                    functions += 1;
                }
            }
        }
    }
    functions
}

#[test]
fn every_promise_names_a_test_that_exists() {
    let text = read("services/PROMISES.md");
    let table = text.split("## By failure").nth(1).unwrap();
    let table = table.split("\n## ").next().unwrap();
    let rows: Vec<&str> = table.lines().filter(|l| l.starts_with("| ")).collect();
    let rows = &rows[1..];
    assert!(rows.len() >= 12, "only {} failures", rows.len());
    for row in rows {
        let stated = row.contains("| no test ");
        assert!(
            stated || functions_of([*row].into_iter()) > 0,
            "no test holds this: {row}"
        );
    }
}
