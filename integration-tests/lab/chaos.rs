//! `fiec-lab chaos`: two minutes of faults of a fixed seed.

use std::time::Duration;

use crate::stage::BINARY;
use tokio::process::Command;
use tokio::time::timeout;

/// Longest time of a run: the faults, the quiet period and the bounds of the oracles.
const PATIENCE: Duration = Duration::from_secs(600);

#[tokio::test]
async fn two_minutes_of_faults_break_no_promise() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().display().to_string();
    let mut command = Command::new(BINARY);
    command
        .args([
            "chaos",
            "--seed",
            "12",
            "--minutes",
            "2",
            "--data-dir",
            &data,
        ])
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
