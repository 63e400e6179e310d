//! A stream that has lost recorded messages: the sequence from which the recorder reads it again, and
//! the rows that no longer count.

use std::collections::BTreeMap;
use std::time::Duration;

use async_nats::HeaderMap;
use async_nats::jetstream::stream::LastRawMessageErrorKind;
use fiec_broker::{Broker, BrokerError, feed};
use fiec_schemas::{Digest, Sequence, Timestamp, subjects};
use sqlx::{PgConnection, PgPool, Row};

use crate::read;
use crate::rows::Rewind;
use crate::table::argument;
use crate::unread;

/// A stream with a checkpoint by which it is known again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Marked {
    /// The ledger: a message is known by its header.
    Ledger,
    /// The records: a message is known by its text.
    Records,
}

impl Marked {
    /// The stream's name.
    pub fn stream(self) -> &'static str {
        match self {
            Self::Ledger => subjects::LEDGER_STREAM,
            Self::Records => subjects::RECORD_STREAM,
        }
    }

    /// The digest by which a message is recognized; none if it is no message of ours.
    pub fn digest(self, headers: Option<&HeaderMap>, payload: &[u8]) -> Option<Digest> {
        match self {
            Self::Ledger => headers
                .and_then(|h| h.get(subjects::EVENT_HEADER))
                .map(|header| Digest::of(header.as_str().as_bytes())),
            Self::Records => Some(Digest::of(payload)),
        }
    }
}

/// A checkpoint, and how the stream is recognized that was read up to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mark {
    /// Which stream.
    pub of: Marked,
    /// Sequence of the last recorded message.
    pub seq: Sequence,
    /// When the stream was made, in nanoseconds since 1970; none if that is not recorded yet.
    pub created: Option<i128>,
    /// Digest of that message ([`Marked::digest`]), and when the broker stored it.
    pub last: Option<(Digest, Timestamp)>,
}

/// Where to go on reading, and the stream as it is now.
pub(crate) struct Resume {
    /// The last recorded message that the stream still has.
    pub from: Sequence,
    /// When the stream was made.
    pub created: i128,
    /// True if messages were lost.
    pub lost: bool,
    /// If the stream has dropped messages behind `from`: the time at which it stored its first message
    /// now. What it stored later is there.
    pub begins: Option<Timestamp>,
}

/// A comparison takes a few requests, each with a deadline of seconds.
const COMPARED_WITHIN: Duration = Duration::from_secs(30);

/// Compares the stream with its checkpoint.
///
/// # Errors
/// When the broker does not answer in time.
pub(crate) async fn resume(broker: &Broker, mark: &Mark) -> Result<Resume, BrokerError> {
    let what = format!("look at the stream {}", mark.of.stream());
    let compared = tokio::time::timeout(COMPARED_WITHIN, compare(broker, mark)).await;
    compared.map_err(BrokerError::operation(what))?
}

async fn compare(broker: &Broker, mark: &Mark) -> Result<Resume, BrokerError> {
    let what = || format!("look at the stream {}", mark.of.stream());
    let stream = broker.js.get_stream(mark.of.stream()).await;
    let stream = stream.map_err(BrokerError::operation(what()))?;
    let info = stream.cached_info();
    let created = info.created.unix_timestamp_nanos();
    let last = info.state.last_sequence;
    let first_at = match info.state.messages {
        0 => broker.now(),
        _ => timestamp(info.state.first_timestamp),
    };
    let resume = |from: Sequence, lost| Resume {
        from,
        created,
        lost,
        begins: (info.state.first_sequence > from.saturating_add(1)).then_some(first_at),
    };
    if mark.created.is_some_and(|then| then != created) {
        // `fiec setup` lets a new stream begin behind the recorded messages.
        let before = info.state.first_sequence.saturating_sub(1);
        return Ok(resume(before.min(mark.seq), true));
    }
    let Some((digest, stored_at)) = mark.last.filter(|_| mark.seq > 0) else {
        let from = mark.seq.min(last);
        return Ok(resume(from, from < mark.seq));
    };
    if last >= mark.seq {
        match stream.get_raw_message(mark.seq).await {
            Ok(message) => {
                let found = mark.of.digest(Some(&message.headers), &message.payload);
                if found == Some(digest) {
                    return Ok(resume(mark.seq, false));
                }
            }
            // It has dropped out by the stream's limits.
            Err(error) if error.kind() == LastRawMessageErrorKind::NoMessageFound => {
                return Ok(resume(mark.seq, false));
            }
            Err(error) => return Err(BrokerError::operation(what())(error)),
        }
    }
    // Messages that were stored since the recorded one are new; the others are what is left.
    let since = Timestamp::from_micros(stored_at.micros().saturating_add(1));
    let after = feed::first_since(broker, mark.of.stream(), since).await?;
    let left = after.map_or(last, |seq| seq.saturating_sub(1));
    Ok(resume(left.min(mark.seq), true))
}

fn timestamp(at: time::OffsetDateTime) -> Timestamp {
    let micros = i64::try_from(at.unix_timestamp_nanos() / 1_000);
    Timestamp::from_micros(micros.unwrap_or(i64::MAX))
}

/// A stream's checkpoint as PostgreSQL has it; none if there is no such row.
///
/// # Errors
/// What PostgreSQL says.
pub(crate) async fn mark(pool: &PgPool, of: Marked) -> sqlx::Result<Option<Mark>> {
    let row = sqlx::query(
        "SELECT seq, created_ns::text, digest, stored_at FROM recorder_checkpoint \
         WHERE stream = $1",
    )
    .bind(of.stream())
    .fetch_optional(pool)
    .await?;
    let Some(row) = row else { return Ok(None) };
    let created: Option<String> = row.try_get("created_ns")?;
    let digest = read::digest(&row, "digest")?;
    Ok(Some(Mark {
        of,
        seq: read::count(&row, "seq")?,
        created: created.and_then(|text| text.parse().ok()),
        last: digest.zip(read::time(&row, "stored_at")?),
    }))
}

/// The sequences up to which streams are recorded, by stream.
///
/// # Errors
/// What PostgreSQL says.
pub async fn checkpoints(pool: &PgPool) -> sqlx::Result<BTreeMap<String, Sequence>> {
    let rows = sqlx::query("SELECT stream, seq FROM recorder_checkpoint");
    let rows = rows.fetch_all(pool).await?;
    let read = |row| Ok((Row::try_get(row, "stream")?, read::count(row, "seq")?));
    rows.iter().map(read).collect()
}

/// Moves the checkpoint to where the stream is to be read from; false if another recorder has moved
/// it meanwhile.
///
/// # Errors
/// What PostgreSQL says.
pub(crate) async fn go_back(pool: &PgPool, mark: &Mark, to: &Resume) -> sqlx::Result<bool> {
    let mut tx = pool.begin().await?;
    let done = sqlx::query(
        "UPDATE recorder_checkpoint SET seq = $3, created_ns = $4::numeric, updated_at = now(), \
         digest = CASE WHEN $5 THEN NULL ELSE digest END, \
         stored_at = CASE WHEN $5 THEN NULL ELSE stored_at END \
         WHERE stream = $1 AND seq = $2",
    )
    .bind(mark.of.stream())
    .bind(argument(&mark.seq))
    .bind(argument(&to.from))
    .bind(to.created.to_string())
    // The message at the checkpoint may be another one now.
    .bind(to.lost)
    .execute(&mut *tx)
    .await?;
    if done.rows_affected() != 1 {
        return Ok(false);
    }
    match mark.of {
        Marked::Records => renumber(&mut tx, to.from).await?,
        Marked::Ledger if to.lost => unread::lose(&mut tx, to.from).await?,
        Marked::Ledger => {}
    }
    tx.commit().await?;
    Ok(true)
}

/// Holds a stream's checkpoint until the end of the transaction: no recorder writes a batch meanwhile.
/// False if it is not where it was read.
///
/// # Errors
/// What PostgreSQL says.
pub(crate) async fn hold(tx: &mut PgConnection, mark: &Mark) -> sqlx::Result<bool> {
    let held = sqlx::query(
        "SELECT seq FROM recorder_checkpoint WHERE stream = $1 AND seq = $2 FOR UPDATE",
    );
    let held = held.bind(mark.of.stream()).bind(argument(&mark.seq));
    Ok(held.fetch_optional(tx).await?.is_some())
}

/// Tables whose key is a record's sequence.
const BY_RECORD: [&str; 4] = [
    "rejections",
    "node_events",
    "verifications",
    "quota_changes",
];

/// Sequences behind `to` are given out again: rows of records that have them get negative numbers
/// instead, below those that were given before.
async fn renumber(tx: &mut PgConnection, to: Sequence) -> sqlx::Result<()> {
    for table in BY_RECORD {
        let renumber = format!(
            "UPDATE {table} t SET seq = given.lowest - t.seq \
             FROM (SELECT least(min(seq), 0) AS lowest FROM {table}) given WHERE t.seq > $1"
        );
        sqlx::query(sqlx::AssertSqlSafe(renumber))
            .bind(argument(&to))
            .execute(&mut *tx)
            .await?;
    }
    Ok(())
}

/// Moves the rows that do not count to `lost_rows`, in a transaction of the caller's; the execution
/// stands as after the message before. The copy of a state goes with its boundary.
///
/// # Errors
/// What PostgreSQL says.
pub(crate) async fn rewind(tx: &mut PgConnection, rewind: &Rewind) -> sqlx::Result<()> {
    let (from, epoch) = (rewind.from, rewind.epoch);
    sqlx::query(
        "DELETE FROM boundary_state s USING boundaries b WHERE s.execution = $1 \
         AND b.execution = $1 AND b.index = s.index AND b.ordinal >= $2",
    )
    .bind(argument(&rewind.execution))
    .bind(argument(&from))
    .execute(&mut *tx)
    .await?;
    let moves = [
        ("boundaries", "ordinal >= $2", from),
        ("decisions", "ordinal >= $2", from),
        ("execution_events", "ordinal >= $2", from),
        ("execution_changes", "ordinal >= $2", from),
        ("rebindings", "epoch > $2", epoch),
        ("placements", "epoch > $2", epoch),
    ];
    for (table, which, bound) in moves {
        sqlx::query(sqlx::AssertSqlSafe(format!(
            "WITH gone AS (DELETE FROM {table} WHERE execution = $1 AND {which} RETURNING *) \
             INSERT INTO lost_rows (execution, table_name, row, found_at) \
             SELECT $1, '{table}', to_jsonb(gone), $3 FROM gone"
        )))
        .bind(argument(&rewind.execution))
        .bind(argument(&bound))
        .bind(argument(&rewind.at))
        .execute(&mut *tx)
        .await?;
    }
    sqlx::query(
        "UPDATE placements SET ended_at = NULL, end_reason = NULL, ended_in = NULL \
         WHERE execution = $1 AND epoch = $2 AND coalesce(ended_in, $3) >= $3",
    )
    .bind(argument(&rewind.execution))
    .bind(argument(&epoch))
    .bind(argument(&from))
    .execute(&mut *tx)
    .await?;
    sqlx::query(
        "UPDATE placements \
         SET started_at = NULL, started_in = NULL, computing_since = NULL, gap_us = NULL \
         WHERE execution = $1 AND epoch = $2 AND started_in >= $3",
    )
    .bind(argument(&rewind.execution))
    .bind(argument(&epoch))
    .bind(argument(&from))
    .execute(&mut *tx)
    .await?;
    sqlx::query(
        "UPDATE executions SET ordinal = $2 - 1, digest = NULL, finished_at = NULL, capsules = NULL, \
         result = NULL, outputs = NULL, failure = NULL, stderr_tail = NULL, \
         fault = NULL, fault_owner = NULL, \
         first_started_at = (SELECT min(computing_since) FROM placements WHERE execution = $1) \
         WHERE id = $1",
    )
    .bind(argument(&rewind.execution))
    .bind(argument(&from))
    .execute(&mut *tx)
    .await?;
    Ok(())
}
