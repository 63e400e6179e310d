//! Fair sharing: the order of the queue, preemption, and parks.
//!
//! * [`order`] compares executions, [`queue`] keeps the waiting ones in that order.
//! * [`deadlines`] schedules the checks of deadlines.
//! * [`rhythm`] learns the interval between an execution's boundaries, and the cost of a move.
//! * [`regret`] estimates the loss of a victim.
//! * [`pause`] chooses what a park keeps.

pub mod deadlines;
mod missed;
mod preempting;
pub(crate) mod victims;

use std::collections::{BTreeMap, BTreeSet};

use fiec_schemas::ExecutionId;

use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::NodeIx;
use crate::lifecycle::cluster::profile::ProfileIx;
use crate::time::Millis;
use deadlines::Deadlines;

/// State of sharing beside the queue.
#[derive(Debug, Default)]
pub struct Memory {
    /// For each waiting execution: the execution ordered to yield for it, and when.
    pub asking: BTreeMap<ExecutionId, (ExecutionId, Millis)>,
    /// Deadlines after which executions fail.
    pub deadlines: Deadlines,
    /// Time of the last review of preemption.
    pub reviewed: Millis,
    /// The node after which the next review begins.
    pub window: Option<NodeIx>,
}

impl Memory {
    /// The profiles of those for which another execution yields.
    pub(crate) fn served(&self, life: &Lifecycle) -> BTreeSet<ProfileIx> {
        let ids = self.asking.keys().chain(life.promised.keys());
        ids.filter_map(|id| life.cluster().execution(*id).map(|e| e.profile))
            .collect()
    }
}
