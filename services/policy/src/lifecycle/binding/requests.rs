//! Carries out a pause or a cancel that a worker has confirmed and cannot carry out any more: its
//! node is lost, or it left the execution first.
//!
//! The request comes before a new binding, and needs no node. So it is done even if no node could
//! take the execution.

use fiec_schemas::{Cause, Event, ExecutionId, RequestKind};

use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::Stage;

impl Lifecycle {
    /// Appends what was requested of an execution that would be bound again for this cause. Returns
    /// false if nothing was.
    pub(crate) fn carry_out_request(&mut self, id: ExecutionId, cause: &Cause) -> bool {
        let now = self.now;
        let Some(e) = self.cluster.execution(id) else {
            return false;
        };
        let open = e.extra.as_ref().and_then(|extra| extra.request.as_ref());
        let Some(open) = open else { return false };
        let who = open.who.to_string();
        let events = match (open.what, e.stage) {
            (RequestKind::Cancel, _) => vec![Event::Cancelled { who }],
            (RequestKind::Pause, Stage::Started(..)) => vec![
                Event::Yielded {
                    cause: cause.clone(),
                    computed_until: now.wall,
                },
                Event::Paused { who },
            ],
            (RequestKind::Pause, _) => vec![Event::Paused { who }],
        };
        self.append(id, events);
        self.clear_order(id);
        self.stop_waiting(id);
        true
    }
}
