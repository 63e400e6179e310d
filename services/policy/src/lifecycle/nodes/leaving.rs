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

use crate::Action;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::binding::bind::Placed;
use crate::lifecycle::cluster::{NodeIx, Stage};
use crate::lifecycle::gate::Gate;
use crate::time::Millis;
use fiec_schemas::messages::ControlRequest;
use fiec_schemas::{Cause, ExecutionId, Timestamp};
use std::cmp::Reverse;

/// The author of a change if it is no longer known.
const SOMEBODY: &str = "an earlier request";

impl Lifecycle {
    /// The reason why an execution must leave its node, independent of measurements.
    pub(crate) fn must_go(&self, id: ExecutionId, ix: NodeIx, started: bool) -> Option<Cause> {
        let node = self.cluster.node(ix);
        let who = || node.flags.who.clone();
        if let Some(at) = node.revoked_at() {
            return Some(Cause::Revoked { who: who(), at });
        }
        if node.flags.draining {
            return Some(Cause::Drain { who: who() });
        }
        // A node that drains on its own initiative yields its running executions itself.
        if !started && node.is_draining() {
            let who = "sigterm".to_owned();
            return Some(Cause::Drain { who });
        }
        self.is_ruled_out(id, ix).then(|| Cause::Operator {
            who: self.who_changed(id),
        })
    }

    pub(crate) fn who_changed(&self, id: ExecutionId) -> String {
        let extra = self.cluster.execution(id).and_then(|e| e.extra.as_ref());
        extra
            .and_then(|x| x.changed_by.as_deref())
            .unwrap_or(SOMEBODY)
            .to_owned()
    }

    /// True if a change of its allowed nodes excludes the node that holds it.
    pub(crate) fn is_ruled_out(&self, id: ExecutionId, ix: NodeIx) -> bool {
        let Some(e) = self.cluster.execution(id) else {
            return false;
        };
        let adjusted = e.extra.as_ref().and_then(|x| x.adjusted.as_deref());
        if adjusted.is_none_or(|change| change.nodes.is_none() && change.exclude.is_none()) {
            return false;
        }
        let name = &self.cluster.node(ix).id;
        self.cluster.profiles.get(e.profile).is_some_and(|profile| {
            let requires = &profile.requires;
            let elsewhere = !requires.nodes.is_empty() && !requires.nodes.contains(name);
            elsewhere || requires.exclude.contains(name)
        })
    }

    /// The moment until which all executions must have left a node, if there is one.
    pub(crate) fn leave_by(&self, ix: NodeIx) -> Option<Timestamp> {
        let node = self.cluster.node(ix);
        match node.revoked_at() {
            Some(gone) => Some(before(gone, self.config.give_up_ms)),
            None => node.flags.drain_by.filter(|_| node.flags.draining),
        }
    }

    pub(crate) fn give_up(&mut self, id: ExecutionId, (ix, epoch): (NodeIx, u64)) {
        let now = self.now;
        let Some(cause) = self.must_go(id, ix, true) else {
            return;
        };
        let until = now.mono.plus(self.config.order_retry_ms);
        let node = self.cluster.node(ix).id.clone();
        let note = format!(
            "it reached no boundary in time and is given up on {node}: {}",
            cause.in_words()
        );
        self.avoid(id, ix, until, note);
        self.out.push(Action::Control {
            node,
            request: ControlRequest::GiveUp {
                execution: id,
                epoch,
                cause,
            },
            ticket: None,
        });
    }

    /// Orders a yield of an execution that must leave without a destination.
    pub(crate) fn suspend(&mut self, id: ExecutionId, ix: NodeIx) {
        let Some(cause) = self.must_go(id, ix, true) else {
            return;
        };
        self.order_yield(id, cause);
    }

    /// Schedules a review at once if a change excludes the execution's node.
    pub(crate) fn look_after_change(&mut self, id: ExecutionId) {
        let now = self.now;
        let Some(e) = self.cluster.execution(id) else {
            return;
        };
        let Some(ix) = e.stage.node() else { return };
        if e.order().is_none() && self.is_ruled_out(id, ix) {
            self.cluster.set_due(id, Millis(now.mono.0.max(1)));
        }
    }
}

pub(crate) fn before(at: Timestamp, ms: u64) -> Timestamp {
    let us = i64::try_from(ms).unwrap_or(0).saturating_mul(1_000);
    Timestamp::from_micros(at.micros().saturating_sub(us))
}

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
        let ids: Vec<_> = self.cluster.node(ix).assigned.iter().copied().collect();
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
