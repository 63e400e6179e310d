//! Facts that belong to no ledger, from `FIEC_RECORD`: rejections, and what happens to nodes.

use std::time::Instant;

use async_nats::jetstream::consumer::{DeliverPolicy, pull};
use fiec_broker::{Broker, BrokerError, Delivered, Reader};
use fiec_schemas::envelope::NodeEnvelopes;
use fiec_schemas::messages::Record;
use fiec_schemas::quota::Quota;
use fiec_schemas::{Digest, NodeDescriptor, Sequence, Tenant, Timestamp, subjects};
use futures_util::StreamExt;
use sqlx::{Connection, PgConnection};

use crate::copy::{json_without_nul, saturate, without_nul};
use crate::error::Result;
use crate::ledger::{Backoff, Shared, again, marked, trouble};
use crate::lost::{self, Marked};
use crate::metrics::Part;
use crate::rows::{json, line};
use crate::time::PgTime;
use crate::trust;
use crate::write::advance;

/// Records of one transaction.
const BATCH: usize = 500;

/// Records that the stream had dropped before they were read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gap {
    /// First sequence that is missing.
    pub first: Sequence,
    /// Last sequence that is missing.
    pub last: Sequence,
    /// When the broker stored the first record after them.
    pub before: Timestamp,
}

/// Follows the stream until the recorder stops. Where it has lost records at its end it is read from
/// there: what is recorded stays.
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
                        "the record stream has lost records; what is recorded stays"
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

/// Records what the reader gives until it ends.
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

/// Writes records and moves the checkpoint to the last of them, which is known by its digest and by
/// when the broker stored it; none where the checkpoint is not where it was expected. `apart`: a
/// record that PostgreSQL cannot hold is passed over; returns their number.
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
        .bind(saturate(gap.first))
        .bind(saturate(gap.last))
        .bind(PgTime(gap.before))
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

/// True where PostgreSQL can never hold a value: SQLSTATE class 22 (data exception) or 54 (program
/// limit exceeded).
fn cannot_hold(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|e| e.code());
    code.is_some_and(|code| code.starts_with("22") || code.starts_with("54"))
}

/// Writes one record.
async fn apply(tx: &mut PgConnection, seq: Sequence, record: &Record) -> sqlx::Result<()> {
    match record {
        Record::Rejection {
            tenant,
            seq: submission,
            error,
            excerpt,
            at,
        } => {
            sqlx::query(
                "INSERT INTO rejections (seq, tenant, submission_seq, line, field, reason, \
                 excerpt, at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT DO NOTHING",
            )
            .bind(saturate(seq))
            .bind(without_nul(tenant))
            .bind(submission.map(saturate))
            .bind(line(error.line))
            .bind(without_nul(&error.field))
            .bind(without_nul(&error.reason))
            .bind(without_nul(excerpt))
            .bind(PgTime(*at))
            .execute(&mut *tx)
            .await?;
        }
        Record::Node {
            node,
            instance,
            what,
            detail,
            who,
            at,
            descriptor,
        } => {
            sqlx::query(
                "INSERT INTO node_events (seq, node, instance, what, detail, at, who) \
                 VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT DO NOTHING",
            )
            .bind(saturate(seq))
            .bind(node.as_str())
            .bind(instance.map(|i| i.0))
            .bind(without_nul(what))
            .bind(without_nul(detail))
            .bind(PgTime(*at))
            .bind(who.as_deref().map(without_nul))
            .execute(&mut *tx)
            .await?;
            node_status(tx, node.as_str(), what, detail, *at).await?;
            if let Some(descriptor) = descriptor {
                describe(tx, descriptor).await?;
            }
        }
        Record::Proof { proof, refused, at } => {
            trust::proof(tx, seq, proof, refused.as_deref(), *at).await?;
        }
        Record::Verification {
            execution,
            from,
            to,
            node,
            by,
            outcome,
            detail,
            at,
        } => {
            let verification = trust::Verification {
                execution: *execution,
                from: *from,
                to: *to,
                node: node.as_ref(),
                by,
                outcome,
                detail,
                at: *at,
            };
            trust::verification(tx, seq, &verification).await?;
        }
        Record::Waiting {
            execution,
            summary,
            candidates,
            omitted,
            would_help,
            at,
        } => {
            let clean = |text: String| json_without_nul(&text).into_owned();
            sqlx::query(
                "INSERT INTO waiting_verdicts AS w (execution, at, summary, candidates, \
                 omitted, would_help) VALUES ($1, $2, $3, $4::text::jsonb, $5, \
                 $6::text::jsonb) ON CONFLICT (execution) DO UPDATE SET at = excluded.at, \
                 summary = excluded.summary, candidates = excluded.candidates, \
                 omitted = excluded.omitted, would_help = excluded.would_help \
                 WHERE w.at < excluded.at",
            )
            .bind(execution.0)
            .bind(PgTime(*at))
            .bind(without_nul(summary))
            .bind(clean(json(candidates)))
            .bind(line(*omitted))
            .bind(clean(json(would_help)))
            .execute(&mut *tx)
            .await?;
        }
        Record::Envelopes { node, envelopes } => {
            self::envelopes(tx, seq, node.as_str(), envelopes).await?;
        }
        Record::Quota { tenant, quota } => {
            self::quota(tx, seq, tenant, quota).await?;
        }
    }
    Ok(())
}

async fn node_status(
    tx: &mut PgConnection,
    node: &str,
    what: &str,
    detail: &str,
    at: Timestamp,
) -> sqlx::Result<()> {
    let status = match what {
        "joined" | "returned" => Some("up"),
        "left" => Some("left"),
        "lost" => Some("lost"),
        _ => None,
    };
    let cordoned = match what {
        "cordoned" | "revoked" => Some(true),
        "uncordoned" => Some(false),
        _ => None,
    };
    let draining = match what {
        "draining" | "revoked" => Some(true),
        "joined" | "uncordoned" => Some(false),
        _ => None,
    };
    sqlx::query(
        "INSERT INTO nodes AS n (node, status, status_detail, status_at, cordoned, draining, \
         viability) VALUES ($1, coalesce($2, 'unknown'), $3, $4, coalesce($5, false), \
         coalesce($6, false), $7) ON CONFLICT (node) DO UPDATE SET \
         status = coalesce($2, n.status), \
         status_detail = CASE WHEN $2 IS NULL THEN n.status_detail ELSE $3 END, \
         status_at = CASE WHEN $2 IS NULL THEN n.status_at ELSE $4 END, \
         cordoned = coalesce($5, n.cordoned), draining = coalesce($6, n.draining), \
         viability = coalesce($7, n.viability)",
    )
    .bind(node)
    .bind(status)
    .bind(without_nul(detail))
    .bind(PgTime(at))
    .bind(cordoned)
    .bind(draining)
    .bind((what == "viability").then(|| without_nul(detail)))
    .execute(tx)
    .await?;
    Ok(())
}

async fn describe(tx: &mut PgConnection, d: &NodeDescriptor) -> sqlx::Result<()> {
    let clean = |text: String| json_without_nul(&text).into_owned();
    sqlx::query(
        "UPDATE nodes SET instance = $2, host = $3, version = $4, joined_at = $5, shard = $6, \
         slots = $7, cpus = $8, isa = $9, memory_limit_bytes = $10, programs = $11, \
         labels = $12::text::jsonb, thresholds = $13::text::jsonb, descriptor = $14::text::jsonb, \
         viability = NULL WHERE node = $1",
    )
    .bind(d.node.as_str())
    .bind(d.instance.0)
    .bind(without_nul(&d.host))
    .bind(without_nul(&d.version))
    .bind(PgTime(d.started_at))
    .bind(i32::from(d.shard))
    .bind(line(d.slots))
    .bind(line(d.cpus))
    .bind(without_nul(&d.isa))
    .bind(saturate(d.memory_limit_bytes))
    .bind(
        d.programs
            .iter()
            .map(|p| without_nul(p))
            .collect::<Vec<_>>(),
    )
    .bind(clean(json(&d.labels)))
    .bind(clean(json(&d.thresholds)))
    .bind(clean(json(d)))
    .execute(tx)
    .await?;
    Ok(())
}

/// What a node may offer from now on, and that somebody said so.
async fn quota(
    tx: &mut PgConnection,
    seq: Sequence,
    tenant: &Tenant,
    quota: &Quota,
) -> sqlx::Result<()> {
    sqlx::query(
        "INSERT INTO quota_changes (seq, tenant, at, who, running, devices, memory_bytes, weight) \
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT DO NOTHING",
    )
    .bind(saturate(seq))
    .bind(tenant.as_str())
    .bind(PgTime(quota.at))
    .bind(without_nul(&quota.who))
    .bind(quota.running.map(i64::from))
    .bind(quota.devices.map(i64::from))
    .bind(quota.memory_bytes.map(saturate))
    .bind(quota.weight.map(line))
    .execute(tx)
    .await?;
    Ok(())
}

async fn envelopes(
    tx: &mut PgConnection,
    seq: Sequence,
    node: &str,
    set: &NodeEnvelopes,
) -> sqlx::Result<()> {
    sqlx::query(
        "INSERT INTO node_events (seq, node, instance, what, detail, at, who) \
         VALUES ($1, $2, NULL, 'envelopes', $3, $4, $5) ON CONFLICT DO NOTHING",
    )
    .bind(saturate(seq))
    .bind(node)
    .bind(without_nul(&set.in_words()))
    .bind(PgTime(set.at))
    .bind(
        Some(set.who.as_str())
            .filter(|who| !who.is_empty())
            .map(without_nul),
    )
    .execute(&mut *tx)
    .await?;
    sqlx::query(
        "INSERT INTO nodes AS n (node, envelopes) VALUES ($1, $2::text::jsonb) \
         ON CONFLICT (node) DO UPDATE SET envelopes = excluded.envelopes",
    )
    .bind(node)
    .bind(json_without_nul(&json(set)).into_owned())
    .execute(tx)
    .await?;
    Ok(())
}
