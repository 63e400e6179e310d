//! For `fiec bench history` and the tests: ledgers made in memory, the recorder's own stages over
//! them, and a plain COPY of the same rows. Only the feature `lab-support` compiles this module, so
//! the product does not contain it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fiec_broker::feed::FeedItem;
use fiec_schemas::event::Decision;
use fiec_schemas::{
    Candidate, Cause, Digest, Event, ExecutionId, ExecutionState, InstanceId, LedgerMessage,
    NodeId, Sequence, Submission, Tenant, Timestamp,
};
use sqlx::{Connection, PgPool};
use tokio_util::sync::CancellationToken;

use crate::error::{RecorderError, Result};
use crate::fold::{Known, fold};
use crate::ledger::{Ended, decode, marked, pump};
use crate::lost::Marked;
use crate::metrics::{Health, Metrics, Part};
use crate::mirror::Mirror;
use crate::records::{nodes, proofs, tables};
pub use crate::table::Column;
use crate::table::Table;
use crate::tasks::Shared;
use crate::write::{Prepared, ensure_day};
use crate::{parts, results, rows, series, telemetry, unread};

/// Rows and how long they took.
#[derive(Debug, Clone, Copy)]
pub struct Measured {
    /// Ledger messages.
    pub messages: usize,
    /// New rows of executions, placements, decisions, boundaries, events and rebindings. A row that
    /// was changed later counts once.
    pub rows: usize,
    /// From the first message in hand to the last commit.
    pub elapsed: Duration,
}

impl Measured {
    /// Rows a second.
    pub fn rows_per_s(&self) -> f64 {
        self.rows as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }
}

/// Writes one execution's ledger in memory, as its writers would.
#[derive(Debug, Clone)]
pub struct LedgerWriter {
    state: ExecutionState,
    prev: Option<Digest>,
}

impl LedgerWriter {
    /// An execution without a ledger.
    pub fn new(
        tenant: Tenant,
        execution: ExecutionId,
        submission: Arc<Submission>,
        submitted_at: Timestamp,
    ) -> Self {
        Self {
            state: ExecutionState::unborn(tenant, execution, submission, None, submitted_at),
            prev: None,
        }
    }

    /// The state so far.
    pub fn state(&self) -> &ExecutionState {
        &self.state
    }

    /// Appends a message. Returns it as the feed does.
    ///
    /// # Errors
    /// An event that the state does not allow, or a message that is too large.
    pub fn append(
        &mut self,
        events: Vec<Event>,
        author: &str,
        at: Timestamp,
        seq: Sequence,
    ) -> std::result::Result<FeedItem, String> {
        let state = self
            .state
            .after(&events, author, at, self.prev)
            .map_err(|e| e.to_string())?;
        let message = LedgerMessage {
            v: 1,
            events,
            state: state.into(),
            sig: None,
        };
        let header = message.encode().map_err(|e| e.to_string())?;
        self.prev = Some(Digest::of(header.as_bytes()));
        self.state = Arc::unwrap_or_clone(message.state);
        self.state.resolve(seq);
        Ok(FeedItem {
            seq,
            tenant: self.state.tenant.clone(),
            execution: self.state.execution,
            header,
            stored_at: at,
            pending: 0,
        })
    }
}

/// The ledgers of executions without work, from sequence `first`: `submitted+bound`, then
/// `started+completed`. A busy system writes fifty of the one, then fifty of the other.
///
/// # Errors
/// Never for a reason outside this program.
pub fn short_ledgers(
    executions: usize,
    first: Sequence,
) -> std::result::Result<Vec<FeedItem>, String> {
    let text = |e: fiec_schemas::IdError| e.to_string();
    let tenant = Tenant::new("bench").map_err(text)?;
    let nodes = ["n1", "n2", "n3"]
        .into_iter()
        .map(NodeId::new)
        .collect::<std::result::Result<Vec<_>, _>>()
        .map_err(text)?;
    let submission = Arc::new(
        Submission::parse(br#"{"program":"synthetic@1","params":{"capsules":1}}"#)
            .map_err(|e| e.to_string())?,
    );
    let instance = InstanceId::random();
    let now = Timestamp::now();
    let mut seq = first.max(1);
    let mut items = Vec::with_capacity(executions * 2);
    let mut numbers = 0..executions;
    loop {
        let mut group = Vec::with_capacity(50);
        for n in numbers.by_ref().take(50) {
            let line = u32::try_from(n).unwrap_or(u32::MAX);
            let id = ExecutionId::from_submission(&tenant, now, seq, line);
            let mut writer = LedgerWriter::new(tenant.clone(), id, Arc::clone(&submission), now);
            let node = nodes.get(n % nodes.len()).cloned().ok_or("no node")?;
            let candidates = nodes
                .iter()
                .map(|n| Candidate {
                    node: n.clone(),
                    substrate: None,
                    score: Some(0.5),
                    rejected: Vec::new(),
                })
                .collect();
            let bound = Event::Bound {
                epoch: 1,
                node: node.clone(),
                instance,
                substrate: "host".into(),
                cause: Cause::Initial,
                decision: Some(Decision {
                    candidates,
                    omitted: 0,
                    entrusted: None,
                }),
            };
            items.push(writer.append(vec![Event::Submitted, bound], "policy/bench", now, seq)?);
            seq += 1;
            group.push((writer, node));
        }
        if group.is_empty() {
            return Ok(items);
        }
        for (writer, node) in &mut group {
            let events = vec![
                Event::Started {
                    epoch: 1,
                    computing_since: now,
                },
                Event::Completed {
                    result: serde_json::Value::Null,
                    object: None,
                    computed_until: now,
                    capsules: 1,
                    outputs: Vec::new(),
                    energy: None,
                },
            ];
            items.push(writer.append(events, &format!("worker/{node}/{instance}"), now, seq)?);
            seq += 1;
        }
    }
}

/// Takes messages through the recorder's own stages into the tables. The first message must be the
/// next one after the checkpoint.
///
/// # Errors
/// When it is not, or a row exists already.
pub async fn project(pool: &PgPool, items: Vec<FeedItem>) -> Result<Measured> {
    project_until(pool, items, 0).await
}

/// The same, but looks up each execution first, as the recorder does after it found new rows in the
/// tables already.
///
/// # Errors
/// When the first message is not the next one after the checkpoint.
pub async fn project_carefully(pool: &PgPool, items: Vec<FeedItem>) -> Result<Measured> {
    project_until(pool, items, Sequence::MAX).await
}

async fn project_until(
    pool: &PgPool,
    items: Vec<FeedItem>,
    careful_until: Sequence,
) -> Result<Measured> {
    let shared = shared(pool);
    let mark = marked(&shared, Part::Ledger, Marked::Ledger).await?;
    let from = mark.map_or(0, |mark| mark.seq);
    let messages = items.len();
    let began = Instant::now();
    let feed = futures_util::stream::iter(items.into_iter().map(Ok));
    match pump(feed, from, careful_until, &shared).await? {
        Ended::Feed => {}
        ended => {
            return Err(RecorderError::NotFound(format!(
                "the messages do not follow the checkpoint, or are recorded already ({ended:?})"
            )));
        }
    }
    let rows = usize::try_from(shared.metrics.rows.get()).unwrap_or(usize::MAX);
    Ok(Measured {
        messages,
        rows,
        elapsed: began.elapsed(),
    })
}

/// Thins the curves of executions that ended before `until`, as the recorder does every hour.
///
/// # Errors
/// What PostgreSQL says.
pub async fn thin_old(pool: &PgPool, until: Timestamp) -> Result<()> {
    let thinned = series::thin_old(pool, until, &CancellationToken::new()).await;
    thinned.map_err(RecorderError::database("thin the curves"))
}

/// The floor: sends the rows of these messages by one COPY a table in one transaction. The time has no
/// reading, folding and encoding. The tables must not have these rows.
///
/// # Errors
/// What PostgreSQL says.
pub async fn plain_copy(pool: &PgPool, items: &[FeedItem]) -> Result<Measured> {
    let decoded = decode(items.to_vec())?;
    let prepared = Prepared::new(fold(decoded.messages, &mut Known::default()));
    let rows = prepared.copied();
    let failed = RecorderError::database;
    let mut connection = pool.acquire().await.map_err(failed("connect"))?;
    for day in &prepared.rows.days {
        ensure_day(&mut connection, *day)
            .await
            .map_err(failed("make partitions"))?;
    }
    let began = Instant::now();
    let mut tx = connection.begin().await.map_err(failed("begin"))?;
    // As the recorder does. Otherwise only the floor would wait for the disk.
    sqlx::query("SET LOCAL synchronous_commit = off")
        .execute(&mut *tx)
        .await
        .map_err(failed("set synchronous_commit"))?;
    prepared.copy_to(&mut tx).await.map_err(failed("copy"))?;
    tx.commit().await.map_err(failed("commit"))?;
    Ok(Measured {
        messages: items.len(),
        rows,
        elapsed: began.elapsed(),
    })
}

/// Records the kept messages that can be read now, as a recorder does when it starts.
///
/// # Errors
/// What PostgreSQL says.
pub async fn read_again(pool: &PgPool) -> Result<()> {
    let read = unread::read_again(&shared(pool)).await;
    read.map_err(RecorderError::database("read kept messages again"))
}

fn shared(pool: &PgPool) -> Shared {
    Shared {
        pool: pool.clone(),
        metrics: Metrics::default(),
        health: Health::default(),
        mirror: Mirror::default(),
        stop: CancellationToken::new(),
    }
}

/// Empties the history and sets the checkpoints to 0. Only for databases made for a bench or a
/// test.
///
/// # Errors
/// What PostgreSQL says.
pub async fn clear(pool: &PgPool) -> Result<()> {
    for statement in [
        "TRUNCATE batches, executions, placements, rebindings, boundaries, decisions, \
         execution_events, execution_changes, series_points, boundary_state, hardware_vectors, nodes, \
         node_events, rejections, ledger_gaps, record_gaps, unread_messages",
        "UPDATE recorder_checkpoint SET seq = 0",
        // Otherwise the next measurement pays for the one before.
        "CHECKPOINT",
    ] {
        sqlx::query(statement)
            .execute(pool)
            .await
            .map_err(RecorderError::database("empty the tables"))?;
    }
    Ok(())
}

/// A declaration of a table's rows.
#[derive(Debug, Clone, Copy)]
pub struct Declared {
    /// The table.
    pub table: &'static str,
    /// The columns that a row has, in their order.
    pub columns: &'static [Column],
    /// The columns that only other statements set.
    pub later: &'static [Column],
}

impl Declared {
    fn of<R: Table>() -> Self {
        Self {
            table: R::NAME,
            columns: R::COLUMNS,
            later: R::LATER,
        }
    }
}

/// All declarations. `nodes` has several, each of some columns.
pub fn declarations() -> Vec<Declared> {
    vec![
        Declared::of::<rows::ExecutionRow>(),
        Declared::of::<rows::PlacementRow>(),
        Declared::of::<rows::DecisionRow>(),
        Declared::of::<rows::RebindingRow>(),
        Declared::of::<rows::BatchRow>(),
        Declared::of::<rows::BoundaryRow>(),
        Declared::of::<rows::EventRow>(),
        Declared::of::<rows::ChangeRow>(),
        Declared::of::<rows::MissingRow>(),
        Declared::of::<unread::UnreadRow>(),
        Declared::of::<parts::SplitRow>(),
        Declared::of::<results::ResultRow>(),
        Declared::of::<series::PointRow>(),
        Declared::of::<tables::RejectionRow>(),
        Declared::of::<tables::NodeEventRow>(),
        Declared::of::<tables::QuotaRow>(),
        Declared::of::<tables::WaitingRow>(),
        Declared::of::<proofs::ProofRow>(),
        Declared::of::<proofs::VerificationRow>(),
        Declared::of::<nodes::DescriptionRow>(),
        Declared::of::<nodes::LoadRow>(),
        Declared::of::<nodes::OfferRow>(),
        Declared::of::<telemetry::VectorRow>(),
    ]
}
