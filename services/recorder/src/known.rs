//! The state of executions that the fold of their next messages needs.

use std::collections::HashMap;

use fiec_schemas::{
    Digest, Epoch, ExecutionId, ExecutionState, LedgerMessage, NodeId, Ordinal, Sequence, Timestamp,
};

/// A ledger message with its place in the stream.
#[derive(Debug, Clone)]
pub struct Message {
    /// Its sequence.
    pub seq: Sequence,
    /// When the broker stored it.
    pub stored_at: Timestamp,
    /// Digest of its header, which the next message names. It may be left out of one that ends its
    /// execution: no message follows, and the digest is the dearest part of recording a short one.
    pub digest: Option<Digest>,
    /// The message.
    pub message: LedgerMessage,
}

/// The state of an execution that the fold of its next message needs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tracked {
    /// Ordinal of its last message.
    pub ordinal: Ordinal,
    /// Sequence of its last message.
    pub seq: Sequence,
    /// Digest of its header; none after a rewind, and after the end.
    pub digest: Option<Digest>,
    /// When the broker stored it.
    pub stored_at: Timestamp,
    /// The recorded run, if it has ended.
    pub ended: Option<EndedRun>,
    /// Epoch of its last binding.
    pub epoch: Epoch,
    /// Node of its last binding.
    pub node: Option<NodeId>,
    /// True while that binding is in force.
    pub open: bool,
    /// When it last yielded.
    pub yielded_at: Option<Timestamp>,
    /// When its last capsule ended, if that is known.
    pub computed_until: Option<Timestamp>,
}

impl Tracked {
    /// True if this is the last recorded message, as it was appended.
    pub(crate) fn is_last(&self, state: &ExecutionState, digest: Option<Digest>) -> bool {
        match &self.ended {
            Some(ended) => {
                self.ordinal == state.ordinal
                    && (ended.submitted_at, ended.at) == (state.submitted_at, state.at)
            }
            None => digest.is_some() && self.digest == digest,
        }
    }
}

/// A recorded run that has ended: no message of another run changes its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndedRun {
    /// When it was submitted. Another run under the same id was submitted at another time.
    pub submitted_at: Timestamp,
    /// When it ended, as its last message says.
    pub at: Timestamp,
    /// True if a gap states another run.
    pub is_followed: bool,
}

impl EndedRun {
    /// A run without another one behind it.
    pub fn new(submitted_at: Timestamp, at: Timestamp) -> Self {
        Self {
            submitted_at,
            at,
            is_followed: false,
        }
    }
}

/// The tracked state of live executions: a cache of the table.
#[derive(Debug, Default)]
pub struct Known {
    pub(crate) tracked: HashMap<ExecutionId, Tracked>,
}

impl Known {
    /// Executions of these messages that must be looked up before the fold. An execution whose first
    /// message is here is normally not in the table; `careful` looks it up all the same.
    pub fn unknown(&self, messages: &[Message], careful: bool) -> Vec<ExecutionId> {
        let mut first = HashMap::new();
        for m in messages {
            let state = &m.message.state;
            if !self.tracked.contains_key(&state.execution) {
                first.entry(state.execution).or_insert(state.ordinal);
            }
        }
        first.retain(|_, ordinal| careful || *ordinal > 1);
        first.into_keys().collect()
    }

    /// Takes over the state that the table has.
    pub fn learn(&mut self, id: ExecutionId, tracked: Tracked) {
        self.tracked.insert(id, tracked);
    }

    /// Number of executions.
    pub fn len(&self) -> usize {
        self.tracked.len()
    }

    /// True if no execution is tracked.
    pub fn is_empty(&self) -> bool {
        self.tracked.is_empty()
    }

    /// Forgets executions whose last message is in the table, so that memory stays bounded.
    pub fn forget_up_to(&mut self, written: Sequence) {
        self.tracked.retain(|_, t| t.seq > written);
    }
}
