//! The modules of the policy, and which of them names which. The machines stand beside the life
//! cycle: each names it and the types of a step, and none names another machine. A new arrow is a
//! decision: enter it here with the code that needs it, or go through `policy`.

#![allow(clippy::unwrap_used, reason = "a test may end so")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// What a step is made of. Every module may name these.
const OF_A_STEP: [&str; 8] = [
    "action",
    "config",
    "fate",
    "input",
    "refusal",
    "submission",
    "time",
    "view",
];

/// What stands beside the life cycle.
const MACHINES: [&str; 9] = [
    "explanation",
    "gangs",
    "parking",
    "prerequisites",
    "quotas",
    "reallocation",
    "sharing",
    "spreading",
    "verification",
];

/// The arrows between modules, without those to [`OF_A_STEP`], and those of `policy`, which has the
/// order of all, and of `config`, which has the settings of all.
const ARROWS: [(&str, &[&str]); 14] = [
    // A change of reservations, the names of outputs and the members of groups are parts of actions
    // and inputs.
    ("action", &["prerequisites", "quotas"]),
    ("input", &["prerequisites", "verification"]),
    // A view reads an open request as the cluster keeps it.
    ("view", &["lifecycle"]),
    // A refusal has the verdicts of placement in words.
    ("refusal", &["lifecycle"]),
    ("lifecycle", &[]),
    ("explanation", &["lifecycle"]),
    ("gangs", &["lifecycle"]),
    ("parking", &["lifecycle"]),
    ("prerequisites", &["lifecycle"]),
    ("quotas", &["lifecycle"]),
    ("reallocation", &["lifecycle"]),
    ("sharing", &["lifecycle"]),
    ("spreading", &["lifecycle"]),
    ("verification", &["lifecycle"]),
];

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            found.push(path);
        }
    }
    found
}

/// The code of a file, without comments.
fn code(file: &Path) -> String {
    let text = std::fs::read_to_string(file).unwrap();
    let lines = text.lines().filter(|l| !l.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

/// The modules from which the crate takes the names of its doors, as `lib.rs` says.
fn doors() -> BTreeMap<String, String> {
    let text = code(&sources().join("lib.rs"));
    let mut doors = BTreeMap::new();
    for line in text
        .split(';')
        .filter_map(|l| l.trim().strip_prefix("pub use "))
    {
        let module = line.split("::").next().unwrap();
        let names = line.rsplit("::").next().unwrap();
        for name in names.trim_matches(['{', '}']).split(',') {
            doors.insert(name.trim().to_owned(), module.to_owned());
        }
    }
    doors
}

/// The names directly behind `crate::`, those in braces too.
fn named(code: &str) -> BTreeSet<String> {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let first = |text: &str| {
        text.trim_start()
            .split(|c| !is_name(c))
            .next()
            .map(str::to_owned)
    };
    let mut found = BTreeSet::new();
    for rest in code.split("crate::").skip(1) {
        match rest.strip_prefix('{') {
            Some(group) => {
                let group = group.split('}').next().unwrap();
                found.extend(group.split(',').filter_map(first));
            }
            None => found.extend(first(rest)),
        }
    }
    found.remove("");
    found
}

fn arrows() -> BTreeMap<String, BTreeSet<String>> {
    let (root, doors) = (sources(), doors());
    let mut arrows: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for file in files(&root) {
        let inner = file.strip_prefix(&root).unwrap();
        let module = inner.iter().next().unwrap().to_str().unwrap();
        let module = module.trim_end_matches(".rs");
        // A file of tests may play the whole policy.
        if module == "lib" || inner.ends_with("tests.rs") {
            continue;
        }
        let of = arrows.entry(module.to_owned()).or_default();
        for name in named(&code(&file)) {
            let to = doors.get(&name).cloned().unwrap_or(name);
            of.extend((to != module).then_some(to));
        }
    }
    arrows
}

#[test]
fn the_arrows_between_modules_are_those_of_the_table() {
    let mut all = MACHINES.to_vec();
    all.push("lifecycle");
    all.sort_unstable();
    // Parking has no settings.
    let with_settings: Vec<_> = all.iter().copied().filter(|m| *m != "parking").collect();
    let mut table: BTreeMap<&str, &[&str]> = ARROWS.into_iter().collect();
    table.insert("policy", &all);
    table.insert("config", &with_settings);
    for (module, to) in arrows() {
        let found: Vec<&str> = to.iter().map(String::as_str).collect();
        let found: Vec<_> = found
            .into_iter()
            .filter(|m| !OF_A_STEP.contains(m))
            .collect();
        let declared = table.get(&*module).copied().unwrap_or_default();
        assert_eq!(
            found, declared,
            "source (left) and table (right) differ for {module}"
        );
    }
}

#[test]
fn no_machine_names_another_one_and_the_life_cycle_names_none() {
    let arrows = arrows();
    for module in MACHINES.into_iter().chain(["lifecycle"]) {
        let to = arrows.get(module).unwrap();
        let others: Vec<_> = to
            .iter()
            .filter(|m| MACHINES.contains(&m.as_str()))
            .collect();
        assert!(others.is_empty(), "{module} names {others:?}");
    }
}

#[test]
fn a_name_in_braces_and_one_of_a_door_is_found() {
    let code = "use crate::{Action, time::Now};\nlet x = crate::quotas::Change::default();";
    let names: Vec<_> = named(code).into_iter().collect();
    assert_eq!(names, ["Action", "quotas", "time"]);
    let doors = doors();
    assert_eq!(doors.get("Action").map(String::as_str), Some("action"));
    assert_eq!(
        doors.get("Discipline").map(String::as_str),
        Some("lifecycle")
    );
}
