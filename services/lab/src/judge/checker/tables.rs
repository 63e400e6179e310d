//! What PostgreSQL must hold of the ledgers, row by row, beside what it holds.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use fiec_broker::{Broker, feed};
use fiec_recorder::fold::SECOND_RUN;
use fiec_schemas::subjects::{LEDGER_STREAM, RECORD_STREAM};
use serde_json::Value;
use sqlx::{PgConnection, PgPool, Row as _, ValueRef as _};
use tokio::time::{Instant, sleep};

use super::chain::Chain;
use super::message::{Message, number, text};
use super::{CLOCKS_MS, Rule, Violation};

/// Rows of each table as text: columns with ` | ` in between, `-` for NULL. The first column is the
/// execution.
pub type Tables = BTreeMap<&'static str, BTreeSet<String>>;

/// The columns that are compared.
const QUERIES: [(&str, &str); 10] = [
    (
        "executions",
        "SELECT id, tenant, phase, CASE WHEN phase IN ('bound', 'started') THEN node END, epoch, \
         boundary_index, encode(state_digest, 'hex'), commits, state_bytes, rebindings, \
         pressure_rebindings, crashes, node_faults, infrastructure_faults, compute_us, capsules, finished_at IS NOT NULL, \
         batch_id, batch_line, ordinal, seq, encode(digest, 'hex'), author, \
         (SELECT string_agg(concat_ws(' ', o ->> 'name', o ->> 'digest', o ->> 'bytes'), ', ') \
          FROM jsonb_array_elements(outputs) o) FROM executions",
    ),
    (
        "placements",
        "SELECT execution, epoch, node, instance, substrate, cause, started_at IS NOT NULL, \
         end_reason FROM placements",
    ),
    (
        "rebindings",
        "SELECT execution, epoch, from_node, to_node, cause, state_index, \
         encode(state_digest, 'hex') FROM rebindings",
    ),
    (
        "boundaries",
        "SELECT execution, index, epoch, node, encode(digest, 'hex'), bytes, compute_us, seq, \
         ordinal, withdrawn_at IS NOT NULL, \
         (SELECT string_agg(concat_ws(' ', o ->> 'name', o ->> 'digest', o ->> 'bytes'), ', ') \
          FROM jsonb_array_elements(outputs) o) FROM boundaries",
    ),
    (
        "decisions",
        "SELECT execution, epoch, ordinal, cause, chosen FROM decisions",
    ),
    (
        "execution_events",
        "SELECT execution, ordinal, kind, epoch FROM execution_events",
    ),
    (
        "execution_changes",
        "SELECT execution, ordinal, nth, who FROM execution_changes",
    ),
    (
        "spread_splits",
        "SELECT holder, part, nth, from_tile, to_tile, merged_at IS NOT NULL FROM spread_splits",
    ),
    (
        "series_points",
        "SELECT execution, name, max(boundary), sum(reports) FROM series_points \
         GROUP BY execution, name",
    ),
    ("batches", "SELECT '-', id, tenant FROM batches"),
];

/// Tables whose rows are records: each with the kinds that it has.
const BY_RECORD: [(&str, &[&str]); 4] = [
    ("rejections", &["rejection"]),
    ("node_events", &["node", "envelopes"]),
    ("verifications", &["verification"]),
    ("quota_changes", &["quota"]),
];

/// Rows that say that something is missing or was made anew.
const MISSING: [&str; 3] = ["ledger_gaps", "record_gaps", "lost_rows"];

/// A moment of PostgreSQL.
#[derive(Debug, Default)]
pub struct Snapshot {
    pub tables: Tables,
    /// Sequences in the tables whose rows are records.
    pub records: BTreeMap<&'static str, BTreeSet<i64>>,
    /// Rows of the tables that should be empty.
    pub missing: Vec<String>,
    /// Executions with a stated gap.
    pub with_gaps: BTreeSet<String>,
    /// Executions whose results are in PostgreSQL.
    pub with_results: BTreeSet<String>,
    /// Executions that had ended before their id began anew. Their rows are of the first run.
    pub ended_before: BTreeSet<String>,
    /// Times that stand in the wrong order.
    pub reversed: Vec<String>,
    /// Checkpoints of the recorder.
    pub ledger: u64,
    pub record: u64,
}

/// Waits until the recorder has come to what the streams hold now, and reads the tables.
///
/// # Errors
/// When PostgreSQL or the broker does not answer, or the recorder stays behind.
pub async fn read(broker: &Broker, pool: &PgPool, patience: Duration) -> Result<Snapshot, String> {
    let mut ends = Vec::new();
    for stream in [LEDGER_STREAM, RECORD_STREAM] {
        let bounds = feed::bounds_of(broker, stream).await;
        let (first, last) = bounds.map_err(|error| error.to_string())?;
        ends.push((stream, if last < first { 0 } else { last }));
    }
    let deadline = Instant::now() + patience;
    loop {
        let found = at_once(pool).await.map_err(|error| error.to_string())?;
        let behind = ends.iter().find(|(stream, last)| match *stream {
            LEDGER_STREAM => found.ledger < *last,
            _ => found.record < *last,
        });
        match behind {
            None => return Ok(found),
            Some((stream, last)) if Instant::now() > deadline => {
                let (ledger, record) = (found.ledger, found.record);
                return Err(format!(
                    "after {patience:?} the recorder is at {ledger} of the ledgers and {record} of \
                     the records; {stream} ends with {last}"
                ));
            }
            Some(_) => sleep(Duration::from_millis(20)).await,
        }
    }
}

/// Everything as of one moment.
async fn at_once(pool: &PgPool) -> sqlx::Result<Snapshot> {
    let mut tx = pool.begin().await?;
    rows(
        &mut tx,
        "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY",
    )
    .await?;
    let mut snapshot = Snapshot::default();
    for row in rows(&mut tx, "SELECT stream, seq FROM recorder_checkpoint").await? {
        let (stream, seq) = row.split_once(" | ").unwrap_or_default();
        match stream {
            LEDGER_STREAM => snapshot.ledger = seq.parse().unwrap_or(0),
            RECORD_STREAM => snapshot.record = seq.parse().unwrap_or(0),
            _ => {}
        }
    }
    for (table, query) in QUERIES {
        let found = rows(&mut tx, query).await?;
        snapshot.tables.insert(table, found.into_iter().collect());
    }
    for (table, _) in BY_RECORD {
        let found = rows(&mut tx, &format!("SELECT seq FROM {table}")).await?;
        let found = found.iter().filter_map(|seq| seq.parse().ok()).collect();
        snapshot.records.insert(table, found);
    }
    for table in MISSING {
        let found = rows(&mut tx, &format!("SELECT * FROM {table} LIMIT 3")).await?;
        let found = found.into_iter().map(|row| format!("{table}: {row}"));
        snapshot.missing.extend(found);
    }
    let gaps = "SELECT DISTINCT execution::text FROM ledger_gaps";
    snapshot.with_gaps = rows(&mut tx, gaps).await?.into_iter().collect();
    let results = "SELECT id::text FROM executions WHERE result IS NOT NULL";
    snapshot.with_results = rows(&mut tx, results).await?.into_iter().collect();
    let again = format!("{gaps} WHERE reason = '{SECOND_RUN}'");
    snapshot.ended_before = rows(&mut tx, &again).await?.into_iter().collect();
    let clocks = format!("interval '{CLOCKS_MS} ms'");
    snapshot.reversed = rows(
        &mut tx,
        &format!(
            "SELECT id, 'finished before it started' FROM executions \
             WHERE finished_at + {clocks} < first_started_at \
             UNION ALL SELECT id, 'started before it was submitted' FROM executions \
             WHERE first_started_at + {clocks} < submitted_at \
             UNION ALL SELECT execution, 'placement ' || epoch || ' started before it was bound' \
             FROM placements WHERE started_at + {clocks} < bound_at \
             UNION ALL SELECT execution, 'placement ' || epoch || ' ended before it was bound' \
             FROM placements WHERE ended_at + {clocks} < bound_at \
             UNION ALL SELECT execution, 'placement ' || epoch || ' computed until before since' \
             FROM placements WHERE computed_until + {clocks} < computing_since \
             UNION ALL SELECT execution, 'boundary ' || index || ' committed before computed' \
             FROM boundaries WHERE committed_at + {clocks} < computed_at"
        ),
    )
    .await?;
    tx.commit().await?;
    Ok(snapshot)
}

/// Rows as text.
async fn rows(connection: &mut PgConnection, query: &str) -> sqlx::Result<Vec<String>> {
    // The simple protocol answers in text.
    let found = sqlx::raw_sql(sqlx::AssertSqlSafe(query.to_owned()));
    let found = found.fetch_all(connection).await?;
    let text = |row: &sqlx::postgres::PgRow, index| -> sqlx::Result<String> {
        let raw = row.try_get_raw(index)?;
        let text = if raw.is_null() {
            "-"
        } else {
            raw.as_str().unwrap_or("?")
        };
        Ok(text.to_owned())
    };
    let read = |row: &sqlx::postgres::PgRow| {
        let columns: sqlx::Result<Vec<String>> = (0..row.len()).map(|i| text(row, i)).collect();
        Ok(columns?.join(" | "))
    };
    found.iter().map(read).collect()
}

fn line(columns: &[&str]) -> String {
    columns.join(" | ")
}

fn flag(is: bool) -> &'static str {
    if is { "t" } else { "f" }
}

fn or_null<T: ToString>(value: Option<T>) -> String {
    value.map_or("-".to_owned(), |value| value.to_string())
}

/// Outputs of an event as the queries above put them.
fn outputs(event: &Value) -> String {
    let all = event["outputs"].as_array().into_iter().flatten();
    let one = |o: &Value| {
        format!(
            "{} {} {}",
            text(o, "name"),
            text(o, "digest"),
            number(o, "bytes")
        )
    };
    let all: Vec<String> = all.map(one).collect();
    if all.is_empty() {
        "-".to_owned()
    } else {
        all.join(", ")
    }
}

/// A placement that may not have ended.
struct Placement {
    /// Columns from the epoch to the cause.
    begin: String,
    started: bool,
}

/// A boundary; a step back may withdraw it.
struct Boundary {
    index: u64,
    /// Columns from the index to the ordinal.
    begin: String,
    outputs: String,
    withdrawn: bool,
}

/// The rows that the messages of the ledgers come to.
pub fn expected(chains: &[Chain]) -> Tables {
    let mut tables: Tables = QUERIES
        .iter()
        .map(|(name, _)| (*name, BTreeSet::new()))
        .collect();
    for chain in chains {
        for (table, row) in rows_of(chain) {
            tables.entry(table).or_default().insert(row);
        }
    }
    tables
}

fn rows_of(chain: &Chain) -> Vec<(&'static str, String)> {
    let id = chain.execution.as_str();
    let mut rows = Vec::new();
    let mut open: Option<Placement> = None;
    let (mut epoch, mut node) = ("0".to_owned(), None::<String>);
    let mut is_known = chain.is_whole();
    let mut boundaries: Vec<Boundary> = Vec::new();
    let mut splits: BTreeMap<String, (String, bool)> = BTreeMap::new();
    let mut curves = Curves::new();
    let (mut capsules, mut end_outputs) = (None, "-".to_owned());
    for message in &chain.messages {
        let ordinal = message.state.ordinal.to_string();
        let mut changes = 0;
        // Messages before this one are not known: the binding in force is the one that it names.
        if message.has("healed") || !std::mem::replace(&mut is_known, true) {
            let bindings = message.events.iter().filter(|e| text(e, "type") == "bound");
            let before = message.state.epoch - bindings.count() as u64;
            if before.to_string() != epoch {
                let in_force = before == message.state.epoch;
                let named = message.state.phase.node.clone();
                (epoch, node, open) = (before.to_string(), named.filter(|_| in_force), None);
            }
        }
        for (at, event) in message.events.iter().enumerate() {
            let kind = text(event, "type");
            let cause = text(&event["cause"], "kind");
            if let Some(reason) = ends_placement(kind, cause)
                && let Some(placement) = open.take()
            {
                rows.push(("placements", placement.row(id, reason)));
            }
            match kind {
                "bound" => {
                    let to = text(event, "node");
                    let new = number(event, "epoch").to_string();
                    // Of a ledger that begins in the middle it may not be known where it was.
                    if let Some(from) = node.as_deref() {
                        let place = message.state.boundary.as_ref();
                        let index = or_null(place.map(|p| p.index));
                        let digest = or_null(place.map(|p| &p.digest));
                        let row = line(&[id, &new, from, to, cause, &index, &digest]);
                        rows.push(("rebindings", row));
                    }
                    if event["decision"].is_object() {
                        rows.push(("decisions", line(&[id, &new, &ordinal, cause, to])));
                    }
                    let (instance, substrate) = (text(event, "instance"), text(event, "substrate"));
                    open = Some(Placement {
                        begin: line(&[&new, to, instance, substrate, cause]),
                        started: false,
                    });
                    (epoch, node) = (new, Some(to.to_owned()));
                }
                "started" => {
                    if let Some(placement) = &mut open {
                        placement.started = true;
                    }
                }
                "boundary" => {
                    let index = number(event, "index");
                    let begin = line(&[
                        &index.to_string(),
                        &epoch,
                        node.as_deref().unwrap_or("-"),
                        text(event, "digest"),
                        &number(event, "bytes").to_string(),
                        &number(event, "compute_us").to_string(),
                        &message.seq.to_string(),
                        &ordinal,
                    ]);
                    boundaries.push(Boundary {
                        index,
                        begin,
                        outputs: outputs(event),
                        withdrawn: false,
                    });
                }
                "noted" => note(&mut curves, &event["numbers"]),
                "stepped_back" => {
                    let to = number(&event["to"], "index");
                    let points = curves.values_mut();
                    points.for_each(|points| points.retain(|boundary, _| *boundary <= to));
                    let beyond = boundaries.iter_mut().filter(|b| b.index > to);
                    beyond.for_each(|b| b.withdrawn = true);
                }
                "completed" => {
                    capsules = Some(number(event, "capsules"));
                    end_outputs = outputs(event);
                }
                "split" => {
                    let row = line(&[
                        id,
                        text(event, "part"),
                        &number(event, "nth").to_string(),
                        &number(event, "from").to_string(),
                        &number(event, "to").to_string(),
                    ]);
                    splits.insert(text(event, "part").to_owned(), (row, false));
                }
                "merged" => {
                    let merged = splits.get_mut(text(event, "part"));
                    merged.into_iter().for_each(|(_, merged)| *merged = true);
                }
                "submitted" => {
                    if let Some(batch) = &message.state.batch {
                        rows.push(("batches", line(&["-", &batch.id, &message.state.tenant])));
                    }
                }
                "adjusted" => {
                    let nth = changes.to_string();
                    let row = line(&[id, &ordinal, &nth, text(event, "who")]);
                    rows.push(("execution_changes", row));
                    changes += 1;
                }
                _ => {}
            }
            if is_told(kind, &message.events[at..]) {
                rows.push(("execution_events", line(&[id, &ordinal, kind, &epoch])));
            }
        }
    }
    if let Some(placement) = open {
        rows.push(("placements", placement.row(id, "-")));
    }
    for Boundary {
        begin,
        outputs,
        withdrawn,
        ..
    } in boundaries
    {
        rows.push(("boundaries", line(&[id, &begin, flag(withdrawn), &outputs])));
    }
    // Otherwise the tables may have points of messages that are not known here.
    let is_whole = chain.is_whole() && !chain.messages.iter().any(|message| message.has("healed"));
    for (name, points) in curves.iter().filter(|_| is_whole) {
        if let Some((last, _)) = points.last_key_value() {
            let reports: u64 = points.values().sum();
            let row = line(&[id, name, &last.to_string(), &reports.to_string()]);
            rows.push(("series_points", row));
        }
    }
    for (row, merged) in splits.into_values() {
        rows.push(("spread_splits", line(&[&row, flag(merged)])));
    }
    if let Some(last) = chain.messages.last() {
        let row = execution(last, capsules, &end_outputs);
        rows.push(("executions", row));
    }
    rows
}

/// The reports of each name, by boundary.
type Curves = BTreeMap<String, BTreeMap<u64, u64>>;

/// Adds the points of an event: `[boundary, value]`, or `[boundary, mean, lowest, highest, reports]`.
fn note(curves: &mut Curves, numbers: &Value) {
    for (name, points) in numbers.as_object().into_iter().flatten() {
        let curve = curves.entry(name.clone()).or_default();
        for point in points.as_array().into_iter().flatten() {
            let reports = point.get(4).and_then(Value::as_u64).unwrap_or(1);
            let boundary = point.get(0).and_then(Value::as_u64);
            boundary.into_iter().for_each(|boundary| {
                curve.insert(boundary, reports);
            });
        }
    }
}

impl Placement {
    fn row(&self, id: &str, end: &str) -> String {
        line(&[id, &self.begin, flag(self.started), end])
    }
}

/// The row of an execution, from the last message of its ledger.
fn execution(last: &Message, capsules: Option<u64>, outputs: &str) -> String {
    let state = &last.state;
    let place = state.boundary.as_ref();
    let totals = &state.totals;
    let columns = [
        state.execution.clone(),
        state.tenant.clone(),
        state.phase.is.clone(),
        or_null(
            state
                .phase
                .node
                .as_ref()
                .filter(|_| state.phase.instance.is_some()),
        ),
        state.epoch.to_string(),
        place.map_or(0, |p| p.index).to_string(),
        or_null(place.map(|p| &p.digest)),
        totals.commits.to_string(),
        totals.state_bytes.to_string(),
        totals.rebindings.to_string(),
        totals.pressure.to_string(),
        totals.crashes.to_string(),
        totals.node_faults.to_string(),
        totals.infrastructure_faults.to_string(),
        totals.compute_us.to_string(),
        or_null(capsules),
        flag(state.phase.is_terminal()).to_owned(),
        or_null(state.batch.as_ref().map(|b| &b.id)),
        or_null(state.batch.as_ref().map(|b| b.line)),
        state.ordinal.to_string(),
        last.seq.to_string(),
        // No message follows an end.
        or_null(Some(&last.digest).filter(|_| !state.phase.is_terminal())),
        state.author.clone(),
        outputs.to_owned(),
    ];
    columns.join(" | ")
}

/// Why an event ends the placement in force; none where it does not.
fn ends_placement<'a>(kind: &'a str, cause: &'a str) -> Option<&'a str> {
    match kind {
        "bound" | "yielded" | "stepped_back" => Some(cause),
        "refused" | "paused" | "held" | "returned" | "completed" | "computed" | "failed"
        | "cancelled" => Some(kind),
        _ => None,
    }
}

/// True for events that have a row of their own in `execution_events`. A yield that the same message
/// binds elsewhere is told by its rebinding.
fn is_told(kind: &str, from_here: &[Value]) -> bool {
    match kind {
        "submitted" | "bound" | "started" | "boundary" | "noted" | "completed" => false,
        "yielded" => !from_here.iter().any(|event| text(event, "type") == "bound"),
        _ => true,
    }
}

/// Compares the tables with what the ledgers come to. Of an execution in `partial` the tables may
/// have more rows: its ledger is not known from its beginning, or has lost messages.
pub fn compare(expected: &Tables, found: &Tables, partial: &BTreeSet<String>) -> Vec<Violation> {
    let execution = |row: &String| row.split(" | ").next().unwrap_or_default().to_owned();
    let none = BTreeSet::new();
    let mut wrong = Vec::new();
    for (table, _) in QUERIES {
        let expected = expected.get(table).unwrap_or(&none);
        let found = found.get(table).unwrap_or(&none);
        for row in expected.difference(found) {
            let id = execution(row);
            // The start may have been told by a message that was recorded and then lost.
            let told = started(row).filter(|_| table == "placements" && partial.contains(&id));
            if told.is_some_and(|row| found.contains(&row)) {
                continue;
            }
            let what = match beside(row, found) {
                Some(other) => format!("{table} lacks {row}, and has {other}"),
                None => format!("{table} lacks {row}"),
            };
            wrong.push(Violation::new(Rule::Table(table), &id, what));
        }
        for row in found.difference(expected) {
            let id = execution(row);
            if table == "executions" || !partial.contains(&id) {
                let what = format!("{table} has {row}");
                wrong.push(Violation::new(Rule::Table(table), &id, what));
            }
        }
    }
    wrong
}

/// The row of the same placement, but started.
fn started(row: &str) -> Option<String> {
    let (row, end) = row.rsplit_once(" | ")?;
    let begin = row.strip_suffix(flag(false))?;
    Some(format!("{begin}{} | {end}", flag(true)))
}

/// The row that a table has with the execution and the number of this one.
fn beside<'a>(row: &str, found: &'a BTreeSet<String>) -> Option<&'a String> {
    let key = |row: &str| {
        let mut columns = row.splitn(3, " | ");
        columns
            .next()
            .map(str::to_owned)
            .zip(columns.next().map(str::to_owned))
    };
    let wanted = key(row)?;
    found
        .iter()
        .find(|other| key(other).as_ref() == Some(&wanted))
}

/// Compares the tables whose rows are records with the records up to the recorder's checkpoint.
pub fn compare_records(records: &BTreeMap<u64, String>, snapshot: &Snapshot) -> Vec<Violation> {
    let none = BTreeSet::new();
    let mut wrong = Vec::new();
    for (table, kinds) in BY_RECORD {
        let of_table = |kind: &String| kinds.contains(&kind.as_str());
        let expected: BTreeSet<i64> = records
            .range(..=snapshot.record)
            .filter(|(_, kind)| of_table(kind))
            .filter_map(|(seq, _)| i64::try_from(*seq).ok())
            .collect();
        let found = snapshot.records.get(table).unwrap_or(&none);
        for seq in expected.difference(found) {
            let what = format!("{table} lacks record {seq}");
            wrong.push(Violation::new(Rule::Records, "", what));
        }
        for seq in found.difference(&expected) {
            let what = format!("{table} has record {seq}, which the stream has not");
            wrong.push(Violation::new(Rule::Durable, "", what));
        }
    }
    wrong
}

/// What the tables themselves say is missing, and times in the wrong order.
pub fn judge(snapshot: &Snapshot) -> Vec<Violation> {
    let of = |rule| move |row: &String| Violation::new(rule, "", row.clone());
    let missing = snapshot.missing.iter().map(of(Rule::Gaps));
    missing
        .chain(snapshot.reversed.iter().map(of(Rule::Times)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tables(row: &str) -> Tables {
        [("placements", BTreeSet::from([row.to_owned()]))].into()
    }

    #[test]
    fn only_a_ledger_that_lost_messages_may_lack_a_start_that_sql_has() {
        let expected = tables("e | 1 | n1 | i | host | initial | f | completed");
        let found = tables("e | 1 | n1 | i | host | initial | t | completed");
        let partial = BTreeSet::from(["e".to_owned()]);
        assert!(compare(&expected, &found, &partial).is_empty());
        let wrong = compare(&expected, &found, &BTreeSet::new());
        let words = wrong.iter().map(|violation| violation.what.as_str());
        let words: Vec<_> = words.collect();
        assert_eq!(wrong.len(), 2, "{words:?}");
        assert!(
            words.iter().any(|w| w.contains("and has e | 1")),
            "{words:?}"
        );
        // The other way round SQL lacks what the ledger tells.
        assert!(!compare(&found, &expected, &partial).is_empty());
    }
}
