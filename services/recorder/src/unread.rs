//! Ledger messages that this version cannot read. They are kept as they were sent. A recorder that can
//! read them writes their rows when it starts, before it follows the ledgers.
//!
//! The recorder does not wait for such a message: each message holds the whole state, so later ones
//! are recorded, and a gap says what is missing. When the message is read at last, there are two cases.
//! If nothing behind it is recorded, it is folded as any other. Else the execution's own row is
//! younger, and only the rows of the message's events are added.

use fiec_schemas::{
    Digest, ExecutionId, LedgerMessage, Ordinal, Sequence, Tenant, Timestamp, subjects,
};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};

use crate::fold::{Known, Message, Tracked, before, fold};
use crate::ledger::look_up;
use crate::read;
use crate::rows::Rows;
use crate::table::{argument, table};
use crate::tasks::Shared;
use crate::time::PgTime;
use crate::write::{self, Prepared};

/// Kept messages that one statement reads.
const PAGE: i64 = 200;

table! {
    /// A row of `unread_messages`.
    struct UnreadRow in "unread_messages" {
        /// Its sequence.
        seq: Sequence,
        /// Digest of its header.
        digest: Digest,
        /// Whose.
        tenant: Tenant,
        /// The execution that its subject names.
        execution: ExecutionId,
        /// When the broker stored it.
        stored_at: Timestamp,
        /// Its header.
        header: String,
        /// Why it could not be read.
        reason: String,
    }
}

/// Writes the rows of all kept messages that can be read now.
///
/// # Errors
/// What PostgreSQL says. What was written stays written; trying again is safe.
pub(crate) async fn read_again(shared: &Shared) -> sqlx::Result<()> {
    let mut last: (Sequence, Vec<u8>) = (0, Vec::new());
    let mut read = 0_u64;
    loop {
        let page = sqlx::query(
            "SELECT seq, digest, execution, stored_at, header FROM unread_messages \
             WHERE (seq, digest) > ($1, $2) ORDER BY seq, digest LIMIT $3",
        );
        let page = page.bind(argument(&last.0)).bind(&last.1).bind(PAGE);
        let page = page.fetch_all(&shared.pool).await?;
        let Some(end) = page.last() else { break };
        last = (read::count(end, "seq")?, end.try_get("digest")?);
        for row in &page {
            let Some(message) = readable(row)? else {
                continue;
            };
            let seq = message.seq;
            match apply(shared, message).await {
                Ok(()) => read += 1,
                // It would be refused each time, and nothing else would be recorded.
                Err(error) if is_refused(&error) => {
                    tracing::error!(seq, %error, "a kept message cannot be recorded; it stays kept");
                }
                Err(error) => return Err(error),
            }
        }
    }
    if read > 0 {
        tracing::info!(
            read,
            "recorded ledger messages that an earlier version could not read"
        );
    }
    count(shared).await;
    Ok(())
}

/// Sets the metric to the number of kept messages.
pub(crate) async fn count(shared: &Shared) {
    let count = sqlx::query_scalar::<_, i64>("SELECT count(*) FROM unread_messages");
    match count.fetch_one(&shared.pool).await {
        Ok(count) => _ = shared.metrics.unread.set(count),
        Err(error) => tracing::debug!(%error, "the unread messages were not counted"),
    }
}

/// Moves the kept messages that the broker has lost to `lost_rows`: those behind `from`.
///
/// # Errors
/// What PostgreSQL says.
pub(crate) async fn lose(tx: &mut PgConnection, from: Sequence) -> sqlx::Result<()> {
    sqlx::query(
        "WITH gone AS (DELETE FROM unread_messages WHERE seq > $1 RETURNING *) \
         INSERT INTO lost_rows (execution, table_name, row, found_at) \
         SELECT execution, 'unread_messages', to_jsonb(gone), now() FROM gone",
    )
    .bind(argument(&from))
    .execute(tx)
    .await?;
    Ok(())
}

/// The kept message, if this version can read it.
fn readable(row: &PgRow) -> sqlx::Result<Option<Message>> {
    let seq = read::count(row, "seq")?;
    let header: String = row.try_get("header")?;
    let of = read::execution(row, "execution")?;
    let Some(digest) = read::digest(row, "digest")? else {
        return Ok(None);
    };
    let message = LedgerMessage::decode(&header, seq).ok();
    let message = message.filter(|message| message.state.execution == of);
    let stored_at = row.try_get::<PgTime, _>("stored_at")?.0;
    Ok(message.map(|message| Message {
        seq,
        stored_at,
        digest: Some(digest),
        message,
    }))
}

/// True if PostgreSQL has refused the rows themselves: SQLSTATE class 22 or 23.
fn is_refused(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|e| e.code());
    code.is_some_and(|code| code.starts_with("22") || code.starts_with("23"))
}

/// Writes the rows of a message, and no longer keeps it, in one transaction.
async fn apply(shared: &Shared, message: Message) -> sqlx::Result<()> {
    let mut tx = shared.pool.begin().await?;
    // No recorder writes a batch meanwhile.
    sqlx::query("SELECT seq FROM recorder_checkpoint WHERE stream = $1 FOR UPDATE")
        .bind(subjects::LEDGER_STREAM)
        .execute(&mut *tx)
        .await?;
    let kept = sqlx::query("DELETE FROM unread_messages WHERE seq = $1 AND digest = $2")
        .bind(argument(&message.seq))
        .bind(argument(&message.digest))
        .execute(&mut *tx)
        .await?;
    if kept.rows_affected() == 0 {
        // Another recorder has read it.
        return tx.rollback().await;
    }
    let (id, ordinal) = (
        message.message.state.execution,
        message.message.state.ordinal,
    );
    let recorded = look_up(&mut *tx, &[id]).await?.pop();
    let recorded = recorded.map(|(_, tracked)| tracked);
    let is_late = recorded.as_ref().is_some_and(|t| t.ordinal >= ordinal);
    if is_late && !close_gap(&mut tx, id, ordinal).await? {
        // It is recorded, or another message has its place.
        return tx.commit().await;
    }
    let mut known = Known::default();
    match recorded {
        Some(_) if is_late => known.learn(id, tracked_before(&mut tx, &message).await?),
        Some(tracked) => known.learn(id, tracked),
        None => {}
    }
    let mut rows = fold(vec![message], &mut known);
    // COPY refuses a row that is there.
    rows.placements.values_mut().for_each(|p| p.is_new = false);
    if is_late {
        rows = only_events(rows);
    }
    for day in &rows.days {
        write::ensure_day(&mut tx, *day).await?;
    }
    let batch = Prepared::new(rows);
    if is_late {
        write::write_late(&mut tx, &batch).await?;
    } else {
        write::write_rows(&mut tx, &batch).await?;
    }
    tx.commit().await?;
    shared.metrics.rows.inc_by(batch.row_count() as u64);
    shared.metrics.messages.inc();
    shared
        .mirror
        .changed(&batch.rows.states, &batch.rows.finished);
    Ok(())
}

/// Leaves out what only the last message of a ledger may say.
fn only_events(rows: Rows) -> Rows {
    Rows {
        executions: Vec::new(),
        states: Vec::new(),
        finished: Vec::new(),
        results: Vec::new(),
        drops: Vec::new(),
        ..rows
    }
}

/// An execution as it was before a message behind which others are recorded.
async fn tracked_before(tx: &mut PgConnection, message: &Message) -> sqlx::Result<Tracked> {
    let mut tracked = before(&message.message);
    let state = &message.message.state;
    let placement = sqlx::query(
        "SELECT node, ended_at IS NULL OR end_reason = 'unseen' OR ended_at >= $3 AS open \
         FROM placements WHERE execution = $1 AND epoch = $2",
    )
    .bind(argument(&state.execution))
    .bind(argument(&tracked.epoch))
    .bind(argument(&state.at))
    .fetch_optional(tx)
    .await?;
    if let Some(row) = placement {
        let node: Option<String> = row.try_get("node")?;
        tracked.node = node.and_then(|node| node.parse().ok());
        tracked.open = row.try_get("open")?;
    }
    Ok(tracked)
}

/// Takes a message out of the gap that it is in; false if it is in none.
async fn close_gap(tx: &mut PgConnection, id: ExecutionId, ordinal: Ordinal) -> sqlx::Result<bool> {
    let gap = sqlx::query(
        "DELETE FROM ledger_gaps WHERE execution = $1 AND $2 BETWEEN first_missing AND last_missing \
         RETURNING first_missing, last_missing, seq, reason, at",
    )
    .bind(argument(&id))
    .bind(argument(&ordinal))
    .fetch_optional(&mut *tx)
    .await?;
    let Some(gap) = gap else { return Ok(false) };
    let rest = [
        (
            read::count(&gap, "first_missing")?,
            ordinal.saturating_sub(1),
        ),
        (
            ordinal.saturating_add(1),
            read::count(&gap, "last_missing")?,
        ),
    ];
    for (first, last) in rest.into_iter().filter(|(first, last)| first <= last) {
        sqlx::query("INSERT INTO ledger_gaps VALUES ($1, $2, $3, $4, $5, $6)")
            .bind(argument(&id))
            .bind(argument(&first))
            .bind(argument(&last))
            .bind(gap.try_get::<i64, _>("seq")?)
            .bind(gap.try_get::<String, _>("reason")?)
            .bind(gap.try_get::<PgTime, _>("at")?)
            .execute(&mut *tx)
            .await?;
    }
    Ok(true)
}
