//! A ledger that does not go on from what is recorded of it: messages in between were dropped, or
//! the broker has lost recorded messages and others stand in their place.

use std::sync::Arc;

use fiec_schemas::{
    Epoch, Event, ExecutionState, Fault, InstanceId, LedgerMessage, NodeId, Phase, Timestamp,
};

use super::{Message, Step};
use crate::known::Tracked;
use crate::rows::{EventColumns, ExecutionRow, Rewind, Rows};

/// The rows of executions that rest after these messages: what is recorded behind them does not count.
/// `at` is when that was found.
pub(crate) fn stand(messages: Vec<Message>, at: Timestamp) -> Rows {
    let mut rows = Rows::default();
    for message in messages {
        let LedgerMessage { events, state, .. } = message.message;
        let state = Arc::unwrap_or_clone(state);
        let columns = how_it_failed(&events, &state);
        rows.rewinds.push(Rewind {
            execution: state.execution,
            from: state.ordinal.saturating_add(1),
            epoch: state.epoch,
            at,
        });
        rows.repeat(state.execution, state.boundary_index());
        let has_ended = state.phase.is_terminal();
        let place = state.boundary.clone();
        match has_ended {
            true => rows.finished.push(state.execution),
            false => rows
                .states
                .extend(place.map(|place| (state.execution, place))),
        }
        let tracked = Tracked {
            ordinal: state.ordinal,
            seq: message.seq,
            digest: message.digest.filter(|_| !has_ended),
            stored_at: message.stored_at,
            epoch: state.epoch,
            ..Tracked::default()
        };
        let row = ExecutionRow::new(false, None, columns, &tracked, state);
        rows.executions.push(row);
    }
    rows
}

/// How an execution has failed that ended so, or is held.
fn how_it_failed(events: &[Event], state: &ExecutionState) -> EventColumns {
    let told = events.iter().rev().find_map(|event| match event {
        Event::Failed {
            reason,
            stderr,
            fault,
        }
        | Event::Held {
            reason,
            stderr,
            fault,
        } => Some((reason, stderr, fault.as_deref().map(Fault::kind))),
        _ => None,
    });
    let mut columns = EventColumns::default();
    match (told, &state.phase) {
        (Some((reason, stderr, fault)), _) => {
            columns.failure = Some(reason.clone());
            columns.stderr_tail = Some(stderr.clone()).filter(|said| !said.is_empty());
            columns.fault = fault;
        }
        // A message that only keeps what would drop out by its age.
        (None, Phase::Held { reason, fault }) => {
            columns.failure = Some(reason.clone());
            columns.fault = *fault;
        }
        (None, _) => {}
    }
    columns
}

impl Step<'_> {
    /// The ledger has lost the recorded messages from this ordinal on, and goes on with this message.
    pub(super) fn rewind(&mut self, events: &[Event]) {
        let (id, from) = (self.id(), self.state.ordinal);
        let epoch = epoch_before(self.state, events);
        // Rows of this very batch have not been written yet.
        let rows = &mut *self.rows;
        rows.boundaries
            .retain(|r| r.execution != id || r.ordinal < from);
        rows.decisions
            .retain(|r| r.execution != id || r.ordinal < from);
        rows.events
            .retain(|r| r.execution != id || r.ordinal < from);
        rows.changes
            .retain(|r| r.execution != id || r.ordinal < from);
        // Numbers belong to their boundary, whichever message says them.
        let noted = events.iter().filter_map(|event| match event {
            Event::Noted { numbers } => numbers.first(),
            _ => None,
        });
        let last = self.state.boundary_index();
        rows.repeat(
            id,
            noted
                .map(|first| first.saturating_sub(1))
                .fold(last, u64::min),
        );
        let stands = |(of, at): &(_, Epoch)| *of != id || *at <= epoch;
        rows.rebindings.retain(|key, _| stands(key));
        rows.placements.retain(|key, _| stands(key));
        if let Some(row) = rows.placements.get_mut(&(id, epoch)) {
            row.withdraw(from);
        }
        rows.rewinds.push(Rewind {
            execution: id,
            from,
            epoch,
            at: self.stored_at,
        });
        if from == 1 {
            // It was submitted again, perhaps with another line.
            self.execution.spec = self.state.spec.clone();
            self.execution.columns = EventColumns::default();
        }
        self.execution.columns.withdraw_end();
        let before = std::mem::take(self.tracked);
        self.tracked.ordinal = from.saturating_sub(1);
        self.tracked.epoch = epoch;
        if epoch > 0 {
            // Its placement goes on. This message may bind the execution to another node.
            let node = before.node.filter(|_| before.epoch == epoch);
            let binding = self.state.phase.binding();
            let binding = binding.filter(|_| epoch == self.state.epoch);
            let author = worker_of(&self.state.author).map(|(node, _)| node);
            let named = binding.map(|b| b.node.clone()).or(author);
            self.tracked.node = node.or(named);
            self.tracked.open = true;
        }
    }

    /// After a gap: brings the placement up to the binding that the message presupposes.
    pub(super) fn bridge(&mut self, events: &[Event]) {
        self.add_parts(None);
        let epoch = epoch_before(self.state, events);
        if epoch == self.tracked.epoch {
            return;
        }
        self.end_placement("unseen");
        self.tracked.epoch = epoch;
        // Only its worker writes while an execution is started.
        let author = worker_of(&self.state.author);
        let binding = self.state.phase.binding();
        let binding = binding.filter(|_| epoch == self.state.epoch);
        let node = binding
            .map(|b| b.node.clone())
            .or(author.map(|(node, _)| node));
        self.tracked.open = node.is_some();
        self.tracked.node = node.clone();
        let row = self.placement(epoch);
        row.node = node;
        row.instance = binding.map(|b| b.instance);
        row.substrate = binding.map(|b| b.substrate.clone());
        row.bound_at = binding.map(|b| b.at);
    }
}

/// The node and instance that an author of a worker's message names.
fn worker_of(author: &str) -> Option<(NodeId, InstanceId)> {
    let (node, instance) = fiec_schemas::author::worker(author)?;
    Some((node.parse().ok()?, instance.parse().ok()?))
}

/// The epoch before a message's own bindings.
pub(super) fn epoch_before(state: &ExecutionState, events: &[Event]) -> Epoch {
    let bindings = events.iter().filter(|e| matches!(e, Event::Bound { .. }));
    state.epoch.saturating_sub(bindings.count() as u64)
}

/// True for a message by which a holder stands in for messages that the broker has lost.
pub(super) fn is_healed(events: &[Event]) -> bool {
    events.iter().any(|e| matches!(e, Event::Healed { .. }))
}
