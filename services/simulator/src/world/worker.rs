//! A worker as it is played: it takes capsules up, computes, commits beside that, yields at
//! boundaries and hands over; whatever it writes may be fenced by the broker.

use super::*;
use crate::broken::Rule;
use crate::node::{Order, Run, Write};
use crate::world::broker::Stored;
use crate::world::services::Asked;
use fiec_schemas::{BoundaryEvent, CommitPolicy, Digest};

/// How long `auto` leaves between two commits.
const AUTO_US: u64 = 1_000_000;

impl<D: Decide> World<'_, D> {
    /// What must wait because a node stands still, planned again for later; nothing for a dead one.
    fn stalled(&mut self, node: usize, what: impl FnOnce() -> What) -> bool {
        let until = self.nodes[node].stalled_until;
        if until <= self.now {
            return false;
        }
        self.queue.plan(until, what());
        true
    }

    /// A capsule, or a handover, reaches a node.
    pub(super) fn capsule(&mut self, node: usize, e: u32, seq: u64) -> Result<(), Wrong> {
        let number = node as u32;
        if !self.nodes[node].up || self.stalled(node, || What::Capsule(number, e, seq)) {
            return Ok(());
        }
        let silent_until = self.nodes[node].silent_until;
        if silent_until > self.now {
            // Its queue at the broker is durable.
            self.queue.plan(silent_until, What::Capsule(number, e, seq));
            return Ok(());
        }
        let n = &self.nodes[node];
        let instance = n.descriptor.instance;
        let current = match self.exec(e).phase() {
            Some(Phase::Bound(b)) => {
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
        let n = &mut self.nodes[node];
        let overfills = self.replicas.iter().any(|r| {
            let policy = r.policy.as_ref();
            policy.is_some_and(Decide::overfills)
        });
        if n.runs.len() < n.descriptor.slots as usize || overfills {
            self.take_up(node, e, seq)
        } else {
            n.queue.push_back((e, seq));
            Ok(())
        }
    }

    fn take_up(&mut self, node: usize, e: u32, seq: u64) -> Result<(), Wrong> {
        let now = self.now;
        let exec = &self.execs[e as usize];
        let (epoch, from) = exec
            .state
            .as_ref()
            .map_or((0, 0), |s| (s.epoch, s.boundary_index()));
        let n = &mut self.nodes[node];
        let fits = n.used_bytes + exec.memory_bytes <= n.descriptor.memory_limit_bytes;
        if fits {
            n.used_bytes += exec.memory_bytes;
        }
        let write = match fits {
            true => Write::Start,
            false => Write::Refuse(format!(
                "{} bytes are left of its memory, {} are needed",
                n.descriptor.memory_limit_bytes - n.used_bytes,
                exec.memory_bytes
            )),
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
            order: None,
            look: u64::MAX,
        });
        let (running, slots) = (n.runs.len(), n.descriptor.slots as usize);
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

    /// Sends what a run is writing; a node that is cut off does so later.
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

    /// What a worker writes reaches the broker.
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
        let d = Arc::clone(&self.nodes[node].descriptor);
        let author = format!("worker/{}/{}", d.node, d.instance);
        let stored = self.append(e, seq, &events, &author, None)?;
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

    /// A worker that does not know what became of its message reads the ledger.
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
            Some(Write::Start | Write::Commit(_)) if ours => {
                self.acknowledged(node, e, epoch, now_at)
            }
            Some(Write::Yield(_) | Write::Finish | Write::Refuse(_)) => {
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
        let (bytes, capsules) = (self.exec(e).state_bytes, self.exec(e).boundaries());
        let run = self.nodes[node].run(e, epoch)?;
        let boundary = |run: &Run, index: u64| {
            Event::Boundary(BoundaryEvent {
                index,
                digest: digest(e, index),
                bytes,
                computed_at: now,
                compute_us: (index - run.committed).saturating_mul(capsule),
                of: None,
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
            Write::Finish => vec![Event::Completed {
                result: serde_json::Value::Null,
                computed_until: now,
                capsules,
                outputs: Vec::new(),
                energy: None,
            }],
            Write::Refuse(reason) => vec![Event::Refused { reason, offer: 0 }],
            Write::Yield(index) => {
                let order = run.order.as_ref()?;
                let mut events = Vec::with_capacity(3);
                if index > run.committed {
                    events.push(boundary(run, index));
                }
                events.push(Event::Yielded {
                    cause: order.cause.clone(),
                    computed_until: now,
                });
                if let Some(to) = &order.to {
                    events.push(Event::Bound {
                        epoch: epoch + 1,
                        node: to.node.clone(),
                        instance: to.instance,
                        substrate: to.substrate.clone(),
                        cause: order.cause.clone(),
                        decision: order.decision.clone(),
                    });
                }
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
                    self.tally.waited.push((now - exec.submitted) as f32);
                }
                self.plan_look(node, e, epoch);
                Ok(())
            }
            Some(Write::Commit(index)) => {
                run.committed = index;
                run.committed_at = now;
                self.plan_look(node, e, epoch);
                Ok(())
            }
            Some(Write::Yield(index)) => {
                run.committed = index;
                self.remove_run(node, e, epoch, 0)?;
                // σ goes ahead to the destination; the capsule message is the backstop.
                self.send_capsule(e);
                Ok(())
            }
            Some(Write::Finish | Write::Refuse(_)) => self.remove_run(node, e, epoch, 0),
            None => Ok(()),
        }
    }

    /// A run that was fenced, or whose node died: what it has not committed is lost.
    pub(super) fn drop_run(&mut self, node: usize, e: u32, epoch: u64) -> Result<(), Wrong> {
        let capsule = self.capsule_us(node, e);
        let now = self.now;
        let lost = self.nodes[node].run(e, epoch).map_or(0, |run| {
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
        let exec = &mut self.execs[e as usize];
        if !matches!(run.writing, Some(Write::Refuse(_))) && run.started {
            self.tally.busy_us += now.saturating_sub(run.base);
        }
        if run.started {
            self.tally.lost_us += lost;
        }
        // A refusal took no memory; it has been written and taken by now.
        if run.started || matches!(run.writing, Some(Write::Start)) {
            n.used_bytes = n.used_bytes.saturating_sub(exec.memory_bytes);
        }
        if exec.running == Some((node as u32, epoch)) {
            exec.running = None;
        }
        n.note_room(now);
        self.take_queued(node)
    }

    /// What waits at a node takes its free slots.
    fn take_queued(&mut self, node: usize) -> Result<(), Wrong> {
        while self.nodes[node].runs.len() < self.nodes[node].descriptor.slots as usize {
            let Some((e, seq)) = self.nodes[node].queue.pop_front() else {
                break;
            };
            let instance = self.nodes[node].descriptor.instance;
            let exec = self.exec(e);
            let current = match exec.phase() {
                Some(Phase::Bound(b)) => exec.seq == seq && b.instance == instance,
                _ => false,
            };
            if current {
                self.take_up(node, e, seq)?;
            }
        }
        Ok(())
    }

    /// How long a capsule takes at a node, in microseconds.
    fn capsule_us(&self, node: usize, e: u32) -> u64 {
        scaled(self.exec(e).capsule_us, self.nodes[node].speed)
    }

    /// Plans the next look at a run: at its end, at a boundary where it must yield or commit.
    fn plan_look(&mut self, node: usize, e: u32, epoch: u64) {
        let due = self.next(node, e, epoch).map(|(at, _)| at);
        let (number, life, now) = (node as u32, self.nodes[node].life, self.now);
        if let (Some(due), Some(run)) = (due, self.nodes[node].run(e, epoch)) {
            let due = due.max(now);
            run.look = due;
            self.queue.plan(due, What::Look(number, life, e, epoch));
        }
    }

    /// What a run does next, and when.
    fn next(&self, node: usize, e: u32, epoch: u64) -> Option<(u64, Write)> {
        let n = &self.nodes[node];
        let run = n.runs.iter().find(|r| r.exec == e && r.epoch == epoch)?;
        let exec = self.exec(e);
        let capsule = scaled(exec.capsule_us, n.speed);
        let (all, from) = (exec.boundaries(), run.from);
        let rest = exec.work_us.saturating_sub(from * exec.capsule_us);
        let finish = run.base.saturating_add(scaled(rest, n.speed));
        let boundary_at = |index: u64| run.base.saturating_add((index - from) * capsule);
        // The first boundary at or after a moment.
        let boundary_after = |at: u64| from + at.saturating_sub(run.base).div_ceil(capsule);
        let mut next = (finish, Write::Finish);
        if run.order.is_some() {
            let index = boundary_after(self.now);
            if index < all {
                next = (boundary_at(index), Write::Yield(index));
            }
            return Some(next);
        }
        let index = match self.specs[exec.workload as usize].commit {
            CommitPolicy::Every(k) => {
                boundary_after(self.now).max(run.committed.saturating_add(k.get()))
            }
            CommitPolicy::EveryMs(ms) => {
                boundary_after(run.committed_at + u64::from(ms.get()) * 1_000)
            }
            CommitPolicy::Auto => boundary_after(run.committed_at + AUTO_US),
        };
        // What has passed while a message was under way is committed at the next boundary.
        let index = index.max(run.committed + 1).max(boundary_after(self.now));
        if index < all && boundary_at(index) < next.0 {
            next = (boundary_at(index), Write::Commit(index));
        }
        Some(next)
    }

    /// A worker looks at what it runs.
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
        match self.next(node, e, epoch) {
            Some((at, write)) if at <= now => {
                if let Some(run) = self.nodes[node].run(e, epoch) {
                    run.writing = Some(write);
                    run.look = u64::MAX;
                }
                self.write(node, e, epoch);
            }
            _ => self.plan_look(node, e, epoch),
        }
        Ok(())
    }

    /// An order to yield reaches a node.
    pub(super) fn control(
        &mut self,
        p: u8,
        node: usize,
        mut asked: Box<Asked>,
    ) -> Result<(), Wrong> {
        let number = node as u32;
        if !self.nodes[node].is_reachable(self.now) {
            if !asked.late {
                self.no_answer(p, &asked);
            }
            return Ok(());
        }
        let until = self.nodes[node].stalled_until;
        if until > self.now {
            if until > Self::gives_up(&asked) && !asked.late {
                asked.late = true;
                self.no_answer(p, &asked);
            }
            self.queue.plan(until, What::Control(p, number, asked));
            return Ok(());
        }
        let (e, epoch, now) = (exec::number(asked.execution), asked.epoch, self.now);
        let answer_lost = self.is_lost();
        let at = self.arrival();
        let outcome = match self.nodes[node].run(e, epoch) {
            Some(run) => {
                run.order = Some(Box::new(Order {
                    at: now,
                    cause: asked.cause.clone(),
                    to: asked.to.clone(),
                    decision: asked.decision.clone(),
                }));
                if run.started && run.writing.is_none() {
                    self.plan_look(node, e, epoch);
                }
                ControlOutcome::Taken
            }
            None => ControlOutcome::Refused("it does not run here under that epoch".to_owned()),
        };
        if asked.late {
            return Ok(());
        }
        if answer_lost {
            self.no_answer(p, &asked);
        } else {
            self.queue
                .plan(at, What::Ordered(p, e, epoch, Box::new(outcome)));
        }
        Ok(())
    }
}

/// A time of work at a speed, at least a microsecond.
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

/// Stands for the digest of σ: nothing here computes one, and no two boundaries share it.
fn digest(e: u32, index: u64) -> Digest {
    let mut bytes = [0; 32];
    bytes[..4].copy_from_slice(&e.to_le_bytes());
    bytes[4..12].copy_from_slice(&index.to_le_bytes());
    Digest(bytes)
}
