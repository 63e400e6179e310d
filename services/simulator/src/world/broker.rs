//! The broker: one ledger per execution, appended by compare-and-set, read by ordered feeds.

use super::*;
use crate::broken::{self, Rule};
use exec::Past;
use fiec_policy::Fate;
use fiec_schemas::{Cause, LedgerMessage};

/// Result of an append at the broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stored {
    /// It is stored with this sequence.
    Yes(u64),
    /// Another author was faster, or the ledger does not exist.
    No,
}

/// The author of a message.
#[derive(Debug, Clone, Copy)]
pub(super) struct Author<'a> {
    pub name: &'a str,
    /// The policy service, if it is one and alive.
    pub replica: Option<u8>,
    /// The node of the worker, if it is one.
    pub node: Option<u32>,
}

impl<D: Decide> World<'_, D> {
    /// Stores a message if its author knows the last one.
    pub(super) fn append(
        &mut self,
        e: u32,
        expected: u64,
        events: &[Event],
        by: Author<'_>,
    ) -> Result<Stored, Wrong> {
        let author = by.name;
        let at = self.wall();
        if self.exec(e).is_done() || self.exec(e).seq != expected {
            return Ok(Stored::No);
        }
        let before = self.exec_mut(e).state.take();
        let after = match &before {
            Some(state) => state.after(events, author, at, None),
            None => self.unborn(e).after(events, author, at, None),
        };
        let mut after = match after {
            Ok(after) => Box::new(after),
            Err(error) => {
                self.exec_mut(e).state = before;
                let names: Vec<_> = events.iter().map(|e| e.kind().as_str()).collect();
                let said = format!("{author} writes {}: {error}", names.join("+"));
                return Err((Some(e), (Rule::PossibleEvents, said)));
            }
        };
        self.last_seq += 1;
        after.resolve(self.last_seq);
        for replica in &self.replicas {
            if let Some(policy) = &replica.policy {
                policy.store(&mut after);
            }
        }
        self.note(e, events, &after);
        if let Err(broken) = broken::message(before.as_deref(), events, &after) {
            self.exec_mut(e).state = Some(after);
            return Err((Some(e), broken));
        }
        let seq = self.last_seq;
        let text = self.encode(events, &after, by.replica)?;
        self.exec_mut(e).seq = seq;
        let by_policy = by.node.is_none();
        let shares = self.exec(e).tiles.is_some();
        if shares {
            self.note_tiles(e, events)?;
        }
        self.account(e, before.as_deref(), events, after, by_policy)?;
        if shares {
            self.follow_range(e)?;
        }
        self.feed(seq, text, by);
        Ok(Stored::Yes(seq))
    }

    fn unborn(&self, e: u32) -> ExecutionState {
        let exec = self.exec(e);
        let submitted = self.stamp(exec.submitted);
        let (tenant, spec) = (self.tenant(e), Arc::clone(&exec.spec));
        match exec.tiles.as_deref().filter(|t| t.holder.is_some()) {
            Some(tiles) => self.unborn_part(tiles, tenant, spec, submitted),
            None => ExecutionState::unborn(tenant, self.id_of(e), spec, None, submitted),
        }
    }

    fn note(&mut self, e: u32, events: &[Event], after: &ExecutionState) {
        let node = after.phase.binding();
        let node = node.and_then(|b| self.by_name.get(&b.node).copied());
        let past = Past::of(self.now, events, after, node);
        self.exec_mut(e).note(past);
    }

    /// The text for the readers, if there are any.
    fn encode(
        &self,
        events: &[Event],
        after: &ExecutionState,
        own: Option<u8>,
    ) -> Result<Option<Arc<str>>, Wrong> {
        let mut readers = (0u8..).zip(&self.replicas);
        if !readers.any(|(p, r)| Some(p) != own && r.policy.is_some()) {
            return Ok(None);
        }
        self.text(events, after).map(Some)
    }

    /// A message in its text form.
    pub(super) fn text(&self, events: &[Event], state: &ExecutionState) -> Result<Arc<str>, Wrong> {
        let message = LedgerMessage {
            v: 1,
            events: events.to_vec(),
            state: state.clone().into(),
            sig: None,
        };
        let number = self.number_of(state.execution);
        let text = message.encode().map(Arc::from);
        text.map_err(|error| (Some(number), (Rule::PossibleEvents, error.to_string())))
    }

    fn feed(&mut self, seq: u64, text: Option<Arc<str>>, by: Author<'_>) {
        let Some(text) = text else { return };
        for p in 0..self.replicas.len() {
            let number = p as u8;
            if Some(number) == by.replica || self.replicas[p].policy.is_none() {
                continue;
            }
            let twice = self.is_doubled();
            for _ in 0..=u8::from(twice) {
                // In order, as for the consumer of one stream.
                let at = self.arrival().max(self.replicas[p].fed_at);
                self.replicas[p].fed_at = at;
                let message = Box::new(Message {
                    seq,
                    by: by.node,
                    text: Arc::clone(&text),
                });
                let life = self.replicas[p].life;
                self.queue.plan(at, What::Feed(number, life, message));
            }
        }
    }

    /// Updates the world's books after a stored message, and checks the promises that need them.
    fn account(
        &mut self,
        e: u32,
        before: Option<&ExecutionState>,
        events: &[Event],
        after: Box<ExecutionState>,
        by_policy: bool,
    ) -> Result<(), Wrong> {
        let now = self.now;
        let wrong = |broken: Broken| (Some(e), broken);
        let place = |state: Option<&ExecutionState>| {
            let ix = self.by_name.get(&state?.phase.binding()?.node)?;
            Some((*ix, u32::from(state?.parked().is_some())))
        };
        let (left, taken) = (place(before), place(Some(&after)));
        if let Some((ix, standing)) = left {
            let node = &mut self.nodes[ix as usize];
            node.bound -= 1;
            node.standing -= standing;
            node.note_room(now);
        }
        if let Some((ix, standing)) = taken {
            let node = &mut self.nodes[ix as usize];
            node.bound += 1;
            node.standing += standing;
            node.note_room(now);
        }
        if left.is_none() && taken.is_some() {
            self.is_reserved(e).map_err(wrong)?;
        }
        for event in events {
            match event {
                Event::Bound { cause, node, .. } => {
                    self.bound_to(e, node, cause, before, &after)
                        .map_err(wrong)?;
                }
                Event::Yielded { cause, .. } | Event::Parked { cause, .. } => {
                    self.tally.parks += u64::from(matches!(event, Event::Parked { .. }));
                    if matches!(cause, Cause::Preempted { by: Some(_), .. }) {
                        self.gave_way(e).map_err(wrong)?;
                    }
                }
                Event::Started { .. } => self.tally.starts += 1,
                Event::Boundary(_) => self.tally.commits += 1,
                Event::Refused { .. } => self.tally.refusals += 1,
                // Parts are counted apart.
                _ if self.exec(e).is_part() => {}
                Event::Completed { .. } => self.completed(e),
                Event::Failed { .. } => {
                    self.tally.failed += 1;
                    self.tally.last_end = now;
                }
                _ => {}
            }
        }
        let tied = after.phase.binding().is_some();
        let reserved = self.exec(e).reserved;
        self.count_anew(e, tied, reserved)?;
        let started = |state: &ExecutionState| matches!(state.phase, Phase::Started(_));
        let parked = |state: &ExecutionState| state.parked().is_some();
        let same =
            before.is_some_and(|b| started(b) && started(&after) && parked(b) == parked(&after));
        let exec = self.exec_mut(e);
        exec.fate = Fate::of(after.phase.kind());
        if exec.fate.is_some() {
            exec.done = now.max(1);
            exec.trace = Vec::new();
        } else {
            exec.state = Some(after);
        }
        if !same {
            self.wait(e, true);
        }
        self.note_holds(e, events, by_policy).map_err(wrong)
    }

    fn bound_to(
        &mut self,
        e: u32,
        node: &NodeId,
        cause: &Cause,
        before: Option<&ExecutionState>,
        after: &ExecutionState,
    ) -> Result<(), Broken> {
        self.tally.bindings += 1;
        let now = self.now;
        let exec = &mut self.execs[e as usize];
        if before.is_none_or(|b| b.epoch == 0) {
            exec.first_bound = now;
        } else {
            *self.tally.rebindings.entry(cause.as_str()).or_default() += 1;
            if let Some(place) = &after.boundary {
                self.tally.moved_bytes += place.bytes;
            }
        }
        let spec = &exec.spec;
        let Some(destination) = self.by_name.get(node) else {
            return Err((Rule::Requirements, format!("there is no node {node}")));
        };
        let destination = &self.nodes[*destination as usize];
        if let Err(what) = destination.meets(&spec.requires, &spec.program) {
            return Err((
                Rule::Requirements,
                format!("{node} does not meet {what} and is the destination"),
            ));
        }
        if matches!(cause, Cause::Pressure { .. }) {
            let most = broken::most_rebindings(now - exec.first_bound, self.shortest_dwell);
            if after.totals.pressure > most {
                return Err((
                    Rule::BoundedRebindings,
                    format!(
                        "{} rebindings for pressure in {} ms, with a dwell of {} ms",
                        after.totals.pressure,
                        (now - exec.first_bound) / 1_000,
                        self.shortest_dwell
                    ),
                ));
            }
        }
        Ok(())
    }

    /// Handles a preemption; the time between two of them has a lower bound.
    fn gave_way(&mut self, e: u32) -> Result<(), Broken> {
        let residency = self.config.preempt_residency_ms.max(1) * 1_000;
        let exec = &mut self.execs[e as usize];
        exec.preempted += 1;
        self.tally.preemptions += 1;
        let passed = self.now - exec.first_bound;
        if u64::from(exec.preempted) > passed / residency + 1 {
            let said = format!(
                "it gave way {} times in {} ms, with a residency of {} ms",
                exec.preempted,
                passed / 1_000,
                residency / 1_000
            );
            return Err((Rule::BoundedRebindings, said));
        }
        Ok(())
    }

    fn completed(&mut self, e: u32) {
        let now = self.now;
        let exec = &self.execs[e as usize];
        self.tally.completed += 1;
        self.tally.useful_us += exec.work_us;
        self.tally.last_end = now;
        self.tally.lasted.push((now - exec.submitted) as f32);
    }

    /// The text of an execution's last message, and its sequence.
    pub(super) fn last_message(&self, e: u32) -> Result<Option<(u64, Arc<str>)>, Wrong> {
        let exec = self.exec(e);
        let text = match (&exec.state, exec.phase_at_end()) {
            (Some(state), _) => self.text(&[], state)?,
            // Only the phase of an ended execution is kept, and no reader needs more.
            (None, Some(phase)) => {
                let mut state = self.unborn(e);
                state.phase = phase;
                self.text(&[], &state)?
            }
            (None, None) => return Ok(None),
        };
        Ok(Some((exec.seq, text)))
    }
}
