//! What was changed about live executions ([`Event::Adjusted`]), field by field, beside the sentence
//! that the event's own row has.

use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::{Event, ExecutionId, Ordinal, Timestamp};
use sqlx::PgConnection;

use crate::copy::{json_without_nul, saturate, without_nul};
use crate::rows::json;
use crate::time::PgTime;

/// A row of `execution_changes`.
#[derive(Debug, Clone, PartialEq)]
pub struct ChangeRow {
    /// Which execution.
    pub execution: ExecutionId,
    /// Its message.
    pub ordinal: Ordinal,
    /// Which of the changes of that message, from 0.
    pub nth: i32,
    /// When the broker stored it.
    pub at: Timestamp,
    /// Who asked.
    pub who: String,
    /// What is changed.
    pub change: Adjustment,
}

/// The changes that a message tells of: seldom any.
pub(crate) fn of<'a>(
    execution: ExecutionId,
    ordinal: Ordinal,
    at: Timestamp,
    events: &'a [Event],
) -> impl Iterator<Item = ChangeRow> + 'a {
    let changes = events.iter().filter_map(|event| match event {
        Event::Adjusted { who, change } => Some((who, change)),
        _ => None,
    });
    (0..)
        .zip(changes)
        .map(move |(nth, (who, change))| ChangeRow {
            execution,
            ordinal,
            nth,
            at,
            who: who.clone(),
            change: change.clone(),
        })
}

/// Writes those that are not there.
pub(crate) async fn write(tx: &mut PgConnection, rows: &[ChangeRow]) -> sqlx::Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let change = |row: &ChangeRow| json_without_nul(&json(&row.change)).into_owned();
    sqlx::query(
        "INSERT INTO execution_changes (execution, ordinal, nth, at, who, change) \
         SELECT execution, ordinal, nth, at, who, change::jsonb \
         FROM UNNEST($1::uuid[], $2::bigint[], $3::integer[], $4::timestamptz[], $5::text[], \
         $6::text[]) AS u(execution, ordinal, nth, at, who, change) ON CONFLICT DO NOTHING",
    )
    .bind(rows.iter().map(|r| r.execution.0).collect::<Vec<_>>())
    .bind(rows.iter().map(|r| saturate(r.ordinal)).collect::<Vec<_>>())
    .bind(rows.iter().map(|r| r.nth).collect::<Vec<_>>())
    .bind(rows.iter().map(|r| PgTime(r.at)).collect::<Vec<_>>())
    .bind(rows.iter().map(|r| without_nul(&r.who)).collect::<Vec<_>>())
    .bind(rows.iter().map(change).collect::<Vec<_>>())
    .execute(tx)
    .await?;
    Ok(())
}
