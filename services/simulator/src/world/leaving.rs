//! Nodes with a deadline: revoked nodes, which then disappear, and drains with a deadline.
//! Executions that can leave in time must leave. No execution is given up that could have left at a
//! boundary.

use super::*;
use crate::broken::Rule;
use crate::scenario::Drawn;

/// Shortest notice with a promise, in ms, beyond the time that a policy service needs for itself.
const NOTICE_MS: u64 = 3_000;
/// An execution should have left after this many boundaries plus this time.
const BOUNDARIES: u64 = 3;
const TIME_US: u64 = 10_000_000;

impl<D: Decide> World<'_, D> {
    /// A node announces its end. It returns at `until`.
    pub(super) fn revoke(&mut self, ix: u32, notice_us: u64, until: u64) {
        let now = self.now;
        let n = &mut self.nodes[ix as usize];
        if n.is_ailing(now) {
            return;
        }
        *self.tally.faults.entry(Drawn::Revoke.name()).or_default() += 1;
        (n.revoked, n.noticed_at, n.leave_by) = (true, now, Some(now + notice_us));
        let life = n.life;
        n.note_room(now);
        self.tell_all_flags(ix);
        let gone = now + notice_us;
        self.queue.plan(gone, What::Gone(ix, life, until));
    }

    /// The node disappears.
    pub(super) fn gone(&mut self, ix: u32, life: u32, until: u64) -> Result<(), Wrong> {
        let n = &self.nodes[ix as usize];
        if n.life != life || !n.up || !n.revoked {
            return Ok(());
        }
        self.is_away(ix, self.now, self.config.give_up_ms)?;
        self.lose(ix as usize)?;
        self.queue.plan(until, What::Over(ix, Drawn::Revoke));
        Ok(())
    }

    /// Schedules the check that a drained node is empty at its deadline.
    pub(super) fn plan_emptied(&mut self, ix: u32, within_us: u64) {
        let now = self.now;
        let n = &mut self.nodes[ix as usize];
        (n.noticed_at, n.leave_by) = (now, Some(now + within_us));
        let life = n.life;
        let at = now + within_us + self.slack_us();
        self.queue.plan(at, What::Emptied(ix, life));
    }

    pub(super) fn emptied(&mut self, ix: u32, life: u32) -> Result<(), Wrong> {
        let n = &self.nodes[ix as usize];
        let Some(end) = n.leave_by.filter(|_| n.draining && n.life == life && n.up) else {
            return Ok(());
        };
        if self.now != end + self.slack_us() {
            // Another drain has started since.
            return Ok(());
        }
        self.is_away(ix, end, 0)
    }

    /// Longest time for an order to take effect.
    fn slack_us(&self) -> u64 {
        2_000 * self.scenario.tick_ms + 20 * self.scenario.network.delay_us + 1_000_000
    }

    /// True if no fault has kept policy services and the node from their promises.
    fn is_undisturbed(&self, n: &Node) -> bool {
        let quiet = self.disturbed_until.max(n.troubled_until) <= n.noticed_at;
        quiet && self.scenario.network.loss == 0.0
    }

    /// Checks that no execution runs on a node that started before its time to be given up.
    fn is_away(&self, ix: u32, end: u64, give_up_ms: u64) -> Result<(), Wrong> {
        let n = &self.nodes[ix as usize];
        let needs = 1_000 * (give_up_ms + NOTICE_MS) + self.slack_us();
        let in_time = give_up_ms == 0 || 1_000 * give_up_ms > self.slack_us() - 1_000_000;
        if !self.is_undisturbed(n) || end < n.noticed_at + needs || !in_time {
            return Ok(());
        }
        let begun_before = end - 1_000 * give_up_ms - self.slack_us();
        let node = &n.descriptor.node;
        let still = n.runs.iter().find(|run| {
            let started =
                matches!(self.exec(run.exec).phase(), Some(Phase::Started(s)) if s.binding.node == *node);
            started && run.started && run.base < begun_before
        });
        let Some(run) = still else { return Ok(()) };
        let said = format!(
            "{node} was to be empty, as it said {} s before, and it is still there",
            (end - n.noticed_at) / 1_000_000
        );
        Err((Some(run.exec), (Rule::AwayInTime, said)))
    }

    /// Checks that an execution that is given up had no boundary at which it could leave.
    pub(super) fn given_up_in_need(&self, node: usize, e: u32, epoch: u64) -> Result<(), Wrong> {
        let capsule = self.capsule_us(node, e);
        let n = &self.nodes[node];
        let run = n.runs.iter().find(|r| r.exec == e && r.epoch == epoch);
        let Some(run) = run.filter(|_| self.is_undisturbed(n)) else {
            return Ok(());
        };
        let had = self.now.saturating_sub(n.noticed_at.max(run.base));
        let margin = 1_000 * self.config.leave_margin_ms;
        if had <= BOUNDARIES * capsule + margin + TIME_US {
            return Ok(());
        }
        let said = format!(
            "it is given up on {} {} s after that was to be left, with a boundary every {} ms",
            n.descriptor.node,
            had / 1_000_000,
            capsule / 1_000
        );
        Err((Some(e), (Rule::AwayInTime, said)))
    }
}
