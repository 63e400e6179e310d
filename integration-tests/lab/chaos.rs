//! `fiec-lab chaos`: faults of fixed seeds, with one broker and with three.

use std::time::Duration;

use crate::stage::BINARY;
use tokio::process::Command;
use tokio::time::timeout;

/// Longest time of a run: the faults, the quiet period and the bounds of the oracles.
const PATIENCE: Duration = Duration::from_secs(600);

async fn no_promise_is_broken(words: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(BINARY);
    command
        .arg("chaos")
        .args(words)
        .arg("--data-dir")
        .arg(folder.path())
        .env_remove("FIEC_LOG")
        .kill_on_drop(true);
    let ran = timeout(PATIENCE, command.output()).await;
    let ran = ran.unwrap_or_else(|_| panic!("the run did not end within {PATIENCE:?}"));
    let ran = ran.unwrap();
    assert!(
        ran.status.success(),
        "{}\n{}",
        String::from_utf8_lossy(&ran.stdout),
        String::from_utf8_lossy(&ran.stderr)
    );
}

#[tokio::test]
async fn two_minutes_of_faults_break_no_promise() {
    no_promise_is_broken(&["--seed", "12", "--minutes", "2"]).await;
}

#[tokio::test]
async fn faults_of_three_brokers_break_no_promise() {
    no_promise_is_broken(&["--seed", "70", "--minutes", "0.6", "--brokers", "3"]).await;
}
