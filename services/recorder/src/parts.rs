//! Parts of a range of tiles that executions have split off and taken back
//! ([`fiec_schemas::spread`]).

use fiec_schemas::{ExecutionId, Timestamp};
use sqlx::PgConnection;

use crate::table::Merge::Key;
use crate::table::{argument, table, write_one};

table! {
    /// A row of `spread_splits`: a part that was split off.
    struct SplitRow in "spread_splits" {
        /// The part.
        part: ExecutionId = Key,
        /// The execution that has split it off.
        holder: ExecutionId,
        /// How often the holder was split before; none if the message was not seen.
        nth: Option<u64>,
        /// The part's first tile.
        from_tile: u64,
        /// The tile behind its last.
        to_tile: u64,
        /// When the broker stored it; none if the message was not seen.
        split_at: Option<Timestamp>,
    }
    later {
        merged_at: Option<Timestamp>,
        dropped_at: Option<Timestamp>,
    }
}

/// A part that its holder has taken back.
#[derive(Debug, Clone, Copy)]
pub struct MergedPart {
    /// Which part.
    pub part: ExecutionId,
    /// When the broker stored it.
    pub at: Timestamp,
}

/// A holder whose ledger was begun anew. It has given up the parts that are not in `kept`.
#[derive(Debug, Clone)]
pub struct DroppedParts {
    /// Which holder.
    pub holder: ExecutionId,
    /// The parts that it has.
    pub kept: Vec<ExecutionId>,
    /// When the broker stored it.
    pub at: Timestamp,
}

/// Writes all of them. A split that was taken from a later state is completed by its own message, if
/// that message comes.
pub(crate) async fn write(
    tx: &mut PgConnection,
    drops: &[DroppedParts],
    splits: &[SplitRow],
    merges: &[MergedPart],
) -> sqlx::Result<()> {
    for row in drops {
        sqlx::query(
            "UPDATE spread_splits SET dropped_at = $3 WHERE holder = $1 AND NOT part = ANY($2) \
             AND merged_at IS NULL AND dropped_at IS NULL",
        )
        .bind(argument(&row.holder))
        .bind(argument(&row.kept))
        .bind(argument(&row.at))
        .execute(&mut *tx)
        .await?;
    }
    // One by one: a batch may have the same part twice.
    for row in splits {
        write_one(&mut *tx, row).await?;
    }
    for row in merges {
        sqlx::query("UPDATE spread_splits SET merged_at = $2 WHERE part = $1")
            .bind(argument(&row.part))
            .bind(argument(&row.at))
            .execute(&mut *tx)
            .await?;
    }
    Ok(())
}
