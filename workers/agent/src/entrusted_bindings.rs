//! First bindings that the policy service entrusted to this node. The node computes at once. Its
//! first message begins the ledger: it holds the binding's events and the node's own.
//!
//! The policy service appends the same binding if it sees no message of the node in time. Then the
//! node's message loses the compare-and-set. The node recognises the binding by its digest, and
//! appends its own events after it. Any other message there means that another node holds the
//! execution. `services/policy-service/src/core/first_appends` has a picture of both roads.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fiec_broker::{AppendError, Draft, Tip};
use fiec_schemas::{Digest, Entrusted, Event, LedgerMessage, Timestamp};
use tokio::sync::oneshot;

use crate::job::{Job, Live, Start, Stored};
use crate::runner::Runner;
use crate::shared::{Shared, enqueue};

/// A binding older than this is not appended here: a deleted ledger must not begin again. The
/// stream keeps the last message of each ledger for weeks, and clocks differ by less.
const APPENDED_WITHIN: Duration = Duration::from_secs(3_600);

/// Number of events of a first binding: `submitted` and `bound`.
pub const BINDING_EVENTS: usize = 2;

/// A first binding that this node may append.
#[derive(Debug)]
pub struct EntrustedBinding {
    /// Its [`BINDING_EVENTS`] events.
    events: Vec<Event>,
    /// Time of the policy service's decision.
    at: Timestamp,
    /// Its sequence, if the policy service appended it.
    confirmed: oneshot::Receiver<Stored>,
}

impl EntrustedBinding {
    /// Its sequence, if a capsule message said that the policy service appended it.
    pub fn confirmed(&mut self) -> Option<Stored> {
        self.confirmed.try_recv().ok()
    }

    /// True if this node may not append it any more.
    pub fn is_too_old(&self, now: Timestamp) -> bool {
        let age = now.micros().abs_diff(self.at.micros());
        u128::from(age) > APPENDED_WITHIN.as_micros()
    }
}

/// Queues the bindings of a message, one a line.
pub fn queue_bindings(shared: &Arc<Shared>, body: &Bytes) {
    let Ok(text) = std::str::from_utf8(body) else {
        tracing::warn!("bindings that are no text were dropped");
        return;
    };
    for line in text.lines() {
        // Dropped without an answer: the policy service appends it, and it is refused then.
        if shared.is_draining() || shared.queued() >= shared.options.queue {
            return;
        }
        queue_binding(shared, line);
    }
}

fn queue_binding(shared: &Arc<Shared>, text: &str) {
    let LedgerMessage {
        mut events, state, ..
    } = match LedgerMessage::decode(text, 0) {
        Ok(message) => message,
        Err(error) => {
            tracing::warn!(%error, "a binding that cannot be read was dropped");
            return;
        }
    };
    let (execution, epoch) = (state.execution, state.epoch);
    let mine = shared.is_bound_here(&state);
    let first = state.ordinal == 1 && epoch == 1 && state.boundary.is_none();
    let binds = matches!(
        &events[..],
        [Event::Submitted, Event::Bound { epoch: 1, node, instance, .. }]
            if *instance == shared.instance && *node == *shared.node()
    );
    if !mine || !first || !binds || state.spec.is_none() {
        tracing::warn!(%execution, epoch, node = %shared.node(), "a binding that is no first one of this node was dropped");
        return;
    }
    if let Some(Event::Bound {
        decision: Some(decision),
        ..
    }) = events.last_mut()
    {
        decision.entrusted = Some(Entrusted {
            by: state.author.clone(),
            at: state.at,
        });
    }
    let digest = Digest::of(text.as_bytes());
    let (confirm, confirmed) = oneshot::channel();
    let (entry, control) = Live::new(&state, (0, digest), Some(confirm));
    let progress = entry.progress.clone();
    let mut live = shared.live();
    // A drain orders the executions that live here by then, and comes only once.
    if shared.is_draining() || live.contains_key(&execution) {
        return;
    }
    live.insert(execution, entry);
    drop(live);
    let binding = EntrustedBinding {
        events,
        at: state.at,
        confirmed,
    };
    let tip = Tip {
        seq: 0,
        digest: Some(digest),
        state,
        seen_in: 0,
    };
    let job = Job {
        start: Start::Entrusted(Box::new(tip), Box::new(binding)),
        ack: None,
        control,
        progress,
    };
    enqueue(shared, job);
}

impl Runner {
    /// Makes the draft of these events. An entrusted binding that nobody appended yet goes into the
    /// same message.
    ///
    /// # Errors
    /// When the state does not allow the events, or the message would be too large.
    pub(crate) fn draft(&mut self, events: Vec<Event>) -> Result<Draft, AppendError> {
        let (author, now) = (&self.shared.author, self.shared.broker.now());
        let Some(mut binding) = self.entrusted.take() else {
            return Draft::new(&self.tip, events, author, now);
        };
        if let Some(stored) = binding.confirmed() {
            stored.complete(&mut self.tip);
            return Draft::new(&self.tip, events, author, now);
        }
        let mut all = std::mem::take(&mut binding.events);
        all.extend(events);
        match Draft::first(&self.tip.state, all, BINDING_EVENTS, author, now) {
            Ok(draft) => Ok(draft),
            Err((error, mut all)) => {
                // The next message, which states the reason, carries the binding instead.
                all.truncate(BINDING_EVENTS);
                binding.events = all;
                self.entrusted = Some(binding);
                Err(error)
            }
        }
    }
}
