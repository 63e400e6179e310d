//! The operators' page on health names the states and metrics that the code has.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

const PAGE: &str = include_str!("../../services/HEALTH.md");

/// The code phrases of the first cell of each row of a table.
fn phrases(section: &str) -> Vec<&str> {
    let body = PAGE.split(section).nth(1).unwrap();
    let body = body.split("\n## ").next().unwrap();
    let cells = body
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split(" | ").next());
    let phrases = cells.flat_map(|cell| cell.split('`').step_by(2));
    phrases.filter(|phrase| !phrase.is_empty()).collect()
}

fn sources(folder: &Path, into: &mut String) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, into);
        } else if path.extension().is_some_and(|e| e == "rs") {
            into.push_str(&std::fs::read_to_string(path).unwrap());
        }
    }
}

fn all_sources() -> String {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut text = String::new();
    for package in [
        "broker-config",
        "services/policy-service",
        "services/recorder",
        "workers/agent",
    ] {
        sources(&root.join(package).join("src"), &mut text);
    }
    text
}

#[test]
fn each_red_state_of_the_page_is_a_message_of_the_code() {
    let code = all_sources();
    let states = phrases("## Red states");
    assert!(states.len() >= 12, "only {states:?} were found");
    for state in states {
        let found = match state.strip_suffix(':') {
            // The name of a part of the recorder.
            Some(part) => code.contains(&format!("=> \"{part}\"")),
            // The worker's is made of the state of its connection.
            None => code.contains(state) || state.starts_with("NATS: "),
        };
        assert!(
            found,
            "no source says {state:?}: correct services/HEALTH.md"
        );
    }
}

#[test]
fn each_alert_of_the_page_is_a_metric_of_the_code() {
    let code = all_sources();
    let metrics = phrases("## Alerts without a red state");
    assert!(metrics.len() >= 4, "only {metrics:?} were found");
    for metric in metrics {
        let name = metric.split('{').next().unwrap();
        let services = ["fiec_policy", "fiec_recorder", "fiec_worker"];
        let (service, field) = services
            .iter()
            .find_map(|service| Some((service, name.strip_prefix(service)?.strip_prefix('_')?)))
            .unwrap();
        // The suffix of a counter is not in the code.
        let field = field.strip_suffix("_total").unwrap_or(field);
        let tables = code.split("figures! {").skip(1);
        let mut tables = tables.filter_map(|rest| rest.split("\n}").next());
        let found = tables.any(|table| {
            table.contains(&format!("in \"{service}\"")) && table.contains(&format!(" {field}: "))
        });
        assert!(
            found,
            "no source registers {metric:?}: correct services/HEALTH.md"
        );
    }
}
