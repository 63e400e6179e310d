//! The Python kit: its own tests, its types, its package, and the examples.

use std::path::Path;
use std::process::Command;

use crate::stage::python::{Python, copy, root, say, success};
use fiec_schemas::Submission;
use fiec_schemas::package::Manifest;

/// Runs a suite of `unittest`; says what it has skipped and why, and how many tests it ran.
#[track_caller]
fn unittest(folder: &Path, words: &[&str]) -> usize {
    let words = [&["-m", "unittest"], words, &["-v"]].concat();
    let mut command = Python::get().command(&words);
    let (_, said) = success(command.current_dir(folder).output().unwrap());
    for line in said.lines().filter(|line| line.contains("... skipped")) {
        say(&format!("SKIPPED in {}: {line}", folder.display()));
    }
    let ran = said.lines().find_map(|line| line.strip_prefix("Ran "));
    let count = ran.and_then(|line| line.split(' ').next());
    count.and_then(|n| n.parse().ok()).expect(&said)
}

/// The kit's own tests in the files that match a pattern.
#[track_caller]
fn own_tests(pattern: &str) -> usize {
    let words = ["discover", "-t", ".", "-s", "tests", "-p", pattern];
    unittest(&root().join("workers/python"), &words)
}

#[test]
fn the_kits_tests_of_values_positions_and_cost_pass() {
    assert!(own_tests("test_[!lw]*.py") >= 30);
}

#[test]
fn the_kits_tests_against_an_agent_pass() {
    assert!(own_tests("test_w*.py") >= 30);
}

#[test]
fn the_kits_tests_without_a_worker_and_in_containers_pass() {
    assert!(own_tests("test_l*.py") >= 15);
}

#[test]
fn the_examples_learn_and_cuts_do_not_change_a_bit_of_what_they_learn() {
    let folder = root().join("examples/python-training");
    assert!(unittest(&folder, &["test_training"]) >= 8);
}

#[test]
fn the_models_in_pytorch_learn_and_cuts_do_not_change_a_bit_of_their_weights() {
    let folder = root().join("examples/torch-training");
    assert!(unittest(&folder, &["test_torch_training"]) >= 6);
}

#[test]
fn the_sweep_finds_what_is_known_and_spreading_does_not_change_a_bit() {
    let folder = root().join("examples/sweep");
    assert!(unittest(&folder, &["test_sweep"]) >= 6);
}

#[test]
fn the_kit_and_the_examples_are_fully_typed() {
    let Some(python) = Python::of_client() else {
        return; // said by `fetch`
    };
    let cache = tempfile::tempdir().unwrap();
    for (folder, files) in [
        ("workers/python", &["fiec", "tests"][..]),
        (
            "examples/python-training",
            &["train.py", "train_torch.py", "test_training.py"],
        ),
        (
            "examples/torch-training",
            &["letters.py", "shapes.py", "test_torch_training.py"],
        ),
        ("examples/notebook", &["descend.py"]),
        ("examples/sweep", &["sweep.py", "test_sweep.py"]),
    ] {
        let words = [
            "-m",
            "mypy",
            "--strict",
            "--ignore-missing-imports",
            "--cache-dir",
        ];
        let mut command = python.command(&words);
        command.arg(cache.path()).args(files);
        success(command.current_dir(root().join(folder)).output().unwrap());
    }
}

#[test]
fn the_kit_installs_by_pip_with_its_types() {
    if !Python::get().has_packages {
        return; // pip cannot get the build tool either; said by `fetch`
    }
    let temp = tempfile::tempdir().unwrap();
    // A build leaves files beside its sources.
    let source = temp.path().join("kit");
    copy(&root().join("workers/python"), &source);
    let target = temp.path().join("package");
    let mut pip = Command::new("python3");
    pip.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--disable-pip-version-check",
    ]);
    success(
        pip.arg("--target")
            .arg(&target)
            .arg(&source)
            .output()
            .unwrap(),
    );
    assert!(target.join("fiec/py.typed").exists());
    assert!(target.join("fiec/client/aio.py").exists());
    let mut python = Command::new("python3");
    let words = "import fiec, fiec.testing as t; print(fiec.__file__, t.run(lambda r: 7).result)";
    let (out, _) = success(
        python
            .args(["-c", words])
            .env("PYTHONPATH", &target)
            .output()
            .unwrap(),
    );
    assert!(out.starts_with(target.to_str().unwrap()), "{out}");
    assert!(out.trim().ends_with(" 7"), "{out}");
}

#[test]
fn the_wheels_have_the_version_of_the_crates_and_need_each_other() {
    let read = |path: &str| std::fs::read_to_string(root().join(path)).unwrap();
    let version = env!("CARGO_PKG_VERSION");
    let kit = read("workers/python/pyproject.toml");
    let product = read("services/fiec/pyproject.toml");
    let lab = read("services/lab/pyproject.toml");
    for (text, name) in [(&kit, "fiec-kit"), (&product, "fiec"), (&lab, "fiec-lab")] {
        assert!(
            text.contains(&format!("\nname = \"{name}\"\nversion = \"{version}\"\n")),
            "{name}"
        );
    }
    assert!(
        read("workers/python/fiec/__init__.py").contains(&format!("__version__ = \"{version}\""))
    );
    for needed in [
        format!("\"fiec-kit=={version}\""),
        format!("\"fiec-lab=={version}\""),
        format!("\"fiec-kit[client]=={version}\""),
        format!("\"fiec-kit[notebook]=={version}\""),
    ] {
        assert!(product.contains(&needed), "{needed}");
    }
}

#[test]
fn the_manifests_and_the_submission_of_the_examples_are_what_they_should_be() {
    let read = |name| std::fs::read(root().join("examples").join(name)).unwrap();
    let manifest = Manifest::parse(&read("python-training/fiec.json")).unwrap();
    assert!(manifest.declares("weights.npy") && manifest.declares("loss.csv"));
    let manifest = Manifest::parse(&read("sweep/fiec.json")).unwrap();
    assert!(manifest.declares("misfit.csv"));
    let submission = Submission::parse(&read("sweep/submission.jsonl")).unwrap();
    assert_eq!(submission.spread.map(|spread| spread.up_to), Some(3));
}
