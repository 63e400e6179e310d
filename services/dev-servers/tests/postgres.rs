//! Real PostgreSQL servers, installed and fetched.

#![allow(clippy::unwrap_used)]

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use fiec_dev_servers::{
    Error, NoProgress, Origin, Postgres, PostgresOptions, Sources, locate_postgres,
    locate_postgres_in,
};
use sqlx::Connection as _;
use sqlx::postgres::{PgConnectOptions, PgConnection};

/// A folder that the server's user can reach.
fn reachable() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o711)).unwrap();
    dir
}

async fn options(dir: &Path) -> PostgresOptions {
    let install = locate_postgres(&NoProgress).await.unwrap();
    let mut options = PostgresOptions::new(install, dir.join("pg"));
    options.durable = false;
    options
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[tokio::test]
async fn a_killed_server_comes_back_on_its_port_with_its_data() {
    let dir = reachable();
    let mut server = Postgres::start(options(dir.path()).await).await.unwrap();
    let owner = std::fs::metadata(format!("/proc/{}", server.pid()))
        .unwrap()
        .uid();
    assert_ne!(owner, 0, "PostgreSQL runs as root");
    assert_eq!(server.account().is_some(), is_root());
    server
        .query_one("CREATE TABLE t AS SELECT 42 AS x")
        .await
        .unwrap();
    let port = server.port();
    server.kill().await;
    server.restart().await.unwrap();
    assert_eq!(server.port(), port);
    let x = server.query_one("SELECT x FROM t").await.unwrap();
    assert_eq!(x.as_deref(), Some("42"));
    for (name, wanted) in [
        ("server_encoding", "UTF8"),
        ("synchronous_commit", "on"),
        ("shared_buffers", "128MB"),
        ("jit", "off"),
        ("listen_addresses", "127.0.0.1"),
        ("unix_socket_directories", ""),
    ] {
        let value = server.query_one(&format!("SHOW {name}")).await.unwrap();
        assert_eq!(value.as_deref(), Some(wanted), "{name}");
    }
    assert!(server.stop(Duration::from_secs(20)).await, "not graceful");
}

#[tokio::test]
async fn an_existing_cluster_is_used_again_despite_a_stale_pid_file() {
    let dir = reachable();
    let mut server = Postgres::start(options(dir.path()).await).await.unwrap();
    server
        .query_one("CREATE TABLE t AS SELECT 7 AS x")
        .await
        .unwrap();
    server.kill().await;
    drop(server);
    // The process id in the file now belongs to another program: to this process.
    let file = dir.path().join("pg/postmaster.pid");
    let text = std::fs::read_to_string(&file).unwrap();
    let (_, rest) = text.split_once('\n').unwrap();
    std::fs::write(&file, format!("{}\n{rest}", std::process::id())).unwrap();
    let server = Postgres::start(options(dir.path()).await).await.unwrap();
    let x = server.query_one("SELECT x FROM t").await.unwrap();
    assert_eq!(x.as_deref(), Some("7"));
    let second = Postgres::start(options(dir.path()).await).await;
    assert!(matches!(second, Err(Error::InUse { .. })), "{second:?}");
}

#[tokio::test]
async fn the_fetched_postgres_runs_without_installation() {
    let dir = reachable();
    let install = locate_postgres_in(&Sources::fetched_only(), &NoProgress)
        .await
        .unwrap();
    assert!(matches!(install.origin, Origin::Cache | Origin::Fetched));
    let mut options = PostgresOptions::new(install, dir.path().join("pg"));
    options.durable = false;
    let server = Postgres::start(options).await.unwrap();
    let sum = server
        .query_one("SELECT sum(i) FROM generate_series(1, 100) i")
        .await;
    assert_eq!(sum.unwrap().as_deref(), Some("5050"));
    // Runs in a module that is loaded from the package's own folder.
    let code = server.query_one("DO $$ BEGIN NULL; END $$").await;
    code.unwrap();
}

#[tokio::test]
async fn a_folder_that_the_server_user_cannot_reach_is_refused_with_a_remedy() {
    if !is_root() {
        return; // Without root the server runs as this user, who can.
    }
    let closed = tempfile::tempdir().unwrap();
    std::fs::set_permissions(closed.path(), PermissionsExt::from_mode(0o700)).unwrap();
    let e = Postgres::start(options(closed.path()).await)
        .await
        .unwrap_err();
    assert!(matches!(e, Error::Unreachable { .. }), "{e:?}");
    assert!(e.to_string().contains("chmod o+x"), "{e}");
}

#[tokio::test]
async fn foreign_files_and_other_versions_are_not_touched() {
    let dir = reachable();
    let pg = dir.path().join("pg");
    std::fs::create_dir(&pg).unwrap();
    std::fs::write(pg.join("thesis.txt"), "mine").unwrap();
    let e = Postgres::start(options(dir.path()).await)
        .await
        .unwrap_err();
    assert!(matches!(e, Error::NotACluster { .. }), "{e:?}");
    std::fs::write(pg.join("PG_VERSION"), "9\n").unwrap();
    let e = Postgres::start(options(dir.path()).await)
        .await
        .unwrap_err();
    assert!(matches!(e, Error::ClusterVersion { .. }), "{e:?}");
    assert_eq!(
        std::fs::read_to_string(pg.join("thesis.txt")).unwrap(),
        "mine"
    );
}

/// The server's answer to a client without the password.
async fn stranger(server: &Postgres) -> String {
    let options = PgConnectOptions::new_without_pgpass()
        .host("127.0.0.1")
        .port(server.port())
        .username("fiec")
        .password("fiec")
        .database("postgres");
    match PgConnection::connect_with(&options).await {
        Ok(_) => "let in".to_owned(),
        Err(error) => error.to_string(),
    }
}

#[tokio::test]
async fn other_users_of_the_machine_cannot_use_the_server() {
    let dir = reachable();
    let mut server = Postgres::start(options(dir.path()).await).await.unwrap();
    let answer = stranger(&server).await;
    assert!(
        answer.contains("password authentication failed"),
        "{answer}"
    );
    let password = std::fs::metadata(dir.path().join("pg.password")).unwrap();
    assert_eq!(password.permissions().mode() & 0o777, 0o600);
    server
        .query_one("CREATE TABLE t AS SELECT 7 AS x")
        .await
        .unwrap();
    server.stop(Duration::from_secs(20)).await;
    drop(server);
    // The state that an earlier version left: no password, and every client is trusted.
    std::fs::remove_file(dir.path().join("pg.password")).unwrap();
    std::fs::write(
        dir.path().join("pg/pg_hba.conf"),
        "host all all 127.0.0.1/32 trust\n",
    )
    .unwrap();
    let server = Postgres::start(options(dir.path()).await).await.unwrap();
    let answer = stranger(&server).await;
    assert!(
        answer.contains("password authentication failed"),
        "{answer}"
    );
    let x = server.query_one("SELECT x FROM t").await.unwrap();
    assert_eq!(x.as_deref(), Some("7"));
}
