//! Ledger messages as this checker reads them: plain JSON, without the product's types.

use std::collections::BTreeMap;

use fiec_broker::feed::FeedItem;
use fiec_schemas::{Digest, Timestamp};
use serde::Deserialize;
use serde_json::Value;

/// A message on a subject of ledgers as the broker stored it.
#[derive(Debug, Clone)]
pub struct Stored {
    pub seq: u64,
    pub stored_at: Timestamp,
    pub tenant: String,
    pub execution: String,
    /// The value of the `Fiec-Event` header.
    pub header: String,
}

impl From<FeedItem> for Stored {
    fn from(item: FeedItem) -> Self {
        Self {
            seq: item.seq,
            stored_at: item.stored_at,
            tenant: item.tenant.to_string(),
            execution: item.execution.to_string(),
            header: item.header,
        }
    }
}

/// The same, read.
#[derive(Debug, Clone)]
pub struct Message {
    pub seq: u64,
    pub stored_at: Timestamp,
    /// Digest of the header in hexadecimal digits.
    pub digest: String,
    pub events: Vec<Value>,
    pub state: State,
}

#[derive(Deserialize)]
struct Header {
    v: u8,
    events: Vec<Value>,
    state: State,
}

/// The state that a message says holds after it: the fields that the rules need.
#[derive(Debug, Clone, Deserialize)]
pub struct State {
    pub execution: String,
    pub tenant: String,
    pub ordinal: u64,
    pub prev: Option<String>,
    pub author: String,
    pub at: Timestamp,
    pub submitted_at: Timestamp,
    pub phase: Phase,
    pub epoch: u64,
    pub boundary: Option<Place>,
    pub batch: Option<Batch>,
    #[serde(default)]
    pub crashes_since_commit: u64,
    #[serde(default)]
    pub totals: Totals,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Phase {
    pub is: String,
    pub node: Option<String>,
    pub instance: Option<String>,
}

impl Phase {
    pub fn is_terminal(&self) -> bool {
        matches!(
            self.is.as_str(),
            "completed" | "failed" | "cancelled" | "returned"
        )
    }
}

/// The last committed boundary, and where its σ is.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Place {
    pub index: u64,
    pub digest: String,
    pub bytes: u64,
    pub seq: Option<u64>,
    pub ordinal: u64,
}

#[derive(Debug, Clone, Deserialize)]
pub struct Batch {
    pub id: String,
    pub line: u32,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Totals {
    pub commits: u64,
    pub state_bytes: u64,
    pub rebindings: u64,
    pub pressure: u64,
    pub crashes: u64,
    pub node_faults: u64,
    pub infrastructure_faults: u64,
    pub compute_us: u64,
    pub steps_back: u64,
}

impl Message {
    /// Reads a stored message.
    ///
    /// # Errors
    /// Says why it is no ledger message of its subject.
    pub fn read(stored: &Stored) -> Result<Self, String> {
        let header: Header = serde_json::from_str(&stored.header)
            .map_err(|error| format!("message {} cannot be read: {error}", stored.seq))?;
        let state = header.state;
        if header.v != 1 {
            return Err(format!("message {} has version {}", stored.seq, header.v));
        }
        if (&state.execution, &state.tenant) != (&stored.execution, &stored.tenant) {
            let (seq, id) = (stored.seq, &state.execution);
            return Err(format!("message {seq} is of {id}, on another subject"));
        }
        Ok(Self {
            seq: stored.seq,
            stored_at: stored.stored_at,
            digest: Digest::of(stored.header.as_bytes()).to_string(),
            events: header.events,
            state,
        })
    }

    pub fn has(&self, kind: &str) -> bool {
        self.events.iter().any(|event| text(event, "type") == kind)
    }
}

/// A field of an event as text; empty where it is absent.
pub fn text<'a>(event: &'a Value, field: &str) -> &'a str {
    event[field].as_str().unwrap_or_default()
}

/// A field of an event as a number; 0 where it is absent.
pub fn number(event: &Value, field: &str) -> u64 {
    event[field].as_u64().unwrap_or_default()
}

/// The messages of each execution, in the order in which they came.
pub fn by_execution(messages: Vec<Message>) -> BTreeMap<String, Vec<Message>> {
    let mut all: BTreeMap<String, Vec<Message>> = BTreeMap::new();
    for message in messages {
        let id = message.state.execution.clone();
        all.entry(id).or_default().push(message);
    }
    all
}
