//! Ledger messages into PostgreSQL by the recorder's path, against plain COPY of the same rows.
//! `cargo run --release -p fiec-recorder --example history_speed [EXECUTIONS]`
#![allow(clippy::unwrap_used, clippy::expect_used)]

use fiec_dev_servers::{NoProgress, Postgres, PostgresOptions, locate_postgres};
use fiec_recorder::bench_support::{clear, plain_copy, project, short_ledgers};

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let executions = std::env::args()
        .nth(1)
        .map_or(20_000, |n| n.parse().unwrap());
    let folder = fiec_dev_servers_folder();
    let install = locate_postgres(&NoProgress).await.unwrap();
    let server = Postgres::start(PostgresOptions::new(install, folder.path().join("pg")))
        .await
        .unwrap();
    let pool = fiec_recorder::connect(&server.url()).await.unwrap();
    fiec_recorder::migrate(&pool).await.unwrap();
    let items = short_ledgers(executions, 1).unwrap();
    println!("{executions} executions, {} messages", items.len());
    for round in 0..4 {
        clear(&pool).await.unwrap();
        let floor = plain_copy(&pool, &items).await.unwrap();
        clear(&pool).await.unwrap();
        let ours = project(&pool, items.clone()).await.unwrap();
        println!(
            "round {round}: copy {:.0} rows/s ({:.1} us an execution), recorder {:.0} rows/s \
             ({:.1} us an execution), ratio {:.2}",
            floor.rows_per_s(),
            floor.elapsed.as_secs_f64() * 1e6 / executions as f64,
            ours.rows_per_s(),
            ours.elapsed.as_secs_f64() * 1e6 / executions as f64,
            ours.rows_per_s() / floor.rows_per_s(),
        );
    }
}

/// A folder that PostgreSQL's user can reach.
fn fiec_dev_servers_folder() -> tempfile::TempDir {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o711)).unwrap();
    folder
}
