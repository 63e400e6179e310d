//! Each kind of event, and the rows that it leads to.

use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::{Cause, CauseKind, Event, EventKind, Fault, FaultKind, NodeId};
use sqlx::types::Json;

use super::Step;
use super::placements::Placed;
use super::progress::Completed;
use crate::rows::{BatchRow, ChangeRow, EventRow, day_of};

impl Step<'_> {
    /// Records one event. `is_handover`: the message yields and binds the execution anew.
    pub(super) fn record(&mut self, event: Event, is_handover: bool) {
        match event {
            Event::Submitted => self.record_batch(),
            Event::Bound {
                epoch,
                node,
                instance,
                substrate,
                cause,
                decision,
            } => {
                let placed = Placed {
                    epoch,
                    node,
                    instance,
                    substrate,
                    cause,
                };
                self.bind(placed, decision);
            }
            Event::Started {
                epoch,
                computing_since,
            } => self.start(epoch, computing_since),
            Event::Boundary(boundary) => self.commit(boundary),
            Event::Noted { numbers } => self.note_numbers(numbers),
            Event::Emitted { outbox } => {
                let (count, through) = (outbox.count, outbox.through);
                let detail = format!("{count} messages, the last at boundary {through}");
                self.note(EventKind::Emitted, detail);
            }
            Event::Yielded {
                cause,
                computed_until,
            } => self.yield_up(&cause, computed_until, is_handover),
            Event::Refused {
                reason,
                offer,
                fault,
            } => {
                let detail = format!("{reason} (the node offers {offer} slots)");
                self.note_fault(EventKind::Refused, fault.as_deref(), detail);
                self.end_placement("refused");
            }
            Event::Paused { who } => {
                self.note_by(who, EventKind::Paused, |who| format!("paused by {who}"));
                self.end_placement("paused");
            }
            Event::Resumed { who } => {
                self.note_by(who, EventKind::Resumed, |who| format!("resumed by {who}"));
            }
            Event::Requested { who, what } => {
                self.note_by(who, EventKind::Requested, |who| {
                    format!("{what} requested by {who}")
                });
            }
            Event::Reconfigured { who, grant } => {
                let grant = serde_json::to_string(&grant).unwrap_or_default();
                self.note_by(who, EventKind::Reconfigured, |who| {
                    format!("given {grant} by {who}")
                });
            }
            Event::Adjusted { who, change } => self.adjust(who, change),
            Event::Parked {
                cause,
                keep,
                computed_until,
            } => {
                self.tracked.computed_until = Some(computed_until);
                let detail = format!("keeps its {}: {}", keep.as_str(), cause.in_words());
                self.note_cause(EventKind::Parked, &cause, detail);
            }
            Event::Unparked { reason, .. } => self.note(EventKind::Unparked, reason),
            Event::Split {
                part,
                nth,
                from,
                to,
            } => self.split(part, nth, from..to),
            Event::Merged { part } => self.merge(part),
            Event::Returned { to } => {
                let detail =
                    format!("returned to its holder {to}, which computes the remaining tiles");
                self.note(EventKind::Returned, detail);
                self.end_placement("returned");
            }
            Event::Crashed {
                attempt,
                exit,
                stderr,
                backoff_ms,
                fault,
            } => {
                let then = match backoff_ms {
                    0 => "not tried again".to_owned(),
                    ms => format!("tried again after {ms} ms"),
                };
                let detail = format!("crash {attempt} since its last commit: {exit}; {then}");
                self.note_fault(EventKind::Crashed, fault.as_deref(), detail);
                self.columns().stderr_tail = Some(stderr);
            }
            Event::Completed {
                result,
                object,
                computed_until,
                capsules,
                outputs,
                energy,
            } => {
                self.end_computing("completed", computed_until, energy);
                self.complete(Completed {
                    result,
                    object,
                    capsules,
                    outputs,
                });
            }
            Event::Computed {
                computed_until,
                energy,
                ..
            } => {
                // Result and outputs are not for readers before `completed` says them again.
                let detail = "computed to its end; others compute it once more before it counts";
                self.note(EventKind::Computed, detail.to_owned());
                self.end_computing("computed", computed_until, energy);
            }
            Event::Verified { by, segments } => {
                let by: Vec<_> = by.iter().map(NodeId::as_str).collect();
                let by = by.join(", ");
                let detail =
                    format!("computed once more in {segments} parts by {by}, with the same bits");
                self.note(EventKind::Verified, detail);
            }
            Event::SteppedBack { to, cause } => self.step_back(to, &cause),
            Event::Healed { kept, lost, .. } => self.heal(kept, lost),
            Event::Failed {
                reason,
                stderr,
                fault,
            } => self.fail(EventKind::Failed, reason, stderr, fault.as_deref()),
            Event::Held {
                reason,
                stderr,
                fault,
            } => self.fail(EventKind::Held, reason, stderr, fault.as_deref()),
            Event::Retried { who } => self.retry(who),
            Event::Cancelled { who } => {
                self.note_by(who, EventKind::Cancelled, |who| {
                    format!("cancelled by {who}")
                });
                self.end_placement("cancelled");
            }
        }
    }

    /// The batch of a new execution.
    fn record_batch(&mut self) {
        let Some(batch) = self.state.batch else {
            return;
        };
        let (state, first_seen_at) = (self.state, self.stored_at);
        let row = self.rows.batches.entry(batch.id);
        row.or_insert_with(|| {
            let spec = state.spec.as_ref();
            let name = spec.and_then(|s| s.batch.as_ref());
            BatchRow {
                id: batch.id,
                tenant: state.tenant.clone(),
                name: name.map(|name| name.as_str().to_owned()),
                first_seen_at,
            }
        });
    }

    /// Somebody has changed something about a live execution.
    fn adjust(&mut self, who: String, change: Adjustment) {
        self.rows.changes.push(ChangeRow {
            execution: self.state.execution,
            ordinal: self.state.ordinal,
            nth: self.changes,
            at: self.stored_at,
            who: who.clone(),
            change: Json(change.clone()),
        });
        self.changes += 1;
        let change = change.in_words();
        let words = |who: &str| format!("changed by {who}: {change}");
        self.note_by(who, EventKind::Adjusted, words);
    }

    /// Adds a row to `execution_events`, with the placement in force.
    pub(super) fn note(&mut self, kind: EventKind, detail: String) {
        self.add_event(kind, Why::default(), detail);
    }

    /// The same for an event that has a cause.
    pub(super) fn note_cause(&mut self, kind: EventKind, cause: &Cause, detail: String) {
        let fault = match cause {
            Cause::NotTaken { fault, .. } => fault.as_deref(),
            _ => None,
        };
        let why = Why {
            cause: Some(cause.kind()),
            fault: fault.map(Fault::kind),
            who: None,
        };
        self.add_event(kind, why, detail);
    }

    /// The same for an event that tells a fault.
    pub(super) fn note_fault(&mut self, kind: EventKind, fault: Option<&Fault>, detail: String) {
        let why = Why {
            fault: fault.map(Fault::kind),
            ..Why::default()
        };
        self.add_event(kind, why, detail);
    }

    /// The same for an event that somebody asked for.
    pub(super) fn note_by(
        &mut self,
        who: String,
        kind: EventKind,
        words: impl FnOnce(&str) -> String,
    ) {
        let detail = words(&who);
        let why = Why {
            who: Some(who),
            ..Why::default()
        };
        self.add_event(kind, why, detail);
    }

    fn add_event(&mut self, kind: EventKind, why: Why, detail: String) {
        let Why { cause, fault, who } = why;
        let tracked = &*self.tracked;
        self.rows.days.insert(day_of(self.stored_at));
        self.rows.events.push(EventRow {
            execution: self.state.execution,
            ordinal: self.state.ordinal,
            at: self.stored_at,
            kind,
            cause,
            epoch: tracked.epoch,
            node: tracked.node.clone().filter(|_| tracked.open),
            who,
            detail,
            fault,
            fault_owner: fault.map(FaultKind::owner),
        });
    }
}

/// Why an event happened.
#[derive(Default)]
struct Why {
    cause: Option<CauseKind>,
    fault: Option<FaultKind>,
    who: Option<String>,
}
