//! The Python client: its own tests, against a cluster whose executions move, fail and are many.

use std::process::Stdio;

use crate::stage::python::{Python, root, success};
use crate::stage::{BINARY, Lab, args, workers_with_history};

#[test]
fn the_clients_tests_without_a_cluster_pass() {
    let Some(python) = Python::of_client() else {
        return; // said by `fetch`
    };
    let mut command = python.command(&["-m", "unittest", "-v", "test_offline"]);
    let folder = root().join("workers/python/tests/client");
    let (_, said) = success(command.current_dir(folder).output().unwrap());
    assert!(said.contains("\nOK"), "{said}");
}

/// Runs tests of the client against a cluster of its own.
async fn against_a_cluster(classes: &[&str], at_least: usize) {
    let Some(python) = Python::of_client() else {
        return; // said by `fetch`
    };
    let mut options = workers_with_history(3);
    options.worker_args.extend(args(&["--allow-program", "*"]));
    let lab = Lab::start(options).await;
    let words = [&["-m", "unittest", "-v"], classes].concat();
    let mut command = tokio::process::Command::from(python.command(&words));
    let ran = command
        .current_dir(root().join("workers/python/tests/client"))
        .envs(lab.environment("wait"))
        .env("FIEC_TENANT", lab.tenant.as_str())
        .env("FIEC_BINARY", BINARY)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .output()
        .await;
    let (out, said) = success(ran.unwrap());
    println!("{out}");
    let passed = said.lines().filter(|line| line.ends_with("ok")).count();
    assert!(passed >= at_least, "{said}");
    assert!(!said.contains("skipped"), "{said}");
    lab.end().await;
}

#[tokio::test]
async fn the_python_client_submits_follows_moves_and_fetches() {
    against_a_cluster(&["test_cluster.OneJob", "test_cluster.Data"], 9).await;
}

#[tokio::test]
async fn the_python_client_maps_over_many_and_survives_ctrl_c_and_a_cut() {
    against_a_cluster(&["test_cluster.Many", "test_cluster.Outages"], 8).await;
}

#[tokio::test]
async fn the_example_notebook_runs_cell_by_cell() {
    against_a_cluster(&["test_notebook"], 1).await;
}
