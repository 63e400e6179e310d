//! From ledger messages to rows, without I/O: a batch and what is known of its executions → rows.
//!
//! Both messages of a short execution usually are in one batch and become one row in each table.
//! Messages are keyed by (execution, ordinal). A message at or below the last known ordinal changes
//! nothing. A message beyond the next ordinal shows a gap: the gap is recorded, and the cumulative
//! state of the message bridges it.

mod events;
mod placements;
mod progress;
mod rewind;
mod spread;

use fiec_schemas::{
    Event, ExecutionId, ExecutionState, LedgerMessage, Ordinal, Sequence, Timestamp,
};

use self::rewind::{epoch_before, is_healed};
pub use crate::known::{Known, Message, Tracked};
use crate::rows::{ExecutionRow, MissingRow, Rows};

/// Folds a batch. The messages must be in the stream's order. The caller must have looked up the
/// executions that [`Known::unknown`] names.
pub fn fold(messages: Vec<Message>, known: &mut Known) -> Rows {
    let mut rows = Rows {
        messages: messages.len(),
        ..Rows::default()
    };
    rows.executions.reserve(messages.len() / 2 + 1);
    for message in messages {
        rows.last_seq = rows.last_seq.max(message.seq);
        fold_message(message, &mut rows, known);
    }
    for row in rows.executions.values() {
        if row.finished_at.is_some() {
            known.tracked.remove(&row.id);
            if row.commits > 0 {
                rows.finished.push(row.id);
            }
        } else if let (true, Some(state)) = (row.has_new_boundary, &row.boundary) {
            rows.states.push((row.id, state.clone()));
        }
    }
    rows
}

fn fold_message(message: Message, rows: &mut Rows, known: &mut Known) {
    let Message {
        seq,
        stored_at,
        digest,
        message: LedgerMessage { events, state, .. },
    } = message;
    let is_recorded = known.tracked.contains_key(&state.execution);
    let tracked = known.tracked.entry(state.execution).or_default();
    let is_repeated = state.ordinal <= tracked.ordinal
        && (stored_at <= tracked.stored_at || tracked.digest == Some(digest));
    if is_repeated {
        return;
    }
    let mut step = Step {
        rows: &mut *rows,
        tracked: &mut *tracked,
        state: &state,
        seq,
        stored_at,
        is_recorded,
        changes: 0,
    };
    step.follow_recorded(&events);
    step.tracked.ordinal = state.ordinal;
    step.tracked.seq = seq;
    step.tracked.digest = Some(digest);
    step.tracked.stored_at = stored_at;
    let is_handover = is_handover(&events);
    for event in events {
        step.record(event, is_handover);
    }
    let row = rows.executions.entry(state.execution);
    let row = row.or_insert_with(|| ExecutionRow::new(&state, is_recorded));
    row.update(tracked, state);
}

/// True if the holder binds the execution anew in the message in which it yields.
fn is_handover(events: &[Event]) -> bool {
    let yields = |e: &Event| matches!(e, Event::Yielded { .. });
    let mut rest = events.iter().skip_while(|e| !yields(e));
    rest.any(|e| matches!(e, Event::Bound { .. }))
}

/// One message on its way into the rows.
struct Step<'a> {
    rows: &'a mut Rows,
    /// What was known of the execution before the message, brought up to date event by event.
    tracked: &'a mut Tracked,
    /// The state after the message.
    state: &'a ExecutionState,
    seq: Sequence,
    stored_at: Timestamp,
    /// True if the table has the execution already.
    is_recorded: bool,
    /// Changes of the execution that the message has told so far.
    changes: u32,
}

impl Step<'_> {
    fn id(&self) -> ExecutionId {
        self.state.execution
    }

    /// When the message was written, by the broker's clock as its author measured it.
    fn at(&self) -> Timestamp {
        self.state.at
    }

    /// The execution's own row, one for all of its messages in the batch.
    fn row(&mut self) -> &mut ExecutionRow {
        let (state, is_recorded) = (self.state, self.is_recorded);
        let row = self.rows.executions.entry(state.execution);
        row.or_insert_with(|| ExecutionRow::new(state, is_recorded))
    }

    /// Compares the message with what is recorded before it: withdraws rows of messages that the
    /// broker has lost, and notes messages that were never seen.
    fn follow_recorded(&mut self, events: &[Event]) {
        let ordinal = self.state.ordinal;
        if ordinal <= self.tracked.ordinal {
            // The broker has lost the message that was recorded here, and this one came after it.
            self.rewind(events);
        } else if epoch_before(self.state, events) < self.tracked.epoch {
            // No valid message lowers the epoch: the last binding recorded is void.
            let last = self.tracked.ordinal;
            self.rewind(events);
            self.tracked.ordinal = last;
        }
        let is_healed = is_healed(events);
        let next = self.tracked.ordinal + 1;
        if ordinal > next {
            let reason = match is_healed {
                true => "lost by the broker before it was recorded",
                false => "dropped by the stream's limit before it was recorded, or unreadable",
            };
            self.note_missing(next, ordinal - 1, reason);
            self.bridge(events);
        } else if self.tracked.digest.is_some()
            && self.state.prev != self.tracked.digest
            && !is_healed
        {
            let reason = "does not follow the message recorded before it";
            self.note_missing(ordinal, ordinal, reason);
        }
    }

    fn note_missing(&mut self, first: Ordinal, last: Ordinal, reason: &'static str) {
        self.rows.missing.push(MissingRow {
            execution: self.id(),
            first_missing: first,
            last_missing: last,
            seq: self.seq,
            reason,
            at: self.stored_at,
        });
    }
}
