//! The connection to PostgreSQL, and its schema.

use std::time::Duration;

use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;

use crate::error::{RecorderError, Result};

static MIGRATIONS: sqlx::migrate::Migrator = sqlx::migrate!("../../migrations");

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

/// Brings the schema up to date; harmless where it is. Several may do it at once.
///
/// # Errors
/// When a migration fails, or the database has one that this program does not know.
pub async fn migrate(pool: &PgPool) -> Result<()> {
    MIGRATIONS.run(pool).await?;
    Ok(())
}
