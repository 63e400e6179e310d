//! Parts of a range of tiles: split off, taken back, replaced.

use std::ops::Range;

use fiec_schemas::{EventKind, ExecutionId, Timestamp};

use super::Step;
use crate::parts::{DroppedParts, MergedPart, SplitRow};

impl Step<'_> {
    pub(super) fn split(&mut self, part: ExecutionId, nth: u32, tiles: Range<u64>) {
        let Range {
            start: from,
            end: to,
        } = tiles;
        let detail = format!("tiles {from} to {to} are part {part}");
        self.note(EventKind::Split, detail);
        self.rows.splits.push(SplitRow {
            part,
            holder: self.state.execution,
            nth: Some(nth.into()),
            from_tile: from,
            to_tile: to,
            split_at: Some(self.stored_at),
        });
    }

    pub(super) fn merge(&mut self, part: ExecutionId) {
        let detail = format!("merged part {part}");
        self.note(EventKind::Merged, detail);
        let at = self.stored_at;
        self.rows.merges.push(MergedPart { part, at });
    }

    /// The parts of a holder whose ledger was begun anew: other ones than it had.
    pub(super) fn replace_parts(&mut self) {
        if self.state.spread.is_none() {
            return;
        }
        let parts = self.state.parts();
        self.rows.drops.push(DroppedParts {
            holder: self.id(),
            kept: parts.iter().map(|part| part.id).collect(),
            at: self.stored_at,
        });
        self.add_parts(Some(self.stored_at));
    }

    /// The parts that the state names. `split_at`: when they were split off, if that is known.
    pub(super) fn add_parts(&mut self, split_at: Option<Timestamp>) {
        let holder = self.id();
        let parts = self.state.parts();
        self.rows.splits.extend(parts.iter().map(|part| SplitRow {
            part: part.id,
            holder,
            nth: None,
            from_tile: part.from,
            to_tile: part.to,
            split_at,
        }));
    }
}
