//! `fiec repair`: restores ledgers that the broker has lost, from PostgreSQL.
//!
//! An execution continues from its last boundary whose σ PostgreSQL has, with its next epoch. Its
//! ordinals continue, so its history stays one. Later boundaries no longer count: the execution
//! steps back. A submission over 2 KiB is stored in the broker again. The holder of a shared range
//! continues, and gets new parts (`ranges`). Existing ledgers are not changed: a worker that still
//! held its execution has appended it again.

mod ranges;

use std::sync::Arc;

use bytes::Bytes;
use clap::Args;
use fiec_broker::{AppendError, Broker, BrokerError, Draft, Ledger, Tip, store};
use fiec_recorder::PgTime;
use fiec_schemas::event::{BatchPlace, Requested, Totals};
use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::{
    BatchId, Cause, Digest, Event, ExecutionId, ExecutionState, Phase, PhaseKind, StatePlace,
    Submission, Tenant,
};
use sqlx::postgres::PgRow;
use sqlx::{PgPool, Row};

use crate::context::Global;
use crate::exit::Outcome;
use crate::sql;

/// Author of the messages that this command appends.
const AUTHOR: &str = "operator/repair";

/// Text for a ledger that another author restored first.
const THERE_AGAIN: &str = "its ledger is there again";

/// Options of `fiec repair`.
#[derive(Debug, Args)]
pub struct RepairArgs {
    /// Print what would be done, and change nothing
    #[arg(long)]
    pub dry_run: bool,
}

/// Restores lost ledgers.
///
/// # Errors
/// If a server does not answer.
pub async fn repair(args: RepairArgs, global: &Global) -> anyhow::Result<Outcome> {
    let broker = global.broker("repair").await?;
    broker.measure_clock().await?;
    let pool = fiec_recorder::connect(global.owner_url()?.expose()).await?;
    let ledger = Ledger::new(&broker);
    let (mut there, mut begun, mut failed) = (0u64, 0u64, 0u64);
    for id in live(&pool).await? {
        let (tenant, row) = match read(&pool, id).await? {
            Some(found) => found,
            // It has ended meanwhile.
            None => continue,
        };
        match ledger.last(&tenant, id).await {
            Ok(None) => {}
            Ok(Some(_)) => {
                there += 1;
                continue;
            }
            // The executions after it can still be repaired.
            Err(error @ BrokerError::Malformed { .. }) => {
                failed += 1;
                println!("{id}: cannot be repaired: its ledger is there, but {error}");
                continue;
            }
            Err(error) => return Err(error.into()),
        }
        let lost = Lost { id, tenant, row };
        let done = match ranges::holder_of(&pool, id).await? {
            None => begin_anew(&broker, &pool, &ledger, &lost, args.dry_run).await,
            Some(holder) => end_part(&broker, &pool, &ledger, (&lost, holder), args.dry_run).await,
        };
        match done {
            Ok(words) => {
                begun += 1;
                println!("{id}: {words}");
            }
            Err(error) => {
                failed += 1;
                println!("{id}: cannot be repaired: {error:#}");
            }
        }
    }
    let verb = if args.dry_run { "would begin" } else { "began" };
    println!("{verb} {begun} ledgers anew; {there} were there; {failed} cannot be repaired");
    Ok(if failed == 0 {
        Outcome::Done
    } else {
        Outcome::Failed
    })
}

/// All executions that have not ended in PostgreSQL, holders before their parts.
async fn live(pool: &PgPool) -> sqlx::Result<Vec<ExecutionId>> {
    let rows = sqlx::query(
        "SELECT e.id FROM executions e LEFT JOIN spread_members m ON m.execution = e.id \
         WHERE e.finished_at IS NULL ORDER BY coalesce(m.depth, 0), e.id",
    );
    let rows = rows.fetch_all(pool).await?;
    rows.iter()
        .map(|row| Ok(ExecutionId(row.try_get(0)?)))
        .collect()
}

async fn read(pool: &PgPool, id: ExecutionId) -> anyhow::Result<Option<(Tenant, PgRow)>> {
    let row = sqlx::query(
        "SELECT e.tenant, e.spec::text AS spec, e.submission, e.batch_id, e.batch_line, e.submitted_at, e.phase, \
         e.paused_by, e.failure, e.fault, e.requested, e.requested_by, e.epoch, e.ordinal, e.digest, e.commits, e.state_bytes AS all_bytes, \
         e.rebindings, e.pressure_rebindings, e.crashes, e.node_faults, e.infrastructure_faults, \
         e.compute_us, e.boundary_index, \
         e.state_digest AS last_digest, e.last_state_bytes AS last_bytes, \
         e.state_ordinal AS last_ordinal, s.index, \
         s.digest AS state_digest, s.state FROM executions e \
         LEFT JOIN boundary_state s ON s.execution = e.id AND s.index <= e.boundary_index \
         WHERE e.id = $1 AND e.finished_at IS NULL",
    )
    .bind(id.0)
    .fetch_optional(pool)
    .await?;
    let Some(row) = row else { return Ok(None) };
    let tenant: String = row.try_get("tenant")?;
    Ok(Some((tenant.parse()?, row)))
}

/// A live execution whose ledger is lost.
struct Lost {
    id: ExecutionId,
    tenant: Tenant,
    row: PgRow,
}

impl Lost {
    /// Its state in PostgreSQL, without the boundary.
    async fn state(&self, pool: &PgPool, spec: Submission) -> anyhow::Result<ExecutionState> {
        let row = &self.row;
        let batch: Option<uuid::Uuid> = row.try_get("batch_id")?;
        let line: Option<i32> = row.try_get("batch_line")?;
        let batch = batch.map(|id| BatchPlace {
            id: BatchId(id),
            line: line.and_then(|line| u32::try_from(line).ok()).unwrap_or(0),
        });
        let submitted_at = row.try_get::<PgTime, _>("submitted_at")?.0;
        let (id, tenant) = (self.id, self.tenant.clone());
        let mut state = ExecutionState::unborn(tenant, id, Arc::new(spec), batch, submitted_at);
        state.ordinal = number(row, "ordinal")?;
        state.epoch = number(row, "epoch")?;
        state.totals = Totals {
            commits: number(row, "commits")?,
            state_bytes: number(row, "all_bytes")?,
            rebindings: number(row, "rebindings")?,
            pressure: number(row, "pressure_rebindings")?,
            crashes: number(row, "crashes")?,
            node_faults: number(row, "node_faults")?,
            infrastructure_faults: number(row, "infrastructure_faults")?,
            compute_us: number(row, "compute_us")?,
            ..Totals::default()
        };
        state.adjusted = adjusted(pool, id).await?.map(Box::new);
        let text = |column: &str| row.try_get::<Option<String>, _>(column);
        state.phase = match sql::parse_phase(id, row.try_get("phase")?)? {
            PhaseKind::Paused => Phase::Paused {
                who: text("paused_by")?.unwrap_or_default(),
            },
            PhaseKind::Held => Phase::Held {
                fault: text("fault")?.and_then(|fault| fault.parse().ok()),
                reason: text("failure")?.unwrap_or_default(),
            },
            _ => Phase::Pending {
                requested: requested(row)?,
            },
        };
        Ok(state)
    }

    /// Appends the first message of the new ledger: the state, continued from `to`, with the
    /// events. Returns false if another author was first.
    async fn append(
        &self,
        broker: &Broker,
        ledger: &Ledger,
        mut state: ExecutionState,
        to: Option<StatePlace>,
        more: Option<Event>,
    ) -> anyhow::Result<bool> {
        let over = digest(self.row.try_get("digest")?).unwrap_or(state.submission);
        let healed = Event::Healed {
            kept: 0,
            lost: state.ordinal,
            over,
        };
        let mut events = vec![healed];
        state.boundary = last_boundary(&self.row)?;
        let index = |place: &StatePlace| place.index;
        if state.boundary.as_ref().map(index) == to.as_ref().map(index) {
            state.boundary = to;
        } else {
            events.push(Event::SteppedBack {
                to,
                cause: Cause::Orphaned {
                    reason: "the broker lost its ledger".to_owned(),
                },
            });
        }
        events.extend(more);
        let tip = Tip {
            seq: 0,
            digest: None,
            state: state.into(),
            seen_in: 0,
        };
        let draft = Draft::new(&tip, events, AUTHOR, broker.now())?;
        match ledger.append(draft, Bytes::new()).await {
            Ok(_) => Ok(true),
            Err(AppendError::Conflict) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

async fn begin_anew(
    broker: &Broker,
    pool: &PgPool,
    ledger: &Ledger,
    lost: &Lost,
    dry_run: bool,
) -> anyhow::Result<String> {
    let (id, row) = (lost.id, &lost.row);
    let spec = submission(row)?;
    let canonical = spec.to_json();
    let mut kept = kept_state(row)?;
    let place = kept.as_ref().map(|(place, _)| place);
    let last = last_boundary(row)?;
    let (spread, goes_on) = ranges::spreading(pool, id, &spec, place, last.as_ref()).await?;
    if !goes_on {
        kept = None;
    }
    let mut words = match &kept {
        Some((place, _)) => format!("goes on from boundary {}", place.index),
        None => "begins anew".to_owned(),
    };
    if let Some(parts) = spread.as_ref().map(|s| s.parts.len()).filter(|n| *n > 0) {
        words += &format!("; {parts} parts of its range begin anew");
    }
    if dry_run {
        return Ok(words);
    }
    if let Some((place, sigma)) = &kept {
        store::keep_state(broker, id, place.digest, sigma).await?;
    }
    let mut state = lost.state(pool, spec).await?;
    state.spread = spread.map(Box::new);
    if state.spec.is_none() {
        store::put_data(broker, state.submission, &canonical).await?;
    }
    let to = kept.map(|(place, _)| place);
    let is_first = lost.append(broker, ledger, state, to, None).await?;
    Ok(if is_first {
        words
    } else {
        THERE_AGAIN.to_owned()
    })
}

/// Ends a part that no holder takes back.
async fn end_part(
    broker: &Broker,
    pool: &PgPool,
    ledger: &Ledger,
    (lost, holder): (&Lost, ExecutionId),
    dry_run: bool,
) -> anyhow::Result<String> {
    let of = (lost.id, holder);
    match ranges::fate(pool, ledger, &lost.tenant, of, dry_run).await? {
        ranges::Fate::MadeAgain => {
            return Ok(format!(
                "the policy service makes it again, as a part of {holder}"
            ));
        }
        ranges::Fate::Cancelled if dry_run => {}
        ranges::Fate::Cancelled => {
            let spec = submission(&lost.row)?;
            let mut state = lost.state(pool, spec).await?;
            if let Some(spread) = &mut state.spread {
                spread.part_of = Some(holder);
            }
            let who = format!("{AUTHOR}: {holder}, of which it is a part, does without it");
            let cancelled = Some(Event::Cancelled { who });
            if !lost.append(broker, ledger, state, None, cancelled).await? {
                return Ok(THERE_AGAIN.to_owned());
            }
        }
    }
    Ok(format!(
        "is cancelled: {holder}, of which it is a part, does without it"
    ))
}

/// The request that its worker had confirmed and not carried out. The policy service that takes the
/// execution over carries it out.
fn requested(row: &PgRow) -> anyhow::Result<Option<Requested>> {
    let what: Option<String> = row.try_get("requested")?;
    let Some(what) = what else { return Ok(None) };
    let what = serde_json::from_value(what.into())?;
    let who: Option<String> = row.try_get("requested_by")?;
    Ok(Some(Requested {
        what,
        who: who.unwrap_or_default(),
        at: None,
    }))
}

/// The submission, if PostgreSQL has the exact one. `jsonb` changes the form of some numbers and
/// cannot hold NUL.
fn submission(row: &PgRow) -> anyhow::Result<Submission> {
    let spec: Option<String> = row.try_get("spec")?;
    let Some(spec) = spec else {
        anyhow::bail!(
            "its submission is over 2 KiB, and the recorder had not copied it to PostgreSQL yet; \
             submit it again"
        );
    };
    let spec: Submission = serde_json::from_str(&spec)?;
    anyhow::ensure!(
        Some(spec.digest()) == digest(row.try_get("submission")?),
        "PostgreSQL does not have its submission bit by bit: a number or a NUL in it has no place \
         in jsonb; submit it again"
    );
    Ok(spec)
}

/// The last boundary.
fn last_boundary(row: &PgRow) -> anyhow::Result<Option<StatePlace>> {
    let Some(digest) = digest(row.try_get("last_digest")?) else {
        return Ok(None);
    };
    Ok(Some(StatePlace {
        index: number(row, "boundary_index")?,
        digest,
        bytes: number(row, "last_bytes")?,
        seq: None,
        ordinal: number(row, "last_ordinal")?,
    }))
}

/// The last boundary whose σ is in PostgreSQL, with that σ.
fn kept_state(row: &PgRow) -> anyhow::Result<Option<(StatePlace, Vec<u8>)>> {
    let index: Option<i64> = row.try_get("index")?;
    let sigma: Option<Vec<u8>> = row.try_get("state")?;
    let stored = digest(row.try_get("state_digest")?);
    let (Some(index), Some(sigma), Some(digest)) = (index, sigma, stored) else {
        return Ok(None);
    };
    anyhow::ensure!(
        Digest::of(&sigma) == digest,
        "its σ in PostgreSQL is damaged: it does not have the digest {}",
        digest.short()
    );
    let place = StatePlace {
        index: u64::try_from(index)?,
        digest,
        bytes: sigma.len() as u64,
        seq: None,
        ordinal: number(row, "ordinal")?,
    };
    Ok(Some((place, sigma)))
}

/// All adjustments since the submission.
async fn adjusted(pool: &PgPool, id: ExecutionId) -> anyhow::Result<Option<Adjustment>> {
    let rows = sqlx::query(
        "SELECT change::text FROM execution_changes WHERE execution = $1 ORDER BY ordinal, nth",
    );
    let mut all: Option<Adjustment> = None;
    for row in rows.bind(id.0).fetch_all(pool).await? {
        let change: Adjustment = serde_json::from_str(&row.try_get::<String, _>(0)?)?;
        all.get_or_insert_default().merge(&change);
    }
    Ok(all)
}

/// A count, 0 if it is missing.
fn number(row: &PgRow, column: &str) -> sqlx::Result<u64> {
    let count: Option<i64> = row.try_get(column)?;
    Ok(count.and_then(|n| u64::try_from(n).ok()).unwrap_or(0))
}

fn digest(bytes: Option<Vec<u8>>) -> Option<Digest> {
    bytes.and_then(|b| <[u8; 32]>::try_from(b).ok()).map(Digest)
}
