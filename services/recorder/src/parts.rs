//! Parts that executions have split off and taken back ([`fiec_schemas::spread`]).

use fiec_schemas::spread::Part;
use fiec_schemas::{ExecutionId, Timestamp};
use sqlx::PgConnection;

use crate::copy::saturate;
use crate::time::PgTime;

/// A row of `spread_splits`.
#[derive(Debug, Clone)]
pub struct SplitRow {
    /// Who has split it off.
    pub holder: ExecutionId,
    /// The part.
    pub part: Part,
    /// How often the holder was split before; none where the message was not seen.
    pub nth: Option<u32>,
    /// When the broker stored it; none where the message was not seen.
    pub at: Option<Timestamp>,
}

/// A part that its holder has taken back.
#[derive(Debug, Clone, Copy)]
pub struct MergeRow {
    /// Which.
    pub part: ExecutionId,
    /// When the broker stored it.
    pub at: Timestamp,
}

/// A holder whose ledger was begun anew: parts that it does not have any more are nobody's.
#[derive(Debug, Clone)]
pub struct DropRow {
    /// Which.
    pub holder: ExecutionId,
    /// The parts that it has.
    pub kept: Vec<ExecutionId>,
    /// When the broker stored it.
    pub at: Timestamp,
}

/// Writes all of them. A split that was taken from a later state is filled in by its own message, should
/// that come.
pub(crate) async fn write(
    tx: &mut PgConnection,
    drops: &[DropRow],
    splits: &[SplitRow],
    merges: &[MergeRow],
) -> sqlx::Result<()> {
    for row in drops {
        sqlx::query(
            "UPDATE spread_splits SET dropped_at = $3 WHERE holder = $1 AND NOT part = ANY($2) \
             AND merged_at IS NULL AND dropped_at IS NULL",
        )
        .bind(row.holder.0)
        .bind(row.kept.iter().map(|id| id.0).collect::<Vec<_>>())
        .bind(PgTime(row.at))
        .execute(&mut *tx)
        .await?;
    }
    for row in splits {
        sqlx::query(
            "INSERT INTO spread_splits (part, holder, nth, from_tile, to_tile, split_at) \
             VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (part) DO UPDATE SET \
             nth = coalesce(spread_splits.nth, excluded.nth), \
             split_at = coalesce(spread_splits.split_at, excluded.split_at)",
        )
        .bind(row.part.id.0)
        .bind(row.holder.0)
        .bind(row.nth.map(i64::from))
        .bind(saturate(row.part.from))
        .bind(saturate(row.part.to))
        .bind(row.at.map(PgTime))
        .execute(&mut *tx)
        .await?;
    }
    for row in merges {
        sqlx::query("UPDATE spread_splits SET merged_at = $2 WHERE part = $1")
            .bind(row.part.0)
            .bind(PgTime(row.at))
            .execute(&mut *tx)
            .await?;
    }
    Ok(())
}
