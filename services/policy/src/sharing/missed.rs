//! Deadlines that have passed. With `on_miss: fail` a pending execution fails at once. A running
//! one yields at its next boundary and then fails as pending.

use fiec_schemas::scheduling::{OnMiss, Rule};
use fiec_schemas::{Cause, Event, ExecutionId, Fault, Timestamp};

use crate::engine::Policy;
use crate::lifecycle::bind::Placed;
use crate::lifecycle::cluster::Stage;

/// Time until an execution that has not failed yet is checked again, in µs.
const AGAIN_US: i64 = 1_000_000;

impl Policy {
    /// The deadline after which the execution fails, if it has one.
    fn fails_at(&self, id: ExecutionId) -> Option<Timestamp> {
        let e = self.life.cluster().execution(id)?;
        let deadline = self.life.cluster().profiles.get(e.profile)?.deadline?;
        (deadline.on_miss == OnMiss::Fail).then(|| deadline.moment(e.submitted_at))
    }

    /// Stores the execution's deadline.
    pub(crate) fn note_deadline(&mut self, id: ExecutionId) {
        let deadline = self.fails_at(id);
        self.share.deadlines.note(id, deadline);
    }

    /// Fails executions whose deadline has passed.
    pub(crate) fn look_at_deadlines(&mut self) {
        let now = self.life.now;
        for _ in 0..self.life.config.burst {
            let Some(id) = self.share.deadlines.due(now.wall) else {
                return;
            };
            let Some(deadline) = self.fails_at(id).filter(|at| *at <= now.wall) else {
                // The deadline was changed since.
                self.note_deadline(id);
                continue;
            };
            let again = Timestamp::from_micros(now.wall.micros().saturating_add(AGAIN_US));
            self.share.deadlines.again(id, again);
            if !self.life.defers(id, self.life.config.grace_ms) {
                self.fail_late(id, deadline);
            }
        }
    }

    /// True if the execution's deadline has passed and it must fail.
    pub(crate) fn is_late(&self, id: ExecutionId) -> bool {
        let now = self.life.now;
        self.fails_at(id).is_some_and(|at| at <= now.wall)
    }

    /// Fails a waiting execution instead of binding it.
    pub(crate) fn let_fail(&mut self, id: ExecutionId) -> Placed {
        if self.life.defers(id, self.life.config.grace_ms) {
            return Placed::Deferred;
        }
        match self.fails_at(id) {
            Some(deadline) => self.fail_late(id, deadline),
            None => return Placed::Deferred,
        }
        Placed::Moot
    }

    fn fail_late(&mut self, id: ExecutionId, deadline: Timestamp) {
        let Some(e) = self.life.cluster().execution(id) else {
            return;
        };
        if e.is_appending() {
            return;
        }
        match e.stage {
            Stage::Started(..) if e.order().is_none() => {
                let reason = format!("its deadline {deadline} has passed, and it is to fail then");
                let cause = Cause::Preempted {
                    rule: Rule::Deadline,
                    by: None,
                    reason,
                };
                self.life.order_yield(id, cause);
            }
            Stage::Pending | Stage::Bound(..) | Stage::Paused => {
                let reason = format!("it was not done by its deadline {deadline}");
                let failed = Event::Failed {
                    reason,
                    stderr: String::new(),
                    fault: Some(Box::new(Fault::Deadline)),
                };
                self.life.end_with(id, failed);
            }
            // It already yields, is kept for somebody, or only comparisons remain.
            Stage::Started(..) | Stage::Held | Stage::Verifying => {}
        }
    }
}
