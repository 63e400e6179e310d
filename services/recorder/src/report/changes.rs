//! Changes of a live execution, and the thresholds in force over its time.

use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::{ExecutionId, Timestamp};
use serde_json::Value;
use sqlx::postgres::PgRow;
use sqlx::{PgPool, Row};

use super::facts::{Rebinding, TABLE_ROWS, text};
use crate::read::time;

/// A change of a live execution.
pub(super) struct Change {
    pub at: Timestamp,
    pub who: String,
    /// As stored; fields that this version does not know are kept.
    pub change: Value,
}

impl Change {
    /// High and low of a signal, if the change names it.
    fn limits(&self, signal: &str) -> Option<(f64, f64)> {
        limits(self.change.get("viability")?.get(signal)?)
    }

    pub fn in_words(&self) -> String {
        let known = serde_json::from_value::<Adjustment>(self.change.clone());
        known.map_or_else(|_| self.change.to_string(), |change| change.in_words())
    }
}

/// High and low of a threshold as it is stored.
pub(super) fn limits(threshold: &Value) -> Option<(f64, f64)> {
    Some((
        threshold.get("high")?.as_f64()?,
        threshold.get("low")?.as_f64()?,
    ))
}

pub(super) async fn changes(pool: &PgPool, id: ExecutionId) -> sqlx::Result<Vec<Change>> {
    let rows = sqlx::query(
        "SELECT at, who, change FROM execution_changes WHERE execution = $1 \
         ORDER BY ordinal, nth LIMIT $2",
    )
    .bind(id.0)
    .bind(TABLE_ROWS)
    .fetch_all(pool)
    .await?;
    let read = |row: &PgRow| {
        Ok(Change {
            at: time(row, "at")?.unwrap_or_default(),
            who: text(row, "who")?,
            change: row.try_get("change")?,
        })
    };
    rows.iter().map(read).collect()
}

/// The thresholds in force, each from when on: as declared, then as changes set them and as
/// rebindings found them.
pub(super) fn limits_over_time(
    signal: &str,
    (since, declared): (Timestamp, Option<(f64, f64)>),
    rebindings: &[Rebinding],
    changes: &[Change],
) -> Vec<(Timestamp, (f64, f64))> {
    let found = rebindings
        .iter()
        .filter(|r| r.signal.as_deref() == Some(signal))
        .filter_map(|r| Some((r.at, r.high.zip(r.low)?)));
    let set = changes
        .iter()
        .filter_map(|c| Some((c.at, c.limits(signal)?)));
    let mut steps: Vec<_> = found.chain(set).collect();
    steps.sort_by_key(|(at, _)| *at);
    let first_change = changes.iter().find_map(|c| c.limits(signal).map(|_| c.at));
    // A rebinding before any change found what was in force from the beginning on.
    let first = steps
        .first()
        .filter(|(at, _)| first_change.is_none_or(|change| *at < change));
    let first = first.map(|(_, limits)| *limits).or(declared);
    steps.extend(first.map(|limits| (since, limits)));
    steps.sort_by_key(|(at, _)| *at);
    steps.dedup_by_key(|(_, limits)| *limits);
    steps
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_micros(seconds * 1_000_000)
    }

    fn change(seconds: i64, change: Value) -> Change {
        Change {
            at: at(seconds),
            who: "ann".to_owned(),
            change,
        }
    }

    fn rebinding(seconds: i64, limits: (f64, f64)) -> Rebinding {
        Rebinding {
            epoch: 2,
            at: at(seconds),
            from: "n1".to_owned(),
            to: "n2".to_owned(),
            why: String::new(),
            signal: Some("memory".to_owned()),
            high: Some(limits.0),
            low: Some(limits.1),
            boundary: None,
            gap_us: None,
        }
    }

    #[test]
    fn thresholds_are_drawn_as_they_were_changed() {
        let declared = (at(0), Some((0.9, 0.7)));
        let tighter = json!({"viability": {"memory": {"high": 0.5, "low": 0.4, "dwell_ms": 0}}});
        let changes = [change(5, json!({"priority": 3})), change(20, tighter)];
        assert_eq!(changes[1].in_words(), "threshold memory=0.5,0.4,0");
        let first = (at(0), (0.9, 0.7));
        let second = (at(20), (0.5, 0.4));
        let found = limits_over_time("memory", declared, &[], &changes);
        assert_eq!(found, [first, second]);
        let moved = [rebinding(10, (0.9, 0.7)), rebinding(30, (0.5, 0.4))];
        let found = limits_over_time("memory", (at(0), None), &moved, &changes);
        assert_eq!(found, [first, second]);
        let other = limits_over_time("stall", (at(0), None), &moved, &changes);
        assert!(other.is_empty(), "{other:?}");
    }
}
