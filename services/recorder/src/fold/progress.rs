//! The progress of executions: boundaries, steps back, ends.

use fiec_schemas::energy::Energy;
use fiec_schemas::series::{BOUNDARY_LIMIT, Series};
use fiec_schemas::{
    BoundaryEvent, BoundaryIndex, Cause, EventKind, Fault, Ordinal, Output, ResultObject,
    StatePlace, Timestamp,
};
use serde_json::Value;
use sqlx::types::Json;

use super::Step;
use crate::results::ResultRow;
use crate::rows::{BoundaryRow, StepBack, day_of};
use crate::series::PointRow;

/// A completion as its event says it.
pub(super) struct Completed {
    pub result: Value,
    pub object: Option<ResultObject>,
    pub capsules: BoundaryIndex,
    pub outputs: Vec<Output>,
}

impl Step<'_> {
    /// A boundary is committed.
    pub(super) fn commit(&mut self, event: BoundaryEvent) {
        self.tracked.computed_until = Some(event.computed_at);
        self.execution.has_new_boundary = true;
        let columns = self.columns();
        columns.boundary_of = event.of.or(columns.boundary_of);
        columns.progress_note = event.note.clone().or(columns.progress_note.take());
        self.add_energy(event.energy);
        self.rows.days.insert(day_of(self.stored_at));
        self.rows.boundaries.push(BoundaryRow {
            execution: self.state.execution,
            index: event.index,
            epoch: self.tracked.epoch,
            node: self.tracked.node.clone(),
            digest: event.digest,
            bytes: event.bytes,
            computed_at: event.computed_at,
            committed_at: self.stored_at,
            compute_us: event.compute_us,
            seq: self.seq,
            ordinal: self.state.ordinal,
            note: event.note,
            outputs: (!event.outputs.is_empty()).then_some(Json(event.outputs)),
            host_uj: event.energy.and_then(|energy| energy.host_uj),
            device_uj: event.energy.and_then(|energy| energy.device_uj),
        });
    }

    /// The program has reported numbers.
    pub(super) fn note_numbers(&mut self, numbers: Series) {
        let (execution, context) = (self.id(), (self.tracked.epoch, self.stored_at));
        for (name, points) in numbers.0 {
            for point in points {
                // Two of them would be one row.
                if point.boundary > BOUNDARY_LIMIT {
                    continue;
                }
                let row = PointRow::new(execution, &name, point, context);
                let key = (execution, name.clone(), point.boundary);
                self.rows.points.insert(key, row);
            }
        }
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

    pub(super) fn complete(&mut self, completed: Completed) {
        let Completed {
            result,
            object,
            capsules,
            outputs,
        } = completed;
        let columns = self.columns();
        columns.capsules = Some(capsules);
        columns.result = (!result.is_null()).then_some(Json(result));
        columns.outputs = (!outputs.is_empty()).then_some(Json(outputs));
        let execution = self.state.execution;
        let object = object.map(|object| ResultRow::new(execution, object));
        self.rows.results.extend(object);
    }

    /// The execution has failed or is held, as `kind` says.
    pub(super) fn fail(
        &mut self,
        kind: EventKind,
        reason: String,
        stderr: String,
        fault: Option<&Fault>,
    ) {
        self.note_fault(kind, fault, reason.clone());
        self.end_placement(kind.as_str());
        let columns = self.columns();
        columns.failure = Some(reason);
        columns.fault = fault.map(Fault::kind);
        if !stderr.is_empty() {
            columns.stderr_tail = Some(stderr);
        }
    }

    /// The execution starts again: it has not failed any more, and its last state is copied again.
    pub(super) fn retry(&mut self, who: String) {
        self.note_by(who, EventKind::Retried, |who| format!("retried by {who}"));
        self.columns().withdraw_end();
        self.execution.has_new_boundary = true;
        self.rows.retried.push(self.state.execution);
    }

    /// The execution goes on from an earlier boundary, or from its beginning.
    pub(super) fn step_back(&mut self, to: Option<StatePlace>, cause: &Cause) {
        let why = cause.in_words();
        let detail = match &to {
            Some(to) => format!("continues from boundary {}: {why}", to.index),
            None => format!("continues from the beginning: {why}"),
        };
        self.note_cause(EventKind::SteppedBack, cause, detail);
        self.end_placement(cause.as_str());
        self.execution.has_new_boundary = true;
        let to = to.map_or(0, |to| to.index);
        self.rows.repeat(self.state.execution, to);
        self.rows.steps_back.push(StepBack {
            execution: self.state.execution,
            to,
            ordinal: self.state.ordinal,
            at: self.stored_at,
        });
    }

    /// The broker had lost messages of the ledger, and this message takes their place.
    pub(super) fn heal(&mut self, kept: Ordinal, lost: u64) {
        // `fiec repair` has begun it anew from PostgreSQL: no node holds it.
        let is_begun_anew = self.state.phase.binding().is_none();
        let detail = if is_begun_anew {
            format!("the broker had lost its {lost} messages; it restarts from PostgreSQL")
        } else {
            format!(
                "the broker had lost the {lost} messages behind message {kept}; their holder \
                 appended its state again"
            )
        };
        self.note(EventKind::Healed, detail);
        if is_begun_anew {
            self.end_placement("lost");
            self.replace_parts();
        }
    }
}
