//! Nodes that cannot start a program, and programs that end their workers.

use super::*;
use crate::node::{Order, Write};
use crate::scenario::{CannotStart, Drawn};
use fiec_schemas::{Cause, Fault as Failure, StartError};

impl<D: Decide> World<'_, D> {
    /// The node's faults of starting a program.
    fn start_faults<'s>(
        &'s self,
        n: &'s Node,
        program: &'s str,
    ) -> impl Iterator<Item = &'s CannotStart> {
        let all = self.scenario.faults.iter().filter_map(|fault| match fault {
            Fault::CannotStart(f) => Some(f),
            _ => None,
        });
        all.filter(move |f| f.node == n.name && f.concerns(program))
    }

    /// The reason and the fault if a node cannot start an execution now.
    pub(super) fn start_fault(
        &self,
        node: usize,
        e: u32,
        after_start: bool,
    ) -> Option<(String, Box<Failure>)> {
        let program = &self.exec(e).spec.program;
        let now_ms = self.now / 1_000;
        let mut faults = self.start_faults(&self.nodes[node], program);
        faults.find(|f| f.after_start == after_start && (f.at_ms..f.end_ms()).contains(&now_ms))?;
        let fault = Failure::CannotStart {
            command: program.clone(),
            error: StartError::NotFound,
        };
        Some((format!("cannot start {program}"), Box::new(fault)))
    }

    /// Gives an execution back if its node notices only after `started` that it cannot start it.
    /// Returns true if it does.
    pub(super) fn gives_back(&mut self, node: usize, e: u32, epoch: u64) -> bool {
        let Some((reason, fault)) = self.start_fault(node, e, true) else {
            return false;
        };
        let Some(run) = self.nodes[node].run(e, epoch) else {
            return false;
        };
        let order = Order::Yield {
            cause: Cause::NotTaken {
                reason,
                fault: Some(fault),
            },
            to: None,
            decision: None,
        };
        run.writing = Some(Write::Order(run.committed, Box::new(order)));
        self.write(node, e, epoch);
        true
    }

    /// True if the policy may have set a node aside for a program at a moment or later. It tries
    /// the node again at most `start_retry_longest_ms` after the end of the fault. If a try gets no
    /// answer, the next one follows after `take_ms`.
    pub(super) fn is_set_aside(&self, n: &Node, program: &str, moment: u64) -> bool {
        let pause = self.config.start_retry_longest_ms + self.config.take_ms;
        let is_aside = |f: &CannotStart| {
            let over = f.end_ms().saturating_add(pause).saturating_mul(1_000);
            f.at_ms * 1_000 <= self.now && over > moment
        };
        let own = self.start_faults(n, program).any(is_aside);
        // Two programs that fail set the node aside for all programs.
        let others = self.specs.iter().map(|spec| spec.program.as_str());
        let failing: BTreeSet<&str> = others
            .filter(|other| self.start_faults(n, other).any(is_aside))
            .collect();
        own || failing.len() > 1
    }

    /// The time at which a run ends its worker, and the time of the worker's return.
    pub(super) fn death(&self, node: usize, e: u32, epoch: u64) -> Option<(u64, u64)> {
        let exec = self.exec(e);
        let kills = self.scenario.faults.iter().find_map(|fault| match fault {
            Fault::Kills(f) if f.program == exec.spec.program => Some(f),
            _ => None,
        })?;
        let mut runs = self.nodes[node].runs.iter();
        let run = runs.find(|r| r.exec == e && r.epoch == epoch && !r.parked)?;
        let is_ahead = run.from < kills.boundary && kills.boundary < run.last_boundary(exec);
        let capsules = kills.boundary.checked_sub(run.from).filter(|_| is_ahead)?;
        let at = run.base.saturating_add(capsules * self.capsule_us(node, e));
        Some((at, self.now + kills.for_ms * 1_000))
    }

    /// A worker dies with all its executions, and returns at `until`. A partitioned node returns
    /// at the end of its partition.
    pub(super) fn die(&mut self, node: usize, until: u64) -> Result<(), Wrong> {
        *self.tally.faults.entry("kills").or_default() += 1;
        let until = until.max(self.nodes[node].silent_until);
        self.lose(node)?;
        self.queue.plan(until, What::Over(node as u32, Drawn::Loss));
        Ok(())
    }

    /// True if the next death of its worker may hold an execution.
    pub(super) fn is_suspect(&self, exec: &Exec) -> bool {
        let deaths = exec.state.as_ref().map_or(0, |state| state.deaths.len());
        deaths > 0 && deaths + 1 >= self.config.deadly_workers as usize
    }
}
