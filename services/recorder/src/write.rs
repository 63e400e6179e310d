//! One transaction a batch: the checkpoint first, under a guard, then the rows.
//!
//! The guard (`… WHERE seq = expected`) locks the checkpoint's row until the end, so that of two
//! recorders with the same batch one waits for the other and then finds itself behind: every
//! message is applied exactly once, and a second recorder does no harm.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use fiec_schemas::{Digest, NodeId, Sequence, Timestamp, subjects};
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool};

use crate::columns::{
    BOUNDARIES, Columns, DECISIONS, EVENTS, EXECUTIONS, PLACEMENTS, names, upsert,
};
use crate::copy::{CopyBuffer, json_without_nul, saturate, without_nul};
use crate::rows::{
    ExecutionRow, PlacementRow, RebindingRow, Rows, StepBackRow, contract, json, line, measured,
};
use crate::time::PgTime;

/// Rows with their COPY streams.
#[derive(Debug)]
pub struct Prepared {
    /// The rows.
    pub rows: Rows,
    copies: Vec<(&'static str, &'static Columns, Vec<u8>, usize)>,
}

impl Prepared {
    /// Encodes what goes by COPY. Costs processor time: not for an async task.
    pub fn new(rows: Rows) -> Self {
        let mut executions = CopyBuffer::default();
        rows.executions
            .values()
            .filter(|r| r.fresh)
            .for_each(|r| r.copy(&mut executions));
        let mut placements = CopyBuffer::default();
        rows.placements
            .values()
            .filter(|r| r.fresh)
            .for_each(|r| r.copy(&mut placements));
        let mut decisions = CopyBuffer::default();
        rows.decisions.iter().for_each(|r| r.copy(&mut decisions));
        let mut boundaries = CopyBuffer::default();
        rows.boundaries.iter().for_each(|r| r.copy(&mut boundaries));
        let mut events = CopyBuffer::default();
        rows.events.iter().for_each(|r| r.copy(&mut events));
        let copies = [
            ("executions", EXECUTIONS, executions),
            ("placements", PLACEMENTS, placements),
            ("decisions", DECISIONS, decisions),
            ("boundaries", BOUNDARIES, boundaries),
            ("execution_events", EVENTS, events),
        ]
        .into_iter()
        .filter(|(_, _, copy)| copy.rows() > 0)
        .map(|(table, columns, copy)| {
            let rows = copy.rows();
            (table, columns, copy.finish(), rows)
        })
        .collect();
        Self { rows, copies }
    }

    /// Rows that go by COPY, and bytes.
    pub fn copied(&self) -> (usize, usize) {
        self.copies
            .iter()
            .fold((0, 0), |(r, b), (_, _, bytes, rows)| {
                (r + rows, b + bytes.len())
            })
    }

    /// New rows; one that is only changed does not count again.
    pub fn row_count(&self) -> usize {
        self.copied().0 + self.rows.rebindings.len()
    }

    /// Sends the COPY streams, in a transaction of the caller's.
    pub(crate) async fn copy_to(&self, connection: &mut PgConnection) -> sqlx::Result<()> {
        for (table, columns, bytes, _) in &self.copies {
            let statement = format!(
                "COPY {table} ({}) FROM STDIN WITH (FORMAT binary)",
                names(columns)
            );
            let mut copy = connection.copy_in_raw(&statement).await?;
            copy.send(bytes.as_slice()).await?;
            copy.finish().await?;
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
    /// A row that was thought new is in the table. Nothing was written; look everything up.
    Conflict,
}

/// The connection that writes.
#[derive(Debug)]
pub struct Writer {
    pool: PgPool,
    connection: Option<PgConnection>,
    days: BTreeSet<i32>,
}

impl Writer {
    /// Connects with the first batch.
    pub fn new(pool: PgPool) -> Self {
        Self {
            pool,
            connection: None,
            days: BTreeSet::new(),
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
                self.connection = Some(connection);
                Ok(written)
            }
            Err(error) => {
                // A failed COPY leaves the connection in doubt: it is dropped. So are the days,
                // since a partition may have been dropped after we saw it.
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
    // A crash of PostgreSQL may lose the last transactions, but always a whole tail of them and the
    // checkpoint with them: the ledger is replayed from there. So no commit waits for the disk.
    sqlx::query("SET synchronous_commit = off")
        .execute(&mut connection)
        .await?;
    Ok(connection)
}

/// Makes the partitions of a day, where they are missing.
pub(crate) async fn ensure_day(connection: &mut PgConnection, day: i32) -> sqlx::Result<()> {
    sqlx::query("SELECT fiec_ensure_partitions(date '1970-01-01' + $1, date '1970-01-01' + $1)")
        .bind(day)
        .execute(connection)
        .await?;
    Ok(())
}

/// Moves a stream's checkpoint; `last`: digest of the header of the message there, and when the
/// broker stored it. False where it is not where it was expected.
pub(crate) async fn advance(
    connection: &mut PgConnection,
    stream: &str,
    expected: Sequence,
    to: Sequence,
    last: Option<(Digest, Timestamp)>,
) -> sqlx::Result<bool> {
    let done = sqlx::query(
        "UPDATE recorder_checkpoint SET seq = $3, digest = $4, stored_at = $5, updated_at = now() \
         WHERE stream = $1 AND seq = $2",
    )
    .bind(stream)
    .bind(saturate(expected))
    .bind(saturate(to))
    .bind(last.map(|(digest, _)| digest.0.to_vec()))
    .bind(last.map(|(_, at)| PgTime(at)))
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
    for rewind in &rows.rewinds {
        crate::lost::rewind(&mut tx, rewind).await?;
    }
    batch.copy_to(&mut tx).await?;
    executions(&mut tx, rows.executions.values()).await?;
    placements(&mut tx, rows.placements.values()).await?;
    rebindings(&mut tx, &rows.rebindings.values().collect::<Vec<_>>()).await?;
    small(&mut tx, rows).await?;
    tx.commit().await?;
    Ok(Written::Done)
}

/// One column of an UNNEST.
macro_rules! column {
    ($rows:expr, $value:expr) => {
        $rows.iter().map($value).collect::<Vec<_>>()
    };
}

fn text(value: Option<&String>) -> Option<String> {
    value.map(|t| without_nul(t))
}

fn json_text(value: Option<&String>) -> Option<String> {
    value.map(|t| json_without_nul(t).into_owned())
}

fn time(value: Option<fiec_schemas::Timestamp>) -> Option<PgTime> {
    value.map(PgTime)
}

fn count(value: Option<u64>) -> Option<i64> {
    value.map(saturate)
}

fn node(value: Option<&NodeId>) -> Option<String> {
    value.map(|n| n.as_str().to_owned())
}

async fn executions(
    tx: &mut PgConnection,
    all: impl Iterator<Item = &ExecutionRow>,
) -> sqlx::Result<()> {
    static SQL: LazyLock<String> = LazyLock::new(|| {
        upsert(
            "executions",
            &["id"],
            EXECUTIONS,
            " WHERE executions.ordinal < excluded.ordinal",
        )
    });
    let rows: Vec<&ExecutionRow> = all.filter(|r| !r.fresh).collect();
    if rows.is_empty() {
        return Ok(());
    }
    let spec = |r: &&ExecutionRow| r.spec.clone();
    let state = |r: &&ExecutionRow| r.boundary.clone();
    let host = |r: &&ExecutionRow| measured(&r.totals).0;
    let device = |r: &&ExecutionRow| measured(&r.totals).1;
    sqlx::query(AssertSqlSafe(SQL.as_str()))
        .bind(column!(rows, |r| r.id.0))
        .bind(column!(rows, |r| r.tenant.as_str().to_owned()))
        .bind(column!(rows, |r| spec(r)
            .and_then(|s| s.id.as_ref().map(|i| i.as_str().to_owned()))))
        .bind(column!(rows, |r| r.batch.map(|b| b.id.0)))
        .bind(column!(rows, |r| r.batch.map(|b| line(b.line))))
        .bind(column!(rows, |r| spec(r).map(|s| s.program.clone())))
        .bind(column!(rows, |r| contract(r.contract).to_owned()))
        .bind(column!(rows, |r| r.submission.0.to_vec()))
        .bind(column!(rows, |r| json_text(
            spec(r).map(|s| json(&*s)).as_ref()
        )))
        .bind(column!(rows, |r| PgTime(r.submitted_at)))
        .bind(column!(rows, |r| r.phase.to_owned()))
        .bind(column!(rows, |r| node(r.node.as_ref())))
        .bind(column!(rows, |r| text(r.substrate.as_ref())))
        .bind(column!(rows, |r| saturate(r.epoch)))
        .bind(column!(rows, |r| time(r.bound_at)))
        .bind(column!(rows, |r| time(r.first_started_at)))
        .bind(column!(rows, |r| time(r.yielded_at)))
        .bind(column!(rows, |r| time(r.computed_until)))
        .bind(column!(rows, |r| saturate(state(r).map_or(0, |s| s.index))))
        .bind(column!(rows, |r| count(r.boundary_of)))
        .bind(column!(rows, |r| text(r.note.as_ref())))
        .bind(column!(rows, |r| state(r).map(|s| s.digest.0.to_vec())))
        .bind(column!(rows, |r| count(state(r).map(|s| s.bytes))))
        .bind(column!(rows, |r| count(state(r).and_then(|s| s.seq))))
        .bind(column!(rows, |r| count(state(r).map(|s| s.ordinal))))
        .bind(column!(rows, |r| saturate(r.totals.commits)))
        .bind(column!(rows, |r| saturate(r.totals.state_bytes)))
        .bind(column!(rows, |r| saturate(r.totals.rebindings)))
        .bind(column!(rows, |r| saturate(r.totals.pressure)))
        .bind(column!(rows, |r| saturate(r.totals.crashes)))
        .bind(column!(rows, |r| saturate(r.totals.compute_us)))
        .bind(column!(rows, |r| time(r.finished_at)))
        .bind(column!(rows, |r| count(r.capsules)))
        .bind(column!(rows, |r| json_text(r.result.as_ref())))
        .bind(column!(rows, |r| json_text(r.outputs.as_ref())))
        .bind(column!(rows, |r| text(r.failure.as_ref())))
        .bind(column!(rows, |r| text(r.stderr_tail.as_ref())))
        .bind(column!(rows, |r| text(r.requested.as_ref())))
        .bind(column!(rows, |r| text(r.paused_by.as_ref())))
        .bind(column!(rows, |r| saturate(r.ordinal)))
        .bind(column!(rows, |r| saturate(r.seq)))
        .bind(column!(rows, |r| without_nul(&r.author)))
        .bind(column!(rows, |r| PgTime(r.recorded_at)))
        .bind(column!(rows, |r| count(host(r).map(|m| m.uj))))
        .bind(column!(rows, |r| count(host(r).map(|m| m.intervals))))
        .bind(column!(rows, |r| count(device(r).map(|m| m.uj))))
        .bind(column!(rows, |r| count(device(r).map(|m| m.intervals))))
        .bind(column!(rows, |r| r.digest.map(|d| d.0.to_vec())))
        .execute(tx)
        .await?;
    Ok(())
}

async fn placements(
    tx: &mut PgConnection,
    all: impl Iterator<Item = &PlacementRow>,
) -> sqlx::Result<()> {
    static SQL: LazyLock<String> =
        LazyLock::new(|| upsert("placements", &["execution", "epoch"], PLACEMENTS, ""));
    let rows: Vec<&PlacementRow> = all.filter(|r| !r.fresh).collect();
    if rows.is_empty() {
        return Ok(());
    }
    sqlx::query(AssertSqlSafe(SQL.as_str()))
        .bind(column!(rows, |r| r.execution.0))
        .bind(column!(rows, |r| saturate(r.epoch)))
        .bind(column!(rows, |r| node(r.node.as_ref())))
        .bind(column!(rows, |r| r.instance.map(|i| i.0)))
        .bind(column!(rows, |r| text(r.substrate.as_ref())))
        .bind(column!(rows, |r| r.cause.map(str::to_owned)))
        .bind(column!(rows, |r| time(r.bound_at)))
        .bind(column!(rows, |r| time(r.started_at)))
        .bind(column!(rows, |r| time(r.computing_since)))
        .bind(column!(rows, |r| time(r.computed_until)))
        .bind(column!(rows, |r| time(r.ended_at)))
        .bind(column!(rows, |r| r.end_reason.map(str::to_owned)))
        .bind(column!(rows, |r| r.gap_us))
        .bind(column!(rows, |r| count(r.host_uj)))
        .bind(column!(rows, |r| count(r.device_uj)))
        .execute(tx)
        .await?;
    Ok(())
}

async fn rebindings(tx: &mut PgConnection, rows: &[&RebindingRow]) -> sqlx::Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let evidence = |r: &&RebindingRow| r.evidence.clone();
    sqlx::query(
        "INSERT INTO rebindings (execution, epoch, at, from_node, to_node, cause, cause_detail, \
         signal, device, value, high, low, dwell_ms, since, vector, state_index, state_digest, \
         state_bytes, yielded_at, gap_us) \
         SELECT execution, epoch, at, from_node, to_node, cause, cause_detail, signal, device, \
         value, high, low, dwell_ms, since, vector::jsonb, state_index, state_digest, state_bytes, \
         yielded_at, gap_us FROM UNNEST($1::uuid[], $2::bigint[], $3::timestamptz[], $4::text[], \
         $5::text[], $6::text[], $7::text[], $8::text[], $9::text[], $10::float8[], $11::float8[], \
         $12::float8[], $13::integer[], $14::timestamptz[], $15::text[], $16::bigint[], \
         $17::bytea[], $18::bigint[], $19::timestamptz[], $20::bigint[]) AS u(execution, epoch, at, \
         from_node, to_node, cause, cause_detail, signal, device, value, high, low, dwell_ms, \
         since, vector, state_index, state_digest, state_bytes, yielded_at, gap_us) \
         ON CONFLICT (execution, epoch) DO NOTHING",
    )
    .bind(column!(rows, |r| r.execution.0))
    .bind(column!(rows, |r| saturate(r.epoch)))
    .bind(column!(rows, |r| PgTime(r.at)))
    .bind(column!(rows, |r| node(r.from_node.as_ref())))
    .bind(column!(rows, |r| r.to_node.as_str().to_owned()))
    .bind(column!(rows, |r| r.cause.to_owned()))
    .bind(column!(rows, |r| without_nul(&r.cause_detail)))
    .bind(column!(rows, |r| evidence(r).map(|e| e.signal.as_str().to_owned())))
    .bind(column!(rows, |r| evidence(r).and_then(|e| text(e.device.as_ref()))))
    .bind(column!(rows, |r| evidence(r).map(|e| e.value)))
    .bind(column!(rows, |r| evidence(r).map(|e| e.threshold.high)))
    .bind(column!(rows, |r| evidence(r).map(|e| e.threshold.low)))
    .bind(column!(rows, |r| evidence(r).map(|e| line(e.threshold.dwell_ms))))
    .bind(column!(rows, |r| evidence(r).map(|e| PgTime(e.since))))
    .bind(column!(rows, |r| json_text(evidence(r).map(|e| json(&e.vector)).as_ref())))
    .bind(column!(rows, |r| r.state.as_ref().map(|s| saturate(s.index))))
    .bind(column!(rows, |r| r.state.as_ref().map(|s| s.digest.0.to_vec())))
    .bind(column!(rows, |r| r.state.as_ref().map(|s| saturate(s.bytes))))
    .bind(column!(rows, |r| time(r.yielded_at)))
    .bind(column!(rows, |r| r.gap_us))
    .execute(tx)
    .await?;
    Ok(())
}

/// What is rare, or a statement of one line.
/// What was reached beyond a step back stays in the history, and says that it does not count.
async fn steps_back(tx: &mut PgConnection, rows: &[StepBackRow]) -> sqlx::Result<()> {
    for row in rows {
        sqlx::query(
            "UPDATE boundaries SET withdrawn_at = $4 WHERE execution = $1 AND index > $2 \
             AND ordinal < $3 AND withdrawn_at IS NULL",
        )
        .bind(row.execution.0)
        .bind(saturate(row.to))
        .bind(saturate(row.ordinal))
        .bind(PgTime(row.at))
        .execute(&mut *tx)
        .await?;
        sqlx::query("DELETE FROM boundary_state WHERE execution = $1 AND index > $2")
            .bind(row.execution.0)
            .bind(saturate(row.to))
            .execute(&mut *tx)
            .await?;
    }
    Ok(())
}

async fn small(tx: &mut PgConnection, rows: &Rows) -> sqlx::Result<()> {
    steps_back(&mut *tx, &rows.steps_back).await?;
    crate::parts::write(&mut *tx, &rows.drops, &rows.splits, &rows.merges).await?;
    crate::changes::write(&mut *tx, &rows.changes).await?;
    crate::results::write(&mut *tx, &rows.results).await?;
    if !rows.gaps_closed.is_empty() {
        sqlx::query(
            "UPDATE rebindings r SET gap_us = u.gap_us \
             FROM UNNEST($1::uuid[], $2::bigint[], $3::bigint[]) AS u(execution, epoch, gap_us) \
             WHERE r.execution = u.execution AND r.epoch = u.epoch",
        )
        .bind(column!(rows.gaps_closed, |(id, _, _)| id.0))
        .bind(column!(rows.gaps_closed, |(_, epoch, _)| saturate(*epoch)))
        .bind(column!(rows.gaps_closed, |(_, _, gap)| *gap))
        .execute(&mut *tx)
        .await?;
    }
    let batches: Vec<_> = rows.batches.values().collect();
    if !batches.is_empty() {
        sqlx::query(
            "INSERT INTO batches (id, tenant, name, first_seen_at) \
             SELECT * FROM UNNEST($1::uuid[], $2::text[], $3::text[], $4::timestamptz[]) \
             ON CONFLICT (id) DO NOTHING",
        )
        .bind(column!(batches, |b| b.id.0))
        .bind(column!(batches, |b| b.tenant.as_str().to_owned()))
        .bind(column!(batches, |b| b.name.clone()))
        .bind(column!(batches, |b| PgTime(b.first_seen_at)))
        .execute(&mut *tx)
        .await?;
    }
    if !rows.missing.is_empty() {
        sqlx::query(
            "INSERT INTO ledger_gaps (execution, first_missing, last_missing, seq, reason, at) \
             SELECT * FROM UNNEST($1::uuid[], $2::bigint[], $3::bigint[], $4::bigint[], \
             $5::text[], $6::timestamptz[]) ON CONFLICT DO NOTHING",
        )
        .bind(column!(rows.missing, |m| m.execution.0))
        .bind(column!(rows.missing, |m| saturate(m.first)))
        .bind(column!(rows.missing, |m| saturate(m.last)))
        .bind(column!(rows.missing, |m| saturate(m.seq)))
        .bind(column!(rows.missing, |m| m.reason.to_owned()))
        .bind(column!(rows.missing, |m| PgTime(m.at)))
        .execute(&mut *tx)
        .await?;
    }
    if !rows.finished.is_empty() {
        // After the executions' own rows: see the mirror for why the order matters.
        sqlx::query("DELETE FROM boundary_state WHERE execution = ANY($1)")
            .bind(column!(rows.finished, |id| id.0))
            .execute(&mut *tx)
            .await?;
    }
    Ok(())
}
