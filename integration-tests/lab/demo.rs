//! `cargo demo`, as a newcomer runs it, in the build of the tests.

use crate::HOST;
use crate::stage::BINARY;
use std::process::Stdio;
use std::time::Duration;
use tokio::time::timeout;

/// The demo takes less than a minute on a quiet machine.
const PATIENCE: Duration = Duration::from_secs(300);

#[tokio::test]
async fn every_claim_of_the_demo_is_checked_and_its_report_is_written() {
    let _one = HOST.lock().await;
    let folder = tempfile::tempdir().unwrap();
    let report = folder.path().join("report.html");
    let mut command = tokio::process::Command::new(BINARY);
    command
        .args(["demo", "--report"])
        .arg(&report)
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let output = timeout(PATIENCE, command.output()).await;
    let output = output.unwrap_or_else(|_| panic!("the demo took more than {PATIENCE:?}"));
    let output = output.unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    let said = format!("stdout:\n{stdout}\nstderr:\n{stderr}");
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(!stdout.contains('✗'), "{said}");
    assert!(stdout.matches('✓').count() > 3, "{said}");
    let page = std::fs::read_to_string(&report).unwrap();
    assert!(
        page.contains("<html") && page.contains("pressure"),
        "{said}"
    );
}
