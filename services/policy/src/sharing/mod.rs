//! Sharing: running executions are preempted for waiting ones, and fail after their deadlines.
//!
//! ```text
//! waits, first in the queue ─▶ [another one ordered to yield] ─▶ that one yielded ─▶ bound first
//!          ▲                             │
//!          └── the order had no effect ──┘
//! ```
//!
//! An execution is preempted for a higher priority, for a deadline at risk, for a tenant below its
//! share, or for less attained service after a time slice. The victim has the lowest priority and then
//! the least regret ([`crate::lifecycle::queue::regret`]). It yields at its next boundary: to another place if
//! there is one, else to a park or to the queue. Then the execution that takes its place is bound
//! first.
//!
//! * [`preempting`] chooses for whom, [`victims`] chooses whom and by which rule.
//! * [`missed`] lets executions fail after their [`deadlines`].
//!
//! Given up: rounds are bounded, so on a large cluster a better victim may be found a round later.
//!
//! It reads the cluster, and changes it by orders to yield and by the event `failed`.

mod deadlines;
mod missed;
mod preempting;
mod settings;
mod victims;

use std::collections::{BTreeMap, BTreeSet};

use fiec_schemas::ExecutionId;

use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::NodeIx;
use crate::lifecycle::cluster::profile::ProfileIx;
use crate::time::Millis;
use deadlines::Deadlines;

pub use settings::SharingSettings;

/// The state of sharing.
#[derive(Debug, Default)]
pub(crate) struct Sharing {
    /// For each waiting execution: the execution ordered to yield for it, and when.
    asking: BTreeMap<ExecutionId, (ExecutionId, Millis)>,
    /// Deadlines after which executions fail.
    deadlines: Deadlines,
    /// Time of the last review of preemption.
    reviewed: Millis,
    /// The node after which the next review begins.
    window: Option<NodeIx>,
}

impl Sharing {
    /// True if this service has ordered another execution to yield for this one.
    pub fn is_yielded_to(&self, id: ExecutionId) -> bool {
        self.asking.contains_key(&id)
    }

    /// Another execution has yielded to this one.
    pub fn yielded_to(&mut self, id: ExecutionId) {
        self.asking.remove(&id);
    }

    /// Forgets an execution that has ended.
    pub fn forget(&mut self, id: ExecutionId) {
        self.asking.remove(&id);
        self.deadlines.forget(id);
    }

    /// The profiles of those for which another execution yields.
    pub fn served(&self, life: &Lifecycle) -> BTreeSet<ProfileIx> {
        let ids = self.asking.keys().chain(life.promised());
        ids.filter_map(|id| life.cluster().execution(*id).map(|e| e.profile))
            .collect()
    }
}
