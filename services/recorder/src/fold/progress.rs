//! What an execution reaches, and how it ends.

use fiec_schemas::energy::Energy;
use fiec_schemas::{BoundaryEvent, BoundaryIndex, Cause, Ordinal, Output, StatePlace, Timestamp};
use serde_json::Value;

use super::Step;
use crate::rows::{BoundaryRow, StepBackRow, day_of, json};

impl Step<'_> {
    /// A boundary is committed.
    pub(super) fn commit(&mut self, event: BoundaryEvent) {
        self.tracked.computed_until = Some(event.computed_at);
        let row = self.row();
        row.state_changed = true;
        row.boundary_of = event.of.or(row.boundary_of);
        row.note = event.note.clone().or(row.note.take());
        self.add_energy(event.energy);
        self.rows.days.insert(day_of(self.stored_at));
        self.rows.boundaries.push(BoundaryRow {
            execution: self.state.execution,
            epoch: self.tracked.epoch,
            node: self.tracked.node.clone(),
            event,
            committed_at: self.stored_at,
            seq: self.seq,
            ordinal: self.state.ordinal,
        });
    }

    /// The last capsule has ended, and the placement with it.
    pub(super) fn end_computing(
        &mut self,
        why: &'static str,
        computed_until: Timestamp,
        energy: Option<Energy>,
    ) {
        self.tracked.computed_until = Some(computed_until);
        self.add_energy(energy);
        self.end_placement(why);
    }

    pub(super) fn complete(&mut self, capsules: BoundaryIndex, result: &Value, outputs: &[Output]) {
        let row = self.row();
        row.capsules = Some(capsules);
        row.result = (!result.is_null()).then(|| json(result));
        row.outputs = (!outputs.is_empty()).then(|| json(&outputs));
    }

    pub(super) fn fail(&mut self, reason: String, stderr: String) {
        self.note("failed", reason.clone());
        self.end_placement("failed");
        let row = self.row();
        row.failure = Some(reason);
        if !stderr.is_empty() {
            row.stderr_tail = Some(stderr);
        }
    }

    /// The execution goes on from an earlier boundary, or from its beginning.
    pub(super) fn step_back(&mut self, to: Option<StatePlace>, cause: &Cause) {
        let why = cause.in_words();
        let detail = match &to {
            Some(to) => format!("goes on from boundary {}: {why}", to.index),
            None => format!("goes on from the beginning: {why}"),
        };
        self.note("stepped_back", detail);
        self.end_placement(cause.as_str());
        self.row().state_changed = true;
        self.rows.steps_back.push(StepBackRow {
            execution: self.state.execution,
            to: to.map_or(0, |to| to.index),
            ordinal: self.state.ordinal,
            at: self.stored_at,
        });
    }

    /// The broker had lost messages of the ledger, and this message takes their place.
    pub(super) fn heal(&mut self, kept: Ordinal, lost: u64) {
        // `fiec repair` has begun it anew from PostgreSQL: no node holds it.
        let is_begun_anew = self.state.phase.binding().is_none();
        let detail = if is_begun_anew {
            format!("the broker had lost its {lost} messages; it begins anew from PostgreSQL")
        } else {
            format!(
                "the broker had lost the {lost} messages behind message {kept}; their holder \
                 appended what they came to"
            )
        };
        self.note("healed", detail);
        if is_begun_anew {
            self.end_placement("lost");
            self.replace_parts();
        }
    }
}
