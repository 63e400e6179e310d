//! Parts of a range of tiles: split off, taken back, replaced.

use std::ops::Range;

use fiec_schemas::ExecutionId;
use fiec_schemas::spread::Part;

use super::Step;
use crate::parts::{DropRow, MergeRow, SplitRow};

impl Step<'_> {
    pub(super) fn split(&mut self, part: ExecutionId, nth: u32, tiles: Range<u64>) {
        let Range {
            start: from,
            end: to,
        } = tiles;
        let detail = format!("tiles {from} to {to} are part {part}");
        self.note("split", detail);
        self.rows.splits.push(SplitRow {
            holder: self.state.execution,
            part: Part { id: part, from, to },
            nth: Some(nth),
            at: Some(self.stored_at),
        });
    }

    pub(super) fn merge(&mut self, part: ExecutionId) {
        let detail = format!("has taken what part {part} has done");
        self.note("merged", detail);
        let at = self.stored_at;
        self.rows.merges.push(MergeRow { part, at });
    }

    /// The parts of a holder whose ledger was begun anew: other ones than it had.
    pub(super) fn replace_parts(&mut self) {
        if self.state.spread.is_none() {
            return;
        }
        let parts = self.state.parts();
        self.rows.drops.push(DropRow {
            holder: self.id(),
            kept: parts.iter().map(|part| part.id).collect(),
            at: self.stored_at,
        });
        self.add_parts(Some(self.stored_at));
    }

    /// The parts that the state names. `at`: when they were split off, if that is known.
    pub(super) fn add_parts(&mut self, at: Option<fiec_schemas::Timestamp>) {
        let holder = self.id();
        let parts = self.state.parts();
        self.rows.splits.extend(parts.iter().map(|part| SplitRow {
            holder,
            part: *part,
            nth: None,
            at,
        }));
    }
}
