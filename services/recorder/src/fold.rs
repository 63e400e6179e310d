//! Folds ledger messages into rows, without I/O.
//!
//! Both messages of a short execution usually are in one batch and become one row in each table.
//! Messages are keyed by (execution, ordinal). A message at or below the last known ordinal changes
//! nothing. A message beyond the next ordinal shows a gap: the gap is recorded, and the cumulative
//! state of the message bridges it.
//!
//! The rows of an execution that has ended never change again for another run under its id. Such a
//! run begins when a submission is sent again after the ledger has dropped out of the stream. One
//! gap states it.

mod events;
mod placements;
mod progress;
mod rewind;
mod spread;

use std::sync::Arc;

use fiec_schemas::{
    Event, ExecutionId, ExecutionState, LedgerMessage, Ordinal, Sequence, Submission, Timestamp,
};
use indexmap::IndexMap;

pub(crate) use self::rewind::stand;
use self::rewind::{epoch_before, is_healed};
pub use crate::known::{EndedRun, Known, Message, Tracked};
use crate::rows::{EventColumns, ExecutionRow, MissingRow, Rows};

/// The reason of a gap behind an execution that had ended.
pub const SECOND_RUN: &str = "a second run under the id of an execution that had ended";

/// An execution of which the batch has messages.
struct Folded {
    /// True if the table cannot hold it yet.
    is_new: bool,
    /// Its submission, unless the table has it.
    spec: Option<Arc<Submission>>,
    columns: EventColumns,
    /// True if a message of the batch has set the last boundary.
    has_new_boundary: bool,
    /// The state after its last message.
    state: Option<Arc<ExecutionState>>,
}

impl Folded {
    /// One that the table has.
    fn known() -> Self {
        Self {
            is_new: false,
            spec: None,
            columns: EventColumns::default(),
            has_new_boundary: false,
            state: None,
        }
    }
}

/// Folds a batch. The messages must be in the stream's order. The caller must have looked up the
/// executions that [`Known::unknown`] names.
pub fn fold(messages: Vec<Message>, known: &mut Known) -> Rows {
    let mut rows = Rows {
        messages: messages.len(),
        ..Rows::default()
    };
    // Most messages are of short executions: one or two each, with one binding.
    let likely = messages.len() / 2 + 1;
    let mut executions = IndexMap::with_capacity(likely);
    rows.placements.reserve(likely);
    rows.decisions.reserve(likely);
    for message in messages {
        rows.last_seq = rows.last_seq.max(message.seq);
        fold_message(message, &mut rows, &mut executions, known);
    }
    rows.executions.reserve(executions.len());
    for (id, folded) in executions {
        let Some((state, tracked)) = folded.state.zip(known.tracked.get(&id)) else {
            continue;
        };
        let place = state.boundary.clone().filter(|_| folded.has_new_boundary);
        let row = ExecutionRow::new(
            folded.is_new,
            folded.spec,
            folded.columns,
            tracked,
            Arc::unwrap_or_clone(state),
        );
        if row.finished_at.is_some() {
            // A retry may follow before this batch is written, so the table cannot be asked yet.
            if !row.phase.can_be_retried() {
                known.tracked.remove(&id);
            }
            if row.commits > 0 {
                rows.finished.push(id);
            }
        } else {
            rows.states.extend(place.map(|place| (id, place)));
        }
        rows.executions.push(row);
    }
    rows
}

fn fold_message(
    message: Message,
    rows: &mut Rows,
    executions: &mut IndexMap<ExecutionId, Folded>,
    known: &mut Known,
) {
    let Message {
        seq,
        stored_at,
        digest,
        message: LedgerMessage { events, state, .. },
    } = message;
    let is_recorded = known.tracked.contains_key(&state.execution);
    let tracked = known.tracked.entry(state.execution).or_default();
    let is_last = tracked.is_last(&state, digest);
    let is_repeated =
        state.ordinal <= tracked.ordinal && (stored_at <= tracked.stored_at || is_last);
    if is_repeated {
        // The broker had lost it, and its author appended it again as it was.
        let is_moved = is_last && stored_at > tracked.stored_at;
        if is_moved && seq != tracked.seq {
            (tracked.seq, tracked.stored_at) = (seq, stored_at);
            let execution = executions.entry(state.execution);
            execution.or_insert_with(Folded::known).state = Some(state);
        }
        return;
    }
    // The broker may have lost the end of the same run: then that run goes on, and is recorded.
    if let Some(ended) = &mut tracked.ended
        && ended.submitted_at != state.submitted_at
    {
        if !std::mem::replace(&mut ended.is_followed, true) {
            rows.missing.push(MissingRow {
                execution: state.execution,
                first_missing: 1,
                last_missing: state.ordinal,
                seq,
                reason: SECOND_RUN,
                at: stored_at,
            });
        }
        return;
    }
    let execution = executions.entry(state.execution);
    let execution = execution.or_insert_with(|| Folded {
        is_new: !is_recorded && state.ordinal == 1,
        // Every message of a live execution has the submission; the table needs it once.
        spec: state.spec.clone().filter(|_| !is_recorded),
        ..Folded::known()
    });
    let mut step = Step {
        rows,
        execution,
        tracked,
        state: &state,
        seq,
        stored_at,
        changes: 0,
    };
    step.follow_recorded(&events);
    step.tracked.ordinal = state.ordinal;
    step.tracked.seq = seq;
    let has_ended = state.phase.is_terminal();
    step.tracked.digest = digest.filter(|_| !has_ended);
    step.tracked.stored_at = stored_at;
    step.tracked.ended = has_ended.then(|| EndedRun::new(state.submitted_at, state.at));
    let is_handover = is_handover(&events);
    for event in events {
        step.record(event, is_handover);
    }
    execution.state = Some(state);
}

/// An execution as it is before a message, as far as the message itself says so.
pub(crate) fn before(message: &LedgerMessage) -> Tracked {
    Tracked {
        ordinal: message.state.ordinal.saturating_sub(1),
        epoch: epoch_before(&message.state, &message.events),
        ..Tracked::default()
    }
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
    execution: &'a mut Folded,
    /// The execution as it is known before the message; each event brings it up to date.
    tracked: &'a mut Tracked,
    /// The state after the message.
    state: &'a ExecutionState,
    seq: Sequence,
    stored_at: Timestamp,
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

    /// The columns of the execution's own row that events give.
    fn columns(&mut self) -> &mut EventColumns {
        &mut self.execution.columns
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
