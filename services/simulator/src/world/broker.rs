//! The broker: one ledger an execution, appended by compare-and-set, read by feeds in order.

use super::*;
use crate::broken::{self, Rule};
use crate::feed;
use exec::Past;
use fiec_schemas::{Cause, LedgerMessage};

/// What became of an append at the broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stored {
    /// It is the message of this sequence.
    Yes(u64),
    /// Somebody else was faster, or there is no ledger.
    No,
}

impl<D: Decide> World<'_, D> {
    /// Stores a message if its writer knew the last one; `own` is the replica that wrote it.
    pub(super) fn append(
        &mut self,
        e: u32,
        expected: u64,
        events: &[Event],
        author: &str,
        own: Option<u8>,
    ) -> Result<Stored, Wrong> {
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
                let names: Vec<_> = events.iter().map(feed::name).collect();
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
        let text = self.encode(events, &after, own)?;
        self.account(e, before.as_deref(), events, &after)?;
        let terminal = after.phase.is_terminal();
        let now = self.now;
        let exec = self.exec_mut(e);
        exec.seq = seq;
        if terminal {
            exec.done = now;
            exec.trace = Vec::new();
        } else {
            exec.state = Some(after);
        }
        self.feed(seq, e, text, own);
        Ok(Stored::Yes(seq))
    }

    fn unborn(&self, e: u32) -> ExecutionState {
        let exec = self.exec(e);
        let spec = &self.specs[exec.workload as usize];
        let submitted = self.stamp(exec.submitted);
        let tenant = self.tenant.clone();
        ExecutionState::unborn(tenant, self.id_of(e), Arc::clone(spec), None, submitted)
    }

    fn note(&mut self, e: u32, events: &[Event], after: &ExecutionState) {
        let past = Past {
            at: self.now,
            what: events.iter().map(feed::name).collect(),
            epoch: after.epoch,
            boundary: after.boundary_index(),
            node: after.phase.binding().map(|b| b.node.clone()),
        };
        self.exec_mut(e).note(past);
    }

    /// The text for readers, where there are any.
    fn encode(
        &self,
        events: &[Event],
        after: &ExecutionState,
        own: Option<u8>,
    ) -> Result<Option<Arc<str>>, Wrong> {
        let readers = (0u8..).zip(&self.replicas);
        let mut readers = readers.filter(|(p, r)| Some(*p) != own && r.policy.is_some());
        if readers.clone().next().is_none() {
            return Ok(None);
        }
        let unknown = readers.any(|(_, r)| {
            !r.policy
                .as_ref()
                .is_some_and(|policy| policy.knows(after.execution))
        });
        self.text(events, after, unknown).map(Some)
    }

    /// A message as readers read it.
    pub(super) fn text(
        &self,
        events: &[Event],
        state: &ExecutionState,
        with_spec: bool,
    ) -> Result<Arc<str>, Wrong> {
        let text = if self.full_encoding {
            let message = LedgerMessage {
                v: 1,
                events: events.to_vec(),
                state: state.clone(),
                sig: None,
            };
            message.encode().map_err(|error| error.to_string())
        } else {
            feed::encode(events, state, with_spec).map_err(|error| error.to_string())
        };
        let number = exec::number(state.execution);
        text.map(Arc::from)
            .map_err(|error| (Some(number), (Rule::PossibleEvents, error)))
    }

    fn feed(&mut self, seq: u64, e: u32, text: Option<Arc<str>>, own: Option<u8>) {
        let Some(text) = text else { return };
        let _ = e;
        for p in 0..self.replicas.len() {
            let number = p as u8;
            if Some(number) == own || self.replicas[p].policy.is_none() {
                continue;
            }
            let twice = self.is_doubled();
            for _ in 0..=u8::from(twice) {
                // In order, as a consumer of one stream is told.
                let at = self.arrival().max(self.replicas[p].fed_at);
                self.replicas[p].fed_at = at;
                let message = Box::new(Message {
                    seq,
                    text: Arc::clone(&text),
                });
                let life = self.replicas[p].life;
                self.queue.plan(at, What::Feed(number, life, message));
            }
        }
    }

    /// What follows from a stored message for the world's own books, and the promises that only
    /// they can judge.
    fn account(
        &mut self,
        e: u32,
        before: Option<&ExecutionState>,
        events: &[Event],
        after: &ExecutionState,
    ) -> Result<(), Wrong> {
        let wrong = |broken: Broken| (Some(e), broken);
        let held = before.and_then(|b| b.phase.binding());
        if let Some(ix) = held.and_then(|b| self.by_name.get(&b.node)).copied() {
            let node = &mut self.nodes[ix as usize];
            node.bound = node.bound.saturating_sub(1);
            node.note_room(self.now);
        }
        if let Some(ix) = after
            .phase
            .binding()
            .and_then(|b| self.by_name.get(&b.node))
            .copied()
        {
            let node = &mut self.nodes[ix as usize];
            node.bound += 1;
            node.note_room(self.now);
        }
        for event in events {
            match event {
                Event::Bound { cause, node, .. } => {
                    self.bound_to(e, node, cause, before, after)
                        .map_err(wrong)?;
                }
                Event::Yielded {
                    cause: Cause::Preempted { by: Some(_), .. },
                    ..
                } => self.gave_way(e).map_err(wrong)?,
                Event::Started { .. } => self.tally.starts += 1,
                Event::Boundary(_) => self.tally.commits += 1,
                Event::Refused { .. } => self.tally.refusals += 1,
                Event::Completed { .. } => self.completed(e),
                _ => {}
            }
        }
        self.wait(e, &after.phase);
        Ok(())
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
        let spec = &self.specs[exec.workload as usize];
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

    /// It gave way to another; the time between two such is bounded from below.
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

    /// Notes since when an execution waits to compute.
    pub(super) fn wait(&mut self, e: u32, phase: &Phase) {
        let now = self.now;
        let exec = &mut self.execs[e as usize];
        let workload = exec.workload as usize;
        if let Some(since) = exec.waits_since.take() {
            self.pending[workload].remove(&(since, e));
            self.bound[workload].remove(&(since, e));
        }
        let set = match phase {
            Phase::Pending => &mut self.pending[workload],
            Phase::Bound(_) => &mut self.bound[workload],
            _ => return,
        };
        exec.waits_since = Some(now);
        set.insert((now, e));
    }

    /// The text of an execution's last message, and its sequence.
    pub(super) fn last_message(&self, e: u32) -> Result<Option<(u64, Arc<str>)>, Wrong> {
        let exec = self.exec(e);
        let Some(state) = &exec.state else {
            return Ok(None);
        };
        let text = self.text(&[], state, true)?;
        Ok(Some((exec.seq, text)))
    }
}
