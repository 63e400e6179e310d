//! Explanation: what people and programs are told of nodes and executions.
//!
//! * [`mod@why`] explains one execution, and what a change would do; [`reports`] records explanations of
//!   those that wait.
//! * [`nodes`] describes nodes, [`mod@offers`] what they offer to programs.
//! * [`mod@duties`] counts who must act next, [`mod@beliefs`] lists what this service knows.
//!
//! It keeps the last report on each waiting execution. It reads the cluster, asks the machines for
//! reasons ([`Reasons`]), and changes nothing but the records that it pushes. Given up: an explanation
//! reads every node, so on large clusters only the front of the queue is reported, and less often.

mod beliefs;
mod duties;
mod nodes;
mod offers;
mod reports;
mod settings;
mod why;

use fiec_schemas::ExecutionId;

use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::Execution;
use crate::time::Now;

pub use settings::ExplanationSettings;

pub(crate) use beliefs::beliefs;
pub use duties::Duties;
pub(crate) use duties::{duties, standing};
pub(crate) use nodes::{lost_nodes, node_statuses};
pub(crate) use offers::offers;
pub(crate) use reports::Reports;
pub(crate) use why::{foresee, why};

/// What explanations ask the machines.
pub(crate) trait Reasons {
    /// Why an execution may not be bound now, independent of room.
    fn held_in_words(&self, life: &Lifecycle, id: ExecutionId) -> Option<String>;

    /// What would let it be bound.
    fn help_for_held(&self, life: &Lifecycle, id: ExecutionId) -> Vec<String>;

    /// Further notes on an execution, each after a semicolon.
    fn notes_in_words(&self, life: &Lifecycle, id: ExecutionId) -> String;

    /// How long an execution has been parked, what it keeps, and why. None if it is not parked.
    fn parked_in_words(&self, now: Now, e: &Execution) -> Option<String>;

    /// True for an execution whose own range is done, and which waits for a part.
    fn is_done_but_for_parts(&self, id: ExecutionId) -> bool;
}
