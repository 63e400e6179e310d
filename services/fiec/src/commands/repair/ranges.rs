//! Repairs shared ranges ([`fiec_schemas::spread`]). The holder's ledger begins again; the ledgers
//! of its parts do not.
//!
//! σ contains the end of the holder's range. So the holder continues with the tiles that it kept if
//! PostgreSQL has a σ from after its last split or merge. The policy service then makes a new part,
//! with its own id, for the range of each part that was out. Otherwise the holder starts with its
//! whole range. In both cases the old parts are cancelled, because no holder takes them back.

use fiec_broker::Ledger;
use fiec_recorder::PgTime;
use fiec_schemas::programs::TileRange;
use fiec_schemas::spread::{PARTS_LIMIT, Part, Spreading, part_id};
use fiec_schemas::{ExecutionId, StatePlace, Submission, Tenant};
use sqlx::{PgPool, Row};

/// The holder of a part. `None` if the execution is no part.
pub(super) async fn holder_of(pool: &PgPool, id: ExecutionId) -> sqlx::Result<Option<ExecutionId>> {
    let holder = sqlx::query_scalar("SELECT holder FROM spread_splits WHERE part = $1");
    let holder = holder.bind(id.0).fetch_optional(pool).await?;
    Ok(holder.map(ExecutionId))
}

/// Decision about a part whose ledger is lost.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// Its holder still has it, so the policy service makes it again.
    MadeAgain,
    /// No holder takes it back.
    Cancelled,
}

/// Decides about a part whose ledger is lost. The ledger of its holder was restored before, if it
/// was lost too.
///
/// # Errors
/// If its holder could not be repaired.
pub(super) async fn fate(
    pool: &PgPool,
    ledger: &Ledger,
    tenant: &Tenant,
    (part, holder): (ExecutionId, ExecutionId),
    dry_run: bool,
) -> anyhow::Result<Fate> {
    let Some(last) = ledger.last(tenant, holder).await? else {
        let lives = "SELECT EXISTS (SELECT FROM executions WHERE id = $1 AND finished_at IS NULL)";
        let lives: bool = sqlx::query_scalar(lives)
            .bind(holder.0)
            .fetch_one(pool)
            .await?;
        anyhow::ensure!(
            !lives || dry_run,
            "the ledger of {holder}, of which it is a part, is gone"
        );
        return Ok(Fate::Cancelled);
    };
    let state = last.message.state;
    let is_listed = state.parts().iter().any(|p| p.id == part);
    Ok(if is_listed && !state.phase.is_terminal() {
        Fate::MadeAgain
    } else {
        Fate::Cancelled
    })
}

/// How a holder shares its range in its new ledger. True if it continues from `place`.
pub(super) async fn spreading(
    pool: &PgPool,
    id: ExecutionId,
    spec: &Submission,
    place: Option<&StatePlace>,
    last: Option<&StatePlace>,
) -> anyhow::Result<(Option<Spreading>, bool)> {
    let Some(mut own) = Spreading::of(spec) else {
        return Ok((None, true));
    };
    let splits = splits(pool, id).await?;
    if splits.is_empty() {
        return Ok((Some(own), true));
    }
    // Ids of parts derive from this number, so no new part gets the id of an old one.
    let nth = splits.iter().filter_map(|s| s.nth).max();
    let nth = nth.map_or(0, |nth| nth + 1).max(splits.len() as i64);
    own.splits = u32::try_from(nth)?;
    let Some(place) = place else {
        return Ok((Some(own), false));
    };
    let row = sqlx::query(
        "SELECT b.committed_at, coalesce(p.end_reason = 'parts', false) AS is_end \
         FROM boundaries b LEFT JOIN placements p ON p.execution = b.execution AND p.epoch = b.epoch \
         WHERE b.execution = $1 AND b.index = $2 AND b.withdrawn_at IS NULL",
    )
    .bind(id.0)
    .bind(i64::try_from(place.index)?)
    .fetch_optional(pool)
    .await?;
    let Some(row) = row else {
        return Ok((Some(own), false));
    };
    let committed_at: PgTime = row.try_get("committed_at")?;
    let is_newest = splits.iter().all(|s| {
        s.split_at.is_some_and(|at| at <= committed_at) && s.gone_at <= Some(committed_at)
    });
    let out: Vec<TileRange> = splits
        .iter()
        .filter(|s| s.gone_at.is_none())
        .map(|s| s.range)
        .collect();
    let is_in_one_piece = out
        .windows(2)
        .all(|pair| matches!(pair, [above, below] if below.to == above.from));
    if !is_newest || !is_in_one_piece || out.len() > PARTS_LIMIT {
        return Ok((Some(own), false));
    }
    own.since = place.index;
    for range in out {
        let id = part_id(id, own.splits, range);
        own.splits += 1;
        own.end = Some(range.from);
        let TileRange { from, to } = range;
        own.parts.push(Part { id, from, to });
    }
    // It waits for its parts if it has computed all tiles that it kept: this σ is its last one.
    let is_last = last.is_some_and(|last| last.index == place.index);
    own.waits = is_last && row.try_get("is_end")? && !own.parts.is_empty();
    Ok((Some(own), true))
}

/// A part that was split off.
struct Split {
    range: TileRange,
    nth: Option<i64>,
    split_at: Option<PgTime>,
    /// When its holder took it back, or began again without it.
    gone_at: Option<PgTime>,
}

/// All parts that a holder has split off, the part with the last tiles first.
async fn splits(pool: &PgPool, holder: ExecutionId) -> anyhow::Result<Vec<Split>> {
    let rows = sqlx::query(
        "SELECT from_tile, to_tile, nth, split_at, coalesce(merged_at, dropped_at) AS gone_at \
         FROM spread_splits WHERE holder = $1 ORDER BY from_tile DESC",
    );
    let rows = rows.bind(holder.0).fetch_all(pool).await?;
    let split = |row: &sqlx::postgres::PgRow| {
        let from = u64::try_from(row.try_get::<i64, _>("from_tile")?)?;
        let to = u64::try_from(row.try_get::<i64, _>("to_tile")?)?;
        Ok(Split {
            range: TileRange { from, to },
            nth: row.try_get("nth")?,
            split_at: row.try_get("split_at")?,
            gone_at: row.try_get("gone_at")?,
        })
    };
    rows.iter().map(split).collect()
}
