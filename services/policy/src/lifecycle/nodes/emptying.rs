//! Empties a node before a deadline, and moves executions whose node an operator's change has
//! excluded.
//!
//! A revoked node disappears at an announced moment, and a drain may have a deadline. The policy
//! acts before that moment, called *end*:
//!
//! 1. Executions on the node move, as for every drain. The one with the longest way to its next
//!    boundary is ordered first, because places elsewhere may be few. No new execution is placed
//!    there.
//! 2. An execution without a destination is ordered to commit and yield. The order comes when twice
//!    its interval between boundaries plus [`Config::leave_margin_ms`] is left, or at once if the
//!    interval is unknown. The execution waits as pending.
//! 3. At *end* an execution without a boundary is given up, and resumes elsewhere from its last
//!    commit. For a revoked node, *end* is [`Config::give_up_ms`] before the node disappears.
//!
//! [`Config::leave_margin_ms`]: crate::Config::leave_margin_ms
//! [`Config::give_up_ms`]: crate::Config::give_up_ms

use std::cmp::Reverse;

use fiec_schemas::ExecutionId;

use crate::lifecycle::Lifecycle;
use crate::lifecycle::binding::bind::Placed;
use crate::lifecycle::cluster::{NodeIx, Stage};
use crate::lifecycle::gate::Gate;

impl Lifecycle {
    /// Moves an execution whose node is excluded by a change. Returns true if the node is excluded.
    pub(crate) fn obey_change(&mut self, gate: &mut impl Gate, id: ExecutionId) -> bool {
        let now = self.now;
        let Some(e) = self.cluster.execution(id) else {
            return false;
        };
        let Some(ix) = e.stage.node() else {
            return false;
        };
        if e.is_appending() || e.order().is_some() || !self.is_ruled_out(id, ix) {
            return false;
        }
        let overdue = now.mono.since(e.since) >= self.config.horizon_ms;
        if matches!(e.stage, Stage::Started(..)) && overdue {
            self.mark_long(id);
        }
        if matches!(self.review_one(gate, id, ix), Placed::NoRoom | Placed::Moot) {
            let again = now.mono.plus(self.config.order_retry_ms);
            self.set_due(id, again);
        }
        true
    }

    /// Time that an execution needs to commit and leave, in ms: twice the 90th percentile of its
    /// recent intervals, plus a margin. None if unknown.
    fn needs_ms(&self, id: ExecutionId) -> Option<u64> {
        let interval = self.rhythms.get(&id)?.quantile(0.9)?;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "float casts saturate, and this one is not negative"
        )]
        let twice = (2.0 * interval).ceil() as u64;
        Some(twice.saturating_add(self.config.leave_margin_ms))
    }

    /// Sorts the executions with the longest need first.
    pub(crate) fn longest_first(&self, ids: &mut [ExecutionId]) {
        ids.sort_by_cached_key(|id| Reverse(self.needs_ms(*id).unwrap_or(u64::MAX)));
    }

    /// Handles executions still on a node near its end: orders a yield without a destination, and
    /// finally gives them up.
    pub(crate) fn hurry(&mut self, ix: NodeIx) {
        let now = self.now;
        let Some(end) = self.leave_by(ix) else {
            return;
        };
        if self.cluster.node(ix).presence != crate::lifecycle::cluster::Presence::Up {
            return;
        }
        let left_ms = u64::try_from(end.millis() - now.wall.millis()).unwrap_or(0);
        let ids: Vec<_> = self.cluster.node(ix).holds.iter().copied().collect();
        for id in ids {
            let Some(e) = self.cluster.execution(id) else {
                continue;
            };
            let Stage::Started(..) = e.stage else {
                continue;
            };
            // Ordered or refused a moment ago: wait until the delay is over.
            let avoided = e.avoided().iter();
            let waits = avoided.filter(|a| a.node == ix).any(|a| now.mono < a.until);
            if e.is_appending() || waits {
                continue;
            }
            let (epoch, ordered) = (e.epoch, e.order().is_some());
            if left_ms == 0 {
                let late = end.millis() + i64::try_from(self.config.order_grace_ms).unwrap_or(0);
                if !self.is_mine(id) && now.wall.millis() < late {
                    continue;
                }
                self.give_up(id, (ix, epoch));
            } else if !ordered && self.needs_ms(id).is_none_or(|needs| left_ms <= needs) {
                if self.defers(id, self.config.order_grace_ms.min(left_ms / 2)) {
                    continue;
                }
                self.suspend(id, ix);
            }
        }
    }
}
