//! No server survives the process that started it.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
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

/// A folder that the servers' user can reach. A killed parent removes nothing.
fn reachable() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o711)).unwrap();
    dir
}

/// Data folder of the process that holds the servers.
const DATA_DIR: &str = "FIEC_ORPHANS_DATA_DIR";
/// Beginning of the line in which that process names the servers.
const MARK: &str = "servers: ";

#[tokio::test]
#[ignore = "started by servers_die_with_a_parent_that_is_killed as another process"]
async fn hold_servers() {
    let Some(data_dir) = std::env::var_os(DATA_DIR) else {
        return;
    };
    let options = Options {
        data_dir: Some(data_dir.into()),
        ..Options::default()
    };
    let servers = DevServers::start(options, &NoProgress).await.unwrap();
    let nats = servers.nats.pid();
    let postgres = servers.postgres.as_ref().unwrap().pid();
    println!("\n{MARK}{nats} {postgres}");
    std::future::pending::<()>().await;
}

#[test]
fn servers_die_with_a_parent_that_is_killed() {
    let dir = reachable();
    let mut parent = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "--nocapture", "hold_servers"])
        .env(DATA_DIR, dir.path().join("data"))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = BufReader::new(parent.stdout.take().unwrap());
    let servers = output
        .lines()
        .map(Result::unwrap)
        .find_map(|line| line.strip_prefix(MARK).map(str::to_owned))
        .unwrap();
    let pids: Vec<u32> = servers.split(' ').map(|p| p.parse().unwrap()).collect();
    let [nats, postgres] = pids[..] else {
        panic!("two process ids in {servers:?}");
    };
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
