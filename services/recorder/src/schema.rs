//! The connection to PostgreSQL, its tables, and the views for people.
//!
//! Tables change by migrations, each of which runs once. Views and functions for people are one file
//! that is applied whenever it has changed, in one transaction: a query sees the old ones or the new
//! ones, never none. Replacing a view waits for the queries that read it, and new queries wait for
//! that; both for [`LOCK_WAIT`] at most. The recorder writes tables alone and waits for neither.

use std::time::Duration;

use fiec_schemas::Digest;
use sqlx::migrate::{MigrateError, Migrator};
use sqlx::postgres::{PgDatabaseError, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool};

use crate::error::{RecorderError, Result};
use crate::table::argument;

static MIGRATIONS: Migrator = sqlx::migrate!("../../migrations");
const VIEWS: &str = include_str!("../../../migrations/views.sql");

/// Longest time that a statement waits for a lock: of somebody who applies the same, or of a reader.
const LOCK_WAIT: &str = "10s";

/// Connects: a small pool, since one connection writes nearly everything.
///
/// # Errors
/// When the server cannot be reached now, or the URL is none.
pub async fn connect(url: &str) -> Result<PgPool> {
    PgPoolOptions::new()
        .max_connections(8)
        .acquire_timeout(Duration::from_secs(5))
        .connect(url)
        .await
        .map_err(RecorderError::database(
            "connect; is the server running, is the URL right?",
        ))
}

/// Brings tables and views up to date; harmless if they are. Several may do it at once.
///
/// # Errors
/// When another version of this program has made the tables, a statement fails, or a lock cannot be
/// had in time.
pub async fn migrate(pool: &PgPool) -> Result<()> {
    let failed = RecorderError::database;
    let connection = pool.acquire().await.map_err(failed("connect"))?;
    // A connection of its own: after a failure the migrator keeps its lock as long as the connection.
    let mut connection = connection.detach();
    sqlx::query(AssertSqlSafe(format!("SET lock_timeout = '{LOCK_WAIT}'")))
        .execute(&mut connection)
        .await
        .map_err(failed("set lock_timeout"))?;
    let migrated = MIGRATIONS.run_direct(None, &mut connection, false).await;
    migrated.map_err(|error| match error {
        MigrateError::VersionMissing(_) | MigrateError::VersionMismatch(_) => {
            RecorderError::OtherVersion(error)
        }
        error => RecorderError::Migrate(error),
    })?;
    apply_views(&mut connection)
        .await
        .map_err(RecorderError::views)?;
    connection.close().await.map_err(failed("disconnect"))
}

/// Applies [`VIEWS`] unless this very text was applied last, after these very migrations.
async fn apply_views(connection: &mut PgConnection) -> sqlx::Result<()> {
    let mut tx = connection.begin().await?;
    sqlx::query("SELECT pg_advisory_xact_lock(hashtext('fiec_views'))")
        .execute(&mut *tx)
        .await?;
    let digest = digest();
    let applied: Option<Vec<u8>> = sqlx::query_scalar("SELECT digest FROM applied_views")
        .fetch_optional(&mut *tx)
        .await?;
    if applied.as_deref() == Some(digest.0.as_slice()) {
        return tx.rollback().await;
    }
    let mut attempt = tx.begin().await?;
    match sqlx::raw_sql(VIEWS).execute(&mut *attempt).await {
        Ok(_) => attempt.commit().await?,
        // A view has other columns than before, or a function another type: OR REPLACE refuses it.
        Err(error) if is_other_shape(&error) => {
            attempt.rollback().await?;
            recreate_views(&mut tx).await?;
        }
        Err(error) => return Err(error),
    }
    sqlx::query(
        "INSERT INTO applied_views (digest) VALUES ($1) \
         ON CONFLICT (one) DO UPDATE SET digest = excluded.digest, applied_at = now()",
    )
    .bind(argument(&digest))
    .execute(&mut *tx)
    .await?;
    tx.commit().await
}

/// A migration may drop a view to change its table, so the migrations count as well.
fn digest() -> Digest {
    let mut text = VIEWS.as_bytes().to_vec();
    for migration in MIGRATIONS.iter() {
        text.extend_from_slice(&migration.checksum);
    }
    Digest::of(&text)
}

/// True for SQLSTATE 42P16 (invalid table definition) and 42P13 (invalid function definition).
fn is_other_shape(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|e| e.code());
    matches!(code.as_deref(), Some("42P16" | "42P13"))
}

/// Drops all views and functions of [`VIEWS`] and creates them again, with the rights that others
/// were granted on the views.
async fn recreate_views(tx: &mut PgConnection) -> sqlx::Result<()> {
    let views = created("VIEW ", ' ');
    let grants: Vec<String> = sqlx::query_scalar(
        "SELECT format('GRANT %s ON %I TO %s', a.privilege_type, c.relname, \
         CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END) \
         FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) a \
         WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind = 'v' \
         AND c.relname = ANY($1) AND a.grantee <> c.relowner",
    )
    .bind(&views)
    .fetch_all(&mut *tx)
    .await?;
    let (views, functions) = (views.join(", "), created("FUNCTION ", '(').join(", "));
    let drop = format!("DROP VIEW IF EXISTS {views}; DROP FUNCTION IF EXISTS {functions}");
    for statements in [drop, VIEWS.to_owned(), grants.join(";\n")] {
        sqlx::raw_sql(AssertSqlSafe(statements))
            .execute(&mut *tx)
            .await?;
    }
    Ok(())
}

/// The names of what [`VIEWS`] creates: each stands at the beginning of a line.
fn created(what: &str, until: char) -> Vec<&'static str> {
    let heads = VIEWS.lines().filter_map(|line| {
        let line = line.strip_prefix("CREATE OR REPLACE ")?;
        line.strip_prefix(what)?.split(until).next()
    });
    heads.collect()
}

/// The detail of an error of PostgreSQL, such as which view depends on another.
pub(crate) fn detail(error: &sqlx::Error) -> Option<String> {
    let error = error.as_database_error()?;
    let error = error.try_downcast_ref::<PgDatabaseError>()?;
    error.detail().map(str::to_owned)
}
