//! Values of rows that are read back.

use fiec_schemas::{Digest, ExecutionId, Timestamp};
use sqlx::Row;
use sqlx::postgres::PgRow;

use crate::time::PgTime;

/// A count; one that is negative by mistake is 0.
pub(crate) fn count(row: &PgRow, column: &str) -> sqlx::Result<u64> {
    Ok(optional_count(row, column)?.unwrap_or(0))
}

/// A count that may be null.
pub(crate) fn optional_count(row: &PgRow, column: &str) -> sqlx::Result<Option<u64>> {
    let value: Option<i64> = row.try_get(column)?;
    Ok(value.map(|value| u64::try_from(value).unwrap_or(0)))
}

/// A digest; none if it is null or has another length.
pub(crate) fn digest(row: &PgRow, column: &str) -> sqlx::Result<Option<Digest>> {
    let bytes: Option<Vec<u8>> = row.try_get(column)?;
    let bytes = bytes.and_then(|bytes| <[u8; 32]>::try_from(bytes).ok());
    Ok(bytes.map(Digest))
}

/// A time that may be null.
pub(crate) fn time(row: &PgRow, column: &str) -> sqlx::Result<Option<Timestamp>> {
    Ok(row.try_get::<Option<PgTime>, _>(column)?.map(|time| time.0))
}

/// An execution's id.
pub(crate) fn execution(row: &PgRow, column: &str) -> sqlx::Result<ExecutionId> {
    Ok(ExecutionId(row.try_get(column)?))
}
