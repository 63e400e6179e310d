//! Dependencies between the crates of the workspace. A new arrow is a decision: enter it here with
//! the code that needs it, or find a place where it is not needed.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value;

/// Dependencies of each crate at run time.
const ARROWS: [(&str, &[&str]); 15] = [
    ("fiec-schemas", &[]),
    ("fiec-broker", &["fiec-schemas"]),
    // Services.
    ("fiec-policy", &["fiec-schemas"]),
    (
        "fiec-policy-service",
        &["fiec-broker", "fiec-policy", "fiec-schemas"],
    ),
    ("fiec-recorder", &["fiec-broker", "fiec-schemas"]),
    ("fiec-console", &["fiec-broker", "fiec-schemas"]),
    // Workers.
    ("fiec-kernels", &[]),
    ("fiec-probes", &["fiec-schemas"]),
    ("fiec-cuda", &["fiec-kernels", "fiec-probes"]),
    ("fiec-kit", &["fiec-kernels", "fiec-schemas"]),
    (
        "fiec-agent",
        &["fiec-broker", "fiec-kit", "fiec-probes", "fiec-schemas"],
    ),
    // The product: all crates above, and none of the following.
    (
        "fiec",
        &[
            "fiec-agent",
            "fiec-broker",
            "fiec-console",
            "fiec-cuda",
            "fiec-kit",
            "fiec-policy",
            "fiec-policy-service",
            "fiec-probes",
            "fiec-recorder",
            "fiec-schemas",
        ],
    ),
    // Crates that measure, simulate and demonstrate the product.
    ("fiec-dev-servers", &[]),
    ("fiec-simulator", &["fiec-policy", "fiec-schemas"]),
    (
        "fiec-lab",
        &[
            "fiec",
            "fiec-broker",
            "fiec-cuda",
            "fiec-dev-servers",
            "fiec-kernels",
            "fiec-kit",
            "fiec-policy",
            "fiec-policy-service",
            "fiec-probes",
            "fiec-recorder",
            "fiec-schemas",
            "fiec-simulator",
        ],
    ),
];

/// Further dependencies of a crate's tests.
const ARROWS_OF_TESTS: [(&str, &[&str]); 6] = [
    ("fiec-agent", &["fiec-dev-servers"]),
    ("fiec-broker", &["fiec-dev-servers"]),
    ("fiec-cuda", &["fiec-kit", "fiec-schemas"]),
    // Its played clusters are recorded as traces.
    ("fiec-policy", &["fiec-simulator"]),
    ("fiec-policy-service", &["fiec-dev-servers"]),
    // Itself with the feature that holds the lab's and the tests' part.
    ("fiec-recorder", &["fiec-dev-servers", "fiec-recorder"]),
];

/// Crates that are not part of the production binary.
const LAB: [&str; 3] = ["fiec-dev-servers", "fiec-lab", "fiec-simulator"];
/// Libraries of the lab that the product linked in the past.
const LIBRARIES_OF_THE_LAB: [&str; 4] = ["faer", "font8x8", "png", "rand_chacha"];

/// Dependencies of each crate of the workspace, as its manifest declares them.
struct Workspace {
    normal: BTreeMap<String, BTreeSet<String>>,
    tests: BTreeMap<String, BTreeSet<String>>,
}

impl Workspace {
    fn read() -> Self {
        let output = Command::new(std::env::var_os("CARGO").unwrap())
            .args([
                "metadata",
                "--format-version",
                "1",
                "--no-deps",
                "--offline",
            ])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .unwrap();
        let words = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words}");
        let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
        let (mut normal, mut tests) = (BTreeMap::new(), BTreeMap::new());
        for package in metadata["packages"].as_array().unwrap() {
            let name = text(&package["name"]);
            let all = package["dependencies"].as_array().unwrap();
            let (dev, used): (Vec<&Value>, Vec<&Value>) = all
                .iter()
                .partition(|dependency| dependency["kind"] == "dev");
            let names = |all: Vec<&Value>| all.iter().map(|d| text(&d["name"])).collect();
            normal.insert(name.clone(), names(used));
            tests.insert(name, names(dev));
        }
        Self { normal, tests }
    }

    fn own(&self, arrows: &BTreeMap<String, BTreeSet<String>>) -> BTreeMap<String, Vec<String>> {
        let is_own = |name: &&String| self.normal.contains_key(*name);
        let own = |all: &BTreeSet<String>| all.iter().filter(is_own).cloned().collect();
        arrows
            .iter()
            .map(|(from, to)| (from.clone(), own(to)))
            .collect()
    }

    /// The crate and its dependencies at run time. Foreign crates count only if they are direct
    /// ones.
    fn closure(&self, root: &str) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        let mut next = vec![root.to_owned()];
        while let Some(name) = next.pop() {
            if !found.contains(&name) {
                next.extend(self.normal.get(&name).into_iter().flatten().cloned());
                found.insert(name);
            }
        }
        found
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}

fn table(rows: &[(&str, &[&str])]) -> BTreeMap<String, Vec<String>> {
    let names = |all: &[&str]| all.iter().map(|name| (*name).to_owned()).collect();
    rows.iter()
        .map(|(from, to)| ((*from).to_owned(), names(to)))
        .collect()
}

#[track_caller]
fn compare(found: &BTreeMap<String, Vec<String>>, declared: &BTreeMap<String, Vec<String>>) {
    for name in found.keys().chain(declared.keys()) {
        assert_eq!(
            found.get(name),
            declared.get(name),
            "manifest (left) and table (right) differ for {name}"
        );
    }
}

#[test]
fn the_arrows_between_crates_are_those_of_the_table() {
    let workspace = Workspace::read();
    compare(&workspace.own(&workspace.normal), &table(&ARROWS));
    let mut tests = workspace.own(&workspace.tests);
    tests.retain(|_, arrows| !arrows.is_empty());
    compare(&tests, &table(&ARROWS_OF_TESTS));
}

#[test]
fn the_product_does_not_depend_on_what_measures_it() {
    let product = Workspace::read().closure("fiec");
    assert!(product.contains("fiec-policy-service") && product.contains("tokio"));
    for name in LAB.into_iter().chain(LIBRARIES_OF_THE_LAB) {
        assert!(!product.contains(name), "fiec depends on {name}");
    }
}
