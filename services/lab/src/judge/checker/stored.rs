//! Reads what a test has left in the broker: ledgers, records, outputs, σ.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use async_nats::jetstream::consumer::pull;
use fiec_broker::feed::{self, Start};
use fiec_broker::{Broker, BrokerError, Reader, store};
use fiec_schemas::{Digest, subjects};
use futures_util::StreamExt as _;
use serde_json::Value;
use tokio::time::timeout;

use super::chain::Chain;
use super::message::{Message, Stored, text};
use super::{Rule, Violation};

/// How long the broker has for the next message.
const SILENCE: Duration = Duration::from_secs(10);
/// Bytes of outputs that are fetched in all, to compare their digests. Of the others the size is
/// compared.
const FETCHED: u64 = 4 << 20;

/// All ledger messages that the stream holds, and what is on its subjects without being one.
pub async fn ledgers(broker: &Broker) -> Result<(Vec<Message>, Vec<Violation>), String> {
    let (stored, mut found) = messages(broker).await?;
    let mut read = Vec::new();
    for stored in stored {
        match Message::read(&stored) {
            Ok(message) => read.push(message),
            Err(why) => found.push(Violation::new(Rule::Readable, &stored.execution, why)),
        }
    }
    Ok((read, found))
}

/// All messages that the stream holds on subjects of ledgers, unread, and violations for those on
/// other subjects.
pub async fn messages(broker: &Broker) -> Result<(Vec<Stored>, Vec<Violation>), String> {
    let words = |error: BrokerError| error.to_string();
    let (mut messages, mut found) = (Vec::new(), Vec::new());
    let (first, last) = feed::bounds(broker).await.map_err(words)?;
    if last < first.max(1) {
        return Ok((messages, found));
    }
    let mut feed = feed::ledger(broker, Start::At(1)).await.map_err(words)?;
    loop {
        let next = timeout(SILENCE, feed.next()).await;
        let next = next.map_err(|_| format!("no message for {SILENCE:?}, before {last}"))?;
        match next.ok_or("the feed has ended")? {
            Ok(item) => {
                let (seq, is_last) = (item.seq, item.pending == 0);
                messages.push(Stored::from(item));
                if is_last || seq >= last {
                    return Ok((messages, found));
                }
            }
            Err(BrokerError::Foreign { seq, reason }) => {
                let what = format!("message {seq} is none of a ledger: {reason}");
                found.push(Violation::new(Rule::Readable, "", what));
                if seq >= last {
                    return Ok((messages, found));
                }
            }
            Err(error) => return Err(words(error)),
        }
    }
}

/// Sequences of the records in `FIEC_RECORD`, by what they are.
pub async fn records(broker: &Broker) -> Result<BTreeMap<u64, String>, String> {
    let words = |error: BrokerError| error.to_string();
    let mut records = BTreeMap::new();
    let stream = subjects::RECORD_STREAM;
    let (first, last) = feed::bounds_of(broker, stream).await.map_err(words)?;
    if last < first.max(1) {
        return Ok(records);
    }
    let what = "check the records";
    let reader = Reader::open(broker, stream, pull::Config::default(), 1_000, what).await;
    let mut reader = reader.map_err(words)?;
    loop {
        let next = timeout(SILENCE, reader.next()).await;
        let next = next.map_err(|_| format!("no record for {SILENCE:?}, before {last}"))?;
        let record = next.ok_or("the records have ended")?.map_err(words)?;
        let read: Value = serde_json::from_slice(&record.message.payload).unwrap_or_default();
        records.insert(record.seq, text(&read, "is").to_owned());
        if record.pending == 0 || record.seq >= last {
            return Ok(records);
        }
    }
}

/// The objects that an event names: outputs, and a result that is too large for a message.
pub fn objects_of(event: &Value) -> impl Iterator<Item = &Value> {
    let outputs = event["outputs"].as_array().into_iter().flatten();
    outputs.chain(result_of(event))
}

/// The result of an event that is too large for a message.
fn result_of(event: &Value) -> Option<&Value> {
    event.get("object").filter(|object| object.is_object())
}

/// Objects that a ledger names: outputs, and results that are too large for a message. By digest,
/// with their size and the execution that names them. Without the results of executions that are in
/// `copied`: the collection removes them once PostgreSQL has them.
pub fn objects(chains: &[Chain], copied: &BTreeSet<String>) -> BTreeMap<String, (u64, String)> {
    let mut objects = BTreeMap::new();
    for chain in chains {
        let is_copied = copied.contains(&chain.execution);
        let events = chain.messages.iter().flat_map(|message| &message.events);
        for event in events {
            let result = result_of(event).filter(|_| is_copied);
            for object in objects_of(event).filter(|object| Some(*object) != result) {
                let digest = text(object, "digest");
                if !digest.is_empty() {
                    let bytes = object["bytes"].as_u64().unwrap_or(u64::MAX);
                    objects.insert(digest.to_owned(), (bytes, chain.execution.clone()));
                }
            }
        }
    }
    objects
}

/// Every object that a ledger names is there, with its size; the first ones with their digest.
pub async fn check_objects(
    broker: &Broker,
    chains: &[Chain],
    copied: &BTreeSet<String>,
) -> Vec<Violation> {
    let mut found = Vec::new();
    let mut fetched = 0;
    for (digest, (bytes, execution)) in objects(chains, copied) {
        let mut say = |what: String| {
            let what = format!("output {digest} of {bytes} bytes: {what}");
            found.push(Violation::new(Rule::Outputs, &execution, what));
        };
        let Ok(named) = digest.parse::<Digest>() else {
            say("its digest is none".to_owned());
            continue;
        };
        match store::data_size(broker, named).await {
            Err(error) => say(error.to_string()),
            Ok(None) => say("it is not in the store".to_owned()),
            Ok(Some(size)) if size != bytes => say(format!("the store has {size} bytes")),
            Ok(Some(size)) if fetched + size <= FETCHED => {
                fetched += size;
                if let Err(error) = store::get_data(broker, named, size).await {
                    say(error.to_string());
                }
            }
            Ok(Some(_)) => {}
        }
    }
    found
}
