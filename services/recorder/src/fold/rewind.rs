//! Where a ledger does not go on from what is recorded of it: messages were dropped in between, or the
//! broker has lost them and others stand in their place.

use fiec_schemas::{Epoch, Event, ExecutionState};

use super::{Folder, Place, Tracked, worker_of};
use crate::parts::SplitRow;
use crate::rows::Rewind;

impl Folder {
    /// The ledger has lost what was recorded from this message on, and goes on with this one.
    pub(super) fn rewind(
        &mut self,
        tracked: &mut Tracked,
        events: &[Event],
        state: &ExecutionState,
        place: Place,
    ) {
        let (id, from) = (place.id, state.ordinal);
        let epoch = epoch_before(state, events);
        // Rows of this very batch have not been written yet.
        self.rows
            .boundaries
            .retain(|r| r.execution != id || r.ordinal < from);
        self.rows
            .decisions
            .retain(|r| r.execution != id || r.ordinal < from);
        self.rows
            .events
            .retain(|r| r.execution != id || r.ordinal < from);
        self.rows
            .changes
            .retain(|r| r.execution != id || r.ordinal < from);
        self.rows
            .rebindings
            .retain(|r| r.execution != id || r.epoch <= epoch);
        self.rows
            .placements
            .retain(|r| r.execution != id || r.epoch <= epoch);
        self.placements.clear();
        for (at, row) in self.rows.placements.iter_mut().enumerate() {
            if (row.execution, row.epoch) == (id, epoch) {
                (row.ended_at, row.end_reason) = (None, None);
            }
            self.placements.insert((row.execution, row.epoch), at);
        }
        self.rebindings.clear();
        for (at, row) in self.rows.rebindings.iter().enumerate() {
            self.rebindings.insert((row.execution, row.epoch), at);
        }
        self.rows.rewinds.push(Rewind {
            execution: id,
            from,
            epoch,
            at: place.stored_at,
        });
        *tracked = Tracked {
            ordinal: from.saturating_sub(1),
            epoch,
            ..Tracked::default()
        };
        let binding = state.phase.binding();
        if epoch > 0 {
            // Its placement goes on; where no later binding says otherwise the node is this one.
            let author = worker_of(&state.author).map(|(node, _)| node);
            tracked.node = binding.map(|b| b.node.clone()).or(author);
            tracked.open = true;
        }
    }

    /// After a gap: brings the placement up to what the message takes for granted.
    pub(super) fn bridge(
        &mut self,
        tracked: &mut Tracked,
        events: &[Event],
        state: &ExecutionState,
        place: Place,
    ) {
        let known = state.parts().iter().map(|part| SplitRow {
            holder: place.id,
            part: *part,
            nth: None,
            at: None,
        });
        self.rows.splits.extend(known);
        let epoch = epoch_before(state, events);
        if epoch == tracked.epoch {
            return;
        }
        self.close(tracked, place, "unseen", place.at);
        tracked.epoch = epoch;
        // Only its worker writes while an execution is started.
        let author = worker_of(&state.author);
        let binding = state.phase.binding().filter(|_| epoch == state.epoch);
        let node = binding
            .map(|b| b.node.clone())
            .or(author.map(|(node, _)| node));
        tracked.open = node.is_some();
        tracked.node = node.clone();
        let instance = binding.map(|b| b.instance);
        let row = self.placement(place.id, epoch);
        row.node = node;
        row.instance = instance;
        row.substrate = binding.map(|b| b.substrate.clone());
        row.bound_at = binding.map(|b| b.at);
    }
}

/// The epoch before a message's own bindings.
pub(super) fn epoch_before(state: &ExecutionState, events: &[Event]) -> Epoch {
    let bindings = events.iter().filter(|e| matches!(e, Event::Bound { .. }));
    state.epoch.saturating_sub(bindings.count() as u64)
}

/// True for a message by which a holder appends again what the broker has lost.
pub(super) fn is_healed(events: &[Event]) -> bool {
    events.iter().any(|e| matches!(e, Event::Healed { .. }))
}
