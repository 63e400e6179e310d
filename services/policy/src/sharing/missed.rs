//! Deadlines that have passed. With `on_miss: fail` a pending execution fails at once. A running
//! one yields at its next boundary and then fails as pending.

use fiec_schemas::scheduling::{OnMiss, Rule};
use fiec_schemas::{Cause, Event, ExecutionId, Fault, Timestamp};

use super::Sharing;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::binding::bind::Placed;
use crate::lifecycle::cluster::Stage;

/// Time until an execution that has not failed yet is checked again, in µs.
const AGAIN_US: i64 = 1_000_000;

impl Sharing {
    /// The deadline after which the execution fails, if it has one.
    fn fails_at(&self, life: &Lifecycle, id: ExecutionId) -> Option<Timestamp> {
        let e = life.cluster().execution(id)?;
        let deadline = life.cluster().profiles.get(e.profile)?.deadline?;
        (deadline.on_miss == OnMiss::Fail).then(|| deadline.moment(e.submitted_at))
    }

    /// Stores the execution's deadline.
    pub fn note_deadline(&mut self, life: &Lifecycle, id: ExecutionId) {
        let deadline = self.fails_at(life, id);
        self.deadlines.note(id, deadline);
    }

    /// Fails executions whose deadline has passed.
    pub fn fail_late_ones(&mut self, life: &mut Lifecycle) {
        let now = life.now;
        for _ in 0..life.config.burst {
            let Some(id) = self.deadlines.due(now.wall) else {
                return;
            };
            let Some(deadline) = self.fails_at(life, id).filter(|at| *at <= now.wall) else {
                // The deadline was changed since.
                self.note_deadline(life, id);
                continue;
            };
            let again = Timestamp::from_micros(now.wall.micros().saturating_add(AGAIN_US));
            self.deadlines.again(id, again);
            if !life.defers(id, life.config.grace_ms) {
                self.fail_late(life, id, deadline);
            }
        }
    }

    /// True if the execution's deadline has passed and it must fail.
    pub fn is_late(&self, life: &Lifecycle, id: ExecutionId) -> bool {
        let now = life.now;
        self.fails_at(life, id).is_some_and(|at| at <= now.wall)
    }

    /// Fails a waiting execution instead of binding it.
    pub fn let_fail(&mut self, life: &mut Lifecycle, id: ExecutionId) -> Placed {
        if life.defers(id, life.config.grace_ms) {
            return Placed::Deferred;
        }
        match self.fails_at(life, id) {
            Some(deadline) => self.fail_late(life, id, deadline),
            None => return Placed::Deferred,
        }
        Placed::Moot
    }

    fn fail_late(&mut self, life: &mut Lifecycle, id: ExecutionId, deadline: Timestamp) {
        let Some(e) = life.cluster().execution(id) else {
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
                life.order_yield(id, cause);
            }
            Stage::Pending | Stage::Bound(..) | Stage::Paused => {
                let so_far = match (e.stage, e.attained_ms(life.now.mono)) {
                    (Stage::Paused, _) => "; it was paused",
                    (_, 0) => "; it had computed nothing",
                    _ => "",
                };
                let reason = format!("it was not done by its deadline {deadline}{so_far}");
                let failed = Event::Failed {
                    reason,
                    stderr: String::new(),
                    fault: Some(Box::new(Fault::Deadline)),
                };
                life.end_with(id, failed);
            }
            // It already yields, is kept for somebody, or only comparisons remain.
            Stage::Started(..) | Stage::Held | Stage::Verifying => {}
        }
    }
}
