//! `fiec-lab chaos`: two minutes of faults of fixed seeds.

use std::time::Duration;

use crate::stage::BINARY;
use tokio::process::Command;
use tokio::time::timeout;

/// Longest time of a run: a minute of faults, the quiet period and the bounds of the oracles.
const PATIENCE: Duration = Duration::from_secs(600);

/// Plays a minute of this seed's faults.
async fn a_minute_of(seed: u64) {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().display().to_string();
    let mut command = Command::new(BINARY);
    let seed = seed.to_string();
    command
        .args([
            "chaos",
            "--seed",
            &seed,
            "--minutes",
            "1",
            "--data-dir",
            &data,
        ])
        .env_remove("FIEC_LOG")
        .kill_on_drop(true);
    let ran = timeout(PATIENCE, command.output()).await;
    let ran = ran.unwrap_or_else(|_| panic!("seed {seed} did not end within {PATIENCE:?}"));
    let ran = ran.unwrap();
    assert!(
        ran.status.success(),
        "seed {seed}:\n{}\n{}",
        String::from_utf8_lossy(&ran.stdout),
        String::from_utf8_lossy(&ran.stderr)
    );
}

#[tokio::test]
async fn two_minutes_of_faults_break_no_promise() {
    for seed in [1, 2] {
        a_minute_of(seed).await;
    }
}
