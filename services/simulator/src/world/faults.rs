//! External events: submissions and faults.

use super::*;
use crate::draw::Draw;
use crate::scenario::{Arrivals, Drawn, Fault, spread_over};
use exec::Tiles;

/// Default notice before a node's end, in ms.
const NOTICE_MS: u64 = 30_000;

/// The arrivals of a workload.
#[derive(Debug)]
pub(super) struct Coming {
    draw: Draw,
    made: u64,
    at: u64,
    over: bool,
}

impl Coming {
    pub(super) fn new(seed: u64, workload: u32) -> Self {
        Self {
            draw: Draw::new(seed, Purpose::Workload(workload)),
            made: 0,
            at: 0,
            over: false,
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.over
    }
}

impl<D: Decide> World<'_, D> {
    /// Schedules a workload's next arrival, if there is one.
    pub(super) fn plan_arrival(&mut self, workload: usize) {
        let coming = &mut self.arrivals[workload];
        let most = |count: Option<u64>| count.is_some_and(|most| coming.made >= most);
        let next = match &self.scenario.workloads[workload].arrivals {
            Arrivals::AtOnce { at_ms, .. } if coming.made == 0 => Some(at_ms * 1_000),
            Arrivals::AtOnce { .. } => None,
            Arrivals::Poisson { count, .. } if most(*count) => None,
            Arrivals::Poisson { per_s, from_ms, .. } => {
                let begin = coming.at.max(from_ms * 1_000);
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "float casts saturate"
                )]
                let gap = coming.draw.exponential(1e6 / per_s) as u64;
                Some(begin.saturating_add(gap))
            }
            Arrivals::Batches { count, .. } if most(*count) => None,
            Arrivals::Batches { every_ms, .. } => {
                Some(coming.at.saturating_add(coming.draw.micros(*every_ms)))
            }
            Arrivals::Listed(moments) => usize::try_from(coming.made)
                .ok()
                .and_then(|n| moments.get(n))
                .map(|ms| ms * 1_000),
        };
        let last = self.scenario.duration_ms * 1_000;
        match next.filter(|at| *at <= last) {
            Some(at) => {
                coming.at = at;
                let workload = u32::try_from(workload).unwrap_or(u32::MAX);
                self.queue.plan(at, What::Arrive(workload));
            }
            None => coming.over = true,
        }
    }

    /// Submits the next executions of a workload.
    pub(super) fn arrive(&mut self, workload: usize) -> Result<(), Wrong> {
        let scenario = self.scenario;
        let w = &scenario.workloads[workload];
        let coming = &mut self.arrivals[workload];
        let count = match &w.arrivals {
            Arrivals::AtOnce { count, .. } => *count,
            Arrivals::Batches { size, count, .. } => {
                count.map_or(*size, |most| (most - coming.made).min(*size))
            }
            Arrivals::Poisson { .. } | Arrivals::Listed(_) => 1,
        };
        let first = coming.made;
        coming.made += count;
        for number in first..first + count {
            let e = u32::try_from(self.execs.len()).unwrap_or(u32::MAX);
            let (spec, held) = self.demands(workload, number, e);
            let draw = &mut self.arrivals[workload].draw;
            let mut work_us = draw.thousandths(&w.work_ms, 1);
            let capsule_us = draw.thousandths(&w.capsule_ms, 1).min(work_us);
            let (spec, tiles) = match w.spread {
                None => (spec, None),
                Some(up_to) => {
                    // All tiles have the same length.
                    let count = work_us.div_ceil(capsule_us);
                    work_us = count * capsule_us;
                    let spec = spread_over(&spec, up_to, count);
                    (Arc::new(spec), Some(Tiles::whole(e, up_to, count)))
                }
            };
            let exec = Exec {
                workload: u32::try_from(workload).unwrap_or(u32::MAX),
                tenant: self.tenant_of[workload],
                spec,
                submitted: self.now,
                work_us,
                capsule_us,
                state_bytes: draw.whole(&w.state_bytes),
                memory_bytes: draw.whole(&w.memory_bytes),
                fails: w.fails > 0.0 && draw.chance(w.fails),
                seq: 0,
                state: None,
                first_bound: 0,
                waits: None,
                began: 0,
                done: 0,
                fate: None,
                running: None,
                preempted: 0,
                held,
                tiles,
                tied: false,
                reserved: false,
                trace: Vec::new(),
            };
            if let Some(tiles) = &exec.tiles {
                self.ranges.begin(e, tiles.end);
            }
            self.execs.push(exec);
            self.tally.first_submission.get_or_insert(self.now);
            let services = self.replicas.len() as u64;
            let p = self.network.below(services) as u8;
            let at = self.arrival();
            self.queue.plan(at, What::Submit(p, e));
        }
        self.plan_arrival(workload);
        Ok(())
    }

    pub(super) fn plan_faults(&mut self) {
        let scenario = self.scenario;
        for (n, fault) in (0u32..).zip(&scenario.faults) {
            let at = match fault {
                Fault::Loss(f) | Fault::Silence(f) | Fault::Stall(f) | Fault::Cordon(f) => f.at_ms,
                Fault::Drain(f) => f.at_ms,
                Fault::CannotStart(f) => f.at_ms,
                Fault::Revoke(f) => f.at_ms,
                Fault::PolicyStall(f) | Fault::PolicyLoss(f) => f.at_ms,
                // It happens when an execution reaches its boundary.
                Fault::Kills(_) => continue,
                Fault::Random { every_ms, .. } => {
                    let first = self.drawn[n as usize].micros(*every_ms);
                    self.queue.plan(first, What::Drawn(n));
                    continue;
                }
            };
            self.queue.plan(at * 1_000, What::Begin(n));
        }
    }

    pub(super) fn begin_fault(&mut self, number: usize) -> Result<(), Wrong> {
        let scenario = self.scenario;
        let fault = &scenario.faults[number];
        let n = u32::try_from(number).unwrap_or(u32::MAX);
        let node = |world: &Self, node| world.by_name.get(node).copied();
        let until = |now: u64, ms: Option<u64>| ms.map_or(u64::MAX, |ms| now + ms * 1_000);
        match fault {
            Fault::Loss(f) | Fault::Silence(f) | Fault::Stall(f) => {
                let what = match fault {
                    Fault::Loss(_) => Drawn::Loss,
                    Fault::Silence(_) => Drawn::Silence,
                    _ => Drawn::Stall,
                };
                if let Some(ix) = node(self, &f.node) {
                    self.afflict(ix, what, until(self.now, f.for_ms), None)?;
                }
            }
            Fault::Drain(f) => {
                if let Some(ix) = node(self, &f.node) {
                    let end = until(self.now, f.for_ms);
                    self.afflict(ix, Drawn::Drain, end, f.within_ms)?;
                }
            }
            Fault::Revoke(f) => {
                if let Some(ix) = node(self, &f.node) {
                    let gone = self.now + f.notice_ms * 1_000;
                    self.revoke(ix, f.notice_ms * 1_000, until(gone, f.for_ms));
                }
            }
            Fault::Cordon(f) => {
                if let Some(ix) = node(self, &f.node) {
                    self.nodes[ix as usize].cordoned = true;
                    self.nodes[ix as usize].note_room(self.now);
                    self.tell_all_flags(ix);
                    self.queue.plan(until(self.now, f.for_ms), What::End(n));
                }
            }
            Fault::CannotStart(_) => {
                *self.tally.faults.entry("cannot_start").or_default() += 1;
            }
            Fault::PolicyStall(f) => {
                let end = self.now + f.for_ms * 1_000;
                self.replicas[f.policy as usize].stalled_until = end;
                self.disturbed_until = self.disturbed_until.max(end);
            }
            Fault::PolicyLoss(f) => {
                let end = self.now + f.for_ms * 1_000;
                self.replicas[f.policy as usize].policy = None;
                self.redeliver_lines(f.policy as u8);
                self.disturbed_until = self.disturbed_until.max(end);
                self.queue.plan(end, What::End(n));
            }
            Fault::Kills(_) | Fault::Random { .. } => {}
        }
        Ok(())
    }

    pub(super) fn end_fault(&mut self, number: usize) -> Result<(), Wrong> {
        let scenario = self.scenario;
        match &scenario.faults[number] {
            Fault::Cordon(f) => {
                if let Some(ix) = self.by_name.get(&f.node).copied() {
                    self.nodes[ix as usize].cordoned = false;
                    self.tell_all_flags(ix);
                }
                Ok(())
            }
            Fault::PolicyLoss(f) => {
                let p = f.policy as usize;
                let life = self.replicas[p].life + 1;
                self.replicas[p] = self.new_replica(f.policy, life);
                self.introduce(p);
                self.plan_clock(p);
                self.perform(p)
            }
            _ => Ok(()),
        }
    }

    pub(super) fn draw_fault(&mut self, number: usize) -> Result<(), Wrong> {
        let Fault::Random {
            what,
            every_ms,
            for_ms,
            notice_ms,
        } = self.scenario.faults[number]
        else {
            return Ok(());
        };
        let nodes = self.nodes.len() as u64;
        let draw = &mut self.drawn[number];
        let node = draw.below(nodes) as u32;
        let lasts = draw.micros(for_ms).max(1_000);
        let next = self.now + draw.micros(every_ms).max(1);
        if self.now < self.scenario.duration_ms * 1_000 {
            let number = u32::try_from(number).unwrap_or(u32::MAX);
            self.queue.plan(next, What::Drawn(number));
        }
        self.afflict(node, what, self.now + lasts, notice_ms)
    }

    /// Starts a fault of a node that lasts until `until`. A node that already has a fault is left
    /// alone. `notice_ms`: the notice before its end, if it gets one.
    fn afflict(
        &mut self,
        ix: u32,
        what: Drawn,
        until: u64,
        notice_ms: Option<u64>,
    ) -> Result<(), Wrong> {
        let now = self.now;
        let n = &mut self.nodes[ix as usize];
        if n.is_ailing(now) {
            return Ok(());
        }
        if what == Drawn::Revoke {
            let notice_us = 1_000 * notice_ms.unwrap_or(NOTICE_MS);
            self.revoke(ix, notice_us, until.saturating_add(notice_us));
            return Ok(());
        }
        *self.tally.faults.entry(what.name()).or_default() += 1;
        match what {
            Drawn::Loss => self.lose(ix as usize)?,
            Drawn::Silence => (n.silent_until, n.troubled_until) = (until, until),
            Drawn::Stall => {
                (n.stalled_until, n.troubled_until) = (until, until);
                let lasts = until - now;
                for run in &mut n.runs {
                    run.base = run.base.saturating_add(lasts);
                    run.committed_at = run.committed_at.saturating_add(lasts);
                }
            }
            Drawn::Drain | Drawn::Revoke => {
                n.draining = true;
                if let Some(ms) = notice_ms {
                    self.plan_emptied(ix, ms * 1_000);
                }
                self.tell_all_flags(ix);
            }
        }
        self.nodes[ix as usize].note_room(now);
        self.queue.plan(until, What::Over(ix, what));
        Ok(())
    }

    pub(super) fn end_drawn(&mut self, ix: u32, what: Drawn) -> Result<(), Wrong> {
        let now = self.now;
        let n = &mut self.nodes[ix as usize];
        match what {
            Drawn::Loss | Drawn::Revoke => {
                n.reborn(now, ix);
                let life = n.life;
                for p in 0..self.replicas.len() {
                    let at = self.arrival();
                    self.queue.plan(at, What::Joined(p as u8, ix));
                }
                self.queue.plan(now + 1_000, What::Sample(ix, life));
                self.tell_all_flags(ix);
            }
            Drawn::Silence => {
                // Messages that could not be sent are sent now.
                let unsaid: Vec<_> = n
                    .runs
                    .iter()
                    .filter(|r| r.writing.is_some())
                    .map(|r| (r.exec, r.epoch))
                    .collect();
                for (e, epoch) in unsaid {
                    let life = self.nodes[ix as usize].life;
                    self.queue.plan(now, What::Reread(ix, life, e, epoch));
                }
            }
            Drawn::Stall => {}
            Drawn::Drain => {
                (n.draining, n.leave_by) = (false, None);
                self.tell_all_flags(ix);
            }
        }
        self.nodes[ix as usize].note_room(now);
        Ok(())
    }

    pub(super) fn tell_all_flags(&mut self, ix: u32) {
        for p in 0..self.replicas.len() {
            let at = self.arrival();
            self.queue.plan(at, What::Flags(p as u8, ix));
        }
    }

    /// A node dies with all its executions.
    pub(super) fn lose(&mut self, node: usize) -> Result<(), Wrong> {
        let now = self.now;
        let n = &mut self.nodes[node];
        n.queue.clear();
        n.up_us += now - n.up_since;
        let runs: Vec<_> = n.runs.iter().map(|r| (r.exec, r.epoch)).collect();
        for (e, epoch) in runs {
            self.drop_run(node, e, epoch)?;
        }
        let n = &mut self.nodes[node];
        n.up = false;
        n.used_bytes = 0;
        n.note_room(now);
        Ok(())
    }
}

impl Drawn {
    /// The name in summaries.
    pub fn name(self) -> &'static str {
        match self {
            Drawn::Loss => "loss",
            Drawn::Silence => "silence",
            Drawn::Stall => "stall",
            Drawn::Drain => "drain",
            Drawn::Revoke => "revoke",
        }
    }
}
