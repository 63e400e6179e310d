//! One transaction a batch: the checkpoint first, under a guard, then the rows.
//!
//! The guard (`… WHERE seq = expected`) locks the checkpoint's row until the end. Of two recorders with
//! the same batch, one waits for the other and then finds the checkpoint moved: every message is
//! applied exactly once, and a second recorder does no harm.

use std::collections::BTreeSet;

use fiec_schemas::{Digest, ExecutionId, Sequence, Timestamp, subjects};
use sqlx::{Connection, PgConnection, PgPool};

use crate::rows::{Rows, StepBack};
use crate::series::{self, Growth, PointRow};
use crate::table::{Copy, argument, write_all};

/// Rows with their COPY streams.
#[derive(Debug)]
pub struct Prepared {
    /// The rows.
    pub rows: Rows,
    /// Points of curves, drawn together where they came fast.
    points: Vec<PointRow>,
    copies: Vec<Copy>,
}

impl Prepared {
    /// Encodes the rows that go by COPY. Costs processor time: not for an async task.
    pub fn new(rows: Rows) -> Self {
        let copies = [
            Copy::of(rows.executions.iter().filter(|row| row.is_new)),
            Copy::of(rows.placements.values().filter(|row| row.is_new)),
            Copy::of(&rows.decisions),
            Copy::of(&rows.boundaries),
            Copy::of(&rows.events),
        ];
        let copies = copies.into_iter().flatten().collect();
        let points = series::few_at_once(&rows);
        Self {
            rows,
            points,
            copies,
        }
    }

    /// Number of rows that go by COPY.
    pub fn copied(&self) -> usize {
        self.copies.iter().map(Copy::rows).sum()
    }

    /// New rows; a row that is only changed does not count again.
    pub fn row_count(&self) -> usize {
        self.copied() + self.rows.rebindings.len()
    }

    /// Sends the COPY streams, in a transaction of the caller's.
    pub(crate) async fn copy_to(&self, connection: &mut PgConnection) -> sqlx::Result<()> {
        for copy in &self.copies {
            copy.send(connection).await?;
        }
        Ok(())
    }
}

/// How writing a batch ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// It is in the tables.
    Done,
    /// The checkpoint is not where it was expected: another recorder is ahead, or an earlier
    /// attempt of ours was committed although it seemed to fail. Nothing was written.
    Behind,
    /// A new row is in the table already. Nothing was written; look every execution up.
    Conflict,
}

/// The connection that writes.
#[derive(Debug)]
pub struct Writer {
    pool: PgPool,
    connection: Option<PgConnection>,
    days: BTreeSet<i32>,
    growth: Growth,
}

impl Writer {
    /// Connects with the first batch.
    pub fn new(pool: PgPool) -> Self {
        Self {
            pool,
            connection: None,
            days: BTreeSet::new(),
            growth: Growth::default(),
        }
    }

    /// Writes a batch and moves the ledger's checkpoint from `expected` to the batch's last
    /// sequence. After an error the connection is made anew by the next call.
    ///
    /// # Errors
    /// What PostgreSQL says; whether the batch was committed is then unknown, and trying again is
    /// safe.
    pub async fn write(&mut self, batch: &Prepared, expected: Sequence) -> sqlx::Result<Written> {
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => connect(&self.pool).await?,
        };
        for day in &batch.rows.days {
            if !self.days.contains(day) {
                ensure_day(&mut connection, *day).await?;
                self.days.insert(*day);
            }
        }
        match transaction(&mut connection, batch, expected).await {
            Ok(written) => {
                if written == Written::Done {
                    let curves = self.growth.note(&batch.points, &batch.rows.finished);
                    if let Err(error) = series::thin(&mut connection, &curves).await {
                        // The next points make it due again.
                        tracing::warn!(%error, "old points of curves were not drawn together");
                        return Ok(written);
                    }
                }
                self.connection = Some(connection);
                Ok(written)
            }
            Err(error) => {
                // A failed COPY leaves the connection in doubt: drop it. Forget the days as well: a
                // partition may have been dropped since.
                self.days.clear();
                let code = error.as_database_error().and_then(|e| e.code());
                if code.as_deref() == Some("23505") {
                    Ok(Written::Conflict)
                } else {
                    Err(error)
                }
            }
        }
    }
}

async fn connect(pool: &PgPool) -> sqlx::Result<PgConnection> {
    // A connection of its own, since it is set up differently from the pool's.
    let mut connection = pool.acquire().await?.detach();
    // A crash of PostgreSQL may lose the last transactions, and their checkpoints with them: the
    // recorder reads the ledger again from there. So no commit waits for the disk.
    sqlx::query("SET synchronous_commit = off")
        .execute(&mut connection)
        .await?;
    Ok(connection)
}

/// Makes the partitions of a day that are missing.
pub(crate) async fn ensure_day(connection: &mut PgConnection, day: i32) -> sqlx::Result<()> {
    sqlx::query("SELECT fiec_ensure_partitions(date '1970-01-01' + $1, date '1970-01-01' + $1)")
        .bind(day)
        .execute(connection)
        .await?;
    Ok(())
}

/// Moves a stream's checkpoint; false if it is not where it was expected. `last`: digest of the message
/// there, and when the broker stored it.
pub(crate) async fn advance(
    connection: &mut PgConnection,
    stream: &str,
    expected: Sequence,
    to: Sequence,
    last: Option<(Digest, Timestamp)>,
) -> sqlx::Result<bool> {
    let (digest, stored_at) = last.unzip();
    let done = sqlx::query(
        "UPDATE recorder_checkpoint SET seq = $3, digest = $4, stored_at = $5, updated_at = now() \
         WHERE stream = $1 AND seq = $2",
    )
    .bind(stream)
    .bind(argument(&expected))
    .bind(argument(&to))
    .bind(argument(&digest))
    .bind(argument(&stored_at))
    .execute(connection)
    .await?;
    Ok(done.rows_affected() == 1)
}

async fn transaction(
    connection: &mut PgConnection,
    batch: &Prepared,
    expected: Sequence,
) -> sqlx::Result<Written> {
    let rows = &batch.rows;
    let mut tx = connection.begin().await?;
    let (stream, to) = (subjects::LEDGER_STREAM, rows.last_seq);
    if !advance(&mut tx, stream, expected, to, rows.last).await? {
        tx.rollback().await?;
        return Ok(Written::Behind);
    }
    write_rows(&mut tx, batch).await?;
    tx.commit().await?;
    Ok(Written::Done)
}

/// Writes all rows, in a transaction of the caller's.
pub(crate) async fn write_rows(tx: &mut PgConnection, batch: &Prepared) -> sqlx::Result<()> {
    let rows = &batch.rows;
    for rewind in &rows.rewinds {
        crate::lost::rewind(&mut *tx, rewind).await?;
    }
    forget_failures(&mut *tx, &rows.retried).await?;
    batch.copy_to(&mut *tx).await?;
    let changed = rows.executions.iter().filter(|row| !row.is_new);
    write_all(&mut *tx, changed).await?;
    let changed = rows.placements.values().filter(|row| !row.is_new);
    write_all(&mut *tx, changed).await?;
    write_all(&mut *tx, rows.rebindings.values()).await?;
    close_gaps(&mut *tx, rows).await?;
    for step in &rows.steps_back {
        withdraw(&mut *tx, step).await?;
        forget_states(&mut *tx, step).await?;
    }
    series::write(&mut *tx, rows, &batch.points).await?;
    crate::parts::write(&mut *tx, &rows.drops, &rows.splits, &rows.merges).await?;
    write_all(&mut *tx, &rows.changes).await?;
    write_all(&mut *tx, &rows.results).await?;
    write_all(&mut *tx, rows.batches.values()).await?;
    write_all(&mut *tx, &rows.missing).await?;
    write_all(&mut *tx, &rows.unread).await?;
    delete_states(&mut *tx, rows).await
}

/// Writes the rows of the events of a message behind which others are recorded, in a transaction of the
/// caller's. Of the execution's own row and of its last state, those others have the last word.
pub(crate) async fn write_late(tx: &mut PgConnection, batch: &Prepared) -> sqlx::Result<()> {
    let rows = &batch.rows;
    batch.copy_to(&mut *tx).await?;
    write_all(&mut *tx, rows.placements.values()).await?;
    write_all(&mut *tx, rows.rebindings.values()).await?;
    close_gaps(&mut *tx, rows).await?;
    for step in &rows.steps_back {
        withdraw(&mut *tx, step).await?;
    }
    series::write(&mut *tx, rows, &batch.points).await?;
    crate::parts::write(&mut *tx, &[], &rows.splits, &rows.merges).await?;
    write_all(&mut *tx, &rows.changes).await?;
    write_all(&mut *tx, rows.batches.values()).await?;
    for row in rows.placements.values() {
        sqlx::query(
            "UPDATE executions SET first_started_at = least(first_started_at, $2) WHERE id = $1",
        )
        .bind(argument(&row.execution))
        .bind(argument(&row.computing_since))
        .execute(&mut *tx)
        .await?;
    }
    Ok(())
}

/// The rows of executions that start again say no more how they failed. Their events still do.
async fn forget_failures(tx: &mut PgConnection, retried: &[ExecutionId]) -> sqlx::Result<()> {
    if retried.is_empty() {
        return Ok(());
    }
    sqlx::query(
        "UPDATE executions SET failure = NULL, stderr_tail = NULL, fault = NULL, \
         fault_owner = NULL WHERE id = ANY($1)",
    )
    .bind(argument(&retried.to_vec()))
    .execute(tx)
    .await?;
    Ok(())
}

/// The gaps of rebindings that earlier batches have written.
async fn close_gaps(tx: &mut PgConnection, rows: &Rows) -> sqlx::Result<()> {
    if rows.gaps_closed.is_empty() {
        return Ok(());
    }
    let (keys, gaps): (Vec<_>, Vec<_>) = rows.gaps_closed.iter().unzip();
    let (ids, epochs): (Vec<_>, Vec<_>) = keys.into_iter().copied().unzip();
    let gaps: Vec<i64> = gaps.into_iter().copied().collect();
    sqlx::query(
        "UPDATE rebindings r SET gap_us = u.gap_us \
         FROM UNNEST($1, $2, $3) AS u(execution, epoch, gap_us) \
         WHERE r.execution = u.execution AND r.epoch = u.epoch",
    )
    .bind(argument(&ids))
    .bind(argument(&epochs))
    .bind(argument(&gaps))
    .execute(tx)
    .await?;
    Ok(())
}

/// The boundaries beyond a step back stay in the history, marked as withdrawn.
async fn withdraw(tx: &mut PgConnection, step: &StepBack) -> sqlx::Result<()> {
    sqlx::query(
        "UPDATE boundaries SET withdrawn_at = $4 WHERE execution = $1 AND index > $2 \
         AND ordinal < $3 AND withdrawn_at IS NULL",
    )
    .bind(argument(&step.execution))
    .bind(argument(&step.to))
    .bind(argument(&step.ordinal))
    .bind(argument(&step.at))
    .execute(tx)
    .await?;
    Ok(())
}

/// Deletes the states beyond a step back.
async fn forget_states(tx: &mut PgConnection, step: &StepBack) -> sqlx::Result<()> {
    sqlx::query("DELETE FROM boundary_state WHERE execution = $1 AND index > $2")
        .bind(argument(&step.execution))
        .bind(argument(&step.to))
        .execute(tx)
        .await?;
    Ok(())
}

/// Deletes the states of finished executions, after the executions' own rows are written: the mirror
/// of states relies on that order.
async fn delete_states(tx: &mut PgConnection, rows: &Rows) -> sqlx::Result<()> {
    if !rows.finished.is_empty() {
        sqlx::query("DELETE FROM boundary_state WHERE execution = ANY($1)")
            .bind(argument(&rows.finished))
            .execute(tx)
            .await?;
    }
    Ok(())
}
