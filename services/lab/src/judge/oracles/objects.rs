//! Each object of `FIEC_DATA` is referred to, or not yet due for its removal.
//!
//! These refer to an object:
//! - a live execution: its submission and its parameters, and each output and result that a message
//!   of its ledger in the stream names. If a submission is too large for the ledger, it is an object
//!   itself, and names others;
//! - an ended execution: the outputs and the result that a message in the stream names. Its
//!   submission and its inputs are no longer needed;
//! - the history in PostgreSQL, for messages that have left the stream: the outputs of executions,
//!   of boundaries that were not withdrawn or whose execution lives, and the results that wait to be
//!   copied;
//! - a registered program: its package.
//!
//! A put leaves no mark of its author. So an input that a client has pushed, an output whose commit
//! was never stored, and what an ended execution has used stay for the same time: the grace of the
//! recorder's collection since the last put. Objects that history with gaps may refer to stay until
//! an operator releases them. Without history nobody collects.
//!
//! The collection asks its tables. This oracle asks the ledgers first, by its own rules, so that it
//! finds a defect of the collection.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use fiec_broker::collect::{self, Store};
use fiec_broker::{Broker, BrokerError, registry, store};
use fiec_schemas::{Digest, Timestamp};
use serde_json::Value;
use sqlx::PgPool;

use crate::judge::checker::message::{self, Stored};
use crate::judge::checker::{Rule, Violation, stored};

/// Digests of the history. Each query gives one column of hexadecimal digits.
const HISTORY: [&str; 3] = [
    "SELECT o ->> 'digest' FROM executions CROSS JOIN LATERAL jsonb_array_elements(outputs) o",
    "SELECT o ->> 'digest' FROM boundaries CROSS JOIN LATERAL jsonb_array_elements(outputs) o \
     WHERE withdrawn_at IS NULL \
     OR execution IN (SELECT id FROM executions WHERE finished_at IS NULL)",
    "SELECT encode(digest, 'hex') FROM results_to_copy",
];
/// Times of storage that missing history may refer to, from and until, in microseconds. An execution
/// may name an object that was put up to an hour before it was submitted.
const MISSING_HISTORY: &str = "\
    SELECT 0::bigint, (extract(epoch FROM history_since) * 1000000)::bigint FROM collection \
    UNION ALL \
    SELECT (extract(epoch FROM e.submitted_at - interval '1 hour') * 1000000)::bigint, \
           (extract(epoch FROM max(g.at)) * 1000000)::bigint \
    FROM ledger_gaps g JOIN executions e ON e.id = g.execution GROUP BY e.id";

/// The collection of objects: where its history is, and the time since its last put for which an
/// object stays without a reference.
#[derive(Clone, Copy)]
pub struct Collection<'a> {
    pub pool: &'a PgPool,
    pub grace: Duration,
}

/// The digests that one ledger names.
#[derive(Debug, Clone, Default)]
pub struct Ledger {
    /// The execution has ended.
    pub is_over: bool,
    /// Outputs and results.
    pub made: BTreeSet<Digest>,
    /// All digests, also of inputs.
    pub named: BTreeSet<Digest>,
}

/// The objects, and everything that may refer to them.
#[derive(Debug, Clone, Default)]
pub struct Objects {
    /// Time of the last put of each object.
    pub stored: BTreeMap<Digest, Timestamp>,
    /// By execution.
    pub ledgers: BTreeMap<String, Ledger>,
    /// Packages of registered programs.
    pub packages: BTreeSet<Digest>,
    /// Digests that the history names.
    pub history: BTreeSet<Digest>,
    /// Times of storage that missing history may refer to.
    pub missing_history: Vec<(Timestamp, Timestamp)>,
    /// An object whose last put is older is due for removal.
    pub due_before: Timestamp,
}

/// Reads the objects that are due, and their references.
pub async fn observe(
    broker: &Broker,
    collection: Collection<'_>,
) -> Result<Vec<Violation>, String> {
    let grace = i64::try_from(collection.grace.as_micros()).unwrap_or(i64::MAX);
    let mut objects = Objects {
        due_before: Timestamp::from_micros(broker.now().micros().saturating_sub(grace)),
        ..Objects::default()
    };
    let words = |error: BrokerError| error.to_string();
    let contents = collect::contents(broker, Store::Data).await;
    for object in contents.map_err(words)?.objects {
        if let Ok(digest) = object.name.parse() {
            objects.stored.insert(digest, object.stored_at);
        }
    }
    if !objects.stored.values().any(|at| *at < objects.due_before) {
        return Ok(Vec::new());
    }
    let programs = registry::list(broker).await.map_err(words)?;
    objects.packages = programs.iter().map(|record| record.artifact).collect();
    // The ledgers before the history: the history has each message that leaves the stream meanwhile.
    let (messages, _) = stored::messages(broker).await?;
    objects.ledgers = ledgers(broker, &messages).await?;
    let history = read_history(collection.pool).await;
    (objects.history, objects.missing_history) = history.map_err(|error| error.to_string())?;
    Ok(judge(&objects))
}

/// The digests that each ledger names.
async fn ledgers(broker: &Broker, messages: &[Stored]) -> Result<BTreeMap<String, Ledger>, String> {
    let mut ledgers: BTreeMap<String, Ledger> = BTreeMap::new();
    let mut large: BTreeMap<&str, Digest> = BTreeMap::new();
    for raw in messages {
        let ledger = ledgers.entry(raw.execution.clone()).or_default();
        ledger.named.extend(digests_in(&raw.header));
        // A message that cannot be read names what its text names, and ends nothing.
        let Ok(read) = message::Message::read(raw) else {
            continue;
        };
        ledger.is_over = read.state.phase.is_terminal();
        let made = read.events.iter().flat_map(stored::objects_of);
        ledger
            .made
            .extend(made.filter_map(|o| message::text(o, "digest").parse::<Digest>().ok()));
        let header: Value = serde_json::from_str(&raw.header).unwrap_or_default();
        let state = &header["state"];
        match message::text(state, "submission").parse() {
            Ok(submission) if state["spec"].is_null() => {
                large.insert(&raw.execution, submission);
            }
            _ => {}
        }
    }
    for (execution, submission) in large {
        let Some(ledger) = ledgers.get_mut(execution).filter(|l| !l.is_over) else {
            continue;
        };
        match store::get_data(broker, submission, 0).await {
            Ok(json) => ledger
                .named
                .extend(digests_in(&String::from_utf8_lossy(&json))),
            Err(BrokerError::Missing { .. }) => {}
            Err(error) => return Err(error.to_string()),
        }
    }
    Ok(ledgers)
}

/// The parts of a text that have the form of a digest.
fn digests_in(text: &str) -> impl Iterator<Item = Digest> {
    text.split(|c: char| !c.is_ascii_hexdigit())
        .filter_map(|part| part.parse().ok())
}

/// The digests that the history names, and the times in which history is missing.
async fn read_history(
    pool: &PgPool,
) -> sqlx::Result<(BTreeSet<Digest>, Vec<(Timestamp, Timestamp)>)> {
    let mut named = BTreeSet::new();
    for query in HISTORY {
        let found: Vec<Option<String>> = sqlx::query_scalar(query).fetch_all(pool).await?;
        let digests = found.iter().flatten();
        named.extend(digests.filter_map(|text| text.parse::<Digest>().ok()));
    }
    let missing: Vec<(i64, i64)> = sqlx::query_as(MISSING_HISTORY).fetch_all(pool).await?;
    let time = |(from, until)| (Timestamp::from_micros(from), Timestamp::from_micros(until));
    Ok((named, missing.into_iter().map(time).collect()))
}

/// Finds objects that are due for removal and to which nothing refers.
pub fn judge(objects: &Objects) -> Vec<Violation> {
    let named_by = |ledger: &Ledger, digest: &Digest| match ledger.is_over {
        true => ledger.made.contains(digest),
        false => ledger.named.contains(digest) || ledger.made.contains(digest),
    };
    let is_named = |digest: &Digest| {
        objects.packages.contains(digest)
            || objects.history.contains(digest)
            || objects.ledgers.values().any(|l| named_by(l, digest))
    };
    let is_missed = |at: &Timestamp| {
        let mut times = objects.missing_history.iter();
        times.any(|(from, until)| from <= at && at <= until)
    };
    let due = objects.stored.iter();
    let due = due.filter(|(_, at)| **at < objects.due_before && !is_missed(at));
    let left = due.filter(|(digest, _)| !is_named(digest));
    let say = |(digest, at): (&Digest, &Timestamp)| {
        let what = format!("the object {digest}, put at {at}, is referred to by nothing");
        Violation::new(Rule::Leaks, "", what)
    };
    left.map(say).collect()
}
