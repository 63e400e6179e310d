//! The gaps in the history of one execution: messages that were never recorded, rows of lost messages,
//! and messages that the recorder has not written yet.

use fiec_broker::{Broker, BrokerError, Ledger};
use fiec_schemas::{BoundaryIndex, ExecutionId, Ordinal, Tenant, Timestamp, subjects};
use serde::Serialize;
use sqlx::postgres::PgRow;
use sqlx::{PgPool, Row};

use crate::read::time;
use crate::time::PgTime;

/// Gaps that are named one by one.
const NAMED: i64 = 100;

/// Where the ledger of an execution stands, as the broker says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LedgerEnd {
    /// At this message.
    At(Reached),
    /// The broker has no message of it.
    Absent,
    /// The broker could not be asked; why, in words.
    Unknown(String),
}

impl LedgerEnd {
    /// Asks the broker for the last message.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn of(
        broker: &Broker,
        tenant: &Tenant,
        id: ExecutionId,
    ) -> Result<Self, BrokerError> {
        let last = Ledger::new(broker).last(tenant, id).await?;
        Ok(last.map_or(Self::Absent, |last| {
            let state = last.message.state;
            Self::At(Reached {
                message: state.ordinal,
                boundary: state.boundary_index(),
            })
        }))
    }
}

/// A message of a ledger, and the boundary that was committed by then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Reached {
    /// The message's ordinal.
    pub message: Ordinal,
    /// The last committed boundary; 0 = none.
    pub boundary: BoundaryIndex,
}

/// The tables compared with the ledger.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "compared", rename_all = "snake_case")]
pub enum Compared {
    /// The whole ledger is recorded.
    Complete,
    /// The recorder is behind.
    Behind {
        /// The last recorded message; none if the execution is not recorded.
        recorded: Option<Reached>,
        /// The last message of the ledger.
        ledger: Reached,
        /// Messages in between.
        messages: u64,
        /// When the recorder wrote its checkpoint last.
        wrote_at: Option<Timestamp>,
        /// How long ago that was by PostgreSQL's clock, in milliseconds.
        wrote_ago_ms: Option<i64>,
    },
    /// The broker has fewer messages than the tables.
    LostByBroker {
        /// The last recorded message.
        recorded: Reached,
        /// The last message of the ledger; none if it has none.
        ledger: Option<Reached>,
    },
    /// The two could not be compared.
    Unknown {
        /// Why, in words.
        why: String,
    },
}

/// Ledger messages that were never recorded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LedgerGap {
    /// The first one's ordinal.
    pub first: i64,
    /// The last one's ordinal.
    pub last: i64,
    /// Why.
    pub reason: String,
    /// When the broker stored the message behind them.
    pub at: Option<Timestamp>,
}

/// Records (events of nodes, refused lines, quotas) that were never recorded while the execution was
/// live.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RecordGap {
    /// How many.
    pub records: i64,
    /// They were stored after this.
    pub after: Option<Timestamp>,
    /// And before this.
    pub before: Option<Timestamp>,
}

/// Rows whose messages the broker has lost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LostRows {
    /// Of which table.
    pub table: String,
    /// How many.
    pub rows: i64,
}

/// The gaps in the history of one execution.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Missing {
    /// The comparison with the ledger.
    pub ledger: Compared,
    /// At most the first hundred.
    pub ledger_gaps: Vec<LedgerGap>,
    /// At most the first hundred.
    pub record_gaps: Vec<RecordGap>,
    /// By table.
    pub lost_rows: Vec<LostRows>,
}

/// The last recorded message of an execution; none if the execution is not recorded.
///
/// # Errors
/// What PostgreSQL says.
pub async fn recorded(pool: &PgPool, id: ExecutionId) -> sqlx::Result<Option<Reached>> {
    Ok(row(pool, id).await?.map(|(reached, _)| reached))
}

/// The last recorded message, and whether the execution has ended by it.
async fn row(pool: &PgPool, id: ExecutionId) -> sqlx::Result<Option<(Reached, bool)>> {
    let row = sqlx::query(
        "SELECT ordinal, boundary_index, finished_at IS NOT NULL AS ended FROM executions \
         WHERE id = $1",
    )
    .bind(id.0)
    .fetch_optional(pool)
    .await?;
    row.map(|row| {
        let number = |column| row.try_get::<i64, _>(column).map(i64::unsigned_abs);
        let reached = Reached {
            message: number("ordinal")?,
            boundary: number("boundary_index")?,
        };
        Ok((reached, row.try_get("ended")?))
    })
    .transpose()
}

/// Reads the gaps.
///
/// # Errors
/// What PostgreSQL says.
pub async fn read(pool: &PgPool, id: ExecutionId, ledger: &LedgerEnd) -> sqlx::Result<Missing> {
    Ok(Missing {
        ledger: compare(pool, id, ledger).await?,
        ledger_gaps: ledger_gaps(pool, id).await?,
        record_gaps: record_gaps(pool, id).await?,
        lost_rows: lost_rows(pool, id).await?,
    })
}

async fn compare(pool: &PgPool, id: ExecutionId, ledger: &LedgerEnd) -> sqlx::Result<Compared> {
    let recorded = row(pool, id).await?;
    Ok(match (ledger, recorded) {
        (LedgerEnd::Unknown(why), _) => Compared::Unknown { why: why.clone() },
        // The broker drops a ledger 30 days after its last message; the history is whole then.
        (LedgerEnd::Absent, Some((_, true)) | None) => Compared::Complete,
        (LedgerEnd::Absent, Some((recorded, false))) => Compared::LostByBroker {
            recorded,
            ledger: None,
        },
        (LedgerEnd::At(ledger), Some((recorded, _))) if ledger.message == recorded.message => {
            Compared::Complete
        }
        (LedgerEnd::At(ledger), Some((recorded, _))) if ledger.message < recorded.message => {
            Compared::LostByBroker {
                recorded,
                ledger: Some(*ledger),
            }
        }
        (LedgerEnd::At(ledger), recorded) => {
            let recorded = recorded.map(|(reached, _)| reached);
            let before = recorded.map_or(0, |reached| reached.message);
            let (wrote_at, wrote_ago_ms) = wrote(pool).await?;
            Compared::Behind {
                recorded,
                ledger: *ledger,
                messages: ledger.message - before,
                wrote_at,
                wrote_ago_ms,
            }
        }
    })
}

/// When the recorder wrote its checkpoint of the ledgers last, and how many ms ago.
async fn wrote(pool: &PgPool) -> sqlx::Result<(Option<Timestamp>, Option<i64>)> {
    let row = sqlx::query(
        "SELECT updated_at, (extract(epoch FROM now() - updated_at) * 1000)::bigint AS ago \
         FROM recorder_checkpoint WHERE stream = $1",
    );
    let Some(row) = row
        .bind(subjects::LEDGER_STREAM)
        .fetch_optional(pool)
        .await?
    else {
        return Ok((None, None));
    };
    let at = row.try_get::<PgTime, _>("updated_at")?.0;
    Ok((Some(at), row.try_get("ago")?))
}

async fn ledger_gaps(pool: &PgPool, id: ExecutionId) -> sqlx::Result<Vec<LedgerGap>> {
    let rows = sqlx::query(
        "SELECT first_missing, last_missing, reason, at FROM ledger_gaps \
         WHERE execution = $1 ORDER BY first_missing LIMIT $2",
    );
    let rows = rows.bind(id.0).bind(NAMED).fetch_all(pool).await?;
    let read = |row: &PgRow| {
        Ok(LedgerGap {
            first: row.try_get("first_missing")?,
            last: row.try_get("last_missing")?,
            reason: row.try_get("reason")?,
            at: time(row, "at")?,
        })
    };
    rows.iter().map(read).collect()
}

async fn record_gaps(pool: &PgPool, id: ExecutionId) -> sqlx::Result<Vec<RecordGap>> {
    let rows = sqlx::query(
        "SELECT g.last_missing - g.first_missing + 1 AS records, g.after, g.before \
         FROM record_gaps g JOIN executions e ON e.id = $1 \
         WHERE g.before >= e.submitted_at AND g.after <= coalesce(e.finished_at, 'infinity') \
         ORDER BY g.first_missing LIMIT $2",
    );
    let rows = rows.bind(id.0).bind(NAMED).fetch_all(pool).await?;
    let read = |row: &PgRow| {
        Ok(RecordGap {
            records: row.try_get("records")?,
            after: time(row, "after")?,
            before: time(row, "before")?,
        })
    };
    rows.iter().map(read).collect()
}

async fn lost_rows(pool: &PgPool, id: ExecutionId) -> sqlx::Result<Vec<LostRows>> {
    let rows = sqlx::query(
        "SELECT table_name, count(*) AS rows FROM lost_rows WHERE execution = $1 \
         GROUP BY table_name ORDER BY table_name",
    );
    let rows = rows.bind(id.0).fetch_all(pool).await?;
    let read = |row: &PgRow| {
        Ok(LostRows {
            table: row.try_get("table_name")?,
            rows: row.try_get("rows")?,
        })
    };
    rows.iter().map(read).collect()
}

/// Number and bytes of the objects that the collection left in the broker at its last sweep because
/// history that is missing may refer to them.
///
/// # Errors
/// What PostgreSQL says.
pub async fn held_objects(pool: &PgPool) -> sqlx::Result<(i64, i64)> {
    let held = sqlx::query_as("SELECT held, held_bytes FROM collection");
    held.fetch_one(pool).await
}

impl Compared {
    /// Checks a loss against the ledger as it was read after the history. A running execution may have
    /// appended between the two reads: then the broker has lost nothing.
    pub fn confirmed(self, ledger: &LedgerEnd) -> Self {
        match (self, ledger) {
            (Self::LostByBroker { recorded, .. }, LedgerEnd::At(ledger)) => {
                match ledger.message >= recorded.message {
                    true => Self::Complete,
                    false => Self::LostByBroker {
                        recorded,
                        ledger: Some(*ledger),
                    },
                }
            }
            (compared, _) => compared,
        }
    }

    /// The comparison as a sentence; none if all is recorded.
    pub fn in_words(&self) -> Option<String> {
        Some(match self {
            Self::Complete => return None,
            Self::Behind {
                recorded,
                ledger,
                messages,
                wrote_ago_ms,
                ..
            } => {
                let ends = match recorded {
                    Some(recorded) => format!("ends at boundary {}", recorded.boundary),
                    None => "has nothing of it yet".to_owned(),
                };
                let wrote = wrote_ago_ms.map_or(String::new(), |ms| {
                    format!(" (it wrote last {} s ago)", ms.max(0) / 1_000)
                });
                format!(
                    "the history {ends}; the ledger is at boundary {}: the recorder is behind by \
                     {} of this execution{wrote}; see that `fiec recorder` runs",
                    ledger.boundary,
                    counted(*messages, "message")
                )
            }
            Self::LostByBroker { recorded, ledger } => {
                let at = match ledger {
                    Some(ledger) => format!("is at message {}", ledger.message),
                    None => "is not there".to_owned(),
                };
                format!(
                    "the ledger {at}, and the history ends at message {}: the broker has lost \
                     messages; if its execution does not continue, run `fiec repair`",
                    recorded.message
                )
            }
            Self::Unknown { why } => {
                format!("the history could not be compared with the ledger: {why}")
            }
        })
    }
}

impl Missing {
    /// All gaps, each a sentence; empty if there are none.
    pub fn in_words(&self) -> Vec<String> {
        let mut words: Vec<String> = self.ledger.in_words().into_iter().collect();
        words.extend(
            self.ledger_gaps
                .iter()
                .map(|gap| match gap.last - gap.first {
                    0 => format!("message {} is missing: {}", gap.first, gap.reason),
                    _ => format!(
                        "messages {} to {} are missing: {}",
                        gap.first, gap.last, gap.reason
                    ),
                }),
        );
        let time = |at: Option<Timestamp>| at.map_or("?".to_owned(), |at| at.to_string());
        words.extend(self.record_gaps.iter().map(|gap| {
            format!(
                "{} of nodes, refusals and quotas, stored between {} and {}, dropped out of the \
                 stream before the recorder read them",
                counted(gap.records.unsigned_abs(), "record"),
                time(gap.after),
                time(gap.before)
            )
        }));
        if !self.lost_rows.is_empty() {
            let tables = self.lost_rows.iter();
            let tables = tables.map(|lost| format!("{} of {}", lost.rows, lost.table));
            words.push(format!(
                "the broker had lost recorded messages, and others took their place; the rows that \
                 do not count any more are in lost_rows: {}",
                tables.collect::<Vec<_>>().join(", ")
            ));
        }
        words
    }
}

/// `1 message`, `37 messages`.
fn counted(number: u64, what: &str) -> String {
    match number {
        1 => format!("1 {what}"),
        _ => format!("{number} {what}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ledger_that_grew_while_the_history_was_read_has_lost_nothing() {
        let at = |message| Reached {
            message,
            boundary: 1,
        };
        let lost = |ledger| Compared::LostByBroker {
            recorded: at(7),
            ledger: Some(at(ledger)),
        };
        for message in [7, 8] {
            let confirmed = lost(6).confirmed(&LedgerEnd::At(at(message)));
            assert_eq!(confirmed, Compared::Complete);
        }
        assert_eq!(lost(5).confirmed(&LedgerEnd::At(at(6))), lost(6));
        assert_eq!(lost(6).confirmed(&LedgerEnd::Absent), lost(6));
    }

    #[test]
    fn what_is_missing_is_told_in_sentences_and_nothing_where_nothing_is() {
        let mut missing = Missing {
            ledger: Compared::Complete,
            ledger_gaps: Vec::new(),
            record_gaps: Vec::new(),
            lost_rows: Vec::new(),
        };
        assert!(missing.in_words().is_empty());
        let reached = |message| Reached {
            message,
            boundary: message - 10,
        };
        missing.ledger = Compared::Behind {
            recorded: Some(reached(130)),
            ledger: reached(167),
            messages: 37,
            wrote_at: None,
            wrote_ago_ms: Some(12_345),
        };
        missing.ledger_gaps.push(LedgerGap {
            first: 4,
            last: 4,
            reason: "unreadable".to_owned(),
            at: None,
        });
        assert_eq!(
            missing.in_words(),
            [
                "the history ends at boundary 120; the ledger is at boundary 157: the recorder is \
                 behind by 37 messages of this execution (it wrote last 12 s ago); see that `fiec \
                 recorder` runs",
                "message 4 is missing: unreadable",
            ]
        );
    }
}
