//! Curves: the rows of `series_points`, and how old points become fewer.
//!
//! A name of an execution has at most about [`MOST`] + [`GROWN`] points. When there are more, pairs of
//! the older half become one point each, so the older a part of the curve is, the thinner it is. A
//! point that stands for several reports has their mean, their extremes and their number.

use std::collections::HashMap;

use fiec_schemas::series::{POINTS_LIMIT, Point, SeriesName};
use fiec_schemas::{BoundaryIndex, Epoch, ExecutionId, Timestamp};
use sqlx::postgres::PgRow;
use sqlx::{Connection as _, PgConnection, PgPool, Row as _};
use tokio_util::sync::CancellationToken;

use crate::read;
use crate::rows::Rows;
use crate::table::{Merge, argument, table, write_all};

/// Most points of a name after the older ones were drawn together.
const MOST: usize = 2_000;
/// So many new points of a name make it due.
const GROWN: usize = 1_000;
/// Most points of a name of an execution that ended long ago.
const MOST_OF_OLD: usize = 100;
/// In this time there are at most [`POINTS_LIMIT`] new points of a name.
const WINDOW_MICROS: i64 = 200_000;
/// Most curves whose points are counted. Beyond that, counting begins anew.
const COUNTED: usize = 100_000;
/// Old executions that are looked at in one transaction.
const OLD_AT_ONCE: i64 = 500;

table! {
    /// A row of `series_points`.
    struct PointRow in "series_points" {
        /// Which execution.
        execution: ExecutionId = Merge::Key,
        /// Of which curve.
        name: String = Merge::Key,
        /// The boundary that ends the capsule of the last report.
        boundary: BoundaryIndex = Merge::Key,
        /// Under which binding.
        epoch: Epoch = Merge::Take,
        /// When the broker stored the commit.
        at: Timestamp = Merge::Take,
        /// Mean of the reports.
        mean: f64 = Merge::Take,
        /// The lowest one.
        lowest: f64 = Merge::Take,
        /// The highest one.
        highest: f64 = Merge::Take,
        /// Their number.
        reports: u64 = Merge::Take,
    }
}

/// The key of a point.
pub type PointKey = (ExecutionId, SeriesName, BoundaryIndex);

impl PointRow {
    pub(crate) fn new(
        execution: ExecutionId,
        name: &SeriesName,
        point: Point,
        (epoch, at): (Epoch, Timestamp),
    ) -> Self {
        Self {
            execution,
            name: name.as_str().to_owned(),
            boundary: point.boundary,
            epoch,
            at,
            mean: point.mean,
            lowest: point.lowest,
            highest: point.highest,
            reports: point.reports,
        }
    }

    fn read(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self {
            execution: read::execution(row, "execution")?,
            name: row.try_get("name")?,
            boundary: read::count(row, "boundary")?,
            epoch: read::count(row, "epoch")?,
            at: read::time(row, "at")?.unwrap_or_default(),
            mean: row.try_get("mean")?,
            lowest: row.try_get("lowest")?,
            highest: row.try_get("highest")?,
            reports: read::count(row, "reports")?,
        })
    }

    fn with(self, next: Self) -> Self {
        let point = |row: &Self| Point {
            boundary: row.boundary,
            mean: row.mean,
            lowest: row.lowest,
            highest: row.highest,
            reports: row.reports,
        };
        let both = point(&self).with(point(&next));
        Self {
            mean: both.mean,
            lowest: both.lowest,
            highest: both.highest,
            reports: both.reports,
            ..next
        }
    }
}

/// Writes the points of a batch, in a transaction of the caller's. Points behind a boundary from which
/// the computation is repeated go first.
pub(crate) async fn write(
    tx: &mut PgConnection,
    rows: &Rows,
    points: &[PointRow],
) -> sqlx::Result<()> {
    for (execution, boundary) in &rows.repeated {
        sqlx::query("DELETE FROM series_points WHERE execution = $1 AND boundary > $2")
            .bind(argument(execution))
            .bind(argument(boundary))
            .execute(&mut *tx)
            .await?;
    }
    write_all(&mut *tx, points).await
}

/// The points of a batch. Those that were committed in quick succession are drawn together: each row
/// costs as much as a commit.
pub(crate) fn few_at_once(rows: &Rows) -> Vec<PointRow> {
    let mut points: Vec<&PointRow> = rows.points.values().collect();
    points.sort_by(|a, b| {
        let key = |row: &PointRow| row.execution;
        let names = || a.name.cmp(&b.name);
        key(a)
            .cmp(&key(b))
            .then_with(names)
            .then_with(|| a.boundary.cmp(&b.boundary))
    });
    let window = |row: &PointRow| row.at.micros().div_euclid(WINDOW_MICROS);
    let together = |a: &&PointRow, b: &&PointRow| {
        (a.execution, window(a)) == (b.execution, window(b)) && a.name == b.name
    };
    let groups = points.chunk_by(together);
    let few = groups.map(|group| thinned(group.iter().copied().cloned().collect(), POINTS_LIMIT));
    few.flatten().collect()
}

/// Counts the points that are written, and says whose are too many.
#[derive(Debug, Default)]
pub(crate) struct Growth(HashMap<ExecutionId, HashMap<String, usize>>);

impl Growth {
    /// Notes the points of a batch that is written. Returns the curves to thin, each once.
    pub fn note(
        &mut self,
        points: &[PointRow],
        finished: &[ExecutionId],
    ) -> Vec<(ExecutionId, String)> {
        if self.0.values().map(HashMap::len).sum::<usize>() > COUNTED {
            self.0.clear();
        }
        let mut due = Vec::new();
        let same = |a: &PointRow, b: &PointRow| a.execution == b.execution && a.name == b.name;
        for curve in points.chunk_by(same) {
            let Some(PointRow {
                execution, name, ..
            }) = curve.first()
            else {
                continue;
            };
            let count = self
                .0
                .entry(*execution)
                .or_default()
                .entry(name.clone())
                .or_default();
            *count += curve.len();
            if *count >= GROWN {
                *count = 0;
                due.push((*execution, name.clone()));
            }
        }
        for execution in finished {
            self.0.remove(execution);
        }
        due
    }
}

/// Draws the older points of curves together.
///
/// # Errors
/// What PostgreSQL says.
pub(crate) async fn thin(
    connection: &mut PgConnection,
    curves: &[(ExecutionId, String)],
) -> sqlx::Result<()> {
    for (execution, name) in curves {
        thin_one(&mut *connection, *execution, name, MOST).await?;
    }
    Ok(())
}

async fn thin_one(
    connection: &mut PgConnection,
    execution: ExecutionId,
    name: &String,
    most: usize,
) -> sqlx::Result<()> {
    let mut tx = connection.begin().await?;
    let rows = sqlx::query(
        "SELECT * FROM series_points WHERE execution = $1 AND name = $2 ORDER BY boundary FOR UPDATE",
    )
    .bind(argument(&execution))
    .bind(argument(name))
    .fetch_all(&mut *tx)
    .await?;
    if rows.len() <= most {
        return tx.rollback().await;
    }
    let rows = rows.iter().map(PointRow::read);
    let rows = rows.collect::<sqlx::Result<Vec<_>>>()?;
    let before: Vec<BoundaryIndex> = rows.iter().map(|row| row.boundary).collect();
    let kept = thinned(rows, most);
    let stays: std::collections::HashSet<_> = kept.iter().map(|row| row.boundary).collect();
    let gone: Vec<_> = before.into_iter().filter(|b| !stays.contains(b)).collect();
    sqlx::query(
        "DELETE FROM series_points WHERE execution = $1 AND name = $2 AND boundary = ANY($3)",
    )
    .bind(argument(&execution))
    .bind(argument(name))
    .bind(argument(&gone))
    .execute(&mut *tx)
    .await?;
    write_all(&mut tx, kept.iter().filter(|row| row.reports > 1)).await?;
    tx.commit().await
}

/// Makes pairs of the older half one point each, until there are few enough. The order is that of the
/// boundaries; the last point stays as it is.
fn thinned(mut points: Vec<PointRow>, most: usize) -> Vec<PointRow> {
    while points.len() > most.max(2) {
        let newer = points.split_off(points.len() / 2);
        let mut older = points.into_iter();
        let mut drawn = Vec::with_capacity(older.len() / 2 + 1 + newer.len());
        while let Some(one) = older.next() {
            drawn.push(match older.next() {
                Some(two) => one.with(two),
                None => one,
            });
        }
        drawn.extend(newer);
        points = drawn;
    }
    points
}

/// Thins the curves of executions that ended before `until`, and were not thinned so before.
///
/// # Errors
/// What PostgreSQL says.
pub(crate) async fn thin_old(
    pool: &PgPool,
    until: Timestamp,
    stop: &CancellationToken,
) -> sqlx::Result<()> {
    let mut connection = pool.acquire().await?;
    while !stop.is_cancelled() {
        let old = sqlx::query(
            "SELECT e.id AS execution, e.finished_at AS at FROM executions e, series_thinning t \
             WHERE e.finished_at > t.until AND e.finished_at <= $1 ORDER BY e.finished_at LIMIT $2",
        )
        .bind(argument(&until))
        .bind(OLD_AT_ONCE)
        .fetch_all(&mut *connection)
        .await?;
        let Some(last) = old.last() else {
            return Ok(());
        };
        let last = read::time(last, "at")?;
        // Others may have ended in the same microsecond as the last one.
        let many = sqlx::query(
            "SELECT p.execution, p.name FROM series_points p JOIN executions e ON e.id = p.execution \
             JOIN series_thinning t ON e.finished_at > t.until WHERE e.finished_at <= $1 \
             GROUP BY p.execution, p.name HAVING count(*) > $2",
        )
        .bind(argument(&last))
        .bind(i64::try_from(MOST_OF_OLD).unwrap_or(i64::MAX))
        .fetch_all(&mut *connection)
        .await?;
        for row in &many {
            let execution = read::execution(row, "execution")?;
            let name: String = row.try_get("name")?;
            thin_one(&mut connection, execution, &name, MOST_OF_OLD).await?;
        }
        sqlx::query("UPDATE series_thinning SET until = greatest(until, $1)")
            .bind(argument(&last))
            .execute(&mut *connection)
            .await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOBODY: ExecutionId = ExecutionId(uuid::Uuid::nil());

    fn points(count: u64) -> Vec<PointRow> {
        let name = SeriesName::new("loss").unwrap();
        let at = (1, Timestamp::from_micros(0));
        let row = |boundary| {
            let point = Point::one(boundary, (boundary % 7) as f64);
            PointRow::new(NOBODY, &name, point, at)
        };
        (1..=count).map(row).collect()
    }

    #[test]
    fn the_older_a_part_of_a_curve_is_the_thinner_it_becomes() {
        let mut kept = Vec::new();
        for more in points(200_000).chunks(GROWN) {
            kept.extend_from_slice(more);
            kept = thinned(kept, MOST);
            assert!(kept.len() <= MOST);
        }
        assert!(kept.len() > MOST / 2);
        assert_eq!(kept.iter().map(|row| row.reports).sum::<u64>(), 200_000);
        assert_eq!(
            kept.last().map(|row| (row.boundary, row.reports)),
            Some((200_000, 1))
        );
        assert!(kept.is_sorted_by(|a, b| a.boundary < b.boundary && a.reports >= b.reports));
        let sum: f64 = kept.iter().map(|row| row.mean * row.reports as f64).sum();
        let exact: f64 = (1..=200_000_u64).map(|b| (b % 7) as f64).sum();
        assert!((sum - exact).abs() < 1e-6 * exact, "{sum} {exact}");
        assert_eq!(kept.iter().map(|row| row.lowest as i64).min(), Some(0));
        assert_eq!(kept.iter().map(|row| row.highest as i64).max(), Some(6));
    }

    #[test]
    fn a_curve_is_due_after_so_many_points_and_forgotten_with_its_execution() {
        let mut growth = Growth::default();
        let some = points(GROWN as u64 - 1);
        assert_eq!(growth.note(&some, &[]), []);
        // However many come at once, it is due once.
        let more = points(3 * GROWN as u64);
        assert_eq!(growth.note(&more, &[]), [(NOBODY, "loss".to_owned())]);
        growth.note(&some, &[NOBODY]);
        assert!(growth.0.is_empty());
    }
}
