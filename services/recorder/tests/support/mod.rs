//! A private PostgreSQL with all tables, and what is read from it.

use std::os::unix::fs::PermissionsExt as _;

use fiec_dev_servers::{NoProgress, Postgres, PostgresOptions, locate_postgres};
use fiec_schemas::{BoundaryEvent, Cause, Digest, Event, InstanceId, Timestamp};
use serde_json::Value;
use sqlx::{AssertSqlSafe, PgPool};

/// A database of its own, as long as it is held.
pub struct Database {
    pub pool: PgPool,
    pub url: String,
    _server: Postgres,
    _folder: tempfile::TempDir,
}

/// A database with all tables.
pub async fn database() -> Database {
    let folder = tempfile::tempdir().unwrap();
    // PostgreSQL's user must be able to reach it.
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o711)).unwrap();
    let install = locate_postgres(&NoProgress).await.unwrap();
    let mut options = PostgresOptions::new(install, folder.path().join("pg"));
    options.durable = false;
    let server = Postgres::start(options).await.unwrap();
    let url = server.url();
    let pool = fiec_recorder::connect(&url).await.unwrap();
    fiec_recorder::migrate(&pool).await.unwrap();
    Database {
        pool,
        url,
        _server: server,
        _folder: folder,
    }
}

/// The only number.
pub async fn number(pool: &PgPool, sql: &str) -> i64 {
    sqlx::query_scalar(AssertSqlSafe(sql.to_owned()))
        .fetch_one(pool)
        .await
        .unwrap()
}

/// The only text.
pub async fn words(pool: &PgPool, sql: &str) -> String {
    sqlx::query_scalar(AssertSqlSafe(sql.to_owned()))
        .fetch_one(pool)
        .await
        .unwrap()
}

/// Each row as an object.
pub async fn rows(pool: &PgPool, sql: &str) -> Vec<Value> {
    sqlx::query_scalar(AssertSqlSafe(format!("SELECT to_jsonb(q) FROM ({sql}) q")))
        .fetch_all(pool)
        .await
        .unwrap()
}

/// A binding to a node.
pub fn bound(epoch: u64, node: &str, cause: Cause) -> Event {
    Event::Bound {
        epoch,
        node: node.parse().unwrap(),
        instance: InstanceId::random(),
        substrate: "host".into(),
        cause,
        decision: None,
    }
}

/// A boundary with this σ, computed now.
pub fn boundary(index: u64, state: &[u8]) -> Event {
    Event::Boundary(BoundaryEvent {
        index,
        digest: Digest::of(state),
        bytes: state.len() as u64,
        computed_at: Timestamp::now(),
        compute_us: 1,
        of: None,
        note: None,
        outputs: Vec::new(),
        energy: None,
    })
}

/// A pool of a role, with a password of its own. Sessions may write: only rights forbid it.
pub async fn as_role(pool: &PgPool, role: &str) -> PgPool {
    // One at a time: two recorders may come together.
    let words =
        format!("SELECT pg_advisory_xact_lock(8); ALTER ROLE {role} PASSWORD 'words of {role}'");
    let done = sqlx::raw_sql(AssertSqlSafe(words)).execute(pool).await;
    assert!(done.is_ok(), "{role}: {done:?}");
    let options = pool.connect_options().as_ref().clone();
    let options = options
        .username(role)
        .password(&format!("words of {role}"))
        .options([("default_transaction_read_only", "off")]);
    sqlx::postgres::PgPoolOptions::new()
        .max_connections(8)
        .connect_with(options)
        .await
        .unwrap()
}
