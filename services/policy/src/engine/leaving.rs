//! What has to be away by a time, and what an operator's change rules out where it is.
//!
//! A node that is revoked will be gone at a moment that somebody has told; a drain may have a
//! deadline. Before that moment *end*:
//!
//! 1. What runs there moves, as for every drain, and what needs longest to its next boundary is
//!    ordered first, since places elsewhere may be few. Nothing new is placed there.
//! 2. What has found no place is told to commit and to give its place up, at the latest when
//!    twice its own interval between boundaries and [`Config::leave_margin_ms`] are left; one
//!    whose interval is not known yet, at once. It waits as pending.
//! 3. At *end* — for a revoked node [`Config::give_up_ms`] before it is gone — what has reached
//!    no boundary is given up, and goes on elsewhere from its last commit.
//!
//! [`Config::leave_margin_ms`]: crate::Config::leave_margin_ms
//! [`Config::give_up_ms`]: crate::Config::give_up_ms

use std::cmp::Reverse;

use fiec_schemas::messages::ControlRequest;
use fiec_schemas::{Cause, ExecutionId, Timestamp};

use super::bind::Placed;
use super::{Action, Policy};
use crate::cluster::{NodeIx, Stage};
use crate::time::{Millis, Now};

/// Who asked for a change, where that is not known any more.
const SOMEBODY: &str = "an earlier request";

impl Policy {
    /// Why something must leave a node, whatever that measures.
    pub(super) fn must_go(&self, id: ExecutionId, ix: NodeIx, started: bool) -> Option<Cause> {
        let node = self.cluster.node(ix);
        let who = || node.flags.who.clone();
        if let Some(at) = node.revoked_at() {
            return Some(Cause::Revoked { who: who(), at });
        }
        if node.flags.draining {
            return Some(Cause::Drain { who: who() });
        }
        // A node that drains of its own accord yields by itself what it runs.
        if !started && node.is_draining() {
            let who = "sigterm".to_owned();
            return Some(Cause::Drain { who });
        }
        self.is_ruled_out(id, ix).then(|| Cause::Operator {
            who: self.who_changed(id),
        })
    }

    fn who_changed(&self, id: ExecutionId) -> String {
        let extra = self.cluster.execution(id).and_then(|e| e.extra.as_ref());
        extra
            .and_then(|x| x.changed_by.as_deref())
            .unwrap_or(SOMEBODY)
            .to_owned()
    }

    /// True where a change of what it may run on rules out the node that has it.
    pub(super) fn is_ruled_out(&self, id: ExecutionId, ix: NodeIx) -> bool {
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

    /// Moves an execution that a change rules out where it is; true where it is.
    pub(super) fn obey_change(&mut self, now: Now, id: ExecutionId, out: &mut Vec<Action>) -> bool {
        let Some(e) = self.cluster.execution(id) else {
            return false;
        };
        let Some(ix) = e.stage.node() else {
            return false;
        };
        if e.busy || e.order().is_some() || !self.is_ruled_out(id, ix) {
            return false;
        }
        let overdue = now.mono.since(e.since) >= self.config.horizon_ms;
        if matches!(e.stage, Stage::Started(..)) && overdue {
            self.cluster.mark_long(id);
        }
        if matches!(
            self.review_one(now, id, ix, out),
            Placed::NoRoom | Placed::Moot
        ) {
            let again = now.mono.plus(self.config.order_retry_ms);
            self.cluster.set_due(id, again);
        }
        true
    }

    /// By when everything must have left a node, if by a time.
    pub(super) fn leave_by(&self, ix: NodeIx) -> Option<Timestamp> {
        let node = self.cluster.node(ix);
        match node.revoked_at() {
            Some(gone) => Some(before(gone, self.config.give_up_ms)),
            None => node.flags.drain_by.filter(|_| node.flags.draining),
        }
    }

    /// How long it needs to commit and leave: twice the ninth decile of its last intervals, and a
    /// margin; none: not known.
    fn needs_ms(&self, id: ExecutionId) -> Option<u64> {
        let interval = self.share.rhythms.get(&id)?.quantile(0.9)?;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "float casts saturate, and this one is not negative"
        )]
        let twice = (2.0 * interval).ceil() as u64;
        Some(twice.saturating_add(self.config.leave_margin_ms))
    }

    /// Those that need longest first.
    pub(super) fn longest_first(&self, ids: &mut [ExecutionId]) {
        ids.sort_by_cached_key(|id| Reverse(self.needs_ms(*id).unwrap_or(u64::MAX)));
    }

    /// What is still on a node as its time comes: told to commit and wait, and in the end given up.
    pub(super) fn hurry(&mut self, now: Now, ix: NodeIx, out: &mut Vec<Action>) {
        let Some(end) = self.leave_by(ix) else {
            return;
        };
        if self.cluster.node(ix).presence != crate::cluster::Presence::Up {
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
            // Told a moment ago, or not willing: once more when that is over.
            let avoided = e.avoided().iter();
            let waits = avoided.filter(|a| a.node == ix).any(|a| now.mono < a.until);
            if e.busy || waits {
                continue;
            }
            let (epoch, ordered) = (e.epoch, e.order().is_some());
            if left_ms == 0 {
                let late = end.millis() + i64::try_from(self.config.order_grace_ms).unwrap_or(0);
                if !self.is_mine(id) && now.wall.millis() < late {
                    continue;
                }
                self.give_up(now, id, (ix, epoch), out);
            } else if !ordered && self.needs_ms(id).is_none_or(|needs| left_ms <= needs) {
                if self.defers(now, id, self.config.order_grace_ms.min(left_ms / 2)) {
                    continue;
                }
                self.suspend(now, id, ix, out);
            }
        }
    }

    fn give_up(
        &mut self,
        now: Now,
        id: ExecutionId,
        (ix, epoch): (NodeIx, u64),
        out: &mut Vec<Action>,
    ) {
        let Some(cause) = self.must_go(id, ix, true) else {
            return;
        };
        let until = now.mono.plus(self.config.order_retry_ms);
        let node = self.cluster.node(ix).id.clone();
        if let Some(e) = self.cluster.execution_mut(id) {
            let extra = e.extra();
            extra.avoid_until(ix, until);
            extra.note = Some(format!(
                "it reached no boundary in time and is given up on {node}: {}",
                cause.in_words()
            ));
        }
        out.push(Action::Control {
            node,
            request: ControlRequest::GiveUp {
                execution: id,
                epoch,
                cause,
            },
            ticket: None,
        });
    }

    /// Orders a yield of an execution that must leave and has no destination.
    fn suspend(&mut self, now: Now, id: ExecutionId, ix: NodeIx, out: &mut Vec<Action>) {
        let Some(cause) = self.must_go(id, ix, true) else {
            return;
        };
        self.order_yield(now, id, cause, out);
    }

    /// Sees to it that an execution is looked at at once if a change rules out where it is.
    pub(super) fn look_after_change(&mut self, now: Now, id: ExecutionId) {
        let Some(e) = self.cluster.execution(id) else {
            return;
        };
        let Some(ix) = e.stage.node() else { return };
        if e.order().is_none() && self.is_ruled_out(id, ix) {
            self.cluster.set_due(id, Millis(now.mono.0.max(1)));
        }
    }
}

fn before(at: Timestamp, ms: u64) -> Timestamp {
    let us = i64::try_from(ms).unwrap_or(0).saturating_mul(1_000);
    Timestamp::from_micros(at.micros().saturating_sub(us))
}
