//! Nothing is left behind: each reservation has an owner that is bound, each chunk is named by the
//! last message of a live ledger, each consumer of capsules has a node, and each submission is taken
//! in. Objects are in [`super::objects`].

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use fiec_broker::chunks::Manifest;
use fiec_broker::collect::{self, Store};
use fiec_broker::{Broker, buckets, store};
use fiec_schemas::quota::Reservations;
use fiec_schemas::{ExecutionId, NodeId, Sequence, Timestamp, subjects};
use futures_util::TryStreamExt as _;

use super::ledgers::Last;
use crate::judge::checker::{Rule, Violation};

/// Time for the collector to drop chunks that their worker has not dropped, in ms.
const COLLECTED_MS: i64 = 35_000;
/// Time for a submission to be taken in, in ms.
const TAKEN_IN_MS: i64 = 15_000;

/// What the broker keeps beside the ledgers.
#[derive(Debug, Clone, Default)]
pub struct Kept {
    /// Executions that have reserved.
    pub reserved: BTreeSet<ExecutionId>,
    /// Number of chunks of each execution.
    pub chunks: BTreeMap<ExecutionId, usize>,
    /// Number of chunks that the last message of a live ledger names.
    pub named: BTreeMap<ExecutionId, usize>,
    /// Consumers of capsules.
    pub consumers: BTreeSet<String>,
    /// The consumers of nodes that have joined.
    pub nodes: BTreeSet<String>,
    /// Chunks of objects without a description.
    pub orphans: Vec<String>,
    /// When the oldest submission that waits was stored.
    pub waits_since: Option<Timestamp>,
    pub now: Timestamp,
    /// Time for which superseded chunks stay, in ms.
    pub superseded_ms: i64,
}

/// Reads what the broker keeps. `superseded`: how long workers keep superseded chunks.
pub async fn observe(
    broker: &Broker,
    ledgers: &BTreeMap<ExecutionId, Last>,
    superseded: Duration,
) -> Result<Vec<Violation>, String> {
    let words = |error: &dyn std::fmt::Display| error.to_string();
    let mut kept = Kept {
        now: broker.now(),
        superseded_ms: COLLECTED_MS + i64::try_from(superseded.as_millis()).unwrap_or(i64::MAX / 2),
        ..Kept::default()
    };
    for payload in last_of_each(broker, subjects::QUOTA_STREAM).await? {
        if let Ok(table) = serde_json::from_slice::<Reservations>(&payload) {
            kept.reserved
                .extend(table.entries.iter().map(|e| e.execution));
        }
    }
    let stream = broker.js.get_stream(subjects::CHUNK_STREAM).await;
    let stream = stream.map_err(|e| words(&e))?;
    let listed = stream.info_with_subjects("fiec.chunk.>").await;
    let listed: Vec<(String, usize)> = listed
        .map_err(|e| words(&e))?
        .try_collect()
        .await
        .map_err(|e| words(&e))?;
    for (subject, count) in listed {
        let id = subject.rsplit('.').next().and_then(|id| id.parse().ok());
        kept.chunks.extend(id.map(|id| (id, count)));
    }
    for id in kept.chunks.keys() {
        let state = ledgers.get(id).map(|last| &last.state);
        let place = state
            .filter(|s| s.phase.kind().needs_state())
            .and_then(|s| s.boundary.as_ref());
        if let Some(place) = place.filter(|place| store::is_large(place))
            && let Ok(manifest) = store::manifest(broker, place).await
        {
            kept.named.insert(*id, distinct(&manifest));
        }
    }
    let shard = broker.js.get_stream(subjects::capsule_stream(0)).await;
    let shard = shard.map_err(|e| words(&e))?;
    kept.consumers = shard
        .consumer_names()
        .try_collect()
        .await
        .map_err(|e| words(&e))?;
    let nodes = broker.js.get_key_value(subjects::NODES_BUCKET).await;
    let nodes = nodes.map_err(|e| words(&e))?;
    let entries = buckets::entries(&nodes).await.map_err(|e| words(&e))?;
    let joined = entries
        .iter()
        .filter_map(|(key, _)| key.strip_prefix("node."));
    let joined = joined.filter_map(|name| name.parse::<NodeId>().ok());
    kept.nodes = joined
        .map(|node| subjects::capsule_consumer(&node))
        .collect();
    kept.orphans = collect::contents(broker, Store::Data)
        .await
        .map_err(|e| words(&e))?
        .orphans;
    let submitted = broker.js.get_stream(subjects::SUBMIT_STREAM).await;
    let submitted = submitted.map_err(|e| words(&e))?;
    let state = &submitted.cached_info().state;
    kept.waits_since = (state.messages > 0).then(|| {
        let micros = state.first_timestamp.unix_timestamp_nanos() / 1_000;
        Timestamp::from_micros(i64::try_from(micros).unwrap_or(i64::MAX))
    });
    Ok(judge(ledgers, &kept))
}

/// Chunks that a manifest names, each once.
fn distinct(manifest: &Manifest) -> usize {
    let all: BTreeSet<Sequence> = manifest.chunks.iter().map(|chunk| chunk.seq).collect();
    all.len()
}

/// The last message on each subject of a stream.
async fn last_of_each(broker: &Broker, stream: &str) -> Result<Vec<bytes::Bytes>, String> {
    let words = |error: &dyn std::fmt::Display| error.to_string();
    let stream = broker.js.get_stream(stream).await.map_err(|e| words(&e))?;
    let listed = stream
        .info_with_subjects(">")
        .await
        .map_err(|e| words(&e))?;
    let listed: Vec<(String, usize)> = listed.try_collect().await.map_err(|e| words(&e))?;
    let mut payloads = Vec::new();
    for (subject, _) in listed {
        if let Ok(last) = stream.get_last_raw_message_by_subject(&subject).await {
            payloads.push(last.payload);
        }
    }
    Ok(payloads)
}

/// Finds what nobody needs any more.
pub fn judge(ledgers: &BTreeMap<ExecutionId, Last>, kept: &Kept) -> Vec<Violation> {
    let mut found = Vec::new();
    let mut say = |id: &str, what: String| found.push(Violation::new(Rule::Leaks, id, what));
    for id in &kept.reserved {
        let has_place = |last: &Last| last.state.phase.binding().is_some();
        if !ledgers.get(id).is_some_and(has_place) {
            say(&id.to_string(), "has reserved, and has no place".to_owned());
        }
    }
    for (id, count) in &kept.chunks {
        let Some(last) = ledgers.get(id) else {
            continue;
        };
        // Superseded chunks stay for a while.
        let is_old = kept.now.millis() - last.state.at.millis() > kept.superseded_ms;
        let named = kept.named.get(id).copied().unwrap_or(0);
        if is_old && *count > named {
            say(
                &id.to_string(),
                "has chunks that its ledger does not name".to_owned(),
            );
        }
    }
    for consumer in &kept.consumers {
        if !kept.nodes.contains(consumer) {
            say("", format!("the consumer {consumer} has no node"));
        }
    }
    for subject in &kept.orphans {
        say("", format!("{subject} belongs to no object"));
    }
    let waits = |since: &Timestamp| kept.now.millis() - since.millis() > TAKEN_IN_MS;
    if kept.waits_since.as_ref().is_some_and(waits) {
        say("", "a submission is not taken in".to_owned());
    }
    found
}
