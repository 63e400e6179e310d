//! Facts that belong to no ledger, from `FIEC_RECORD`: rejections, events of nodes, proofs, quotas,
//! and why executions wait.

pub(crate) mod nodes;
pub(crate) mod proofs;
pub(crate) mod tables;

use std::time::Instant;

use async_nats::jetstream::consumer::{DeliverPolicy, pull};
use fiec_broker::{Broker, BrokerError, Delivered, Reader};
use fiec_schemas::messages::Record;
use fiec_schemas::{Digest, Sequence, Timestamp, subjects};
use futures_util::StreamExt;
use sqlx::{Connection, PgConnection};

use self::tables::apply;
use crate::error::Result;
use crate::ledger::marked;
use crate::lost::{self, Marked};
use crate::metrics::Part;
use crate::table::argument;
use crate::tasks::{Backoff, Shared, again, trouble};
use crate::write::advance;

/// Records of one transaction.
const BATCH: usize = 500;

/// Records that the stream dropped before they were read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gap {
    /// First sequence that is missing.
    pub first: Sequence,
    /// Last sequence that is missing.
    pub last: Sequence,
    /// When the broker stored the first record after them.
    pub before: Timestamp,
}

/// Follows the stream until the recorder stops. If it has lost records at its end, the recorder reads
/// it from there: recorded rows stay.
///
/// # Errors
/// When there is no checkpoint.
pub(crate) async fn follow(broker: Broker, shared: Shared) -> Result<()> {
    let mut backoff = Backoff::default();
    while !shared.stop.is_cancelled() {
        let Some(mark) = marked(&shared, Part::Records, Marked::Records).await? else {
            return Ok(());
        };
        shared.health.read(Part::Records, mark.seq);
        let mut connections = broker.connections();
        connections.mark_unchanged();
        let opened = Instant::now();
        match lost::resume(&broker, &mark).await {
            Ok(resume) if resume.lost || mark.created.is_none() => {
                if resume.lost {
                    tracing::error!(
                        checkpoint = mark.seq,
                        from = resume.from,
                        "the record stream has lost records; recorded rows stay"
                    );
                    shared.metrics.losses.inc();
                }
                let moved = || lost::go_back(&shared.pool, &mark, &resume);
                if again(&shared, Part::Records, moved).await.is_none() {
                    return Ok(());
                }
            }
            Ok(_) => match open(&broker, mark.seq).await {
                Ok(messages) => tokio::select! {
                    () = record(messages, mark.seq, &shared) => {}
                    // A broker that was started again may have lost records: compare again.
                    Ok(()) = connections.changed() => {}
                },
                Err(error) => trouble(&shared, Part::Records, &error),
            },
            Err(error) => trouble(&shared, Part::Records, &error),
        }
        backoff.wait_after(opened, &shared.stop).await;
    }
    Ok(())
}

async fn open(broker: &Broker, at: Sequence) -> std::result::Result<Reader, BrokerError> {
    let config = pull::Config {
        deliver_policy: DeliverPolicy::ByStartSequence {
            start_sequence: at + 1,
        },
        ..Default::default()
    };
    let what = "follow the record stream";
    Reader::open(broker, subjects::RECORD_STREAM, config, BATCH, what).await
}

/// Writes the records of a reader until it ends.
async fn record(messages: Reader, at: Sequence, shared: &Shared) {
    let mut chunks = messages.ready_chunks(BATCH);
    let mut expected = at;
    loop {
        let chunk = tokio::select! {
            () = shared.stop.cancelled() => return,
            chunk = chunks.next() => chunk,
        };
        let Some(chunk) = chunk else { return };
        let (mut records, mut gaps) = (Vec::new(), Vec::new());
        let (mut last, mut known) = (expected, None);
        for delivered in chunk {
            let delivered = match delivered {
                Ok(delivered) => delivered,
                Err(error) => {
                    tracing::warn!(%error, "opening the record feed anew");
                    break;
                }
            };
            let Delivered { message, seq, .. } = delivered;
            if seq > last + 1 {
                gaps.push(Gap {
                    first: last + 1,
                    last: seq - 1,
                    before: delivered.stored_at,
                });
            }
            last = seq;
            let digest = Marked::Records.digest(message.headers.as_ref(), &message.payload);
            known = digest.map(|digest| (digest, delivered.stored_at));
            match serde_json::from_slice::<Record>(&message.payload) {
                Ok(record) => records.push((last, record)),
                Err(error) => {
                    shared.metrics.unreadable.inc();
                    tracing::error!(seq = last, %error, "unreadable record passed over");
                }
            }
        }
        if last == expected {
            continue;
        }
        let (records, gaps) = (&records, &gaps);
        let written = again(shared, Part::Records, || async move {
            let mut connection = shared.pool.acquire().await?;
            let mut write = async |apart| {
                let to = (last, known);
                write(&mut connection, records, gaps, expected, to, apart).await
            };
            match write(false).await {
                // The other records of the batch must not wait for ever.
                Err(error) if cannot_hold(&error) => write(true).await,
                written => written,
            }
        });
        match written.await {
            Some(Some(refused)) => {
                shared.metrics.unreadable.inc_by(refused);
                let held = (records.len() as u64).saturating_sub(refused);
                shared.metrics.records.inc_by(held);
                shared.metrics.gaps.inc_by(gaps.len() as u64);
                for Gap { first, last, .. } in gaps {
                    tracing::error!(first, last, "records were lost before they were recorded");
                }
            }
            // Another recorder is ahead, or it is time to stop.
            Some(None) | None => return,
        };
        expected = last;
        shared.health.read(Part::Records, last);
    }
}

/// Writes records and moves the checkpoint to the last of them, with its digest and the time at which
/// the broker stored it; none if the checkpoint is not where it was expected. `apart`: passes over a
/// record that PostgreSQL cannot hold, and returns their number.
async fn write(
    connection: &mut PgConnection,
    records: &[(Sequence, Record)],
    gaps: &[Gap],
    expected: Sequence,
    (last, known): (Sequence, Option<(Digest, Timestamp)>),
    apart: bool,
) -> sqlx::Result<Option<u64>> {
    let mut tx = connection.begin().await?;
    for gap in gaps {
        sqlx::query(
            "INSERT INTO record_gaps (first_missing, last_missing, after, before) \
             SELECT $2, $3, updated_at, $4 FROM recorder_checkpoint WHERE stream = $1 \
             ON CONFLICT DO NOTHING",
        )
        .bind(subjects::RECORD_STREAM)
        .bind(argument(&gap.first))
        .bind(argument(&gap.last))
        .bind(argument(&gap.before))
        .execute(&mut *tx)
        .await?;
    }
    if !advance(&mut tx, subjects::RECORD_STREAM, expected, last, known).await? {
        tx.rollback().await?;
        return Ok(None);
    }
    let mut refused = 0;
    for (seq, record) in records {
        if !apart {
            apply(&mut tx, *seq, record).await?;
            continue;
        }
        let mut savepoint = tx.begin().await?;
        match apply(&mut savepoint, *seq, record).await {
            Ok(()) => savepoint.commit().await?,
            Err(error) if cannot_hold(&error) => {
                savepoint.rollback().await?;
                tracing::error!(seq, %error, "PostgreSQL cannot hold a record; it is passed over");
                refused += 1;
            }
            Err(error) => return Err(error),
        }
    }
    tx.commit().await?;
    Ok(Some(refused))
}

/// True if PostgreSQL can never hold a value: SQLSTATE class 22 (data exception) or 54 (program
/// limit exceeded).
fn cannot_hold(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|e| e.code());
    code.is_some_and(|code| code.starts_with("22") || code.starts_with("54"))
}
