//! One execution's history as a self-contained HTML page, from PostgreSQL alone.

mod changes;
mod curves;
mod facts;
mod figures;
mod page;

use fiec_schemas::ExecutionId;
use sqlx::PgPool;

use crate::error::Result;
use crate::missing::Missing;
pub use figures::register_font;

/// The page: figures of location, capsules and pressure over time, placements, decisions in words,
/// facts, and gaps in the history. The page refers to nothing outside itself, and every text in it is
/// escaped.
///
/// # Errors
/// [`crate::RecorderError::NotFound`] if the execution is not recorded; errors of PostgreSQL.
pub async fn render(pool: &PgPool, execution: ExecutionId, missing: &Missing) -> Result<String> {
    let facts = facts::load(pool, execution, missing.in_words()).await?;
    // Drawing is brief: a figure has at most a few thousand points.
    page::render(&facts)
}
