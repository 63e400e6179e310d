//! Placements: how they begin, start and end, and the rebinding that each after the first is.

use fiec_schemas::energy::Energy;
use fiec_schemas::{Cause, Decision, Epoch, EventKind, InstanceId, NodeId, Timestamp};
use indexmap::map::Entry;
use sqlx::types::Json;

use super::Step;
use crate::rows::{DecisionRow, PlacementRow, RebindingRow, day_of};

/// A binding as its event says it.
pub(super) struct Placed {
    pub epoch: Epoch,
    pub node: NodeId,
    pub instance: InstanceId,
    pub substrate: String,
    pub cause: Cause,
}

impl Step<'_> {
    /// Ends the placement in force, and begins the next one.
    pub(super) fn bind(&mut self, placed: Placed, decision: Option<Decision>) {
        let entrusted = decision.as_ref().and_then(|d| d.entrusted.as_ref());
        let at = entrusted.map_or(self.at(), |e| e.at);
        self.end_placement_at(placed.cause.as_str(), at);
        if let Some(decision) = decision {
            self.add_decision(&placed, decision);
        }
        self.begin_placement(&placed, at);
        self.tracked.epoch = placed.epoch;
        self.columns().substrate = Some(placed.substrate.clone());
        if placed.epoch > 1 {
            self.add_rebinding(&placed, at);
        }
        self.tracked.node = Some(placed.node);
        self.tracked.open = true;
    }

    fn begin_placement(&mut self, placed: &Placed, at: Timestamp) {
        let (id, epoch) = (self.id(), placed.epoch);
        let row = |is_new| PlacementRow {
            is_new,
            node: Some(placed.node.clone()),
            instance: Some(placed.instance),
            substrate: Some(placed.substrate.clone()),
            cause: Some(placed.cause.kind()),
            bound_at: Some(at),
            ..PlacementRow::new(id, epoch)
        };
        match self.rows.placements.entry((id, epoch)) {
            Entry::Vacant(entry) => _ = entry.insert(row(true)),
            // A second row of the same key would make PostgreSQL refuse the batch.
            Entry::Occupied(mut entry) => _ = entry.insert(row(entry.get().is_new)),
        }
    }

    /// The move from the node that is tracked to the one of the new binding.
    fn add_rebinding(&mut self, placed: &Placed, at: Timestamp) {
        let cause = &placed.cause;
        let is_silent = matches!(cause, Cause::Lost { .. } | Cause::NotTaken { .. });
        let evidence = match cause {
            Cause::Pressure { evidence } => Some(evidence),
            _ => None,
        };
        let boundary = self.state.boundary.as_ref();
        let row = RebindingRow {
            execution: self.id(),
            epoch: placed.epoch,
            at,
            from_node: self.tracked.node.clone(),
            to_node: placed.node.clone(),
            cause: cause.kind(),
            cause_detail: cause.in_words(),
            who: match cause {
                Cause::Operator { who } | Cause::Drain { who } | Cause::Revoked { who, .. } => {
                    Some(who.clone())
                }
                _ => None,
            },
            signal: evidence.map(|e| e.signal),
            device: evidence.and_then(|e| e.device.clone()),
            value: evidence.map(|e| e.value),
            high: evidence.map(|e| e.threshold.high),
            low: evidence.map(|e| e.threshold.low),
            dwell_ms: evidence.map(|e| e.threshold.dwell_ms),
            since: evidence.map(|e| e.since),
            vector: evidence.map(|e| Json(e.vector.clone())),
            state_index: boundary.map(|place| place.index),
            state_digest: boundary.map(|place| place.digest),
            state_bytes: boundary.map(|place| place.bytes),
            // A yield of an earlier binding says nothing about a node that fell silent.
            yielded_at: self.tracked.yielded_at.filter(|_| !is_silent),
            gap_us: None,
        };
        let key = (row.execution, row.epoch);
        self.rows.rebindings.insert(key, row);
    }

    fn add_decision(&mut self, placed: &Placed, decision: Decision) {
        self.rows.days.insert(day_of(self.stored_at));
        self.rows.decisions.push(DecisionRow {
            execution: self.state.execution,
            epoch: placed.epoch,
            ordinal: self.state.ordinal,
            at: self.stored_at,
            cause: placed.cause.kind(),
            chosen: placed.node.clone(),
            candidates: Json(decision.candidates),
            omitted: decision.omitted,
        });
    }

    /// The node computes: the gap since the last capsule elsewhere is known.
    pub(super) fn start(&mut self, epoch: Epoch, computing_since: Timestamp) {
        let (id, at) = (self.id(), self.at());
        let gap_us = self
            .tracked
            .computed_until
            .filter(|_| epoch > 1)
            .map(|until| computing_since.micros().saturating_sub(until.micros()));
        let ordinal = self.state.ordinal;
        let row = self.placement(epoch);
        (row.started_at, row.started_in) = (Some(at), Some(ordinal));
        row.computing_since = Some(computing_since);
        row.gap_us = gap_us;
        if let Some(gap_us) = gap_us {
            match self.rows.rebindings.get_mut(&(id, epoch)) {
                Some(row) => row.gap_us = Some(gap_us),
                None => _ = self.rows.gaps_closed.insert((id, epoch), gap_us),
            }
        }
        self.columns()
            .first_started_at
            .get_or_insert(computing_since);
    }

    /// The node gave the execution up at a boundary.
    pub(super) fn yield_up(&mut self, cause: &Cause, computed_until: Timestamp, handover: bool) {
        self.tracked.computed_until = Some(computed_until);
        self.tracked.yielded_at = Some(self.at());
        // In a handover the rebinding's row says all of it.
        if !handover {
            self.note_cause(EventKind::Yielded, cause, cause.in_words());
        }
        self.end_placement(cause.as_str());
    }

    /// Ends the placement in force, if there is one.
    pub(super) fn end_placement(&mut self, why: &'static str) {
        self.end_placement_at(why, self.at());
    }

    fn end_placement_at(&mut self, why: &'static str, at: Timestamp) {
        if !std::mem::take(&mut self.tracked.open) {
            return;
        }
        let (ordinal, computed_until) = (self.state.ordinal, self.tracked.computed_until);
        let row = self.placement(self.tracked.epoch);
        // After a rewind it may have ended before.
        if row.ended_at.is_some() {
            return;
        }
        (row.ended_at, row.end_reason, row.ended_in) = (Some(at), Some(why), Some(ordinal));
        // A capsule that ended before this placement's first one is not its own. If the first one
        // is in an earlier batch, the upsert decides.
        row.computed_until = match row.computing_since {
            Some(since) => computed_until.filter(|until| *until >= since),
            None if row.is_new => None,
            None => computed_until,
        };
    }

    /// Adds the energy of an interval to the placement in force.
    pub(super) fn add_energy(&mut self, energy: Option<Energy>) {
        if let Some(energy) = energy {
            let row = self.placement(self.tracked.epoch);
            let add = |sum: &mut Option<u64>, uj: Option<u64>| {
                if let Some(uj) = uj {
                    *sum = Some(sum.unwrap_or(0).saturating_add(uj));
                }
            };
            add(&mut row.host_uj, energy.host_uj);
            add(&mut row.device_uj, energy.device_uj);
        }
    }

    /// The row of a placement of this execution.
    pub(super) fn placement(&mut self, epoch: Epoch) -> &mut PlacementRow {
        let id = self.state.execution;
        let row = self.rows.placements.entry((id, epoch));
        row.or_insert_with(|| PlacementRow::new(id, epoch))
    }
}
