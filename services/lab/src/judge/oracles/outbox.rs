//! For every execution the stream holds a prefix of the emitted messages, each once, in order.

use std::collections::BTreeMap;
use std::time::Duration;

use async_nats::jetstream::consumer::pull;
use fiec_broker::outbox::PLACE_HEADER;
use fiec_broker::{Broker, Reader, feed};
use fiec_schemas::{Event, ExecutionId, subjects};
use futures_util::StreamExt as _;
use tokio::time::timeout;

use crate::judge::checker::{Rule, Violation};
use crate::judge::journal::Journal;

/// How long the broker has for the next message.
const SILENCE: Duration = Duration::from_secs(10);

/// What ledgers and stream say of one execution.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Emitted {
    /// Number of messages in each `emitted` of its ledger, in order.
    pub counts: Vec<u64>,
    /// Boundary and index of each published message, in the order of the stream.
    pub published: Vec<(u64, u32)>,
    /// True once it has ended.
    pub is_over: bool,
}

/// Reads the stream, and what the journal has seen.
pub async fn observe(broker: &Broker, journal: &Journal) -> Result<Vec<Violation>, String> {
    let mut all: BTreeMap<ExecutionId, Emitted> = BTreeMap::new();
    for line in journal.all() {
        let id = line.state().execution;
        for event in &line.message.events {
            if let Event::Emitted { outbox } = event {
                let counts = &mut all.entry(id).or_default().counts;
                counts.push(outbox.count.into());
            }
        }
        if let Some(emitted) = all.get_mut(&id) {
            emitted.is_over |= line.state().phase.is_terminal();
        }
    }
    let stream = subjects::OUTBOX_STREAM;
    let words = |error: fiec_broker::BrokerError| error.to_string();
    let (first, last) = feed::bounds_of(broker, stream).await.map_err(words)?;
    if last >= first.max(1) {
        let config = pull::Config {
            headers_only: true,
            ..pull::Config::default()
        };
        let mut reader = Reader::open(broker, stream, config, 1_000, "check the outbox")
            .await
            .map_err(words)?;
        loop {
            let next = timeout(SILENCE, reader.next()).await;
            let next = next.map_err(|_| format!("no message for {SILENCE:?}"))?;
            let next = next.ok_or("the outbox has ended")?.map_err(words)?;
            let headers = next.message.headers.as_ref();
            let place = headers
                .and_then(|h| h.get(PLACE_HEADER))
                .map(|v| v.as_str());
            let place = place.and_then(|place| place.split_once('.'));
            let place = place.and_then(|(b, i)| Some((b.parse().ok()?, i.parse().ok()?)));
            // fiec.outbox.<tenant>.<execution>.<name>
            let id = next.message.subject.split('.').nth(3);
            let id: Option<ExecutionId> = id.and_then(|id| id.parse().ok());
            if let (Some(id), Some(place)) = (id, place) {
                all.entry(id).or_default().published.push(place);
            }
            if next.pending == 0 || next.seq >= last {
                break;
            }
        }
    }
    Ok(judge(&all))
}

/// Finds messages that are missing, doubled or out of order.
pub fn judge(all: &BTreeMap<ExecutionId, Emitted>) -> Vec<Violation> {
    let mut found = Vec::new();
    for (id, emitted) in all {
        let mut say = |what: String| {
            found.push(Violation::new(Rule::Outbox, &id.to_string(), what));
        };
        for pair in emitted.published.windows(2) {
            if pair[0] >= pair[1] {
                say(format!("published {:?} after {:?}", pair[1], pair[0]));
            }
        }
        let owed: u64 = emitted.counts.iter().sum();
        // The last set may be about to be published.
        let settled = match emitted.counts.split_last() {
            Some((last, _)) if !emitted.is_over => owed - last,
            _ => owed,
        };
        let published = emitted.published.len() as u64;
        if published > owed {
            say(format!(
                "published {published} messages, and emitted {owed}"
            ));
        } else if published < settled {
            say(format!("published {published} of {owed} messages"));
        }
    }
    found
}
