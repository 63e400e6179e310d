//! Nodes that leave.

use fiec_schemas::messages::ControlRequest;
use fiec_schemas::{Cause, ExecutionId, Timestamp};

use crate::Action;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::NodeIx;
use crate::time::Millis;

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
