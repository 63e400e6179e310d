//! `bench launch`: publish of a submission to the begin of its first capsule, for a program of the
//! Rust kit and one of the Python kit, with a child that is warm and with a new one each time. The
//! floor is one acknowledged publish on the same connection.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use fiec_schemas::programs;
use serde_json::json;

use super::latency::{self, Of};
use super::python::Kit;
use super::{Lab, cluster};
use crate::cluster::Cluster;

/// The name of the package in Python.
const PYTHON: &str = "launch@1";
/// How long pushing it may take.
const PUSH: Duration = Duration::from_secs(60);

/// Runs the bench: `start_p50_ms` and `start_p99_ms` of each case; reach ≤ 1 for the median of
/// `warm rust`.
///
/// # Errors
/// When something could not be started or measured.
pub async fn run(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    let kit = Kit::find().await;
    if let Err(why) = &kit {
        lab.left_out("bench launch: cold python, warm python", why);
    }
    // A new process each time takes long enough that fewer samples fill the same time.
    let runs = [
        (&["--cold"][..], "cold rust", "cold python", 300, 200),
        (&[][..], "warm rust", "warm python", 500, 500),
    ];
    for (more, rust, python, of_rust, of_python) in runs {
        let worker_args = [&["--allow-program", PYTHON], more].concat();
        let cluster = cluster(lab, 1, &worker_args, true).await?;
        let mut cases = vec![(rust, programs::SYNTHETIC, json!({"capsules": 1}), of_rust)];
        if let Ok(kit) = &kit {
            let folder = tempfile::tempdir()?;
            kit.package(folder.path())?;
            push(&cluster, folder.path()).await?;
            cases.push((python, PYTHON, json!({}), of_python));
        }
        for (case, program, params, count) in cases {
            let count = lab.samples(count);
            let of = Of {
                case,
                program,
                params,
                // The package is fetched for the first; children and caches are warm after some.
                unmeasured: if more.is_empty() { 20 } else { 3 },
                named: true,
            };
            let starts = latency::starts(lab, &cluster.broker, &of, count).await?;
            starts.add_to(lab.figures, "launch", case);
        }
        cluster.stop().await;
    }
    Ok(())
}

/// Pushes the package as a person does.
async fn push(cluster: &Cluster, folder: &Path) -> anyhow::Result<()> {
    let binary = std::env::current_exe().context("cannot find this program's own file")?;
    let mut command = tokio::process::Command::new(binary);
    command
        .args(["--json", "program", "push", PYTHON])
        .arg(folder)
        .envs(cluster.environment())
        .stdin(std::process::Stdio::null())
        .kill_on_drop(true);
    let output = tokio::time::timeout(PUSH, command.output())
        .await
        .with_context(|| format!("the push of {PYTHON} did not end within {PUSH:?}"))??;
    ensure!(
        output.status.success(),
        "the push of {PYTHON} failed: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}
