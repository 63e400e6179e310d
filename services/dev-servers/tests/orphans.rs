//! Nothing survives the process that started the servers.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use fiec_dev_servers::{DevServers, NoProgress, Options};
use rustix::process::{Pid, test_kill_process};

fn alive(pid: u32) -> bool {
    let pid = Pid::from_raw(pid.try_into().unwrap()).unwrap();
    test_kill_process(pid).is_ok()
}

fn children_of(pid: u32) -> Vec<u32> {
    let path = format!("/proc/{pid}/task/{pid}/children");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace()
        .map(|p| p.parse().unwrap())
        .collect()
}

fn gone_within(pids: &[u32], limit: Duration) -> bool {
    let until = Instant::now() + limit;
    while pids.iter().any(|p| alive(*p)) {
        if Instant::now() > until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    true
}

/// A folder that the servers' user can reach; a killed parent removes nothing.
fn reachable() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o711)).unwrap();
    dir
}

/// Cargo builds the examples of a package for its tests.
fn hold() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let target = test.parent().and_then(|p| p.parent()).unwrap();
    target.join("examples/hold")
}

#[test]
fn servers_die_with_a_parent_that_is_killed() {
    let dir = reachable();
    let mut parent = Command::new(hold())
        .arg(dir.path().join("data"))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(parent.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    let told: serde_json::Value = serde_json::from_str(&line).unwrap();
    let pid = |name: &str| u32::try_from(told[name].as_u64().unwrap()).unwrap();
    let (nats, postgres) = (pid("nats_pid"), pid("postgres_pid"));
    let mut all = children_of(postgres);
    assert!(!all.is_empty(), "PostgreSQL has background processes");
    all.extend([nats, postgres]);
    assert!(all.iter().all(|p| alive(*p)), "{all:?}");
    parent.kill().unwrap();
    parent.wait().unwrap();
    assert!(
        gone_within(&all, Duration::from_secs(20)),
        "{all:?} still run"
    );
}

#[tokio::test]
async fn stopping_leaves_neither_processes_nor_the_temporary_folder() {
    let servers = DevServers::start(Options::default(), &NoProgress)
        .await
        .unwrap();
    let pids = [servers.nats.pid(), servers.postgres.as_ref().unwrap().pid()];
    let dir = servers.data_dir().to_owned();
    assert!(dir.is_dir());
    servers.stop(Duration::from_secs(20)).await;
    assert!(gone_within(&pids, Duration::from_secs(20)));
    assert!(!dir.exists());
}

#[tokio::test]
async fn dropping_leaves_neither_processes_nor_the_temporary_folder() {
    let servers = DevServers::start(Options::default(), &NoProgress)
        .await
        .unwrap();
    let pids = [servers.nats.pid(), servers.postgres.as_ref().unwrap().pid()];
    let dir = servers.data_dir().to_owned();
    drop(servers);
    assert!(gone_within(&pids, Duration::from_secs(20)));
    assert!(!dir.exists());
}

#[tokio::test]
async fn a_given_folder_stays_and_is_used_again() {
    let dir = reachable();
    let options = || Options {
        data_dir: Some(dir.path().join("data")),
        ..Options::default()
    };
    let servers = DevServers::start(options(), &NoProgress).await.unwrap();
    let postgres = servers.postgres.as_ref().unwrap();
    postgres
        .query_one("CREATE TABLE t AS SELECT 1 AS x")
        .await
        .unwrap();
    servers.stop(Duration::from_secs(20)).await;
    let servers = DevServers::start(options(), &NoProgress).await.unwrap();
    let postgres = servers.postgres.as_ref().unwrap();
    let x = postgres.query_one("SELECT x FROM t").await.unwrap();
    assert_eq!(x.as_deref(), Some("1"));
}
