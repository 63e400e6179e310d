//! The committed traces are those of the tests in this folder.

#![allow(clippy::unwrap_used, reason = "a test may end so")]

mod world;

use std::collections::BTreeSet;
use std::path::Path;

use fiec_simulator::trace::committed::{Committed, is_update};

/// The names of all functions below a folder, which include those of all tests.
fn functions(folder: &Path, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            functions(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            let names = text.lines().filter_map(|line| {
                let name = line.trim_start().strip_prefix("fn ")?;
                name.split(['(', '<']).next().map(str::to_owned)
            });
            found.extend(names);
        }
    }
}

fn is_of(trace: &str, test: &str) -> bool {
    let rest = trace.strip_prefix(test);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

#[test]
fn each_committed_trace_is_of_one_test() {
    let mut names = Vec::new();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    functions(&folder, &mut names);
    let tests: BTreeSet<&String> = names.iter().collect();
    let committed = Committed::read(&world::trace::path()).unwrap();
    let is_stale = |name: &String| !tests.iter().any(|test| is_of(name, test));
    if is_update() {
        world::trace::update(|all| all.retain(|name, _| !is_stale(name)));
        return;
    }
    for name in committed.0.keys() {
        assert!(
            !is_stale(name),
            "the committed trace {name} has no test any more: FIEC_UPDATE=1 cargo test -p fiec-policy"
        );
        let of = names.iter().filter(|test| is_of(name, test)).count();
        assert_eq!(of, 1, "two tests would have the trace {name}: rename one");
    }
}
