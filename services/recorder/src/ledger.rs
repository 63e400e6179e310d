//! The ledger stream into the tables, in three stages: collect, fold, write. The next batch is folded
//! on another thread while PostgreSQL takes in the current one.

use std::time::{Duration, Instant};

use fiec_broker::{Broker, BrokerError, feed};
use fiec_schemas::event::MessageError;
use fiec_schemas::{ExecutionId, LedgerMessage, Sequence};
use futures_util::{Stream, StreamExt};
use sqlx::postgres::PgRow;
use sqlx::{PgExecutor, Row};
use tokio::sync::mpsc;

use crate::error::{RecorderError, Result};
use crate::fold::{EndedRun, Known, Message, Tracked, fold};
use crate::held;
use crate::lost::{self, Mark, Marked};
use crate::metrics::Part;
use crate::read;
use crate::rests;
use crate::table::argument;
use crate::tasks::{Backoff, Shared, again, pause, trouble};
use crate::time::PgTime;
use crate::unread::{self, UnreadRow};
use crate::write::{Prepared, Writer, Written};

/// Most messages of a batch. Half as many cost a third of the throughput on two busy cores.
pub(crate) const BATCH_MESSAGES: usize = 6_000;
/// Most messages of the first batch; each next batch may have twice as many. PostgreSQL begins early
/// if the recorder is far behind.
const FIRST_MESSAGES: usize = BATCH_MESSAGES / 8;
/// Most bytes of headers of a batch.
const BATCH_BYTES: usize = 12 << 20;
/// Time for which a batch waits for more messages.
const BATCH_WAIT: Duration = Duration::from_millis(20);
/// If many messages came meanwhile, the batch goes on for spans of this length, until a span brings
/// fewer than [`BUSY_MESSAGES`] or there were [`BUSY_SPANS`]. An execution whose whole life falls into
/// one batch costs one row; one that is seen twice costs its row again, in every index.
const BUSY_SPAN: Duration = Duration::from_millis(15);
const BUSY_SPANS: u32 = 15;
const BUSY_MESSAGES: usize = 40;
/// Live executions remembered between batches; others are looked up.
const KNOWN_LIMIT: usize = 300_000;

/// Why the stages ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The feed ended, or the recorder is being stopped.
    Feed,
    /// Another recorder has moved the checkpoint.
    Behind,
    /// A new row is in the table already: look up every execution up to this sequence.
    Conflict(Sequence),
}

/// Follows the ledger until `stop`.
///
/// # Errors
/// When the stream is written by a newer program.
pub(crate) async fn follow(broker: Broker, shared: Shared) -> Result<()> {
    let mut careful_until = 0;
    let mut backoff = Backoff::default();
    let read = again(&shared, Part::Ledger, || async {
        match unread::read_again(&shared).await {
            // No such table: no back-off helps.
            Err(error) if undefined_table(&error) => Ok(false),
            read => read.map(|()| true),
        }
    });
    match read.await {
        None => return Ok(()),
        Some(true) => {}
        Some(false) => {
            return Err(RecorderError::NoCheckpoint {
                stream: Marked::Ledger.stream(),
            });
        }
    }
    while !shared.stop.is_cancelled() {
        let Some(mark) = marked(&shared, Part::Ledger, Marked::Ledger).await? else {
            return Ok(());
        };
        let mut connections = broker.connections();
        connections.mark_unchanged();
        let opened = async {
            let resume = lost::resume(&broker, &mark).await?;
            let feed = feed::ledger(&broker, feed::Start::At(resume.from + 1)).await?;
            Ok::<_, BrokerError>((resume, feed))
        };
        let (resume, feed) = match opened.await {
            Ok(opened) => opened,
            Err(error) => {
                trouble(&shared, Part::Ledger, &error);
                backoff.wait(&shared.stop).await;
                continue;
            }
        };
        let at = resume.from;
        if resume.lost {
            tracing::error!(
                checkpoint = mark.seq,
                from = at,
                "the ledger stream has lost recorded messages; continuing with the remaining ones"
            );
            shared.metrics.losses.inc();
        }
        if resume.lost {
            match rests::set_back(&broker, &shared, &mark, at).await {
                Ok(true) => {}
                Ok(false) => {
                    backoff.wait(&shared.stop).await;
                    continue;
                }
                Err(error) => {
                    trouble(&shared, Part::Ledger, &error);
                    backoff.wait(&shared.stop).await;
                    continue;
                }
            }
        }
        if resume.lost || mark.created.is_none() {
            let moved = again(&shared, Part::Ledger, || {
                lost::go_back(&shared.pool, &mark, &resume)
            });
            match moved.await {
                None => return Ok(()),
                Some(true) => {}
                Some(false) => {
                    backoff.wait(&shared.stop).await;
                    continue;
                }
            }
        }
        if let Some(begins) = resume.begins {
            tracing::warn!(
                checkpoint = at,
                %begins,
                "the ledger stream has dropped messages that were never recorded"
            );
            let noted = again(&shared, Part::Ledger, || {
                held::history_begins(&shared.pool, begins)
            });
            if noted.await.is_none() {
                return Ok(());
            }
        }
        shared.health.recorded(at);
        shared.health.read(Part::Ledger, at);
        shared.health.writes_up_to(at);
        tracing::info!(checkpoint = at, "recording the ledger");
        // A broker that was started again may have lost messages: compare again.
        let reconnected = async move { connections.changed().await.is_ok() };
        let feed = feed.take_until(Box::pin(reconnected));
        let opened = Instant::now();
        match pump(feed, at, careful_until, &shared).await? {
            Ended::Feed => {
                backoff.wait_after(opened, &shared.stop).await;
            }
            Ended::Behind => {
                tracing::info!("another recorder is ahead; continuing from its checkpoint");
            }
            Ended::Conflict(seq) => {
                tracing::warn!(
                    seq,
                    "the tables already have the new rows; checking each execution"
                );
                careful_until = seq;
            }
        }
        pause(&shared.stop, Duration::from_millis(50)).await;
    }
    Ok(())
}

/// Records the messages of a feed, from a checkpoint on, until the feed ends.
///
/// # Errors
/// When a message is of a newer version.
pub(crate) async fn pump<S>(
    feed: S,
    from: Sequence,
    careful_until: Sequence,
    shared: &Shared,
) -> Result<Ended>
where
    S: Stream<Item = std::result::Result<feed::FeedItem, BrokerError>> + Unpin,
{
    let (to_fold, collected) = mpsc::channel(1);
    let (to_write, folded) = mpsc::channel(1);
    let collect = async {
        collect(feed, to_fold, shared).await;
        Ok(Ended::Feed)
    };
    let fold = read(collected, to_write, careful_until, shared);
    let write = write(folded, from, shared);
    // The first that cannot go on ends the others; at the end of the feed each ends in its turn.
    let stages = async { futures_util::try_join!(stage(collect), stage(fold), stage(write)) };
    match stages.await {
        Ok(_) => Ok(Ended::Feed),
        Err(Stopped::For(ended)) => Ok(ended),
        Err(Stopped::Failed(error)) => Err(error),
    }
}

enum Stopped {
    For(Ended),
    Failed(RecorderError),
}

async fn stage(work: impl Future<Output = Result<Ended>>) -> std::result::Result<(), Stopped> {
    match work.await {
        Ok(Ended::Feed) => Ok(()),
        Ok(ended) => Err(Stopped::For(ended)),
        Err(error) => Err(Stopped::Failed(error)),
    }
}

async fn collect<S>(mut feed: S, to: mpsc::Sender<Vec<feed::FeedItem>>, shared: &Shared)
where
    S: Stream<Item = std::result::Result<feed::FeedItem, BrokerError>> + Unpin,
{
    let mut most = FIRST_MESSAGES;
    loop {
        let mut batch = Vec::new();
        let mut bytes = 0;
        let full = tokio::time::sleep(Duration::MAX);
        tokio::pin!(full);
        let (mut last, mut spans, mut seen) = (false, 0, 0);
        while batch.len() < most && bytes < BATCH_BYTES {
            tokio::select! {
                biased;
                () = shared.stop.cancelled() => { last = true; break; }
                item = feed.next() => match item {
                    Some(Ok(item)) => {
                        if batch.is_empty() {
                            full.as_mut().reset(tokio::time::Instant::now() + BATCH_WAIT);
                        }
                        bytes += item.header.len();
                        shared.health.read(Part::Ledger, item.seq);
                        shared.health.writes_up_to(item.seq);
                        batch.push(item);
                    }
                    // A message that is passed over shows as a gap in the ordinals.
                    Some(Err(error @ BrokerError::Foreign { seq, .. })) => {
                        tracing::warn!(%error, "a message was passed over");
                        shared.health.read(Part::Ledger, seq);
                        shared.metrics.unreadable.inc();
                    }
                    // The feed ends with it.
                    Some(Err(error)) => tracing::warn!(%error, "opening the ledger feed anew"),
                    None => { last = true; break; }
                },
                () = &mut full, if !batch.is_empty() => {
                    if spans == BUSY_SPANS || batch.len() - seen < BUSY_MESSAGES {
                        break;
                    }
                    spans += 1;
                    seen = batch.len();
                    full.as_mut().reset(tokio::time::Instant::now() + BUSY_SPAN);
                }
            }
        }
        most = (2 * most).min(BATCH_MESSAGES);
        if (!batch.is_empty() && to.send(batch).await.is_err()) || last {
            return;
        }
    }
}

async fn read(
    mut from: mpsc::Receiver<Vec<feed::FeedItem>>,
    to: mpsc::Sender<Prepared>,
    careful_until: Sequence,
    shared: &Shared,
) -> Result<Ended> {
    let mut known = Known::default();
    while let Some(items) = from.recv().await {
        let last_seq = items.last().map_or(0, |item| item.seq);
        let last = items.last().map(|item| (item.digest(), item.stored_at));
        let decoded = tokio::task::spawn_blocking(move || decode(items)).await??;
        let Decoded {
            messages,
            unread,
            foreign,
        } = decoded;
        let unreadable = foreign.saturating_add(unread.len() as u64);
        shared.metrics.unreadable.inc_by(unreadable);
        if known.len() > KNOWN_LIMIT {
            known.forget_up_to(shared.health.checkpoint());
        }
        let careful = last_seq <= careful_until;
        let unknown = known.unknown(&messages, careful);
        if !unknown.is_empty() {
            let loaded = again(shared, Part::Ledger, || look_up(&shared.pool, &unknown));
            let Some(loaded) = loaded.await else {
                return Ok(Ended::Feed);
            };
            loaded
                .into_iter()
                .for_each(|(id, tracked)| known.learn(id, tracked));
        }
        let folded = tokio::task::spawn_blocking(move || {
            let mut rows = fold(messages, &mut known);
            // Also past what could not be read at the batch's end.
            rows.last_seq = last_seq;
            rows.last = last;
            rows.unread = unread;
            if careful {
                // COPY refuses a placement that is there, each time.
                rows.placements.values_mut().for_each(|p| p.is_new = false);
            }
            (Prepared::new(rows), known)
        });
        let prepared;
        (prepared, known) = folded.await?;
        shared
            .metrics
            .tracked
            .set(i64::try_from(known.len()).unwrap_or(i64::MAX));
        if to.send(prepared).await.is_err() {
            break;
        }
    }
    Ok(Ended::Feed)
}

/// The messages of a batch.
#[derive(Debug, Default)]
pub(crate) struct Decoded {
    /// Those that can be read.
    pub messages: Vec<Message>,
    /// Those that are kept until they can be read.
    pub unread: Vec<UnreadRow>,
    /// Number of those that name another execution than their subject. They are passed over.
    pub foreign: u64,
}

/// Reads the headers.
///
/// # Errors
/// A message of a newer version: passing it over would lose history silently.
pub(crate) fn decode(items: Vec<feed::FeedItem>) -> Result<Decoded> {
    let mut decoded = Decoded {
        messages: Vec::with_capacity(items.len()),
        ..Decoded::default()
    };
    for item in items {
        match LedgerMessage::decode(&item.header, item.seq) {
            Ok(message) if message.state.execution == item.execution => {
                decoded.messages.push(Message {
                    seq: item.seq,
                    stored_at: item.stored_at,
                    digest: (!message.state.phase.is_terminal()).then(|| item.digest()),
                    message,
                });
            }
            Ok(message) => {
                tracing::error!(seq = item.seq, execution = %item.execution,
                    says = %message.state.execution, "ledger message names another execution");
                decoded.foreign += 1;
            }
            Err(source @ MessageError::Version(_)) => {
                return Err(RecorderError::Version {
                    seq: item.seq,
                    source,
                });
            }
            Err(error) => {
                tracing::error!(seq = item.seq, execution = %item.execution, %error,
                    "a ledger message is kept unread");
                decoded.unread.push(UnreadRow {
                    seq: item.seq,
                    digest: item.digest(),
                    tenant: item.tenant,
                    execution: item.execution,
                    stored_at: item.stored_at,
                    reason: error.to_string(),
                    header: item.header,
                });
            }
        }
    }
    Ok(decoded)
}

async fn write(
    mut from: mpsc::Receiver<Prepared>,
    mut expected: Sequence,
    shared: &Shared,
) -> Result<Ended> {
    let mut writer = Writer::new(shared.pool.clone());
    while let Some(batch) = from.recv().await {
        let began = Instant::now();
        let mut backoff = Backoff::default();
        let written = loop {
            match writer.write(&batch, expected).await {
                Ok(written) => break written,
                Err(error) => {
                    shared.metrics.database_errors.inc();
                    trouble(shared, Part::Ledger, &error);
                    if !backoff.wait(&shared.stop).await {
                        return Ok(Ended::Feed);
                    }
                }
            }
        };
        match written {
            Written::Done => {}
            Written::Behind => return Ok(Ended::Behind),
            Written::Conflict => return Ok(Ended::Conflict(batch.rows.last_seq)),
        }
        expected = batch.rows.last_seq;
        account(&batch, began, shared);
        if !batch.rows.unread.is_empty() {
            unread::count(shared).await;
        }
    }
    Ok(Ended::Feed)
}

fn account(batch: &Prepared, began: Instant, shared: &Shared) {
    let (metrics, rows) = (&shared.metrics, &batch.rows);
    shared.health.well(Part::Ledger);
    shared.health.recorded(rows.last_seq);
    metrics.batches.inc();
    metrics.messages.inc_by(rows.messages as u64);
    metrics.rows.inc_by(batch.row_count() as u64);
    metrics.batch_seconds.observe(began.elapsed().as_secs_f64());
    metrics.gaps.inc_by(rows.missing.len() as u64);
    metrics
        .checkpoint
        .set(i64::try_from(rows.last_seq).unwrap_or(i64::MAX));
    for gap in &rows.missing {
        tracing::warn!(execution = %gap.execution, first = gap.first_missing, last = gap.last_missing,
            "ledger messages were never seen: {}", gap.reason);
    }
    shared.mirror.changed(&rows.states, &rows.finished);
}

/// What the tables have of executions that the fold of their next messages needs.
///
/// # Errors
/// What PostgreSQL says.
pub(crate) async fn look_up(
    tables: impl PgExecutor<'_>,
    ids: &[ExecutionId],
) -> sqlx::Result<Vec<(ExecutionId, Tracked)>> {
    let rows = sqlx::query(
        "SELECT id, ordinal, seq, digest, recorded_at, epoch, node, \
         phase IN ('bound', 'started') AS open, yielded_at, computed_until, \
         CASE WHEN finished_at IS NOT NULL THEN submitted_at END AS ended_run, finished_at \
         FROM executions WHERE id = ANY($1)",
    )
    .bind(argument(&ids.to_vec()))
    .fetch_all(tables)
    .await?;
    let tracked = |row: &PgRow| {
        let node: Option<String> = row.try_get("node")?;
        let tracked = Tracked {
            ordinal: read::count(row, "ordinal")?,
            seq: read::count(row, "seq")?,
            digest: read::digest(row, "digest")?,
            stored_at: row.try_get::<PgTime, _>("recorded_at")?.0,
            ended: read::time(row, "ended_run")?
                .zip(read::time(row, "finished_at")?)
                .map(|(submitted_at, at)| EndedRun::new(submitted_at, at)),
            epoch: read::count(row, "epoch")?,
            node: node.and_then(|node| node.parse().ok()),
            open: row.try_get("open")?,
            yielded_at: read::time(row, "yielded_at")?,
            computed_until: read::time(row, "computed_until")?,
        };
        Ok((read::execution(row, "id")?, tracked))
    };
    rows.iter().map(tracked).collect()
}

/// A stream's checkpoint, as soon as PostgreSQL answers; none if the recorder is being stopped.
///
/// # Errors
/// When there is no such row.
pub(crate) async fn marked(shared: &Shared, part: Part, of: Marked) -> Result<Option<Mark>> {
    let found = again(shared, part, || async {
        match lost::mark(&shared.pool, of).await {
            // No such table: no back-off helps.
            Err(error) if undefined_table(&error) => Ok(None),
            found => found,
        }
    });
    match found.await {
        None => Ok(None),
        Some(None) => Err(RecorderError::NoCheckpoint {
            stream: of.stream(),
        }),
        Some(mark) => Ok(mark),
    }
}

fn undefined_table(error: &sqlx::Error) -> bool {
    error.as_database_error().and_then(|e| e.code()).as_deref() == Some("42P01")
}
