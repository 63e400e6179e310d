//! A simulated worker. It accepts capsules, computes, commits in the background, leaves at
//! boundaries and hands over. The broker may fence any of its messages. [`super::orders`] has its
//! orders.

use super::*;
use crate::broken::Rule;
use crate::node::{Order, Run, Write};
use crate::world::broker::{Author, Stored};
use fiec_schemas::{Bound, BoundaryEvent, CommitPolicy, Digest, Fault};

/// Interval of commits under `auto`, in microseconds.
const AUTO_US: u64 = 1_000_000;

impl<D: Decide> World<'_, D> {
    /// Returns true if a node is stalled, and schedules the event again for the end of the stall.
    fn stalled(&mut self, node: usize, what: impl FnOnce() -> What) -> bool {
        let until = self.nodes[node].stalled_until;
        if until <= self.now {
            return false;
        }
        self.queue.plan(until, what());
        true
    }

    /// A capsule message, or a handover, reaches a node.
    pub(super) fn capsule(&mut self, node: usize, e: u32, seq: u64) -> Result<(), Wrong> {
        let number = node as u32;
        if !self.nodes[node].up || self.stalled(node, || What::Capsule(number, e, seq)) {
            return Ok(());
        }
        let silent_until = self.nodes[node].silent_until;
        if silent_until > self.now {
            // Its consumer at the broker is durable.
            self.queue.plan(silent_until, What::Capsule(number, e, seq));
            return Ok(());
        }
        let n = &self.nodes[node];
        let instance = n.descriptor.instance;
        let current = match self.exec(e).phase() {
            Some(Phase::Bound(Bound { binding: b, .. })) => {
                self.exec(e).seq == seq && b.instance == instance && b.node == n.descriptor.node
            }
            _ => false,
        };
        let epoch = self.exec(e).state.as_ref().map_or(0, |s| s.epoch);
        let known = n.runs.iter().any(|r| r.exec == e && r.epoch == epoch)
            || n.queue.iter().any(|(queued, _)| *queued == e);
        if !current || known {
            self.tally.stale_capsules += 1;
            return Ok(());
        }
        let n = &self.nodes[node];
        let room = n.computing() < n.descriptor.slots as usize;
        if room || self.overfills() {
            self.take_up(node, e, seq)
        } else {
            self.nodes[node].queue.push_back((e, seq));
            Ok(())
        }
    }

    fn take_up(&mut self, node: usize, e: u32, seq: u64) -> Result<(), Wrong> {
        let now = self.now;
        let fault = self.start_fault(node, e, false);
        let exec = &self.execs[e as usize];
        let (epoch, from) = exec
            .state
            .as_ref()
            .map_or((0, 0), |s| (s.epoch, s.boundary_index()));
        let n = &mut self.nodes[node];
        let fits = n.used_bytes + exec.memory_bytes <= n.descriptor.memory_limit_bytes;
        if fits && fault.is_none() {
            n.used_bytes += exec.memory_bytes;
        }
        let (tile, range_end) = exec.tiles.as_ref().map_or((0, 0), |t| (t.next, t.end));
        let write = match (fault, fits) {
            (Some((reason, fault)), _) => Write::Refuse(reason, Some(fault)),
            (None, true) => Write::Start,
            (None, false) => {
                let reason = format!(
                    "{} bytes are left of its memory, {} are needed",
                    n.descriptor.memory_limit_bytes - n.used_bytes,
                    exec.memory_bytes
                );
                Write::Refuse(reason, None)
            }
        };
        n.runs.push(Run {
            exec: e,
            epoch,
            seq,
            from,
            base: now,
            committed: from,
            committed_at: now,
            writing: Some(write),
            started: false,
            parked: false,
            order: None,
            tile,
            end: range_end,
            split: false,
            look: u64::MAX,
        });
        let (running, slots) = (n.computing(), n.descriptor.slots as usize);
        if running > slots || n.used_bytes > n.descriptor.memory_limit_bytes {
            let said = format!("{} runs {running} on {slots} slots", n.descriptor.node);
            return Err((Some(e), (Rule::Capacity, said)));
        }
        if let Some((other, theirs)) = exec.running
            && theirs == epoch
            && other as usize != node
        {
            let said = format!("epoch {epoch} runs on two nodes at once");
            return Err((Some(e), (Rule::OneBinding, said)));
        }
        self.execs[e as usize].running = Some((node as u32, epoch));
        self.write(node, e, epoch);
        Ok(())
    }

    /// Sends the message in flight of a run. A partitioned node sends it later.
    pub(super) fn write(&mut self, node: usize, e: u32, epoch: u64) {
        let (number, life) = (node as u32, self.nodes[node].life);
        if !self.nodes[node].is_reachable(self.now) {
            return;
        }
        if self.is_lost() && self.network.chance(0.5) {
            let later = self.now + ACK_TIMEOUT_US;
            self.queue.plan(later, What::Reread(number, life, e, epoch));
        } else {
            let at = self.arrival();
            self.queue.plan(at, What::Written(number, life, e, epoch));
        }
    }

    /// A worker's message reaches the broker.
    pub(super) fn written(
        &mut self,
        node: usize,
        life: u32,
        e: u32,
        epoch: u64,
    ) -> Result<(), Wrong> {
        let number = node as u32;
        if self.nodes[node].life != life || !self.nodes[node].up {
            return Ok(());
        }
        let Some(events) = self.events_of(node, e, epoch) else {
            return Ok(());
        };
        let Some(seq) = self.nodes[node].run(e, epoch).map(|r| r.seq) else {
            return Ok(());
        };
        let name = Arc::clone(&self.nodes[node].author);
        let author = Author {
            name: &name,
            replica: None,
            node: Some(number),
        };
        self.ranges.said = self.range_after(node, e, epoch);
        let stored = self.append(e, seq, &events, author)?;
        self.ranges.said = None;
        let n = &self.nodes[node];
        let deaf = n.silent_until.max(n.stalled_until);
        if deaf > self.now || self.is_lost() {
            // The acknowledgement does not arrive.
            let later = deaf.max(self.now + ACK_TIMEOUT_US);
            self.queue.plan(later, What::Reread(number, life, e, epoch));
            return Ok(());
        }
        match stored {
            Stored::Yes(seq) => self.acknowledged(node, e, epoch, seq),
            Stored::No => {
                self.tally.fenced += 1;
                self.drop_run(node, e, epoch)
            }
        }
    }

    /// A worker with an unknown result reads the ledger.
    pub(super) fn reread(
        &mut self,
        node: usize,
        life: u32,
        e: u32,
        epoch: u64,
    ) -> Result<(), Wrong> {
        let number = node as u32;
        if self.nodes[node].life != life || !self.nodes[node].up {
            return Ok(());
        }
        let deaf = self.nodes[node]
            .silent_until
            .max(self.nodes[node].stalled_until);
        if deaf > self.now {
            self.queue.plan(deaf, What::Reread(number, life, e, epoch));
            return Ok(());
        }
        let Some(run) = self.nodes[node].run(e, epoch) else {
            return Ok(());
        };
        let (seq, writing) = (run.seq, run.writing.clone());
        let exec = self.exec(e);
        if !exec.is_done() && exec.seq == seq {
            self.write(node, e, epoch);
            return Ok(());
        }
        let instance = self.nodes[node].descriptor.instance;
        let held = exec.phase().and_then(Phase::binding);
        let ours = held.is_some_and(|b| b.instance == instance)
            && exec.state.as_ref().is_some_and(|s| s.epoch == epoch);
        let now_at = exec.seq;
        match writing {
            Some(
                Write::Start | Write::Commit(_) | Write::Unpark(_) | Write::Split(_) | Write::Merge,
            ) if ours => self.acknowledged(node, e, epoch, now_at),
            Some(Write::Order(_, order)) if ours || !matches!(*order, Order::Park { .. }) => {
                self.acknowledged(node, e, epoch, now_at)
            }
            Some(Write::Finish | Write::Refuse(..) | Write::Rest) => {
                self.acknowledged(node, e, epoch, now_at)
            }
            _ => {
                self.tally.fenced += 1;
                self.drop_run(node, e, epoch)
            }
        }
    }

    fn events_of(&mut self, node: usize, e: u32, epoch: u64) -> Option<Vec<Event>> {
        let now = self.wall();
        let capsule = self.capsule_us(node, e);
        let exec = self.exec(e);
        if exec.tiles.is_some()
            && let Some(events) = self.range_events(node, e, epoch)
        {
            return Some(events);
        }
        let exec = self.exec(e);
        let (bytes, capsules, fails) = (exec.state_bytes, exec.boundaries(), exec.fails);
        let shares = exec.tiles.is_some();
        let run = self.nodes[node].run(e, epoch)?;
        let boundary = |run: &Run, index: u64| {
            Event::Boundary(BoundaryEvent {
                index,
                digest: digest(e, index),
                bytes,
                computed_at: now,
                compute_us: (index - run.committed).saturating_mul(capsule),
                of: shares.then(|| index + run.end - run.tile_at(index)),
                note: None,
                outputs: Vec::new(),
                energy: None,
            })
        };
        Some(match run.writing.clone()? {
            Write::Start => vec![Event::Started {
                epoch,
                computing_since: now,
            }],
            Write::Commit(index) => vec![boundary(run, index)],
            Write::Finish if fails => vec![Event::Failed {
                reason: "its program ended with exit status 1".to_owned(),
                stderr: String::new(),
                fault: Some(Box::new(Fault::Exited { status: 1 })),
            }],
            Write::Finish => vec![Event::Completed {
                result: serde_json::Value::Null,
                object: None,
                computed_until: now,
                capsules,
                outputs: Vec::new(),
                energy: None,
            }],
            Write::Refuse(reason, fault) => vec![Event::Refused {
                reason,
                offer: 0,
                fault,
            }],
            // `range_events` handles these.
            Write::Split(_) | Write::Merge | Write::Rest => return None,
            Write::Unpark(reason) => vec![Event::Unparked {
                reason,
                computing_since: now,
            }],
            Write::Order(index, order) => {
                let mut events = Vec::with_capacity(3);
                if index > run.committed {
                    events.push(boundary(run, index));
                }
                left(&mut events, *order, epoch, now);
                events
            }
        })
    }

    fn acknowledged(&mut self, node: usize, e: u32, epoch: u64, seq: u64) -> Result<(), Wrong> {
        let now = self.now;
        let Some(run) = self.nodes[node].run(e, epoch) else {
            return Ok(());
        };
        run.seq = seq;
        match run.writing.take() {
            Some(Write::Start) => {
                run.started = true;
                let exec = &mut self.execs[e as usize];
                if exec.began == 0 {
                    exec.began = now.max(1);
                    if !exec.is_part() {
                        self.tally.waited.push((now - exec.submitted) as f32);
                    }
                }
                if !self.gives_back(node, e, epoch) && !self.takes_back(node, e, epoch) {
                    self.plan_look(node, e, epoch);
                }
                Ok(())
            }
            Some(Write::Commit(index)) => {
                run.committed = index;
                run.committed_at = now;
                self.plan_look(node, e, epoch);
                Ok(())
            }
            Some(Write::Unpark(_)) => {
                run.base = now;
                self.plan_look(node, e, epoch);
                Ok(())
            }
            Some(Write::Order(index, order)) => {
                run.committed = index;
                match *order {
                    Order::Park { .. } => return self.parked(node, e, epoch),
                    Order::GiveUp { .. } => {
                        self.tally.given_up += 1;
                        return self.drop_run(node, e, epoch);
                    }
                    Order::Cancel { .. } => return self.drop_run(node, e, epoch),
                    Order::Yield { .. } => self.remove_run(node, e, epoch, 0)?,
                }
                // σ goes ahead to the destination; the capsule message is the fallback.
                self.send_capsule(e);
                Ok(())
            }
            Some(Write::Split(index)) => {
                self.has_split(node, e, epoch, index);
                Ok(())
            }
            Some(Write::Merge) => {
                self.has_merged(node, e, epoch);
                Ok(())
            }
            Some(Write::Finish | Write::Refuse(..) | Write::Rest) => {
                self.remove_run(node, e, epoch, 0)
            }
            None => Ok(()),
        }
    }

    /// Drops a run that was fenced, or whose node died: uncommitted work is lost.
    pub(super) fn drop_run(&mut self, node: usize, e: u32, epoch: u64) -> Result<(), Wrong> {
        let capsule = self.capsule_us(node, e);
        let now = self.now;
        let computes = |run: &&mut Run| !run.parked;
        let run = self.nodes[node].run(e, epoch).filter(computes);
        let lost = run.map_or(0, |run| {
            let kept = (run.committed - run.from).saturating_mul(capsule);
            now.saturating_sub(run.base).saturating_sub(kept)
        });
        self.remove_run(node, e, epoch, lost)
    }

    fn remove_run(&mut self, node: usize, e: u32, epoch: u64, lost: u64) -> Result<(), Wrong> {
        let now = self.now;
        let n = &mut self.nodes[node];
        let Some(at) = n.runs.iter().position(|r| r.exec == e && r.epoch == epoch) else {
            return Ok(());
        };
        let run = n.runs.swap_remove(at);
        n.parked -= u32::from(run.parked);
        let exec = &mut self.execs[e as usize];
        if run.started && !run.parked {
            self.tally.busy_us += now.saturating_sub(run.base);
        }
        if run.started {
            self.tally.lost_us += lost;
        }
        // A refused execution used no memory. Its refusal is stored by now.
        if run.started || matches!(run.writing, Some(Write::Start)) {
            n.used_bytes = n.used_bytes.saturating_sub(exec.memory_bytes);
        }
        if exec.running == Some((node as u32, epoch)) {
            exec.running = None;
        }
        n.note_room(now);
        self.take_queued(node)
    }

    /// Starts queued executions in free slots.
    pub(super) fn take_queued(&mut self, node: usize) -> Result<(), Wrong> {
        while self.nodes[node].computing() < self.nodes[node].descriptor.slots as usize {
            let Some((e, seq)) = self.nodes[node].queue.pop_front() else {
                break;
            };
            let instance = self.nodes[node].descriptor.instance;
            let exec = self.exec(e);
            let current = match exec.phase() {
                Some(Phase::Bound(Bound { binding: b, .. })) => {
                    exec.seq == seq && b.instance == instance
                }
                _ => false,
            };
            if current {
                self.take_up(node, e, seq)?;
            }
        }
        Ok(())
    }

    /// Time of a capsule on a node, in microseconds.
    pub(super) fn capsule_us(&self, node: usize, e: u32) -> u64 {
        scaled(self.exec(e).capsule_us, self.nodes[node].speed)
    }

    /// Schedules the next look at a run: at its end, or at a boundary where it must yield or
    /// commit.
    pub(super) fn plan_look(&mut self, node: usize, e: u32, epoch: u64) {
        let next = self.next(node, e, epoch).map(|(at, _)| at);
        let death = self.death(node, e, epoch).map(|(at, _)| at);
        let due = next.into_iter().chain(death).min();
        let (number, life, now) = (node as u32, self.nodes[node].life, self.now);
        if let (Some(due), Some(run)) = (due, self.nodes[node].run(e, epoch)) {
            let due = due.max(now);
            run.look = due;
            self.queue.plan(due, What::Look(number, life, e, epoch));
        }
    }

    /// A run's next message, and its time.
    fn next(&self, node: usize, e: u32, epoch: u64) -> Option<(u64, Write)> {
        let n = &self.nodes[node];
        let run = n.runs.iter().find(|r| r.exec == e && r.epoch == epoch)?;
        let exec = self.exec(e);
        match run.order.as_deref() {
            Some(order @ (Order::GiveUp { .. } | Order::Cancel { .. })) => {
                return Some((
                    self.now,
                    Write::Order(run.committed, Box::new(order.clone())),
                ));
            }
            Some(order) if run.parked => {
                return Some((
                    self.now,
                    Write::Order(run.committed, Box::new(order.clone())),
                ));
            }
            None if run.parked => return None,
            _ => {}
        }
        let capsule = scaled(exec.capsule_us, n.speed);
        let from = run.from;
        let all = run.last_boundary(exec);
        let rest = match exec.tiles {
            None => exec.work_us.saturating_sub(from * exec.capsule_us),
            Some(_) => (run.end - run.tile) * exec.capsule_us,
        };
        let finish = run.base.saturating_add(scaled(rest, n.speed));
        let boundary_at = |index: u64| run.base.saturating_add((index - from) * capsule);
        // The first boundary at or after a moment.
        let boundary_after = |at: u64| from + at.saturating_sub(run.base).div_ceil(capsule);
        let mut next = (finish, Write::Finish);
        if let Some(order) = &run.order {
            let index = boundary_after(self.now);
            if index < all {
                next = (boundary_at(index), Write::Order(index, order.clone()));
            }
            return Some(next);
        }
        if run.split {
            let index = boundary_after(self.now).max(run.committed + 1);
            // Fewer than two remaining tiles cannot be split.
            if index + 2 <= all {
                return Some((boundary_at(index), Write::Split(index)));
            }
        }
        let index = match exec.spec.commit {
            CommitPolicy::Every(k) => {
                boundary_after(self.now).max(run.committed.saturating_add(k.get()))
            }
            CommitPolicy::EveryMs(ms) => {
                boundary_after(run.committed_at + u64::from(ms.get()) * 1_000)
            }
            CommitPolicy::Auto => boundary_after(run.committed_at + AUTO_US),
        };
        // Boundaries that passed while a message was in flight are committed at the next boundary.
        let index = index.max(run.committed + 1).max(boundary_after(self.now));
        if index < all && boundary_at(index) < next.0 {
            next = (boundary_at(index), Write::Commit(index));
        }
        Some(next)
    }

    /// A worker looks at a run.
    pub(super) fn look(&mut self, node: usize, life: u32, e: u32, epoch: u64) -> Result<(), Wrong> {
        let number = node as u32;
        if self.nodes[node].life != life
            || !self.nodes[node].up
            || self.stalled(node, || What::Look(number, life, e, epoch))
        {
            return Ok(());
        }
        let now = self.now;
        let Some(run) = self.nodes[node].run(e, epoch) else {
            return Ok(());
        };
        if run.look > now || run.writing.is_some() || !run.started {
            return Ok(());
        }
        if let Some((at, until)) = self.death(node, e, epoch)
            && at <= now
        {
            return self.die(node, until);
        }
        match self.next(node, e, epoch) {
            Some((at, write)) if at <= now => {
                if let Some(run) = self.nodes[node].run(e, epoch) {
                    if matches!(write, Write::Order(..)) {
                        run.order = None;
                    }
                    run.writing = Some(write);
                    run.look = u64::MAX;
                }
                self.write(node, e, epoch);
            }
            _ => self.plan_look(node, e, epoch),
        }
        Ok(())
    }
}

/// The events of an order that is obeyed.
fn left(events: &mut Vec<Event>, order: Order, epoch: u64, now: Timestamp) {
    match order {
        Order::Park { cause, keep } => events.push(Event::Parked {
            cause,
            keep,
            computed_until: now,
        }),
        Order::GiveUp { cause } => events.push(Event::Yielded {
            cause,
            computed_until: now,
        }),
        Order::Cancel { who } => events.push(Event::Cancelled { who }),
        Order::Yield {
            cause,
            to,
            decision,
        } => {
            events.push(Event::Yielded {
                cause: cause.clone(),
                computed_until: now,
            });
            if let Some(to) = to {
                events.push(Event::Bound {
                    epoch: epoch + 1,
                    node: to.node,
                    instance: to.instance,
                    substrate: to.substrate,
                    cause,
                    decision,
                });
            }
        }
    }
}

/// The time of work at a speed, at least a microsecond.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "times far below 2^52"
)]
fn scaled(us: u64, speed: f64) -> u64 {
    if speed == 1.0 {
        return us.max(1);
    }
    ((us as f64 / speed) as u64).max(1)
}

/// A unique value in place of the digest of σ, which the simulation does not compute.
pub(super) fn digest(e: u32, index: u64) -> Digest {
    let mut bytes = [0; 32];
    bytes[..4].copy_from_slice(&e.to_le_bytes());
    bytes[4..12].copy_from_slice(&index.to_le_bytes());
    Digest(bytes)
}
