//! From ledger messages to rows, without I/O: a batch and what is known of its executions → rows.
//!
//! Both messages of a short execution usually are in one batch and become one row in each table.
//! Messages are keyed by (execution, ordinal): one at or below the last ordinal known changes
//! nothing, one beyond the next shows a gap, which is stated and bridged by the cumulative state.

mod rewind;

use std::collections::HashMap;

use fiec_schemas::energy::Energy;
use fiec_schemas::spread::Part;
use fiec_schemas::{
    Cause, Decision, Epoch, Event, ExecutionId, ExecutionState, InstanceId, LedgerMessage, NodeId,
    Ordinal, Phase, Sequence, Timestamp,
};

use self::rewind::{epoch_before, is_healed};
use crate::changes;
pub use crate::known::{Known, Message, Tracked};
use crate::parts::{DropRow, MergeRow, SplitRow};
use crate::results;
use crate::rows::{
    BatchRow, BoundaryRow, DecisionRow, EventRow, ExecutionRow, MissingRow, PlacementRow,
    RebindingRow, Rows, StepBackRow, blank, day_of, json, no_placement,
};

/// Folds a batch. The messages must be in the stream's order, and what [`Known::unknown`] named
/// must have been learned where the table has it.
pub fn fold(messages: Vec<Message>, known: &mut Known) -> Rows {
    let mut folder = Folder {
        rows: Rows {
            messages: messages.len(),
            ..Rows::default()
        },
        executions: HashMap::with_capacity(messages.len()),
        placements: HashMap::new(),
        rebindings: HashMap::new(),
    };
    folder.rows.executions.reserve(messages.len() / 2 + 1);
    for message in messages {
        folder.rows.last_seq = folder.rows.last_seq.max(message.seq);
        folder.message(message, known);
    }
    let mut rows = folder.rows;
    for row in &rows.executions {
        if row.finished_at.is_some() {
            known.tracked.remove(&row.id);
            if row.totals.commits > 0 {
                rows.finished.push(row.id);
            }
        } else if let (true, Some(state)) = (row.state_changed, &row.boundary) {
            rows.states.push((row.id, state.clone()));
        }
    }
    rows
}

struct Folder {
    rows: Rows,
    executions: HashMap<ExecutionId, usize>,
    placements: HashMap<(ExecutionId, Epoch), usize>,
    rebindings: HashMap<(ExecutionId, Epoch), usize>,
}

/// A message's place, for every row that it leads to.
#[derive(Clone, Copy)]
struct Place {
    id: ExecutionId,
    seq: Sequence,
    ordinal: Ordinal,
    stored_at: Timestamp,
    /// By the broker's clock, as its author measured it.
    at: Timestamp,
}

impl Folder {
    fn message(&mut self, m: Message, known: &mut Known) {
        let Message {
            seq,
            stored_at,
            digest,
            message: LedgerMessage { events, state, .. },
        } = m;
        let place = Place {
            id: state.execution,
            seq,
            ordinal: state.ordinal,
            stored_at,
            at: state.at,
        };
        let in_table = known.tracked.contains_key(&place.id);
        let tracked = known.tracked.entry(place.id).or_default();
        if state.ordinal <= tracked.ordinal {
            // Read once more, unless the broker has lost what was recorded here and this came after.
            if stored_at <= tracked.stored_at || tracked.digest == Some(digest) {
                return;
            }
            self.rewind(tracked, &events, &state, place);
        } else if epoch_before(&state, &events) < tracked.epoch {
            // No valid message lowers the epoch: the last binding recorded is void.
            let ordinal = tracked.ordinal;
            self.rewind(tracked, &events, &state, place);
            tracked.ordinal = ordinal;
        }
        if state.ordinal > tracked.ordinal + 1 {
            self.rows.missing.push(MissingRow {
                execution: place.id,
                first: tracked.ordinal + 1,
                last: state.ordinal - 1,
                seq,
                reason: match is_healed(&events) {
                    true => "lost by the broker before it was recorded",
                    false => "dropped by the stream's limit before it was recorded, or unreadable",
                },
                at: stored_at,
            });
            self.bridge(tracked, &events, &state, place);
        } else if tracked.digest.is_some() && state.prev != tracked.digest && !is_healed(&events) {
            self.rows.missing.push(MissingRow {
                execution: place.id,
                first: state.ordinal,
                last: state.ordinal,
                seq,
                reason: "does not follow the message recorded before it",
                at: stored_at,
            });
        }
        tracked.ordinal = state.ordinal;
        tracked.seq = seq;
        tracked.digest = Some(digest);
        tracked.stored_at = stored_at;
        let index = *self.executions.entry(place.id).or_insert_with(|| {
            self.rows.executions.push(blank(&state, in_table));
            self.rows.executions.len() - 1
        });
        let changed = changes::of(place.id, place.ordinal, stored_at, &events);
        self.rows.changes.extend(changed);
        self.rows.results.extend(results::of(place.id, &events));
        let yields = |e: &Event| matches!(e, Event::Yielded { .. });
        let mut behind = events.iter().skip_while(|e| !yields(e));
        let handover = behind.any(|e| matches!(e, Event::Bound { .. }));
        for event in events {
            self.event(event, index, tracked, &state, place, handover);
        }
        settle(&mut self.rows.executions[index], tracked, state);
    }

    fn event(
        &mut self,
        event: Event,
        index: usize,
        tracked: &mut Tracked,
        state: &ExecutionState,
        place: Place,
        handover: bool,
    ) {
        match event {
            Event::Submitted => {
                if let Some(batch) = state.batch {
                    let known = self
                        .rows
                        .batches
                        .iter()
                        .rev()
                        .take(64)
                        .any(|b| b.id == batch.id);
                    if !known {
                        self.rows.batches.push(BatchRow {
                            id: batch.id,
                            tenant: state.tenant.clone(),
                            name: state
                                .spec
                                .as_ref()
                                .and_then(|s| s.batch.as_ref())
                                .map(|name| name.as_str().to_owned()),
                            first_seen_at: place.stored_at,
                        });
                    }
                }
            }
            Event::Bound {
                epoch,
                node,
                instance,
                substrate,
                cause,
                decision,
            } => {
                let entrusted = decision.as_ref().and_then(|d| d.entrusted.as_ref());
                let at = entrusted.map_or(place.at, |e| e.at);
                let place = Place { at, ..place };
                self.close(tracked, place, cause.as_str(), at);
                if let Some(decision) = decision {
                    self.decision(place, epoch, &cause, &node, decision);
                }
                self.bound(
                    tracked,
                    state,
                    place,
                    epoch,
                    (&node, instance, &substrate),
                    cause,
                );
                tracked.epoch = epoch;
                tracked.node = Some(node);
                tracked.open = true;
                self.rows.executions[index].substrate = Some(substrate);
            }
            Event::Started {
                epoch,
                computing_since,
            } => {
                self.started(tracked, place, epoch, computing_since);
                let row = &mut self.rows.executions[index];
                row.first_started_at = row.first_started_at.or(Some(place.at));
            }
            Event::Boundary(event) => {
                tracked.computed_until = Some(event.computed_at);
                let row = &mut self.rows.executions[index];
                row.state_changed = true;
                row.boundary_of = event.of.or(row.boundary_of);
                row.note = event.note.clone().or(row.note.take());
                self.used(tracked, place, event.energy);
                self.rows.days.insert(day_of(place.stored_at));
                self.rows.boundaries.push(BoundaryRow {
                    execution: place.id,
                    epoch: tracked.epoch,
                    node: tracked.node.clone(),
                    event,
                    committed_at: place.stored_at,
                    seq: place.seq,
                    ordinal: place.ordinal,
                });
            }
            Event::Yielded {
                cause,
                computed_until,
            } => {
                tracked.computed_until = Some(computed_until);
                tracked.yielded_at = Some(place.at);
                // In a handover the rebinding's row says all of it.
                if !handover {
                    self.happened(place, tracked, "yielded", None, cause.in_words());
                }
                self.close(tracked, place, cause.as_str(), place.at);
            }
            Event::Healed { kept, lost, .. } => {
                // `fiec repair` has begun it anew from here: nobody holds it.
                let is_anew = state.phase.binding().is_none();
                let detail = if is_anew {
                    format!(
                        "the broker had lost its {lost} messages; it begins anew from PostgreSQL"
                    )
                } else {
                    format!(
                        "the broker had lost the {lost} messages behind message {kept}; their \
                         holder appended what they came to"
                    )
                };
                self.happened(place, tracked, "healed", None, detail);
                if is_anew {
                    self.close(tracked, place, "lost", place.at);
                    self.parts_anew(state, place);
                }
            }
            Event::Refused { reason, offer } => {
                let detail = format!("{reason} (the node offers {offer} slots)");
                self.happened(place, tracked, "refused", None, detail);
                self.close(tracked, place, "refused", place.at);
            }
            Event::Paused { who } => {
                let detail = format!("paused by {who}");
                self.happened(place, tracked, "paused", Some(who), detail);
                self.close(tracked, place, "paused", place.at);
            }
            Event::Resumed { who } => {
                let detail = format!("resumed by {who}");
                self.happened(place, tracked, "resumed", Some(who), detail);
            }
            Event::Requested { who, what } => {
                let detail = format!("{what} asked for by {who}");
                self.happened(place, tracked, "requested", Some(who), detail);
            }
            Event::Reconfigured { who, grant } => {
                let grant = serde_json::to_string(&grant).unwrap_or_default();
                let detail = format!("given {grant} by {who}");
                self.happened(place, tracked, "reconfigured", Some(who), detail);
            }
            Event::Adjusted { who, change } => {
                let detail = format!("changed by {who}: {}", change.in_words());
                self.happened(place, tracked, "adjusted", Some(who), detail);
            }
            Event::Parked {
                cause,
                keep,
                computed_until,
            } => {
                tracked.computed_until = Some(computed_until);
                let detail = format!("keeps its {}: {}", keep.as_str(), cause.in_words());
                self.happened(place, tracked, "parked", None, detail);
            }
            Event::Unparked { reason, .. } => {
                self.happened(place, tracked, "unparked", None, reason);
            }
            Event::Split {
                part,
                nth,
                from,
                to,
            } => {
                let detail = format!("tiles {from} to {to} are part {part}");
                self.happened(place, tracked, "split", None, detail);
                self.rows.splits.push(SplitRow {
                    holder: place.id,
                    part: Part { id: part, from, to },
                    nth: Some(nth),
                    at: Some(place.stored_at),
                });
            }
            Event::Merged { part } => {
                let detail = format!("has taken what part {part} has done");
                self.happened(place, tracked, "merged", None, detail);
                let at = place.stored_at;
                self.rows.merges.push(MergeRow { part, at });
            }
            Event::Returned { to } => {
                let detail = format!("what is left is done by its holder, {to}");
                self.happened(place, tracked, "returned", None, detail);
                self.close(tracked, place, "returned", place.at);
            }
            Event::Emitted { outbox } => {
                let count = outbox.count;
                let detail = format!("{count} messages, the last at boundary {}", outbox.through);
                self.happened(place, tracked, "emitted", None, detail);
            }
            Event::Crashed {
                attempt,
                exit,
                stderr,
                backoff_ms,
            } => {
                let detail = format!("crash {attempt}: {exit}; tried again after {backoff_ms} ms");
                self.happened(place, tracked, "crashed", None, detail);
                self.rows.executions[index].stderr_tail = Some(stderr);
            }
            Event::Completed {
                result,
                computed_until,
                capsules,
                outputs,
                energy,
                ..
            } => {
                tracked.computed_until = Some(computed_until);
                self.used(tracked, place, energy);
                self.close(tracked, place, "completed", place.at);
                let row = &mut self.rows.executions[index];
                row.capsules = Some(capsules);
                row.result = (!result.is_null()).then(|| json(&result));
                row.outputs = (!outputs.is_empty()).then(|| json(&outputs));
            }
            Event::Computed {
                computed_until,
                energy,
                ..
            } => {
                // Result and outputs are not for readers before `completed` says them again.
                tracked.computed_until = Some(computed_until);
                self.used(tracked, place, energy);
                let detail = "computed to its end; others compute it once more before it counts";
                self.happened(place, tracked, "computed", None, detail.to_owned());
                self.close(tracked, place, "computed", place.at);
            }
            Event::Verified { by, segments } => {
                let by: Vec<_> = by.iter().map(NodeId::as_str).collect();
                let detail = format!(
                    "computed once more in {segments} parts by {}, with the same bits",
                    by.join(", ")
                );
                self.happened(place, tracked, "verified", None, detail);
            }
            Event::SteppedBack { to, cause } => {
                let detail = match &to {
                    Some(to) => format!("goes on from boundary {}: {}", to.index, cause.in_words()),
                    None => format!("goes on from the beginning: {}", cause.in_words()),
                };
                self.happened(place, tracked, "stepped_back", None, detail);
                self.close(tracked, place, cause.as_str(), place.at);
                self.rows.executions[index].state_changed = true;
                self.rows.steps_back.push(StepBackRow {
                    execution: place.id,
                    to: to.map_or(0, |to| to.index),
                    ordinal: place.ordinal,
                    at: place.stored_at,
                });
            }
            Event::Failed { reason, stderr } => {
                self.happened(place, tracked, "failed", None, reason.clone());
                self.close(tracked, place, "failed", place.at);
                let row = &mut self.rows.executions[index];
                row.failure = Some(reason);
                if !stderr.is_empty() {
                    row.stderr_tail = Some(stderr);
                }
            }
            Event::Cancelled { who } => {
                let detail = format!("cancelled by {who}");
                self.happened(place, tracked, "cancelled", Some(who), detail);
                self.close(tracked, place, "cancelled", place.at);
            }
        }
    }

    /// The parts of a holder whose ledger was begun anew: other ones than it had.
    fn parts_anew(&mut self, state: &ExecutionState, place: Place) {
        if state.spread.is_none() {
            return;
        }
        let parts = state.parts();
        self.rows.drops.push(DropRow {
            holder: place.id,
            kept: parts.iter().map(|part| part.id).collect(),
            at: place.stored_at,
        });
        self.rows.splits.extend(parts.iter().map(|part| SplitRow {
            holder: place.id,
            part: *part,
            nth: None,
            at: Some(place.stored_at),
        }));
    }

    fn bound(
        &mut self,
        tracked: &Tracked,
        state: &ExecutionState,
        place: Place,
        epoch: Epoch,
        (node, instance, substrate): (&NodeId, InstanceId, &str),
        cause: Cause,
    ) {
        let key = (place.id, epoch);
        let known = self.placements.contains_key(&key);
        let row = self.placement(place.id, epoch);
        *row = PlacementRow {
            // A second row of the same key would make PostgreSQL refuse the batch.
            fresh: row.fresh || !known,
            node: Some(node.clone()),
            instance: Some(instance),
            substrate: Some(substrate.to_owned()),
            cause: Some(cause.as_str()),
            bound_at: Some(place.at),
            ..no_placement(place.id, epoch)
        };
        if epoch <= 1 {
            return;
        }
        self.rebindings.insert(key, self.rows.rebindings.len());
        self.rows.rebindings.push(RebindingRow {
            execution: place.id,
            epoch,
            at: place.at,
            from_node: tracked.node.clone(),
            to_node: node.clone(),
            cause: cause.as_str(),
            cause_detail: cause.in_words(),
            state: state.boundary.clone(),
            // A yield of an earlier binding says nothing about a node that fell silent.
            yielded_at: tracked
                .yielded_at
                .filter(|_| !matches!(cause, Cause::Lost { .. } | Cause::NotTaken { .. })),
            evidence: match cause {
                Cause::Pressure { evidence } => Some(evidence),
                _ => None,
            },
            gap_us: None,
        });
    }

    fn started(
        &mut self,
        tracked: &mut Tracked,
        place: Place,
        epoch: Epoch,
        computing_since: Timestamp,
    ) {
        let gap_us = tracked
            .computed_until
            .filter(|_| epoch > 1)
            .map(|until| computing_since.micros().saturating_sub(until.micros()));
        let row = self.placement(place.id, epoch);
        row.started_at = Some(place.at);
        row.computing_since = Some(computing_since);
        row.gap_us = gap_us;
        if let Some(gap_us) = gap_us {
            match self.rebindings.get(&(place.id, epoch)) {
                Some(index) => self.rows.rebindings[*index].gap_us = Some(gap_us),
                None => self.rows.gaps_closed.push((place.id, epoch, gap_us)),
            }
        }
    }

    /// Ends the placement in force, if there is one.
    fn close(&mut self, tracked: &mut Tracked, place: Place, why: &'static str, at: Timestamp) {
        if !std::mem::take(&mut tracked.open) {
            return;
        }
        let computed_until = tracked.computed_until;
        let row = self.placement(place.id, tracked.epoch);
        row.ended_at = Some(at);
        row.end_reason = Some(why);
        // What was computed before this placement's first capsule is not its own. Where that capsule
        // is in an earlier batch, the upsert judges.
        row.computed_until = match row.computing_since {
            Some(since) => computed_until.filter(|until| *until >= since),
            None if row.fresh => None,
            None => computed_until,
        };
    }

    /// Adds what an interval used to the placement in which it lies.
    fn used(&mut self, tracked: &Tracked, place: Place, energy: Option<Energy>) {
        if let Some(energy) = energy {
            let row = self.placement(place.id, tracked.epoch);
            let add = |sum: &mut Option<u64>, uj: Option<u64>| {
                if let Some(uj) = uj {
                    *sum = Some(sum.unwrap_or(0).saturating_add(uj));
                }
            };
            add(&mut row.host_uj, energy.host_uj);
            add(&mut row.device_uj, energy.device_uj);
        }
    }

    fn decision(
        &mut self,
        place: Place,
        epoch: Epoch,
        cause: &Cause,
        chosen: &NodeId,
        decision: Decision,
    ) {
        self.rows.days.insert(day_of(place.stored_at));
        self.rows.decisions.push(DecisionRow {
            execution: place.id,
            epoch,
            ordinal: place.ordinal,
            at: place.stored_at,
            cause: cause.as_str(),
            chosen: chosen.clone(),
            candidates: decision.candidates,
            omitted: decision.omitted,
        });
    }

    fn happened(
        &mut self,
        place: Place,
        tracked: &Tracked,
        kind: &'static str,
        who: Option<String>,
        detail: String,
    ) {
        self.rows.days.insert(day_of(place.stored_at));
        self.rows.events.push(EventRow {
            execution: place.id,
            ordinal: place.ordinal,
            at: place.stored_at,
            kind,
            epoch: tracked.epoch,
            node: tracked.node.clone().filter(|_| tracked.open),
            who,
            detail,
        });
    }

    fn placement(&mut self, id: ExecutionId, epoch: Epoch) -> &mut PlacementRow {
        let rows = &mut self.rows.placements;
        let index = *self.placements.entry((id, epoch)).or_insert_with(|| {
            rows.push(no_placement(id, epoch));
            rows.len() - 1
        });
        &mut rows[index]
    }
}

/// The node and instance that an author of a worker's message names.
fn worker_of(author: &str) -> Option<(NodeId, InstanceId)> {
    let (node, instance) = author.strip_prefix("worker/")?.split_once('/')?;
    Some((node.parse().ok()?, instance.parse().ok()?))
}

/// Puts the cumulative state into the row; what only events say was put there before.
fn settle(row: &mut ExecutionRow, tracked: &Tracked, state: ExecutionState) {
    row.phase = state.phase.as_str();
    row.node.clone_from(&tracked.node);
    row.epoch = state.epoch;
    row.bound_at = state.moved_at;
    row.yielded_at = tracked.yielded_at;
    row.computed_until = tracked.computed_until;
    row.totals = state.totals;
    row.finished_at = state.phase.is_terminal().then_some(state.at);
    row.requested = state.requested.map(|r| format!("{} by {}", r.what, r.who));
    row.paused_by = match state.phase {
        Phase::Paused { who } => Some(who),
        _ => None,
    };
    row.boundary = state.boundary;
    row.ordinal = state.ordinal;
    row.seq = tracked.seq;
    row.digest = tracked.digest;
    row.author = state.author;
    row.recorded_at = tracked.stored_at;
}
