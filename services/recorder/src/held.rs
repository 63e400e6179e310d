//! Objects that missing history may refer to. No row refers to such an object, and it may still be an
//! output: of an execution that ended before these tables were made, of one whose ledger dropped out
//! of the stream before it was recorded, or of a boundary whose message is missing. The collection
//! leaves these objects in the broker until an operator releases them.
//!
//! A put renews an object that is older than a moment. So an object whose last put is younger than
//! the missing history counts as new, also if that history had named it.

use std::time::Duration;

use fiec_schemas::Timestamp;
use sqlx::{PgPool, Row};

use crate::read;
use crate::table::argument;
use crate::time::PgTime;

/// Longest time by which an execution may be younger than the last put of an object that it names
/// again. Earlier versions renewed an object after this time.
const UNRENEWED: Duration = Duration::from_secs(3_600);

/// The times at which objects were stored that missing history may refer to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MissingHistory {
    /// The tables may lack executions that ended before this time.
    since: Timestamp,
    /// An operator has released the objects that were stored before this time.
    released: Timestamp,
    /// The times in which executions lived whose messages are missing; in order, and disjoint.
    gaps: Vec<(Timestamp, Timestamp)>,
}

impl MissingHistory {
    /// Reads what is missing.
    ///
    /// # Errors
    /// What PostgreSQL says.
    pub async fn read(pool: &PgPool) -> sqlx::Result<Self> {
        let known = sqlx::query("SELECT history_since, released_before FROM collection");
        let known = known.fetch_one(pool).await?;
        let gaps = sqlx::query(
            "SELECT e.submitted_at AS from, max(g.at) AS until FROM ledger_gaps g \
             JOIN executions e ON e.id = g.execution GROUP BY e.id ORDER BY e.submitted_at",
        );
        let gaps = gaps.fetch_all(pool).await?;
        let gap = |row| Ok::<_, sqlx::Error>((read::time(row, "from")?, read::time(row, "until")?));
        let gaps = gaps.iter().map(gap).collect::<sqlx::Result<Vec<_>>>()?;
        let gaps = gaps.into_iter().filter_map(|(from, until)| from.zip(until));
        Ok(Self {
            since: known.try_get::<PgTime, _>("history_since")?.0,
            released: known.try_get::<PgTime, _>("released_before")?.0,
            gaps: merged(gaps),
        })
    }

    /// True if missing history may refer to an object that was stored at this time.
    pub fn may_refer_to(&self, stored_at: Timestamp) -> bool {
        let in_a_gap =
            |(from, until): &(Timestamp, Timestamp)| (*from..=*until).contains(&stored_at);
        stored_at >= self.released && (stored_at < self.since || self.gaps.iter().any(in_a_gap))
    }
}

/// Joins gaps that overlap. The gaps must be in the order of their beginnings. Each begins as much
/// earlier as a put may leave an object unrenewed.
fn merged(gaps: impl Iterator<Item = (Timestamp, Timestamp)>) -> Vec<(Timestamp, Timestamp)> {
    let before = i64::try_from(UNRENEWED.as_micros()).unwrap_or(i64::MAX);
    let mut merged: Vec<(Timestamp, Timestamp)> = Vec::new();
    for (from, until) in gaps {
        let from = Timestamp::from_micros(from.micros().saturating_sub(before));
        match merged.last_mut() {
            Some(last) if from <= last.1 => last.1 = last.1.max(until),
            _ => merged.push((from, until)),
        }
    }
    merged
}

/// Notes that the tables may lack executions that ended before `at`.
///
/// # Errors
/// What PostgreSQL says.
pub(crate) async fn history_begins(pool: &PgPool, at: Timestamp) -> sqlx::Result<()> {
    sqlx::query("UPDATE collection SET history_since = greatest(history_since, $1)")
        .bind(argument(&at))
        .execute(pool)
        .await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_of_a_time_without_history_are_held_until_they_are_released() {
        let at = |hours: i64| Timestamp::from_micros(hours * 3_600_000_000);
        let mut missing = MissingHistory {
            since: at(10),
            released: at(0),
            gaps: merged([(at(20), at(22)), (at(23), at(24)), (at(40), at(41))].into_iter()),
        };
        assert_eq!(missing.gaps, [(at(19), at(24)), (at(39), at(41))]);
        let held = |missing: &MissingHistory| -> Vec<i64> {
            let hours = 0..50;
            hours.filter(|h| missing.may_refer_to(at(*h))).collect()
        };
        let in_gaps = [19, 20, 21, 22, 23, 24, 39, 40, 41];
        assert_eq!(
            held(&missing),
            [&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9][..], &in_gaps].concat()
        );
        missing.released = at(24);
        assert_eq!(held(&missing), [24, 39, 40, 41]);
    }
}
