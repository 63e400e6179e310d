//! Tests of the pages: their submissions are valid, their links work, and the first pages stay
//! short. `integration-tests/pages.rs` runs their commands.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use fiec_schemas::Submission;
use fiec_schemas::programs::BUILT_IN;

/// Pages with a limit: name, most lines, most bytes.
const LIMITS: [(&str, usize, usize); 2] = [
    ("README.md", 220, 16 * 1024),
    ("ARCHITECTURE.md", 300, 20 * 1024),
];
/// Folders without pages of this project.
const SKIPPED: [&str; 3] = ["target", "node_modules", ".git"];
/// Programs of the pages and of `examples` that are not built in.
const OWN_PROGRAMS: [&str; 2] = ["train@1", "walk@1"];

struct Page {
    /// Path relative to the project.
    path: PathBuf,
    text: String,
}

fn root() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    root.canonicalize().unwrap()
}

fn pages() -> Vec<Page> {
    let mut found = Vec::new();
    find(&root(), &mut found);
    found.sort();
    assert!(found.len() >= 10, "only {} pages were found", found.len());
    let read = |path: PathBuf| Page {
        text: std::fs::read_to_string(&path).unwrap(),
        path: path.strip_prefix(root()).unwrap().to_owned(),
    };
    found.into_iter().map(read).collect()
}

fn find(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name();
        let kind = entry.file_type().unwrap();
        if kind.is_dir() && !SKIPPED.iter().any(|skipped| name == *skipped) {
            find(&entry.path(), found);
        } else if kind.is_file() && entry.path().extension().is_some_and(|e| e == "md") {
            found.push(entry.path());
        }
    }
}

/// The text between the fences of one language.
fn blocks<'a>(text: &'a str, language: &str) -> Vec<&'a str> {
    let fence = format!("```{language}\n");
    let blocks = text.split(fence.as_str()).skip(1);
    blocks
        .map(|rest| rest.split("```").next().unwrap())
        .collect()
}

#[test]
fn the_submissions_in_the_pages_are_valid_and_name_programs_that_exist() {
    let mut seen = 0;
    for page in pages() {
        for block in blocks(&page.text, "json") {
            let stream = serde_json::Deserializer::from_str(block).into_iter::<serde_json::Value>();
            // A block with a part of a submission is no valid JSON.
            for value in stream
                .map_while(Result::ok)
                .filter(|v| v.get("program").is_some())
            {
                let at = page.path.display();
                let line = value.to_string();
                let submission = Submission::parse(line.as_bytes());
                let submission = submission.unwrap_or_else(|error| panic!("{at}: {error}: {line}"));
                let program = submission.program.as_str();
                assert!(
                    BUILT_IN.contains(&program) || OWN_PROGRAMS.contains(&program),
                    "{at}: there is no program {program}: {line}"
                );
                seen += 1;
            }
        }
    }
    assert!(seen >= 7, "only {seen} submissions were found");
}

/// Headings outside code, in the form of links. A repeated heading gets a number.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    for line in without_code(text).lines() {
        let name = line.trim_start_matches('#');
        if name.len() == line.len() || !name.starts_with(' ') {
            continue;
        }
        let lower = name.trim().to_lowercase().replace(' ', "-");
        let is_kept = |c: &char| c.is_alphanumeric() || matches!(c, '-' | '_');
        let anchor: String = lower.chars().filter(is_kept).collect();
        let mut number = 0;
        let mut own = anchor.clone();
        while !anchors.insert(own.clone()) {
            number += 1;
            own = format!("{anchor}-{number}");
        }
    }
    anchors
}

/// The text without its blocks of code.
fn without_code(text: &str) -> String {
    let parts = text.split("```").enumerate();
    parts
        .filter(|(n, _)| n % 2 == 0)
        .map(|(_, part)| part)
        .collect()
}

/// Targets of a page's links, as written.
fn links(text: &str) -> Vec<String> {
    let text = without_code(text);
    let links = text.split("](").skip(1);
    links
        .map(|rest| rest.split(')').next().unwrap().to_owned())
        .collect()
}

/// `a/../b` is `b`.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(plain.pop()),
            Component::CurDir => {}
            part => plain.push(part),
        }
    }
    plain
}

#[test]
fn every_link_between_the_pages_leads_to_a_file_and_a_heading() {
    let pages = pages();
    let mut broken = Vec::new();
    for page in &pages {
        for link in links(&page.text) {
            if link.contains("://") {
                continue;
            }
            let (file, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let folder = page.path.parent().unwrap();
            let target = match file {
                "" => page.path.clone(),
                file => plain(&folder.join(file)),
            };
            if !root().join(&target).exists() {
                broken.push(format!("{}: no file for {link}", page.path.display()));
                continue;
            }
            let named = pages.iter().find(|page| page.path == target);
            let has = |page: &Page| anchors(&page.text).contains(anchor);
            if !anchor.is_empty() && !named.is_some_and(has) {
                broken.push(format!("{}: no heading for {link}", page.path.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn every_page_of_a_folder_is_reached_from_the_readme() {
    let pages = pages();
    let mut reached = BTreeSet::from([PathBuf::from("README.md")]);
    let mut next = vec![PathBuf::from("README.md")];
    while let Some(path) = next.pop() {
        let Some(page) = pages.iter().find(|page| page.path == path) else {
            continue;
        };
        let folder = path.parent().unwrap();
        for link in links(&page.text) {
            let file = link.split('#').next().unwrap();
            let target = plain(&folder.join(file));
            // A link to a folder shows its README.
            for target in [target.join("README.md"), target] {
                if reached.insert(target.clone()) {
                    next.push(target);
                }
            }
        }
    }
    let missing: Vec<_> = pages
        .iter()
        .map(|page| &page.path)
        .filter(|path| !reached.contains(*path) && **path != Path::new("CHANGELOG.md"))
        .collect();
    assert!(missing.is_empty(), "no link leads to {missing:?}");
}

#[test]
fn the_first_pages_stay_short() {
    for (name, lines, bytes) in LIMITS {
        let text = std::fs::read_to_string(root().join(name)).unwrap();
        let has = (text.lines().count(), text.len());
        assert!(
            has.0 <= lines && has.1 <= bytes,
            "{name} has {} lines and {} bytes; at most {lines} and {bytes} are allowed: move details to \
             the page of their folder",
            has.0,
            has.1
        );
    }
}
